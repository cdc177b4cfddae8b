//! Random programs and an interpreter of programs, for tests that compare the verifier's verdict with
//! what happens.

// Not every test uses all of it.
#![allow(dead_code)]

pub(crate) mod interpreter;
pub(crate) mod sample;
