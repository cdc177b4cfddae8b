//! Conversion of Python arrays, in any supported form, to device memory.

use crate::dlpack;
use crate::element::Element;
use crate::errors::{invalid, raise};
use crate::memory::{Memory, View};
use crate::owner::Owner;
use crate::place::Place;
use crate::region::Region;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};
use std::collections::BTreeSet;
use std::sync::Arc;
use warplink::device::DeviceSlice;
use warplink::program::Bindings;
use warplink::{DeviceKind, Error, Rank};

/// Maximum nesting depth of record types.
const MAX_NESTING: usize = 64;

/// A resolved array: its memory and, if known, its element type and shape.
#[derive(Clone, Debug)]
pub(crate) struct Array {
    pub(crate) slice: DeviceSlice,
    pub(crate) element: Option<Element>,
    /// Bytes of an element; `None` for memory without an element type.
    pub(crate) item_bytes: Option<usize>,
    pub(crate) shape: Vec<usize>,
    /// Whether the memory must not be written.
    pub(crate) read_only: bool,
}

/// Options for reading the arrays of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader<'a> {
    place: &'a Place,
    stream: Option<u64>,
    nothing: Option<&'a DeviceSlice>,
    targets: bool,
}

impl<'a> Reader<'a> {
    /// Reads arrays of the device. On a GPU, `stream` (a raw handle) waits for the producer's pending work on an array;
    /// without a stream there is no synchronization.
    pub(crate) fn new(place: &'a Place, stream: Option<u64>) -> Self {
        Self {
            place,
            stream,
            nothing: None,
            targets: false,
        }
    }

    /// As [`new`](Self::new), also accepting empty arrays, whose memory is `nothing`, of 0 bytes.
    pub(crate) fn with_empty(self, nothing: &'a DeviceSlice) -> Self {
        Self {
            nothing: Some(nothing),
            ..self
        }
    }

    /// As before, for arrays to be written: rejects read-only arrays.
    pub(crate) fn for_targets(self) -> Self {
        Self {
            targets: true,
            ..self
        }
    }

    /// The memory of `object`, which is a [`Region`], [`Memory`], [`View`], NumPy array, or has `__dlpack__`; `name`
    /// identifies it in errors. Nothing is copied.
    pub(crate) fn read(&self, object: &Bound<'_, PyAny>, name: &str) -> PyResult<Array> {
        let array = self.find(object, name)?;
        if self.targets && array.read_only {
            let error = Error::invalid("the array is read-only; expected one that can be written");
            let error = error.with_operation(format!("write {name}"));
            return Err(raise(error.with_help("pass a writable array")));
        }
        Ok(array)
    }

