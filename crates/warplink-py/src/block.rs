//! Arguments of the Python function of a host kernel: its block and channels.
//!
//! The running block is thread-local, so these objects are invalid after the function has returned and on other
//! threads.

use crate::channel::PlaceInRegion;
use crate::errors::{detached, raise};
use crate::memory::Memory;
use crate::owner::Owner;
use crate::place::Place;
use pyo3::prelude::*;
use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use warplink::device;
use warplink::{Error, Result};

thread_local! {
    /// The block whose function runs on this thread, and its number.
    static RUNNING: Cell<Option<Running>> = const { Cell::new(None) };
    /// Error of the function's last call.
    static FAILED: Cell<Option<Error>> = const { Cell::new(None) };
}

#[derive(Clone, Copy)]
struct Running {
    block: NonNull<device::Block<'static>>,
    number: u64,
}

/// Restores the previous running block when a function returns or unwinds.
struct Reset(Option<Running>);

impl Drop for Reset {
    fn drop(&mut self) {
        RUNNING.set(self.0);
    }
}

/// A block of a launch, passed to the function of a host kernel and valid while it runs.
///
/// All methods raise InvalidArgumentError after the function has returned, and on any thread other than the one that
/// runs it.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct Block {
    number: u64,
    place: Place,
}

/// A channel of a block: the methods of `warplink::Channel` in CUDA C++, called by the whole block. A position in a
/// region is an offset in bytes, or a pair of the region's number and an offset.
///
/// All methods raise InvalidArgumentError where the block's methods do; methods that take positions also if a range
/// passes the end of a region or the region does not exist. Methods that move data, signal, flush, wait or poll raise
/// the error that ended the device's work, such as PeerLostError, if there is one, and ClosedError if the channel's
/// proxy has ended.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct BlockChannel {
    number: u64,
    argument: usize,
    /// Index in an array of channels.
    index: Option<usize>,
    place: Place,
}

/// Runs the function `body` as `block`. An exception in it becomes the error of the kernel.
pub(crate) fn run(block: &device::Block<'_>, body: &Owner, place: &Place) -> Result<()> {
    // Numbers are never reused, so that an object kept from an earlier block cannot reach a later block on this
    // thread.
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let running = Running {
        block: NonNull::from(block).cast(),
        number,
    };
    // An error that an earlier function caught must not be reported for this one.
    FAILED.take();
    let reset = Reset(RUNNING.replace(Some(running)));
    // Fails rather than panics while the interpreter is finalizing, when a kernel may still be queued.
    let called = Python::try_attach(|py| {
        let given = Block {
            number,
            place: place.clone(),
        };
        let called = body.object(py).call1((given,));
        called.map(drop).map_err(|error| failure(py, &error))
    });
    drop(reset);
    let ended = || Error::closed("the interpreter has ended");
    called.ok_or_else(ended)?
}

/// Converts the exception of a kernel's function: the library's error if it is one.
fn failure(py: Python<'_>, error: &PyErr) -> Error {
    // Only the library's exceptions have a `kind`. The original error is returned with its fields, such as the peer,
    // which the exception's text alone would lose.
    let own = error.value(py).getattr("kind").is_ok();
    if let Some(failed) = FAILED.take().filter(|_| own) {
        return failed;
    }
    Error::invalid(format!("the function of a host kernel raised {error}"))
        .with_operation("run a kernel")
        .with_help("fix the function, or handle the exception in it")
}

