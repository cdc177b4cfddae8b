//! NVIDIA GPUs, through the driver, which is loaded at run time.
//!
//! | folder or file | subject |
//! |---|---|
//! | `driver/` | driver functions and errors; the primary context; RAII wrappers of streams, events and pinned memory (`raw`); captures; operations on words (`memory_ops`) |
//! | `gpu/` | state shared by everything on one GPU: progress of streams (`live`); aborting waits after a fault (`signals`); reuse of freed memory (`block_pool`), and returning it to the driver (`reaper`) when that is safe (`gate`); blocking copies (`staging`); scratch memory (`workspace`); attributes of addresses (`known_places`) |
//! | `device` | the implementation of `Device` |
//! | `memory/` | own and borrowed allocations; exporting and importing (`sharing`, `ipc`) |
//! | `stream/` | enqueuing, also small transfers by kernels (`transfer`); graphs |
//! | `kernels/` | compiling (`nvrtc`), caching and loading kernels |
//! | `user/` | users' kernels; serialized launches (`serial`) |
//! | `compute/` | GEMMs by `cublas_lt`, batches by `cublas`; algorithm tuning; prepared launches (`recorded`); element-wise operations |
//! | `nccl/`, `engine` | NCCL; collectives over it |
//! | `nvml/` | NVML: links and peer access of a GPU |
//! | `capabilities` | GPU capabilities, for the doctor |
//!
//! # Invariants
//! 1. Default streams and whole-context synchronization are never used: they would wait for streams that wait
//!    for a peer.
//! 2. A call restores the thread's current context and capture mode (a thread without a context keeps ours).
//! 3. GPU memory is neither freed nor unmapped on the thread that drops it, where the driver might block
//!    without bound. Freed memory is pooled and reused once streams have completed; it is returned to the
//!    driver when memory is short, on request and at close, while no stream has work of this process.
//! 4. No lock that enqueue calls take is held while the driver may block.
//! 5. A missing library or symbol is an error.

mod capabilities;
mod compute;
mod device;
mod driver;
mod engine;
mod gpu;
mod kernels;
mod memory;
mod nccl;
mod nvml;
mod properties;
mod stream;
mod user;

pub use super::library::{LibraryReport, libraries};
pub use capabilities::{Capabilities, capabilities};
pub use kernels::nvrtc::{CompiledKernel, compile, compile_all};
#[doc(hidden)]
pub use nccl::{NCCL_OPERATORS, NCCL_TYPES};

use super::{Device, Pretend};
use crate::error::Result;
use std::sync::Arc;

/// Architectures that the kernels must compile for, one for each supported GPU generation. On other
/// architectures of a generation kernels are compiled at run time.
pub const ARCHITECTURES: [&str; 4] = ["sm_80", "sm_90", "sm_100", "sm_120"];

/// Number of GPUs visible to this process.
///
/// # Errors
/// [`ErrorKind::LibraryMissing`](crate::ErrorKind::LibraryMissing) without a driver,
/// [`ErrorKind::Driver`](crate::ErrorKind::Driver) if it fails to initialize.
pub fn device_count() -> Result<usize> {
    driver::Driver::get()?.device_count()
}

/// Opens GPU `ordinal`.
///
/// # Errors
/// As [`device_count`], and [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if the GPU does
/// not exist.
pub fn open(ordinal: usize) -> Result<Arc<dyn Device>> {
    open_as(ordinal, Pretend::Nothing)
}

/// As [`open`], with features disabled by `pretend`.
pub(super) fn open_as(ordinal: usize, pretend: Pretend) -> Result<Arc<dyn Device>> {
    Ok(device::CudaDevice::open(ordinal, pretend)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn missing_driver_error_names_the_package() {
        let Err(error) = device_count() else { return };
        assert!(
            matches!(error.kind(), ErrorKind::LibraryMissing | ErrorKind::Driver),
            "{error}"
        );
        if error.kind() == ErrorKind::LibraryMissing {
            assert!(error.to_string().contains("install"), "{error}");
            assert_eq!(open(0).unwrap_err().kind(), ErrorKind::LibraryMissing);
            assert_eq!(
                capabilities(0).unwrap_err().kind(),
                ErrorKind::LibraryMissing
            );
        }
        // UCX hooks functions at load time that the thread sanitizer has already intercepted.
        if cfg!(warplink_tsan) {
            return;
        }
        let names: Vec<_> = libraries().iter().map(|library| library.name).collect();
        assert_eq!(
            names,
            [
                "the CUDA driver",
                "NVRTC",
                "cuBLASLt",
                "cuBLAS",
                "NCCL",
                "NVML",
                "UCX"
            ]
        );
    }
}
