//! NVIDIA GPUs, through the driver, which is loaded at run time.
//!
//! | file | subject |
//! |---|---|
//! | `library` | finding the vendor's libraries |
//! | `driver` | the driver's functions and its errors |
//! | `context`, `raw` | the primary context; streams, events and pinned memory as the driver has them |
//! | `gpu`, `device` | what everything of one GPU shares; the device as the traits want it |
//! | `memory`, `virtual_memory`, `borrowed` | allocations, ours and others' |
//! | `sharing`, `ipc` | giving allocations to peers and opening theirs |
//! | `staging`, `signals` | blocking copies; ending waits after a fault |
//! | `reaper`, `quiet` | freeing; when it may be done |
//! | `stream`, `memory_ops`, `event`, `graph` | what is enqueued, and recording it |
//! | `nvrtc`, `cache`, `module` | compiling, keeping, loading kernels |
//! | `transfer`, `sum` | the kernels: a small transfer; adding |
//! | `blas`, `plan`, `compute`, `workspace` | cuBLASLt; products and sums; scratch memory of products |
//! | `batch`, `recorded` | cuBLAS; several products in one launch; launches ready to be repeated |
//! | `nccl`, `engine` | NCCL; collectives over it |
//! | `capabilities` | what a GPU can do, for the doctor |
//!
//! # What holds here
//! 1. The default streams and whole-context synchronization are never used: they would wait for
//!    streams that wait for a peer.
//! 2. A call leaves the thread's current context and capture mode as they were (a thread without a
//!    context keeps ours).
//! 3. A GPU's memory is neither freed nor unmapped on the thread that drops it, nor while a stream may
//!    wait for a peer: the driver might block without bound.
//! 4. A missing library or symbol is an error.

mod batch;
mod blas;
mod borrowed;
mod cache;
mod capabilities;
mod compute;
mod context;
mod device;
mod driver;
mod engine;
mod event;
mod gpu;
mod graph;
mod ipc;
mod library;
mod memory;
mod memory_ops;
mod module;
mod nccl;
mod nvrtc;
mod plan;
mod poll;
mod quiet;
mod raw;
mod reaper;
mod recorded;
mod sharing;
mod signals;
mod staging;
mod stream;
mod sum;
mod transfer;
mod virtual_memory;
mod workspace;

pub use capabilities::{Capabilities, capabilities};
pub use library::{LibraryReport, libraries};
pub use nvrtc::{CompiledKernel, compile_all};

use super::Device;
use crate::error::Result;
use std::sync::Arc;

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
    Ok(device::CudaDevice::open(ordinal)?)
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
        let names: Vec<_> = libraries().iter().map(|library| library.name).collect();
        assert_eq!(
            names,
            ["the CUDA driver", "NVRTC", "cuBLASLt", "cuBLAS", "NCCL"]
        );
    }
}
