//! Device memory, and views of it with a shape and an element type.

use crate::dlpack;
use crate::element::{Element, type_name};
use crate::errors::{detached, invalid, raise};
use crate::number::whole;
use crate::place::Place;
use pyo3::exceptions::PyAttributeError;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyCapsule, PyDict, PyMemoryView};
use warplink::DeviceKind;
use warplink::device::DeviceSlice;

/// A range of device memory, kept allocated as long as this object, a slice or a view of it exists.
///
/// Peers cannot access it unless it is part of a `Region`.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) slice: DeviceSlice,
    pub(crate) place: Place,
    /// Whether it is the memory of a read-only array.
    pub(crate) read_only: bool,
}

/// Device memory with a shape and an element type, row-major and contiguous.
///
/// NumPy (`numpy.asarray`), PyTorch (`torch.from_dlpack`) and every library that supports DLPack or NumPy's array
/// interface use it in place, without a copy.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct View {
    pub(crate) slice: DeviceSlice,
    pub(crate) place: Place,
    pub(crate) element: Element,
    pub(crate) shape: Vec<usize>,
    /// Whether it is the memory of a read-only array.
    pub(crate) read_only: bool,
}

impl Memory {
    /// Writable memory.
    pub(crate) fn new(slice: DeviceSlice, place: &Place) -> Self {
        Self {
            slice,
            place: place.clone(),
            read_only: false,
        }
    }
}

#[pymethods]
impl Memory {
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

    /// Copies `data` (bytes, bytearray) of the same length into the memory. Blocks until the copy is complete; not
    /// ordered after work in any stream. Raises InvalidArgumentError for another length, and for memory of a read-only
    /// array; TypeError for an object that is not bytes; and the error that ended the device's work, such as
    /// PeerLostError, if there is one.
    pub(crate) fn upload(&self, data: &Bound<'_, PyAny>) -> PyResult<()> {
        if self.read_only {
            return Err(invalid(
                "upload to memory of a read-only array; expected one that can be written",
            ));
        }
        // Copied in all cases: without the interpreter's lock, another thread may resize a bytearray or write to a
        // buffer.
        let bytes: Vec<u8> = if let Ok(bytes) = data.cast::<PyBytes>() {
            bytes.as_bytes().to_vec()
        } else if let Ok(array) = data.cast::<PyByteArray>() {
            array.to_vec()
        } else {
            // Other objects with the buffer protocol; the limited API has no other access to it.
            let bytes = PyMemoryView::from(data)?.call_method0("tobytes")?;
            bytes.cast::<PyBytes>()?.as_bytes().to_vec()
        };
        detached(data.py(), || self.place.device.upload(&self.slice, &bytes))
    }

    /// All bytes. Blocks until they are copied; not ordered after work in any stream. Raises the error that ended the
    /// device's work, such as PeerLostError, if there is one.
    pub(crate) fn download<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        // The bytes object is created after the copy: Python objects cannot be written without the interpreter's lock.
        let bytes = detached(py, || {
            let mut bytes = vec![0; self.slice.bytes()];
            let copied = self.place.device.download(&self.slice, &mut bytes);
            copied.map(|()| bytes)
        })?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// The bytes from `start` to `stop`, without a copy. Raises InvalidArgumentError out of bounds.
    fn slice(
        &self,
        #[pyo3(from_py_with = whole)] start: usize,
        #[pyo3(from_py_with = whole)] stop: usize,
    ) -> PyResult<Self> {
        Ok(Self {
            slice: self.slice.slice(start..stop).map_err(raise)?,
            place: self.place.clone(),
            read_only: self.read_only,
        })
    }

