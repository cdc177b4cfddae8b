//! Warplink for C and C++: the functions of `warplink.h`.
//!
//! Every function is a thin wrapper of a library call. These rules hold throughout:
//!
//! - No panic and no Rust error crosses the language boundary: every function runs in `status::entry`, which returns a
//!   status and stores the error text for the thread.
//! - No C++ exception passes through: a callback that throws terminates the process (`callback`).
//! - Handles held by C are indices of table entries ([`handles`]), never addresses. A handle that was freed or never
//!   valid is an error.
//! - Arguments from C are checked before use: null pointers, numbers out of range, text that is not UTF-8 (`pointer`).
//! - `unsafe` is used only to dereference C pointers and to call C functions.
//!
//! `include/warplink.h` is generated from these files by cbindgen; a test keeps it up to date. The comments of exported
//! items are written for readers of that header.

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
