//! Joining, the store, and loss of ranks, without a device. Ranks are threads or processes.

// A test fails by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod cut_off;
mod join;
mod loss;
mod store;
mod strangers;
mod support;
mod unique_id;
