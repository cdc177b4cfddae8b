//! The CUDA C++ kernels: compiling, keeping and loading them; the two that are embedded, and users'.

pub(super) mod cache;
pub(super) mod elementwise;
pub(super) mod module;
pub(super) mod nvrtc;
pub(super) mod serial;
pub(super) mod transfer;
pub(super) mod user;
