//! Collectives of a communicator.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

#[path = "collectives/adopted.rs"]
mod adopted;
#[path = "collectives/bound.rs"]
mod bound;
#[path = "collectives/buffers.rs"]
mod buffers;
#[path = "collectives/buses.rs"]
mod buses;
#[path = "collectives/cube.rs"]
mod cube;
#[path = "collectives/data.rs"]
mod data;
#[path = "collectives/direct.rs"]
mod direct;
#[path = "collectives/disagreements.rs"]
mod disagreements;
#[path = "collectives/endurance.rs"]
mod endurance;
#[path = "collectives/expected.rs"]
mod expected;
#[path = "collectives/experts.rs"]
mod experts;
#[path = "collectives/failures.rs"]
mod failures;
#[path = "collectives/fallback.rs"]
mod fallback;
#[path = "collectives/fused.rs"]
mod fused;
#[path = "collectives/fused_nvfp4.rs"]
mod fused_nvfp4;
#[path = "collectives/fused_rows.rs"]
mod fused_rows;
#[path = "collectives/fused_table.rs"]
mod fused_table;
#[path = "collectives/fused_wire.rs"]
mod fused_wire;
#[path = "collectives/launches.rs"]
mod launches;
#[path = "collectives/layer.rs"]
mod layer;
#[path = "collectives/lent.rs"]
mod lent;
#[path = "collectives/losses.rs"]
mod losses;
#[path = "collectives/memories.rs"]
mod memories;
#[path = "collectives/messages.rs"]
mod messages;
#[path = "collectives/on_device.rs"]
mod on_device;
#[path = "collectives/parts.rs"]
mod parts;
#[path = "collectives/pieces.rs"]
mod pieces;
#[path = "collectives/planned.rs"]
mod planned;
#[path = "collectives/reductions.rs"]
mod reductions;
#[path = "collectives/repeated.rs"]
mod repeated;
#[path = "collectives/scaled.rs"]
mod scaled;
#[path = "collectives/starved.rs"]
mod starved;
#[path = "collectives/streams.rs"]
mod streams;
