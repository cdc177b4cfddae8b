//! Memory that a caller names in any of the forms that Python has for it.

use crate::dlpack;
use crate::element::Element;
use crate::errors::{invalid, raise};
use crate::memory::{Memory, View};
use crate::owner::Owner;
use crate::region::Region;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};
use std::sync::Arc;
use warplink::device::{Device, DeviceSlice};
use warplink::program::Bindings;
use warplink::{DeviceKind, Error, ErrorKind};

/// The device of a job, and the number that DLPack knows it by.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) ordinal: i32,
}

impl Place {
    /// The `bytes` at `address`, which the caller keeps.
    pub(crate) fn borrow_unowned(&self, address: u64, bytes: usize) -> PyResult<DeviceSlice> {
        // SAFETY: the caller promises, as documented in Python, that the memory is there and of this device
        // whenever it is used. It is accessed by copies and kernels only, never by a Rust reference.
        let slice = unsafe { self.device.borrow(address, bytes, Arc::new(())) };
        slice.map_err(raise)
    }

    /// DLPack's device type and number.
    pub(crate) fn dlpack(&self) -> (i32, i32) {
        match self.device.kind() {
            DeviceKind::Host => (dlpack::CPU, 0),
            DeviceKind::Cuda => (dlpack::CUDA, self.ordinal),
        }
    }

    /// Fails unless memory of DLPack's `device` is this device's.
    fn check(&self, device: (i32, i32)) -> PyResult<()> {
        let fits = match self.device.kind() {
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
        Err(raise(error.with_operation("read an array").with_help(
            "move the array to the job's device, or join a job on the array's device",
        )))
    }
}

/// An array that was resolved: its memory and, where it is known, what is in it.
#[derive(Clone, Debug)]
pub(crate) struct Array {
    pub(crate) slice: DeviceSlice,
    pub(crate) element: Option<Element>,
    pub(crate) shape: Vec<usize>,
}

impl Array {
    /// The memory of `object`, which is a [`Region`], [`Memory`], [`View`], NumPy array, or has
    /// `__dlpack__`. On a GPU, `stream` (a raw handle) is made to wait for what the producer does with
    /// it. Nothing is copied.
    pub(crate) fn resolve(
        object: &Bound<'_, PyAny>,
        place: &Place,
        stream: Option<u64>,
    ) -> PyResult<Self> {
        if let Ok(region) = object.cast::<Region>() {
            return Ok(Self::bytes(region.get().slice().clone()));
        }
        if let Ok(memory) = object.cast::<Memory>() {
            return Ok(Self::bytes(memory.get().slice.clone()));
        }
        if let Ok(view) = object.cast::<View>() {
            let view = view.get();
            return Ok(Self {
                slice: view.slice.clone(),
                element: Some(view.element),
                shape: view.shape.clone(),
            });
        }
        if place.device.kind() == DeviceKind::Host
            && let Ok(interface) = object.getattr("__array_interface__")
        {
            return Self::of_interface(object, &interface.cast_into::<PyDict>()?, place);
        }
        if object.hasattr("__dlpack__")? {
            return Self::of_dlpack(object, place, stream);
        }
        Err(pyo3::exceptions::PyTypeError::new_err(format!(
            "{} is not an array; expected a Region, a Memory, a View, a NumPy array or an object with __dlpack__",
            object.get_type().qualname()?
        )))
    }

    fn bytes(slice: DeviceSlice) -> Self {
        Self {
            shape: vec![slice.bytes()],
            slice,
            element: None,
        }
    }

    /// A NumPy array, by the protocol that also tells read-only ones.
    fn of_interface(
        object: &Bound<'_, PyAny>,
        interface: &Bound<'_, PyDict>,
        place: &Place,
    ) -> PyResult<Self> {
        let field = |name: &str| -> PyResult<Bound<'_, PyAny>> {
            let value = interface.get_item(name)?;
            value.ok_or_else(|| invalid(format!("__array_interface__ has no '{name}'")))
        };
        let (address, _read_only): (u64, bool) = field("data")?.extract()?;
        let typestr: String = field("typestr")?.extract()?;
        let shape: Vec<i64> = field("shape")?.extract()?;
        let item_bytes: usize = typestr
            .get(2..)
            .and_then(|digits| digits.parse().ok())
            .ok_or_else(|| invalid(format!("unknown NumPy type '{typestr}'")))?;
        let strides: Option<Vec<i64>> = match interface.get_item("strides")? {
            Some(strides) => strides.extract()?,
            None => None,
        };
        // In bytes there, in elements here.
        let strides = strides.map(|strides| {
            let elements = strides
                .iter()
                .map(|stride| stride / item_bytes.max(1) as i64);
            elements.collect()
        });
        let described = dlpack::Described {
            address,
            device: (dlpack::CPU, 0),
            element: Element::of_typestr(&typestr),
            item_bytes,
            shape,
            strides,
        };
        Self::borrow(described, place, object.clone().unbind())
    }

