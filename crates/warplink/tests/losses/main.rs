//! Ranks that are killed, abort, fail, or leave without closing: every wait that depends on them ends with an error that names
//! them, and the ranks that are left continue.

// A test fails by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod abort;
#[path = "../common/mod.rs"]
mod common;
mod failed;
mod failures;
mod repeated;
mod shared_streams;
mod survivors;
