//! Channels: kernels that put, get, signal and wait, on either device.

// A test fails by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "channels/buses.rs"]
mod buses;
#[path = "channels/closures.rs"]
mod closures;
mod common;
#[path = "channels/data.rs"]
mod data;
#[path = "channels/device_memory.rs"]
mod device_memory;
#[path = "channels/examples.rs"]
mod examples;
#[path = "channels/failures.rs"]
mod failures;
#[path = "channels/group_closures.rs"]
mod group_closures;
#[path = "channels/groups.rs"]
mod groups;
#[path = "channels/kernels.rs"]
mod kernels;
#[path = "channels/launches.rs"]
mod launches;
#[path = "channels/malformed.rs"]
mod malformed;
#[path = "channels/mistakes.rs"]
mod mistakes;
#[path = "channels/network.rs"]
mod network;
#[path = "channels/proxied.rs"]
mod proxied;
#[path = "channels/regions.rs"]
mod regions;
#[path = "channels/setups.rs"]
mod setups;
#[path = "channels/staged.rs"]
mod staged;
