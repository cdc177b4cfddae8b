//! DLPack: reading tensors of other libraries and exporting views, without copies.
//!
//! A tensor is read from a capsule of DLPack 1, a `DLManagedTensorVersioned` named `dltensor_versioned`, which reports
//! read-only memory, or of DLPack 0.x, a `DLManagedTensor` named `dltensor`, which every library produces if no version
//! is requested. A capsule that is read is not consumed: it is held as the owner of the memory, and its own destructor
//! releases the tensor.

use crate::element::Element;
use crate::errors::invalid;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods};
use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

/// DLPack's device types.
pub(crate) const CPU: i32 = 1;
pub(crate) const CUDA: i32 = 2;
pub(crate) const CUDA_HOST: i32 = 3;

const NAME: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";

/// The requested version; all of its minor versions can be read.
pub(crate) const VERSION: (u32, u32) = (1, 0);

/// Flag of a versioned tensor whose memory must not be written.
const READ_ONLY: u64 = 1;

#[repr(C)]
struct DLTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    dimensions: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct DLManagedTensor {
    tensor: DLTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DLManagedTensor)>,
}

#[repr(C)]
struct DLManagedTensorVersioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DLManagedTensorVersioned)>,
    flags: u64,
    tensor: DLTensor,
}

/// Description of a capsule's tensor.
pub(crate) struct Described {
    pub(crate) address: u64,
    pub(crate) device: (i32, i32),
    pub(crate) element: Option<Element>,
    pub(crate) item_bytes: usize,
    pub(crate) shape: Vec<i64>,
    /// In elements; `None` if contiguous.
    pub(crate) strides: Option<Vec<i64>>,
    /// `None` if unknown: capsules before DLPack 1 cannot express it.
    pub(crate) read_only: Option<bool>,
}

/// Contents of a capsule of one version of DLPack.
trait Managed: Sized {
    /// The name of an unused capsule.
    const NAME: &'static CStr;

    /// A tensor that `deleter` frees, with its `context`.
    fn new(tensor: DLTensor, read_only: bool, context: *mut c_void, deleter: Deleter<Self>)
    -> Self;
    fn context(&self) -> *mut c_void;
    fn deleter(&self) -> Option<Deleter<Self>>;
}

/// Frees a tensor.
type Deleter<M> = unsafe extern "C" fn(*mut M);

impl Managed for DLManagedTensor {
    const NAME: &'static CStr = NAME;

    fn new(tensor: DLTensor, _: bool, context: *mut c_void, deleter: Deleter<Self>) -> Self {
        Self {
            tensor,
            context,
            deleter: Some(deleter),
        }
    }

    fn context(&self) -> *mut c_void {
        self.context
    }

    fn deleter(&self) -> Option<Deleter<Self>> {
        self.deleter
    }
}

impl Managed for DLManagedTensorVersioned {
    const NAME: &'static CStr = VERSIONED;

    fn new(
        tensor: DLTensor,
        read_only: bool,
        context: *mut c_void,
        deleter: Deleter<Self>,
    ) -> Self {
        Self {
            major: VERSION.0,
            minor: VERSION.1,
            context,
            deleter: Some(deleter),
            flags: if read_only { READ_ONLY } else { 0 },
            tensor,
        }
    }

    fn context(&self) -> *mut c_void {
        self.context
    }

    fn deleter(&self) -> Option<Deleter<Self>> {
        self.deleter
    }
}

/// Memory to be exported.
pub(crate) struct Shared<'a> {
    pub(crate) address: u64,
    pub(crate) device: (i32, i32),
    pub(crate) element: Element,
    pub(crate) shape: &'a [usize],
    pub(crate) read_only: bool,
}

/// The context of an exported tensor, which the deleter frees.
struct Held<K> {
    shape: Vec<i64>,
    strides: Vec<i64>,
    _keep: K,
}

/// Description of the capsule that an object's `__dlpack__` returned.
pub(crate) fn describe(capsule: &Bound<'_, PyCapsule>) -> PyResult<Described> {
    let (tensor, read_only) = match capsule.pointer_checked(Some(VERSIONED)) {
        Ok(pointer) => {
            // SAFETY: by the protocol, an unused capsule of this name holds a valid DLManagedTensorVersioned that lives
            // as long as the capsule, and every version begins with these fields up to the flags; the interpreter is
            // attached, so that no other thread consumes it meanwhile.
            let managed = unsafe { pointer.cast::<DLManagedTensorVersioned>().as_ref() };
            if managed.major != VERSION.0 {
                let text = format!(
                    "__dlpack__ returned a tensor of DLPack {}.{}; expected version {}",
                    managed.major, managed.minor, VERSION.0
                );
                return Err(invalid(text));
            }
            (&managed.tensor, Some(managed.flags & READ_ONLY != 0))
        }
        Err(_) => {
            let pointer = capsule.pointer_checked(Some(NAME)).map_err(|_| {
                invalid(
                    "__dlpack__ returned another capsule; expected an unused one named 'dltensor_versioned' or \
                     'dltensor'",
                )
            })?;
            // SAFETY: as above, for a DLManagedTensor.
            let managed = unsafe { pointer.cast::<DLManagedTensor>().as_ref() };
            (&managed.tensor, None)
        }
    };
    let dimensions = usize::try_from(tensor.dimensions)
        .map_err(|_| invalid("the DLPack tensor has a negative number of dimensions"))?;
    // SAFETY: by the protocol, `shape` has as many entries as there are dimensions, and so has
    // `strides` unless it is null.
    let (shape, strides) = unsafe {
        (
            read(tensor.shape, dimensions),
            read(tensor.strides, dimensions),
        )
    };
    let shape = match (shape, dimensions) {
        (Some(shape), _) => shape,
        (None, 0) => Vec::new(),
        (None, _) => return Err(invalid("the DLPack tensor has no shape")),
    };
    // Elements that share a byte are packed in some exporters and padded in others, so their size is not known.
    let bits = usize::from(tensor.bits) * usize::from(tensor.lanes);
    if !bits.is_multiple_of(8) {
        return Err(invalid(format!(
            "elements of {bits} bits; expected whole bytes; help: pass the array as bytes"
        )));
    }
    Ok(Described {
        address: (tensor.data as u64).wrapping_add(tensor.byte_offset),
        device: (tensor.device_type, tensor.device_id),
        element: Element::of_dlpack(tensor.code, tensor.bits, tensor.lanes),
        item_bytes: bits / 8,
        shape,
        strides,
        read_only,
    })
}