    /// The message ends in one direction, passed as the argument `name`.
    pub(crate) fn ends(
        &self,
        name: &str,
        ends: &[(Rank, Bound<'_, PyAny>)],
    ) -> PyResult<Vec<(Rank, DeviceSlice)>> {
        let ends = ends.iter().enumerate().map(|(number, (peer, array))| {
            let array = self.read(array, &format!("{name}[{number}]"))?;
            Ok((*peer, array.slice))
        });
        ends.collect()
    }

    fn find(&self, object: &Bound<'_, PyAny>, name: &str) -> PyResult<Array> {
        // Own classes come first: their slices are used as they are, with their owner, instead of being borrowed a
        // second time.
        if let Ok(region) = object.cast::<Region>() {
            return Ok(Array::bytes(region.get().slice().clone(), false));
        }
        if let Ok(memory) = object.cast::<Memory>() {
            let memory = memory.get();
            return Ok(Array::bytes(memory.slice.clone(), memory.read_only));
        }
        if let Ok(view) = object.cast::<View>() {
            let view = view.get();
            return Ok(Array {
                slice: view.slice.clone(),
                element: Some(view.element),
                item_bytes: Some(view.element.bytes()),
                shape: view.shape.clone(),
                read_only: view.read_only,
            });
        }
        // NumPy exports neither records nor, before version 2.1, read-only arrays by __dlpack__; both can be sources
        // here.
        if self.place.device.kind() == DeviceKind::Host
            && let Ok(interface) = object.getattr("__array_interface__")
        {
            return self.of_interface(object, &interface.cast_into::<PyDict>()?, name);
        }
        if object.hasattr("__dlpack__")? {
            return self.of_dlpack(object, name);
        }
        Err(PyTypeError::new_err(format!(
            "read {name}: {} is not an array; expected a Region, a Memory, a View, a NumPy array or an object with \
             __dlpack__",
            object.get_type().qualname()?
        )))
    }

    /// A NumPy array, read by its array interface, which also reports read-only arrays.
    fn of_interface(
        &self,
        object: &Bound<'_, PyAny>,
        interface: &Bound<'_, PyDict>,
        name: &str,
    ) -> PyResult<Array> {
        let field = |name: &str| -> PyResult<Bound<'_, PyAny>> {
            let value = interface.get_item(name)?;
            value.ok_or_else(|| invalid(format!("__array_interface__ has no '{name}'")))
        };
        let (address, read_only): (u64, bool) = field("data")?.extract()?;
        let typestr: String = field("typestr")?.extract()?;
        let shape: Vec<i64> = field("shape")?.extract()?;
        let item_bytes = item_bytes(&typestr, name)?;
        // A record's fields may be addresses of objects, which are of no use to another process.
        if typestr.get(1..2) == Some("V") && has_objects(object, interface)? {
            let error = Error::invalid(
                "the array has fields that are Python objects; expected numbers or raw bytes in all of them",
            );
            return Err(raise(error.with_operation(format!("read {name}"))));
        }
        let strides: Option<Vec<i64>> = match interface.get_item("strides")? {
            Some(strides) => strides.extract()?,
            None => None,
        };
        let strides = strides.map(|strides| in_elements(&strides, &shape, item_bytes, name));
        let strides = strides.transpose()?;
        let described = dlpack::Described {
            address,
            device: (dlpack::CPU, 0),
            element: Element::of_typestr(&typestr),
            item_bytes,
            shape,
            strides,
            read_only: Some(read_only),
        };
        self.borrow(described, object.clone().unbind(), name)
    }

    fn of_dlpack(&self, object: &Bound<'_, PyAny>, name: &str) -> PyResult<Array> {
        let (kind, number) = object.call_method0("__dlpack_device__")?.extract()?;
        // Before the export: asking for a stream of another kind of device is an error of the producer, with a text
        // that does not name the argument.
        self.place.check((kind, number), name)?;
        let arguments = PyDict::new(object.py());
        if kind == dlpack::CUDA {
            // The protocol has a separate number for the default stream, and None for no stream. JAX would take that
            // for a handle, so it gets no argument and blocks until the array is computed.
            let stream = match self.stream {
                Some(stream) => Some(i128::from(stream.max(1))),
                None if is_of_jax(object)? => None,
                None => Some(-1),
            };
            arguments.set_item("stream", stream)?;
        }
        let ask = || object.call_method("__dlpack__", (), Some(&arguments));
        arguments.set_item("max_version", dlpack::VERSION)?;
        let capsule = ask().or_else(|error| {
            if !error.is_instance_of::<PyTypeError>(object.py()) {
                return Err(error);
            }
            // Libraries older than DLPack 1 do not accept this argument.
            arguments.del_item("max_version")?;
            ask()
        })?;
        let capsule = capsule.cast_into::<PyCapsule>()?;
        let mut described = dlpack::describe(&capsule)?;
        // Checked again: the capsule is another statement of the producer, and memory of the wrong device would be
        // accessed through an address that means something else here.
        self.place.check(described.device, name)?;
        if described.read_only.is_none() {
            described.read_only = Some(is_of_jax(object)?);
        }
        self.borrow(described, capsule.into_any().unbind(), name)
    }

    /// Borrows the described memory, which `owner` keeps allocated.
    fn borrow(
        &self,
        described: dlpack::Described,
        owner: Py<PyAny>,
        name: &str,
    ) -> PyResult<Array> {
        let refused = |text: String| Error::invalid(text).with_operation(format!("read {name}"));
        let shape: Option<Vec<usize>> = described
            .shape
            .iter()
            .map(|&extent| usize::try_from(extent).ok())
            .collect();
        let negative = || raise(refused("the array has a negative extent".to_owned()));
        let shape = shape.ok_or_else(negative)?;
        let mut extents = shape.iter();
        let bytes = extents.try_fold(described.item_bytes, |all, &extent| all.checked_mul(extent));
        let overflows = "the array's size overflows the address space";
        let bytes = bytes.ok_or_else(|| raise(refused(overflows.to_owned())))?;
        let (element, item_bytes) = (described.element, Some(described.item_bytes));
        let read_only = described.read_only.unwrap_or(false);
        // Devices reject empty memory, and an empty array may have a null address or any strides.
        if bytes == 0 {
            let empty = "the array is empty; expected at least one element";
            let nothing = self.nothing.cloned();
            return Ok(Array {
                slice: nothing.ok_or_else(|| raise(refused(empty.to_owned())))?,
                element,
                item_bytes,
                shape,
                read_only,
            });
        }
        if !is_contiguous(&shape, described.strides.as_deref()) {
            let error = refused(format!(
                "an array of shape {shape:?} has strides {:?}; expected contiguous rows",
                described.strides.unwrap_or_default()
            ));
            return Err(raise(error.with_help("pass a contiguous copy")));
        }
        // The library may drop the last slice on any thread, without the interpreter's lock; see `owner`.
        let owner = Arc::new(Owner::new(owner));
        // SAFETY: the producer guarantees that the memory exists and belongs to this device (`check`), and keeps it
        // allocated while `owner` is held. It is accessed by copies and kernels only, never through a Rust reference.
        let slice = unsafe { self.place.device.borrow(described.address, bytes, owner) };
        Ok(Array {
            slice: slice.map_err(raise)?,
            element,
            item_bytes,
            shape,
            read_only,
        })
    }
}

impl Array {
    /// The memory of `object`, read by [`Reader`].
    pub(crate) fn resolve(
        object: &Bound<'_, PyAny>,
        place: &Place,
        stream: Option<u64>,
    ) -> PyResult<Self> {
        Reader::new(place, stream).read(object, "an array")
    }

