//! The CUDA C++ kernels: compiling, keeping and loading them, and the two that are embedded.

pub(super) mod cache;
pub(super) mod module;
pub(super) mod nvrtc;
pub(super) mod sum;
pub(super) mod transfer;
