//! Random kernel sections, an interpreter of their lanes, and what it says of the verifier's verdicts.

// Not every test uses all of it.
#![allow(dead_code, unused_imports)]

mod beyond;
pub(crate) mod device;
pub(crate) mod evidence;
mod functions;
mod memory;
mod mutation;
pub(crate) mod play;
mod read;
pub(crate) mod sample;
mod stage;
mod writer;