    /// The memory as an array of `shape` and `dtype` ("f32", "bf16", "i64", …, or a name or type of NumPy or PyTorch),
    /// which must cover all of its bytes. Raises InvalidArgumentError if the lengths differ, and for an unknown type.
    pub(crate) fn view(
        &self,
        #[pyo3(from_py_with = whole)] shape: Vec<usize>,
        #[pyo3(from_py_with = type_name)] dtype: String,
    ) -> PyResult<View> {
        Ok(View {
            read_only: self.read_only,
            ..View::new(&self.slice, &self.place, shape, &dtype)?
        })
    }

    fn __repr__(&self) -> String {
        format!("Memory({:?})", self.slice)
    }
}

impl View {
    /// Bytes of an array of `shape` and `dtype`.
    pub(crate) fn bytes_of(shape: &[usize], dtype: &str) -> PyResult<usize> {
        let element = Element::named(dtype)?;
        let bytes = shape
            .iter()
            .try_fold(element.bytes(), |all, &extent| all.checked_mul(extent));
        bytes.ok_or_else(|| {
            invalid(format!(
                "{dtype} of shape {shape:?} overflows the address space"
            ))
        })
    }

    pub(crate) fn new(
        slice: &DeviceSlice,
        place: &Place,
        shape: Vec<usize>,
        dtype: &str,
    ) -> PyResult<Self> {
        let element = Element::named(dtype)?;
        if Self::bytes_of(&shape, dtype)? != slice.bytes() {
            return Err(invalid(format!(
                "{dtype} of shape {shape:?} does not take the {} bytes of the memory; expected the same length",
                slice.bytes()
            )));
        }
        Ok(Self {
            slice: slice.clone(),
            place: place.clone(),
            element,
            shape,
            read_only: false,
        })
    }
}

#[pymethods]
impl View {
    /// The extents.
    #[getter]
    fn shape(&self) -> Vec<usize> {
        self.shape.clone()
    }

    /// The element type's name, such as "f32".
    #[getter]
    fn dtype(&self) -> &'static str {
        self.element.name
    }

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

    /// NumPy's array interface; only for the host device, and for types that NumPy has.
    #[getter]
    fn __array_interface__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyDict>> {
        let view = slf.get();
        if view.place.device.kind() != DeviceKind::Host {
            return Err(PyAttributeError::new_err(
                "memory of a GPU has no array interface; expected __dlpack__ to be used",
            ));
        }
        let Some(typestr) = view.element.typestr() else {
            return Err(PyAttributeError::new_err(format!(
                "NumPy has no type for {}; expected __dlpack__ to be used",
                view.element.name
            )));
        };
        let py = slf.py();
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("shape", pyo3::types::PyTuple::new(py, &view.shape)?)?;
        interface.set_item("typestr", typestr)?;
        interface.set_item("data", (view.slice.address(), view.read_only))?;
        Ok(interface)
    }

    /// DLPack's device type and number.
    fn __dlpack_device__(&self) -> (i32, i32) {
        self.place.dlpack()
    }

    /// A DLPack capsule of this memory. There is no synchronization with streams: writes by Warplink's streams are
    /// visible once the consumer's stream waits for them. Raises BufferError for memory of a read-only array if the
    /// consumer requests DLPack without a version, which cannot express that it is read-only.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        // Ignored: a view has no pending work of its own that the consumer's stream would have to wait for. The
        // caller orders streams, as documented.
        let _ = stream;
        if dl_device.is_some_and(|device| device != self.place.dlpack()) || copy == Some(true) {
            return Err(pyo3::exceptions::PyBufferError::new_err(
                "the view is handed out in place; expected no copy and no other device",
            ));
        }
        let memory = dlpack::Shared {
            address: self.slice.address(),
            device: self.place.dlpack(),
            element: self.element,
            shape: &self.shape,
            read_only: self.read_only,
        };
        dlpack::hand_out(py, &memory, max_version, self.slice.clone())
    }

    fn __repr__(&self) -> String {
        let (name, shape) = (self.element.name, &self.shape);
        format!("View({:?}, shape={shape:?}, dtype='{name}')", self.slice)
    }
}
