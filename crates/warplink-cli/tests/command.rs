//! The command as a process: what it measures, runs, prices, diagnoses and draws, and how it reports mistakes.

// A test fails by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "command/benches.rs"]
mod benches;
#[path = "command/collective.rs"]
mod collective;
#[allow(dead_code, reason = "each test binary uses a part of it")]
mod common;
#[path = "command/cost.rs"]
mod cost;
#[path = "command/doctor.rs"]
mod doctor;
#[path = "command/documents.rs"]
mod documents;
#[path = "command/expert_parallel.rs"]
mod expert_parallel;
#[path = "command/files.rs"]
mod files;
#[path = "command/fused.rs"]
mod fused;
#[path = "command/gemm.rs"]
mod gemm;
#[path = "command/json.rs"]
mod json;
#[path = "command/models.rs"]
mod models;
#[path = "command/sections.rs"]
mod sections;
#[path = "command/topo.rs"]
mod topo;
#[path = "command/transfers.rs"]
mod transfers;
#[path = "command/values.rs"]
mod values;
