//! Channels: kernels that put, get, signal and wait, on either device.

// A test fails by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod buses;
mod closures;
#[path = "../common/mod.rs"]
mod common;
mod data;
mod device_memory;
mod examples;
mod failures;
mod group_closures;
mod groups;
mod kernels;
mod launches;
mod malformed;
mod mistakes;
mod network;
mod proxied;
mod regions;
mod setups;
mod staged;
