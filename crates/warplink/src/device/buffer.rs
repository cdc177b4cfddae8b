//! Device memory with an element type.

use super::interface::{AllocationKind, Device};
use super::slice::DeviceSlice;
use crate::dtype::Element;
use crate::error::{Error, Result};
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

/// `len` elements of `T` on a device. Values are copied in and out; no reference is handed out,
/// since a GPU or a peer may write at any time.
#[derive(Clone, Debug)]
pub struct DeviceBuffer<T> {
    device: Arc<dyn Device>,
    slice: DeviceSlice,
    element: PhantomData<T>,
}

impl<T: Element> DeviceBuffer<T> {
    /// Allocates `len` elements (more than none); their values are undefined.
    pub fn new(device: &Arc<dyn Device>, len: usize, kind: AllocationKind) -> Result<Self> {
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(|| {
            Error::invalid(format!("{len} elements overflow the address space"))
                .with_operation("allocate device memory")
        })?;
        let slice = device.allocate(bytes, kind)?;
        Ok(Self {
            device: device.clone(),
            slice,
            element: PhantomData,
        })
    }

    /// Allocates and fills a buffer with `values`.
    pub fn from_values(device: &Arc<dyn Device>, values: &[T]) -> Result<Self> {
        let buffer = Self::new(device, values.len(), AllocationKind::Plain)?;
        buffer.upload(values)?;
        Ok(buffer)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.slice.bytes() / size_of::<T>()
    }

    /// Whether it holds no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its memory.
    pub fn memory(&self) -> &DeviceSlice {
        &self.slice
    }

    /// The elements in `range`, as a view of the same memory.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) where the range is
    /// reversed or passes the end.
    pub fn slice(&self, range: Range<usize>) -> Result<Self> {
        let bytes = |elements: usize| elements.saturating_mul(size_of::<T>());
        Ok(Self {
            device: self.device.clone(),
            slice: self.slice.slice(bytes(range.start)..bytes(range.end))?,
            element: PhantomData,
        })
    }

    /// Copies `values` to the device; the length must match. Blocks; not ordered with any stream.
    pub fn upload(&self, values: &[T]) -> Result<()> {
        self.device
            .upload(&self.slice, zerocopy::IntoBytes::as_bytes(values))
    }

    /// Copies all values to the host. Blocks; not ordered with any stream.
    pub fn download(&self) -> Result<Vec<T>> {
        let mut bytes = vec![0; self.slice.bytes()];
        self.device.download(&self.slice, &mut bytes)?;
        bytes
            .chunks_exact(size_of::<T>())
            .map(|chunk| {
                T::read_from_bytes(chunk).map_err(|_| Error::invalid("a chunk is not one element"))
            })
            .collect()
    }
}

impl<T> AsRef<DeviceSlice> for DeviceBuffer<T> {
    fn as_ref(&self) -> &DeviceSlice {
        &self.slice
    }
}
