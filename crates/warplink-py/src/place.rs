//! The device of a job's memory.

use crate::dlpack;
use crate::errors::raise;
use pyo3::PyResult;
use std::sync::Arc;
use warplink::device::{Device, DeviceSlice};
use warplink::{DeviceKind, Error};

/// The device of a job, and its DLPack number.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) ordinal: i32,
}

impl Place {
    /// Borrows `bytes` bytes at `address`, which the caller keeps allocated.
    pub(crate) fn borrow_unowned(&self, address: u64, bytes: usize) -> PyResult<DeviceSlice> {
        self.borrow_given(address, bytes).map_err(raise)
    }

    /// As [`borrow_unowned`](Self::borrow_unowned), for the operands of a call that only enqueues.
    pub(crate) fn borrow_operand(&self, address: u64, bytes: usize) -> PyResult<DeviceSlice> {
        // SAFETY: as in `borrow_given`; the caller keeps the memory until the stream has completed the call.
        unsafe { self.device.borrow_operand(address, bytes) }.map_err(raise)
    }

    /// As [`borrow_unowned`](Self::borrow_unowned), with the library's error.
    pub(crate) fn borrow_given(&self, address: u64, bytes: usize) -> Result<DeviceSlice, Error> {
        // SAFETY: the caller guarantees, as documented in Python, that the memory is allocated and belongs to this
        // device whenever it is used. It is accessed by copies and kernels only, never through a Rust reference.
        // Without an owner: the caller keeps the memory, and a launch does not pay for a Python reference per
        // operand.
        unsafe { self.device.borrow(address, bytes, Arc::new(())) }
    }

    /// DLPack's device type and number.
    pub(crate) fn dlpack(&self) -> (i32, i32) {
        match self.device.kind() {
            DeviceKind::Host => (dlpack::CPU, 0),
            DeviceKind::Cuda => (dlpack::CUDA, self.ordinal),
        }
    }

    /// Fails unless DLPack's `device` is this device; `array` is the array's name.
    pub(crate) fn check(&self, device: (i32, i32), array: &str) -> PyResult<()> {
        let fits = match self.device.kind() {
            // Page-locked memory is ordinary memory to the host.
            DeviceKind::Host => matches!(device.0, dlpack::CPU | dlpack::CUDA_HOST),
            DeviceKind::Cuda => device == (dlpack::CUDA, self.ordinal),
        };
        if fits {
            return Ok(());
        }
        let name = match device.0 {
            dlpack::CPU | dlpack::CUDA_HOST => "the processor's memory".to_owned(),
            dlpack::CUDA => format!("memory of GPU {}", device.1),
            other => format!("memory of a device of DLPack's type {other}"),
        };
        let error = Error::invalid(format!(
            "the array is in {name}; expected memory of {}",
            self.device.name()
        ));
        Err(raise(
            error.with_operation(format!("read {array}")).with_help(
                "move the array to the job's device, or join a job on the array's device",
            ),
        ))
    }
}