/// Calls `call` with block `number`, if that block runs on this thread.
fn running<R>(number: u64, call: impl FnOnce(&device::Block<'_>) -> Result<R>) -> Result<R> {
    // The pointer is used only on the thread that set it and while the number matches, so that it never outlives its
    // block.
    let Some(running) = RUNNING.get().filter(|running| running.number == number) else {
        return Err(Error::invalid(
            "the block does not run on this thread; expected a call from its function",
        )
        .with_help("make the call in the function of the kernel, on the thread that runs it"));
    };
    // SAFETY: `run` set the pointer and resets it before the block ends; the lifetime does not escape `call`.
    let called = call(unsafe { running.block.as_ref() });
    if let Err(error) = &called {
        // Kept because the exception that Python sees, and may re-raise, does not carry the error itself.
        FAILED.set(Some(error.clone()));
    }
    called
}

impl Block {
    fn ask<R>(&self, call: impl FnOnce(&device::Block<'_>) -> Result<R>) -> PyResult<R> {
        running(self.number, call).map_err(raise)
    }
}

#[pymethods]
impl Block {
    /// The block's index in the grid.
    #[getter]
    fn index(&self) -> PyResult<u32> {
        self.ask(|block| Ok(block.index()))
    }

    /// The number of blocks of the launch.
    #[getter]
    fn blocks(&self) -> PyResult<u32> {
        self.ask(|block| Ok(block.blocks()))
    }

    /// The number of threads that a block would have on a GPU.
    #[getter]
    fn threads(&self) -> PyResult<u32> {
        self.ask(|block| Ok(block.threads()))
    }

    /// The integer passed as argument `argument` of the launch. Raises InvalidArgumentError if there is no such
    /// argument or it has another type, as do the accessors below.
    fn integer(&self, argument: usize) -> PyResult<i128> {
        self.ask(|block| match block.i64(argument) {
            // Python passes whole numbers of either signedness with one type; 128 bits hold both ranges.
            Ok(value) => Ok(value.into()),
            Err(_) => block.u64(argument).map(i128::from),
        })
    }

    /// The float or double passed as argument `argument`.
    fn real(&self, argument: usize) -> PyResult<f64> {
        self.ask(|block| match block.f64(argument) {
            Ok(value) => Ok(value),
            Err(_) => block.f32(argument).map(f64::from),
        })
    }

    /// The memory passed as argument `argument`. Writes to memory of a read-only array are not prevented.
    fn memory(&self, argument: usize) -> PyResult<Memory> {
        let slice = self.ask(|block| block.slice(argument).cloned())?;
        Ok(Memory::new(slice, &self.place))
    }

    /// The channel passed as argument `argument`.
    fn channel(&self, argument: usize) -> PyResult<BlockChannel> {
        self.ask(|block| block.channel(argument).map(drop))?;
        Ok(self.of(argument, None))
    }

    /// The channels passed as argument `argument`.
    fn channels(&self, argument: usize) -> PyResult<Vec<BlockChannel>> {
        let count = self.ask(|block| Ok(block.channels(argument)?.len()))?;
        Ok((0..count)
            .map(|index| self.of(argument, Some(index)))
            .collect())
    }

    /// Blocks until the peers of all channels passed as argument `argument` have called it as well. Raises the error
    /// that ended the device's work, such as PeerLostError, if there is one.
    fn barrier(&self, py: Python<'_>, argument: usize) -> PyResult<()> {
        let number = self.number;
        // Blocks of other ranks may run Python functions in this process, and need the interpreter's lock to arrive.
        detached(py, || {
            running(number, |block| block.barrier(&block.channels(argument)?))
        })
    }
}

impl Block {
    fn of(&self, argument: usize, index: Option<usize>) -> BlockChannel {
        BlockChannel {
            number: self.number,
            argument,
            index,
            place: self.place.clone(),
        }
    }
}

impl BlockChannel {
    /// Runs a call that may block.
    fn call<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&device::BlockChannel<'_>) -> Result<R> + Send,
    ) -> PyResult<R> {
        let (number, argument, index) = (self.number, self.argument, self.index);
        let work = || {
            running(number, |block| match index {
                None => call(&block.channel(argument)?),
                Some(index) => match block.channels(argument)?.get(index) {
                    Some(channel) => call(channel),
                    None => Err(Error::invalid(format!("there is no channel {index}"))),
                },
            })
        };
        // The wait may be for another block, whose Python function needs the interpreter's lock to get there.
        detached(py, work)
    }
}

#[pymethods]
impl BlockChannel {
    /// The rank at the other end.
    fn peer(&self, py: Python<'_>) -> PyResult<u32> {
        self.call(py, |channel| Ok(channel.peer()))
    }

    /// Memory of `nbytes` bytes in this rank's region.
    fn here(&self, py: Python<'_>, at: PlaceInRegion, nbytes: u64) -> PyResult<Memory> {
        let slice = self.call(py, |channel| channel.here(at, nbytes))?;
        Ok(Memory::new(slice, &self.place))
    }

    /// Copies `nbytes` from `source` here to `target` at the peer; completion is only known after a signal or a flush.
    fn put(
        &self,
        py: Python<'_>,
        target: PlaceInRegion,
        source: PlaceInRegion,
        nbytes: u64,
    ) -> PyResult<()> {
        self.call(py, |channel| channel.put(target, source, nbytes))
    }

    /// Copies `nbytes` from `source` at the peer to `target` here; completion is only known after a flush.
    fn get(
        &self,
        py: Python<'_>,
        target: PlaceInRegion,
        source: PlaceInRegion,
        nbytes: u64,
    ) -> PyResult<()> {
        self.call(py, |channel| channel.get(target, source, nbytes))
    }

    /// A put and a signal.
    fn put_with_signal(
        &self,
        py: Python<'_>,
        target: PlaceInRegion,
        source: PlaceInRegion,
        nbytes: u64,
    ) -> PyResult<()> {
        self.call(py, |channel| {
            channel.put_with_signal(target, source, nbytes)
        })
    }

    /// A put, a signal and a flush. Blocks until the source may be overwritten.
    fn put_with_signal_and_flush(
        &self,
        py: Python<'_>,
        target: PlaceInRegion,
        source: PlaceInRegion,
        nbytes: u64,
    ) -> PyResult<()> {
        self.call(py, |channel| {
            channel.put_with_signal_and_flush(target, source, nbytes)
        })
    }

    /// Increments the peer's epoch by one, ordered after all earlier operations of the block.
    fn signal(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |channel| channel.signal())
    }

    /// Blocks until sources of earlier puts may be overwritten, and the data of earlier gets may be read.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |channel| channel.flush())
    }

    /// Blocks until the peer has sent one signal more than were consumed, and consumes it.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |channel| channel.wait())
    }

    /// Blocks until the peer has signalled `epoch` times in total. Consumes no signal.
    fn wait_until(&self, py: Python<'_>, epoch: u64) -> PyResult<()> {
        self.call(py, |channel| channel.wait_until(epoch))
    }

    /// The non-blocking form of `wait`; returns whether a signal was consumed.
    fn poll(&self, py: Python<'_>) -> PyResult<bool> {
        self.call(py, |channel| channel.poll())
    }

    /// The total number of signals received from the peer so far.
    fn epoch(&self, py: Python<'_>) -> PyResult<u64> {
        self.call(py, |channel| Ok(channel.epoch()))
    }

    /// Puts `nbytes` as packets of 16 bytes, each with 8 bytes of data, with `flag`. `nbytes` and the data's offset are
    /// multiples of 8, the packets' offset of 16. Raises InvalidArgumentError otherwise, and UnsupportedError on a
    /// channel that is not direct.
    fn put_packets(
        &self,
        py: Python<'_>,
        target: PlaceInRegion,
        source: PlaceInRegion,
        nbytes: u64,
        flag: u32,
    ) -> PyResult<()> {
        self.call(py, |channel| {
            channel.put_packets16(target, source, nbytes, flag)
        })
    }

    /// Unpacks data that the peer put here by `put_packets` with the same flag from `source` here to `target` here,
    /// once it has arrived. Raises InvalidArgumentError as `put_packets` does.
    fn read_packets(
        &self,
        py: Python<'_>,
        target: PlaceInRegion,
        source: PlaceInRegion,
        nbytes: u64,
        flag: u32,
    ) -> PyResult<()> {
        self.call(py, |channel| {
            channel.read_packets16(target, source, nbytes, flag)
        })
    }
}
