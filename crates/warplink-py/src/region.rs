//! Memory that peers may access.

use crate::element::type_name;
use crate::errors::{closed, detached, raise};
use crate::memory::{Memory, View};
use crate::number::whole;
use crate::owner::Detached;
use crate::place::Place;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::time::Duration;
use warplink::Deadline;
use warplink::device::DeviceSlice;

/// Local memory registered for peers, created by `Communicator.alloc` and `Communicator.register`.
///
/// The registration ends with the last object that holds it: this one, its slices, and the transfers and plans that use
/// it. The memory is freed when no peer maps it any more.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct Region {
    region: Detached<warplink::memory::Region>,
    slice: DeviceSlice,
    place: Place,
}

impl Region {
    pub(crate) fn new(region: warplink::memory::Region, place: &Place) -> Self {
        Self {
            slice: region.memory().clone(),
            region: Detached::new(region, || closed("region")),
            place: place.clone(),
        }
    }

    /// The memory, available even after the region was closed.
    pub(crate) fn slice(&self) -> &DeviceSlice {
        &self.slice
    }

    /// The registration.
    pub(crate) fn registered(&self) -> PyResult<warplink::memory::Region> {
        self.region.get()
    }
}

#[pymethods]
impl Region {
    /// Length in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.slice.bytes()
    }

    /// Address of the first byte in this process.
    #[getter]
    fn address(&self) -> u64 {
        self.slice.address()
    }

    /// The memory, without the registration.
    #[getter]
    fn memory(&self) -> Memory {
        Memory::new(self.slice.clone(), &self.place)
    }

    /// Number of the registration; it changes if the memory is registered again. Raises ClosedError after the region
    /// was closed.
    #[getter]
    fn generation(&self) -> PyResult<u64> {
        Ok(self.registered()?.generation())
    }

    /// Copies `data` (bytes, bytearray) of the same length into the memory. Blocks until the copy is complete; not
    /// ordered after work in any stream. Raises InvalidArgumentError for another length, TypeError for an object that
    /// is not bytes, and the error that ended the device's work, such as PeerLostError, if there is one.
    fn upload(&self, data: &Bound<'_, PyAny>) -> PyResult<()> {
        self.memory().upload(data)
    }

    /// All bytes. Blocks until they are copied; not ordered after work in any stream. Raises the error that ended the
    /// device's work, such as PeerLostError, if there is one.
    fn download<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        self.memory().download(py)
    }

    /// The bytes from `start` to `stop` as a region of the same registration, without a copy. Raises
    /// InvalidArgumentError out of bounds, and ClosedError after the region was closed.
    #[pyo3(name = "slice")]
    fn part(
        &self,
        #[pyo3(from_py_with = whole)] start: usize,
        #[pyo3(from_py_with = whole)] stop: usize,
    ) -> PyResult<Self> {
        let part = self.registered()?.slice(start..stop).map_err(raise)?;
        Ok(Self::new(part, &self.place))
    }

    /// The memory as an array of `shape` and `dtype` ("f32", "bf16", "i64", …, or a name or type of NumPy or PyTorch),
    /// which must cover all of its bytes. Raises InvalidArgumentError if the lengths differ, and for an unknown type.
    fn view(
        &self,
        #[pyo3(from_py_with = whole)] shape: Vec<usize>,
        #[pyo3(from_py_with = type_name)] dtype: String,
    ) -> PyResult<View> {
        self.memory().view(shape, dtype)
    }

    /// Ends the registration and waits up to `timeout` seconds until no peer maps the memory. Nothing else may hold the
    /// registration. A second call does nothing. Raises InvalidArgumentError if another object holds it, and for a
    /// timeout that is not a valid number of seconds; TimeoutError, with the peer, if one still uses the memory.
    #[pyo3(signature = (timeout=60.0))]
    fn close(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let limit = seconds(timeout)?;
        // Taken before the wait: a second thread that closes finds nothing, and new exports fail.
        let Some(region) = self.region.take() else {
            return Ok(());
        };
        detached(py, || region.close(Deadline::after(limit)))
    }

    fn __repr__(&self) -> String {
        format!("Region({:?})", self.slice)
    }
}

/// A peer's region, mapped here as long as this object, a slice or a view of it exists.
///
/// Accesses are not ordered with operations of the peer; use transfers or barriers of streams for that.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct RemoteRegion {
    pub(crate) region: warplink::memory::RemoteRegion,
    pub(crate) place: Place,
}

#[pymethods]
impl RemoteRegion {
    /// The owner's rank in the job.
    #[getter]
    fn owner(&self) -> usize {
        self.region.owner()
    }

    /// Length in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.region.memory().bytes()
    }

    /// The mapped memory, at an address of this process.
    #[getter]
    fn memory(&self) -> Memory {
        Memory::new(self.region.memory().clone(), &self.place)
    }

    /// The bytes from `start` to `stop`, of the same mapping. Raises InvalidArgumentError out of bounds.
    #[pyo3(name = "slice")]
    fn part(
        &self,
        #[pyo3(from_py_with = whole)] start: usize,
        #[pyo3(from_py_with = whole)] stop: usize,
    ) -> PyResult<Self> {
        Ok(Self {
            region: self.region.slice(start..stop).map_err(raise)?,
            place: self.place.clone(),
        })
    }

    /// The memory as an array of `shape` and `dtype`; see `Region.view`. Raises the same.
    fn view(
        &self,
        #[pyo3(from_py_with = whole)] shape: Vec<usize>,
        #[pyo3(from_py_with = type_name)] dtype: String,
    ) -> PyResult<View> {
        self.memory().view(shape, dtype)
    }

    fn __repr__(&self) -> String {
        format!("RemoteRegion(owner={})", self.region.owner())
    }
}

/// A number of seconds as a duration.
pub(crate) fn seconds(number: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(number).map_err(|_| {
        crate::errors::invalid(format!(
            "{number} is not a valid timeout; expected seconds, at least 0"
        ))
    })
}