/// The `count` numbers at `pointer`; `None` if it is null.
///
/// # Safety
/// Unless it is null, `pointer` must point to `count` numbers.
unsafe fn read(pointer: *const i64, count: usize) -> Option<Vec<i64>> {
    if pointer.is_null() {
        return None;
    }
    // SAFETY: guaranteed by the caller; the numbers are copied immediately.
    Some(unsafe { std::slice::from_raw_parts(pointer, count) }.to_vec())
}

/// A capsule for contiguous memory; `keep` is held until its consumer has finished, and is dropped on any thread. It is
/// of DLPack 1 if `max_version` reports that the consumer supports it: some consumers treat older capsules as
/// read-only.
///
/// Raises BufferError for read-only memory if the capsule cannot express that.
pub(crate) fn hand_out<'py, K: Send + 'static>(
    py: Python<'py>,
    memory: &Shared<'_>,
    max_version: Option<(u32, u32)>,
    keep: K,
) -> PyResult<Bound<'py, PyCapsule>> {
    // `None` is less than any version: consumers that do not pass one predate DLPack 1.
    if max_version >= Some(VERSION) {
        return hand_out_as::<DLManagedTensorVersioned, K>(py, memory, keep);
    }
    if memory.read_only {
        return Err(PyBufferError::new_err(
            "the view is of a read-only array; expected one that can be written, or numpy.asarray",
        ));
    }
    hand_out_as::<DLManagedTensor, K>(py, memory, keep)
}

fn hand_out_as<'py, M: Managed, K: Send + 'static>(
    py: Python<'py>,
    memory: &Shared<'_>,
    keep: K,
) -> PyResult<Bound<'py, PyCapsule>> {
    let shape: Vec<i64> = memory.shape.iter().map(|&extent| extent as i64).collect();
    let mut strides = vec![1; shape.len()];
    for index in (1..shape.len()).rev() {
        // As NumPy and PyTorch do for empty arrays: a stride of 0 would look like a broadcast dimension.
        strides[index - 1] = strides[index] * shape[index].max(1);
    }
    let mut held = Box::new(Held {
        shape,
        strides,
        _keep: keep,
    });
    let tensor = DLTensor {
        data: memory.address as *mut c_void,
        device_type: memory.device.0,
        device_id: memory.device.1,
        dimensions: held.shape.len() as i32,
        code: memory.element.code,
        bits: memory.element.bits,
        lanes: 1,
        // The vectors' heap blocks do not move, so that these stay valid until `delete`.
        shape: held.shape.as_mut_ptr(),
        strides: held.strides.as_mut_ptr(),
        byte_offset: 0,
    };
    let context = Box::into_raw(held).cast();
    let managed = M::new(tensor, memory.read_only, context, delete::<M, K>);
    let managed = NonNull::from(Box::leak(Box::new(managed)));
    // SAFETY: the pointer is to an `M`, as consumers of a capsule of this name expect, and `destroy` frees it only if
    // no consumer has taken it.
    let capsule = unsafe {
        PyCapsule::new_with_pointer_and_destructor(py, managed.cast(), M::NAME, Some(destroy::<M>))
    };
    capsule.inspect_err(|_| {
        // SAFETY: the tensor was not published.
        unsafe { delete::<M, K>(managed.as_ptr()) }
    })
}

/// Frees an exported tensor; its consumer calls it once.
///
/// # Safety
/// `managed` must come from [`hand_out_as`] with the same types, and must not be used afterwards.
unsafe extern "C" fn delete<M: Managed, K>(managed: *mut M) {
    // SAFETY: guaranteed by the caller: both are boxes that `hand_out_as` created.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.context().cast::<Held<K>>()));
    }
}

/// Frees the tensor of a capsule that was never consumed.
///
/// # Safety
/// Called by the interpreter, with a capsule that [`hand_out_as`] created for an `M`.
unsafe extern "C" fn destroy<M: Managed>(capsule: *mut pyo3::ffi::PyObject) {
    // SAFETY: the interpreter calls this attached, with a valid capsule. A consumer renames the capsule, and then owns
    // the tensor.
    unsafe {
        if pyo3::ffi::PyCapsule_IsValid(capsule, M::NAME.as_ptr()) == 0 {
            return;
        }
        let managed = pyo3::ffi::PyCapsule_GetPointer(capsule, M::NAME.as_ptr());
        let managed = managed.cast::<M>();
        if let Some(deleter) = (*managed).deleter() {
            deleter(managed);
        }
    }
}
