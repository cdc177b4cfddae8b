//! Joining, the store, and loss of ranks, without a device. Ranks are threads or processes.

// A test fails by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "bootstrap/cut_off.rs"]
mod cut_off;
#[path = "bootstrap/join.rs"]
mod join;
#[path = "bootstrap/loss.rs"]
mod loss;
#[path = "bootstrap/store.rs"]
mod store;
#[path = "bootstrap/strangers.rs"]
mod strangers;
#[path = "bootstrap/support.rs"]
mod support;
#[path = "bootstrap/unique_id.rs"]
mod unique_id;
