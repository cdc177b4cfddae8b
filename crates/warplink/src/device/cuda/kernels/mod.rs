//! CUDA C++ kernels, embedded and user-supplied: compilation, cache and loading.

pub(super) mod cache;
pub(super) mod module;
pub(super) mod nvrtc;
pub(super) mod transfer;
