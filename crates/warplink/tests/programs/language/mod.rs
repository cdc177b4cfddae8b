//! The language of host programs, run on every rank eagerly and as a graph.

mod elementwise;
mod nvfuser;
mod own_peer;
mod parts;
mod products;
mod slices;
mod subprograms;
mod types;
mod zeros;
