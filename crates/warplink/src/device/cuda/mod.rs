//! NVIDIA GPUs, through the driver, which is loaded at run time.
//!
//! | folder or file | subject |
//! |---|---|
//! | `driver/` | the driver's functions and errors; the primary context; streams, events and pinned memory as the driver has them (`raw`) |
//! | `gpu`, `device` | what everything of one GPU shares; the device as the traits want it |
//! | `memory/` | allocations, ours and others'; giving them to peers and opening theirs (`sharing`, `ipc`); blocking copies (`staging`); keeping what is freed (`block_pool`), giving it to the driver (`reaper`), and when that may be done (`gate`) |
//! | `stream/` | what is enqueued, and recording it; how far streams are (`live`); ending waits after a fault (`signals`) |
//! | `kernels/` | compiling (`nvrtc`), keeping and loading kernels, also users' (`user`); launches that follow one another (`serial`); a small transfer; adding |
//! | `compute/` | GEMMs by `cublas_lt`, several in one launch by `cublas`; their algorithms and scratch memory; launches ready to be repeated (`recorded`) |
//! | `nccl/` | NCCL; collectives over it |
//! | `nvml/` | NVML; a GPU's links and peer access |
//! | `capabilities` | what a GPU can do, for the doctor |
//!
//! # What holds here
//! 1. The default streams and whole-context synchronization are never used: they would wait for
//!    streams that wait for a peer.
//! 2. A call leaves the thread's current context and capture mode as they were (a thread without a
//!    context keeps ours).
//! 3. A GPU's memory is neither freed nor unmapped on the thread that drops it: the driver might block
//!    without bound. What is freed is kept, and used again when streams are past it; it is given to
//!    the driver when memory is short, on request and at close, at moments without work of this
//!    process.
//! 4. No lock that those take who enqueue is held while the driver may block.
//! 5. A missing library or symbol is an error.

mod capabilities;
mod compute;
mod device;
mod driver;
mod gpu;
mod kernels;
mod memory;
mod nccl;
mod nvml;
mod properties;
mod stream;

pub use super::library::{LibraryReport, libraries};
pub use capabilities::{Capabilities, capabilities};
pub use kernels::nvrtc::{CompiledKernel, compile, compile_all};

use super::{Device, Pretend};
use crate::error::Result;
use std::sync::Arc;

/// The architectures that kernels are kept compiling for: one of each generation that is served. A GPU of another one of
/// the same generation has its own compiled for it.
pub const ARCHITECTURES: [&str; 4] = ["sm_80", "sm_90", "sm_100", "sm_120"];

/// How many GPUs this process sees.
///
/// # Errors
/// [`ErrorKind::LibraryMissing`](crate::ErrorKind::LibraryMissing) without a driver,
/// [`ErrorKind::Driver`](crate::ErrorKind::Driver) if it does not start.
pub fn device_count() -> Result<usize> {
    driver::Driver::get()?.device_count()
}

/// Opens the GPU with `ordinal`.
///
/// # Errors
/// As [`device_count`], and [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) where
/// there is no such GPU.
pub fn open(ordinal: usize) -> Result<Arc<dyn Device>> {
    open_as(ordinal, Pretend::Nothing)
}

/// As [`open`], a GPU that does without something.
pub(super) fn open_as(ordinal: usize, pretend: Pretend) -> Result<Arc<dyn Device>> {
    Ok(device::CudaDevice::open(ordinal, pretend)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn without_a_driver_everything_is_an_error_that_says_what_to_install() {
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
        // UCX replaces functions when it is loaded, which the thread sanitizer has replaced already.
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
