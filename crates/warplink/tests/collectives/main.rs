//! Collectives of a communicator.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../common/mod.rs"]
mod common;

mod adopted;
mod arithmetic;
mod bound;
mod buffers;
mod buses;
mod cube;
mod data;
mod direct;
mod disagreements;
mod endurance;
mod expected;
mod experts;
mod failures;
mod fallback;
mod fused;
mod fused_nvfp4;
mod fused_rows;
mod fused_table;
mod fused_wire;
mod launches;
mod layer;
mod lent;
mod losses;
mod memories;
mod messages;
mod on_device;
mod parts;
mod pieces;
mod planned;
mod reductions;
mod repeated;
mod scaled;
mod starved;
mod streams;
