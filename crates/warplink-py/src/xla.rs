//! Collectives in programs that XLA compiles, such as those of `jax.jit`.
//!
//! A program refers to a group by number, since it outlives Python's objects; XLA calls the handler on its threads,
//! without the interpreter.

mod frame;

use crate::collectives::Collectives;
use crate::communicator::Communicator;
use frame::{Buffer, Call, Frame, RawError, called};
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use warplink::collective::CollectiveKind;
use warplink::device::{Priority, Stream};
use warplink::{DType, DeviceKind, Error, Result};

/// The element types that reductions compute with, by XLA's numbers.
const TYPES: [(c_int, DType); 12] = [
    (2, DType::I8),
    (4, DType::I32),
    (5, DType::I64),
    (6, DType::U8),
    (8, DType::U32),
    (9, DType::U64),
    (10, DType::F16),
    (11, DType::F32),
    (12, DType::F64),
    (16, DType::BF16),
    (19, DType::F8E5M2),
    (20, DType::F8E4M3),
];

/// Further types of whole bytes, with their sizes: booleans, integers of 16 bits, complex numbers and floats of 8 bits.
const MOVED: [(c_int, usize); 10] = [
    (1, 1),
    (3, 2),
    (7, 2),
    (15, 8),
    (18, 16),
    (23, 1),
    (24, 1),
    (25, 1),
    (28, 1),
    (29, 1),
];

/// Groups by the numbers that programs have for them.
static GROUPS: Mutex<Groups> = Mutex::new(Groups {
    last: 0,
    members: BTreeMap::new(),
});

struct Groups {
    last: i64,
    members: BTreeMap<i64, Arc<[Member]>>,
}

/// One of this process's ranks in a group.
struct Member {
    communicator: warplink::Communicator,
    collectives: Py<Collectives>,
    /// Streams on which calls were made; on the host device, the only one.
    streams: Mutex<BTreeMap<u64, Stream>>,
}

/// Collectives of this process's devices, for programs that XLA compiles. Used by `warplink.jax`.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct XlaGroup {
    number: i64,
}