    /// As [`resolve`](Self::resolve), for an array to be written.
    pub(crate) fn resolve_target(
        object: &Bound<'_, PyAny>,
        place: &Place,
        stream: Option<u64>,
    ) -> PyResult<Self> {
        let reader = Reader::new(place, stream).for_targets();
        reader.read(object, "the target")
    }

    fn bytes(slice: DeviceSlice, read_only: bool) -> Self {
        Self {
            shape: vec![slice.bytes()],
            slice,
            element: None,
            item_bytes: None,
            read_only,
        }
    }

    /// The element type.
    pub(crate) fn element(&self, what: &str) -> PyResult<Element> {
        self.element.ok_or_else(|| {
            raise(
                Error::invalid(format!("{what} has no element type that Warplink knows"))
                    .with_help("pass a view: region.view(shape, dtype)"),
            )
        })
    }
}

/// Memory for some of a program's tensors, by name.
pub(crate) struct NamedMemory {
    pub(crate) bindings: Bindings,
    /// The names of the read-only arrays.
    pub(crate) read_only: BTreeSet<String>,
}

/// Memory for some of a program's tensors, read by [`Reader`] for `stream`; `is_output` selects the tensors that the
/// program writes.
pub(crate) fn bindings(
    memory: Option<&Bound<'_, PyDict>>,
    place: &Place,
    stream: Option<u64>,
    is_output: impl Fn(&str) -> bool,
) -> PyResult<NamedMemory> {
    let sources = Reader::new(place, stream);
    let targets = sources.for_targets();
    let (mut bindings, mut read_only) = (Bindings::new(), BTreeSet::new());
    for (name, array) in memory.into_iter().flatten() {
        let name: String = name.extract()?;
        // Only outputs need to be writable: PyTorch and NumPy callers pass read-only inputs, such as mapped weights.
        let reader = if is_output(&name) { targets } else { sources };
        let array = reader.read(&array, &format!("'{name}'"))?;
        if array.read_only {
            read_only.insert(name.clone());
        }
        bindings.insert(name, array.slice);
    }
    Ok(NamedMemory {
        bindings,
        read_only,
    })
}

/// Whether `object` is a JAX array. These are always read-only, which their capsules cannot express since they are
/// unversioned.
fn is_of_jax(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let modules = object.py().import("sys")?.getattr("modules")?;
    // If a JAX array exists, JAX has been imported; it may be only partially imported while another thread imports it.
    let jax = modules.call_method1("get", ("jax",))?;
    match jax.getattr_opt("Array")? {
        Some(class) => object.is_instance(&class),
        None => Ok(false),
    }
}

/// Bytes of an element of NumPy's type `typestr`, of the array `name`. For other kinds, the number is not a number of
/// bytes, or elements are addresses in this process.
fn item_bytes(typestr: &str, name: &str) -> PyResult<usize> {
    let bytes = match typestr.get(1..2) {
        Some("b" | "i" | "u" | "f" | "c" | "V") => {
            typestr.get(2..).and_then(|digits| digits.parse().ok())
        }
        _ => None,
    };
    bytes.ok_or_else(|| {
        let error = Error::invalid(format!(
            "the array has elements of NumPy's type '{typestr}'; expected booleans, integers, floats, complex numbers \
             or raw bytes"
        ));
        let error = error.with_operation(format!("read {name}"));
        raise(error.with_help("pass a view of its bytes, if these are to be moved"))
    })
}

/// Converts `strides` from bytes, as in the array interface, to elements.
fn in_elements(
    strides: &[i64],
    shape: &[i64],
    item_bytes: usize,
    name: &str,
) -> PyResult<Vec<i64>> {
    // Records without fields have 0 bytes; the divisor must not be 0.
    let item_bytes = i64::try_from(item_bytes.max(1)).unwrap_or(i64::MAX);
    // Strides of dimensions with at most one element are ignored.
    let counts = !shape.contains(&0);
    let whole = |(stride, extent): (&i64, &i64)| stride % item_bytes == 0 || *extent == 1;
    if counts && !strides.iter().zip(shape).all(whole) {
        let error = Error::invalid(format!(
            "an array of shape {shape:?} has strides of {strides:?} bytes; expected contiguous rows of elements of \
             {item_bytes} bytes"
        ));
        let error = error.with_operation(format!("read {name}"));
        return Err(raise(error.with_help("pass a contiguous copy")));
    }
    Ok(strides.iter().map(|stride| stride / item_bytes).collect())
}

/// Whether records of an array have fields that are references to Python objects. NumPy reports this itself; for other
/// producers, the field descriptions are searched.
fn has_objects(object: &Bound<'_, PyAny>, interface: &Bound<'_, PyDict>) -> PyResult<bool> {
    if let Ok(has) = object
        .getattr("dtype")
        .and_then(|dtype| dtype.getattr("hasobject"))
        && has.is_truthy()?
    {
        return Ok(true);
    }
    match interface.get_item("descr")? {
        Some(fields) if !fields.is_none() => describes_objects(&fields, 0),
        _ => Ok(false),
    }
}

/// Whether any of `fields`, pairs of a name and a type or a nested list of fields, is a Python object.
fn describes_objects(fields: &Bound<'_, PyAny>, depth: usize) -> PyResult<bool> {
    if depth > MAX_NESTING {
        return Err(invalid(format!(
            "fields are nested more than {MAX_NESTING} deep; expected fewer levels"
        )));
    }
    for field in fields.try_iter()? {
        let kind = field?.get_item(1)?;
        let found = match kind.extract::<String>() {
            Ok(typestr) => typestr.get(1..2) == Some("O"),
            Err(_) => describes_objects(&kind, depth + 1)?,
        };
        if found {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether elements are stored in row-major order without gaps.
fn is_contiguous(shape: &[usize], strides: Option<&[i64]>) -> bool {
    // Both interfaces pass no strides for row-major arrays.
    let Some(strides) = strides else {
        return true;
    };
    let mut expected = 1_i64;
    for (&extent, &stride) in shape.iter().zip(strides).rev() {
        // Producers may put any stride at an extent of 1, since it is never multiplied by an index above 0.
        if extent != 1 && stride != expected {
            return false;
        }
        expected = expected.saturating_mul(extent as i64);
    }
    true
}
