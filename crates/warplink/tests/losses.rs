//! Ranks that are killed, abort, fail, or leave without closing: every wait that depends on them ends with an error that names
//! them, and the ranks that are left continue.

// A test fails by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "losses/abort.rs"]
mod abort;
mod common;
#[path = "losses/failed.rs"]
mod failed;
#[path = "losses/failures.rs"]
mod failures;
#[path = "losses/repeated.rs"]
mod repeated;
#[path = "losses/shared_streams.rs"]
mod shared_streams;
#[path = "losses/survivors.rs"]
mod survivors;