#[pymethods]
impl XlaGroup {
    /// `members` are the communicator and the collectives of each local device, in the order of the devices.
    #[new]
    fn new(members: Vec<(Bound<'_, Communicator>, Py<Collectives>)>) -> PyResult<Self> {
        let member = |(communicator, collectives): (Bound<'_, Communicator>, _)| {
            Ok(Member {
                communicator: communicator.get().inner.get()?,
                collectives,
                streams: Mutex::default(),
            })
        };
        let members = members.into_iter().map(member).collect::<PyResult<_>>()?;
        let mut groups = groups();
        // Numbers are not reused: a compiled program that outlives its group gets an error and not another group.
        groups.last += 1;
        let number = groups.last;
        groups.members.insert(number, members);
        Ok(Self { number })
    }

    /// The number by which programs refer to the group, which is valid as long as this object exists.
    #[getter]
    fn number(&self) -> i64 {
        self.number
    }

    /// The address of the handler that XLA calls.
    #[staticmethod]
    fn handler() -> usize {
        handle as *const () as usize
    }
}

impl Drop for XlaGroup {
    fn drop(&mut self) {
        let members = groups().members.remove(&self.number);
        // Outside the lock: dropping members may take other locks, and the interpreter's.
        drop(members);
    }
}

fn groups() -> MutexGuard<'static, Groups> {
    GROUPS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Handles a call of a program.
///
/// # Safety
/// `frame` is a valid frame of XLA's.
unsafe extern "C" fn handle(frame: *mut Frame) -> *mut RawError {
    // SAFETY: by the contract, for the time of this call.
    let Some(call) = (unsafe { called(frame) }) else {
        return ptr::null_mut();
    };
    match run(&call) {
        Ok(()) => ptr::null_mut(),
        Err(error) => call.error(&error),
    }
}

fn run(call: &Call<'_>) -> Result<()> {
    let number = call.integer("group")?;
    // Cloned out of the lock: devices of one process enter the handler concurrently, and calls may block.
    let members = groups().members.get(&number).cloned();
    let closed = || {
        let text = format!("the program's group {number} does not exist in this process");
        let help = "keep the warplink.jax.Group as long as its functions are called";
        Error::closed(text).with_help(help)
    };
    let members = members.ok_or_else(closed)?;
    // With one member the ordinal is not needed, which older releases of XLA do not report.
    let member = match &*members {
        [only] => only,
        all => {
            let (ordinal, count) = (call.ordinal(), all.len());
            all.get(ordinal).ok_or_else(|| {
                let text =
                    format!("the program runs on device {ordinal}; the group has {count} devices");
                Error::invalid(text)
                    .with_help("give the group a communicator for each local device")
            })?
        }
    };
    member.run(call)
}

impl Member {
    fn run(&self, call: &Call<'_>) -> Result<()> {
        let kind: CollectiveKind = call.text("kind")?.parse()?;
        let op = match call.text("op")? {
            "" => None,
            op => Some(op.parse()?),
        };
        let (source, target) = (call.source()?, call.target()?);
        let (dtype, size) = match op {
            Some(_) => computed(source)?,
            // Moved as bytes, so that types the library has no name for work as well.
            None => (DType::U8, element_size(source)?),
        };
        let collectives = self.collectives.get();
        let inputs = kind.rows(collectives.world).0.max(1);
        let described = warplink::collective::Call {
            kind,
            op,
            dtype,
            // XLA's source has the elements of all rows; the library counts those of one part.
            count: source.elements * size / dtype.size() / inputs,
            root: None,
        };
        let memory = |buffer: Buffer| match buffer.elements * size {
            0 => Ok(collectives.nothing.clone()),
            bytes => collectives.place.borrow_given(buffer.address, bytes),
        };
        let stream = self.stream(call)?;
        // `get` makes exceptions of Python.
        let inner = collectives
            .inner
            .with(Clone::clone)
            .ok_or_else(|| Error::closed("the collectives belong to another process"))?;
        inner.enqueue(&described, &memory(target)?, &memory(source)?, &stream)?;
        collectives.watched.made();
        match collectives.place.device.kind() {
            // XLA has no streams there: the results are ready when the handler returns.
            DeviceKind::Host => self.communicator.synchronize(&stream),
            DeviceKind::Cuda => Ok(()),
        }
    }

    /// The stream on which the program runs.
    fn stream(&self, call: &Call<'_>) -> Result<Stream> {
        let device = &self.collectives.get().place.device;
        let raw = match device.kind() {
            // XLA's CPU client has no streams to tell apart: one of the library serves all calls of the device.
            DeviceKind::Host => 0,
            DeviceKind::Cuda => call.stream()?,
        };
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(stream) = streams.get(&raw) {
            return Ok(stream.clone());
        }
        let stream = match device.kind() {
            DeviceKind::Host => self.communicator.create_stream(Priority::Normal)?,
            // SAFETY: XLA keeps the streams of a device as long as the device is in use.
            DeviceKind::Cuda => unsafe { device.borrow_stream(raw, Arc::new(())) }?,
        };
        // Kept, since borrowing is not free and XLA reuses a few streams.
        streams.insert(raw, stream.clone());
        Ok(stream)
    }
}

/// The element type of `buffer`, which is reduced, and its size.
fn computed(buffer: Buffer) -> Result<(DType, usize)> {
    let known = TYPES.iter().find(|(number, _)| *number == buffer.dtype);
    let (_, dtype) = known.ok_or_else(|| unsupported(buffer, "reduced"))?;
    Ok((*dtype, dtype.size()))
}

/// Bytes of an element of `buffer`, which is moved.
fn element_size(buffer: Buffer) -> Result<usize> {
    if let Ok((_, size)) = computed(buffer) {
        return Ok(size);
    }
    let known = MOVED.iter().find(|(number, _)| *number == buffer.dtype);
    let (_, size) = known.ok_or_else(|| unsupported(buffer, "moved"))?;
    Ok(*size)
}

fn unsupported(buffer: Buffer, done: &str) -> Error {
    let text = format!("elements of XLA's type {} cannot be {done}", buffer.dtype);
    Error::unsupported(text).with_help("convert the array to another type")
}
