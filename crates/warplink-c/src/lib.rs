//! Warplink for C and C++: the functions of `warplink.h`.
//!
//! Every function is a thin wrapper of the library's. Five rules hold throughout:
//!
//! - No panic and no Rust error crosses the border: every function runs in `status::entry`, which gives a
//!   status and keeps the error's text for the thread.
//! - No exception of C++ goes through: a function of the caller's that throws ends the process (`callback`).
//! - What C holds are numbers of entries in tables ([`handles`]), never addresses. A number that was given
//!   back, or that never was one, is an error.
//! - What C passes is checked before it is used: null pointers, numbers out of range, text that is not UTF-8
//!   (`pointer`).
//! - `unsafe` is used where C's pointers are followed and C's functions called, and nowhere else.
//!
//! `include/warplink.h` is made from these files by cbindgen; a test keeps it up to date. The comments of
//! exported items are written for readers of that header.

#![expect(
    clippy::missing_safety_doc,
    reason = "the header says once what callers owe for pointers"
)]

pub mod block;
pub mod block_channel;
pub mod bound_call;
pub mod buffer;
mod callback;
pub mod channel;
pub mod collectives;
pub mod experts;
pub mod fused;
pub mod handles;
pub mod job;
pub mod kernel;
pub mod log;
pub mod memory;
pub mod messages;
mod pointer;
pub mod status;
pub mod stream;
pub mod types;
pub mod version;