    fn of_dlpack(object: &Bound<'_, PyAny>, place: &Place, stream: Option<u64>) -> PyResult<Self> {
        let (kind, number) = object.call_method0("__dlpack_device__")?.extract()?;
        place.check((kind, number))?;
        let capsule = match stream.filter(|_| kind == dlpack::CUDA) {
            Some(stream) => {
                let arguments = PyDict::new(object.py());
                // The default stream has a number of its own in the protocol.
                arguments.set_item("stream", stream.max(1))?;
                object.call_method("__dlpack__", (), Some(&arguments))?
            }
            None => object.call_method0("__dlpack__")?,
        };
        let capsule = capsule.cast_into::<PyCapsule>()?;
        let described = dlpack::describe(&capsule)?;
        place.check(described.device)?;
        Self::borrow(described, place, capsule.into_any().unbind())
    }

    /// Borrows what was described, kept by `owner`.
    fn borrow(described: dlpack::Described, place: &Place, owner: Py<PyAny>) -> PyResult<Self> {
        let shape: Option<Vec<usize>> = described
            .shape
            .iter()
            .map(|&extent| usize::try_from(extent).ok())
            .collect();
        let shape = shape.ok_or_else(|| invalid("the array has a negative extent"))?;
        let bytes = shape
            .iter()
            .try_fold(described.item_bytes, |all, &extent| all.checked_mul(extent))
            .ok_or_else(|| invalid("the array's size overflows the address space"))?;
        if bytes == 0 {
            return Err(invalid("the array is empty; expected at least one element"));
        }
        if !is_contiguous(&shape, described.strides.as_deref()) {
            let error = Error::invalid(format!(
                "an array of shape {shape:?} has strides {:?}; expected contiguous rows",
                described.strides.unwrap_or_default()
            ));
            return Err(raise(
                error
                    .with_operation("read an array")
                    .with_help("pass a contiguous copy"),
            ));
        }
        let owner = Arc::new(Owner::new(owner));
        // SAFETY: the producer says that the memory is there and of this device (`check`), and keeps
        // it as long as `owner` is held. It is accessed by copies and kernels only, never by a Rust
        // reference.
        let slice = unsafe { place.device.borrow(described.address, bytes, owner) };
        Ok(Self {
            slice: slice.map_err(raise)?,
            element: described.element,
            shape,
        })
    }

    /// The element type.
    pub(crate) fn element(&self, what: &str) -> PyResult<Element> {
        self.element.ok_or_else(|| {
            raise(
                Error::new(
                    ErrorKind::InvalidArgument,
                    format!("{what} has no element type that Warplink knows"),
                )
                .with_help("pass a view: region.view(shape, dtype)"),
            )
        })
    }
}

/// Memory for some of a plan's tensors, by name.
pub(crate) fn replacements(
    memory: Option<&Bound<'_, PyDict>>,
    place: &Place,
) -> PyResult<Bindings> {
    let mut bindings = Bindings::new();
    for (name, array) in memory.into_iter().flatten() {
        let array = Array::resolve(&array, place, None)?;
        bindings.insert(name.extract()?, array.slice);
    }
    Ok(bindings)
}

/// Whether the elements lie in the order of their indices without gaps.
fn is_contiguous(shape: &[usize], strides: Option<&[i64]>) -> bool {
    let Some(strides) = strides else {
        return true;
    };
    let mut expected = 1_i64;
    for (&extent, &stride) in shape.iter().zip(strides).rev() {
        if extent != 1 && stride != expected {
            return false;
        }
        expected = expected.saturating_mul(extent as i64);
    }
    true
}
