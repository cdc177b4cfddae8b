//! Random programs, an interpreter of programs, and what either says of the verifier's verdicts.

// Not every test uses all of it.
#![allow(dead_code, unused_imports)]

pub(crate) mod device;
// Tests of this that use the common support as well have it twice.
#[path = "../common/elements.rs"]
#[allow(unreachable_pub, clippy::duplicate_mod)]
pub(crate) mod elements;
pub(crate) mod evidence;
pub(crate) mod interpreter;
pub(crate) mod machine;
pub(crate) mod meaning;
pub(crate) mod sample;
