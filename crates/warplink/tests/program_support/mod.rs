//! Random programs, an interpreter of programs, and what either says of the verifier's verdicts.

// Not every test uses all of it.
#![allow(dead_code, unused_imports)]

pub(crate) mod device;
#[path = "../common/elements.rs"]
#[allow(unreachable_pub)]
pub(crate) mod elements;
pub(crate) mod evidence;
pub(crate) mod interpreter;
pub(crate) mod sample;
