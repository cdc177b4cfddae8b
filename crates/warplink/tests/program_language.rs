//! The language of host programs, run on every rank eagerly and as a graph. The same cases
//! run on GPUs.

// A test fails by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;
#[path = "program_language/elementwise.rs"]
mod elementwise;
#[path = "program_language/nvfuser.rs"]
mod nvfuser;
#[path = "program_language/own_peer.rs"]
mod own_peer;
#[path = "program_language/parts.rs"]
mod parts;
#[path = "program_language/products.rs"]
mod products;
#[path = "program_language/run.rs"]
mod run;
#[path = "program_language/slices.rs"]
mod slices;
#[path = "program_language/subprograms.rs"]
mod subprograms;
#[path = "program_language/types.rs"]
mod types;
#[path = "program_language/zeros.rs"]
mod zeros;
