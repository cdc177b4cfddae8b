//! The command as the launcher of ranks: what starts, what its output is, and how everything ends.

// A test fails by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[allow(dead_code, reason = "each test binary uses a part of it")]
mod common;
#[path = "launch/endings.rs"]
mod endings;
#[path = "launch/faults.rs"]
mod faults;
#[path = "launch/ranks.rs"]
mod ranks;
#[path = "launch/robustness.rs"]
mod robustness;
#[path = "launch/shared_gpus.rs"]
mod shared_gpus;
