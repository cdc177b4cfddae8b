//! NVIDIA GPUs, through the driver, which is loaded at run time.

use super::Device;
use crate::error::{Error, ErrorKind, Result};
use std::sync::Arc;

pub(crate) fn device_count() -> Result<usize> {
    Err(Error::new(
        ErrorKind::LibraryMissing,
        "libcuda.so.1 was not found",
    ))
}

pub(crate) fn open(_ordinal: usize) -> Result<Arc<dyn Device>> {
    Err(Error::new(
        ErrorKind::LibraryMissing,
        "libcuda.so.1 was not found",
    ))
}
