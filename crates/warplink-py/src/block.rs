//! Arguments of the Python function of a host kernel: its block, and its channels.
//!
//! Which block runs is known by the thread, so that these objects are of no use after the function has
//! returned, or on another thread.

use crate::channel::PlaceInRegion;
use crate::errors::raise;
use crate::memory::Memory;
use crate::owner::Owner;
use crate::place::Place;
use pyo3::prelude::*;
use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use warplink::device::{self, At};
use warplink::{Error, ErrorKind, Result};

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

/// Sets back which block runs, however a function ends.
struct Reset(Option<Running>);

impl Drop for Reset {
    fn drop(&mut self) {
        RUNNING.set(self.0);
    }
}

/// A block of a launch, for the function of a host kernel and as long as that runs.
///
/// Everything raises InvalidArgumentError once the function has returned, and on another thread than the one that runs
/// it.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct Block {
    number: u64,
    place: Place,
}

/// A channel, as a block has it: the calls of `warplink::Channel` in CUDA C++, made by the whole block. A
/// place in a region is an offset in bytes, or a pair of the region's number and an offset.
///
/// Everything raises InvalidArgumentError where the block's calls do. Calls with places raise it past the end of a region,
/// too, and for a number that no region has. Calls that move data, signal, flush, wait or poll raise what ended the
/// device's work, such as PeerLostError, if something did, and ClosedError where the channel's proxy has ended.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct BlockChannel {
    number: u64,
    argument: usize,
    /// Which of several.
    index: Option<usize>,
    place: Place,
}

/// Runs the function `body` as `block`. What it raises is what the kernel fails with.
pub(crate) fn run(block: &device::Block<'_>, body: &Owner, place: &Place) -> Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let running = Running {
        block: NonNull::from(block).cast(),
        number,
    };
    FAILED.take();
    let reset = Reset(RUNNING.replace(Some(running)));
    let called = Python::try_attach(|py| {
        let given = Block {
            number,
            place: place.clone(),
        };
        let called = body.object(py).call1((given,));
        called.map(drop).map_err(|error| failure(py, &error))
    });
    drop(reset);
    let ended = || Error::new(ErrorKind::Closed, "the interpreter has ended");
    called.ok_or_else(ended)?
}

/// Error of a kernel whose function raised `error`: the library's error if it is one.
fn failure(py: Python<'_>, error: &PyErr) -> Error {
    let own = error.value(py).getattr("kind").is_ok();
    if let Some(failed) = FAILED.take().filter(|_| own) {
        return failed;
    }
    Error::invalid(format!("the function of a host kernel raised {error}"))
        .with_operation("run a kernel")
        .with_help("see to it that the function returns")
}

/// Calls `call` with block `number`, if it runs on this thread.
fn running<R>(number: u64, call: impl FnOnce(&device::Block<'_>) -> Result<R>) -> Result<R> {
    let Some(running) = RUNNING.get().filter(|running| running.number == number) else {
        return Err(Error::invalid(
            "the block does not run on this thread; expected a call from its function",
        )
        .with_help("make the call in the function of the kernel, on the thread that runs it"));
    };
    // SAFETY: `run` set it and sets it back before the block ends; its lifetime does not leave `call`.
    let called = call(unsafe { running.block.as_ref() });
    if let Err(error) = &called {
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
    /// Its number in the grid.
    #[getter]
    fn index(&self) -> PyResult<u32> {
        self.ask(|block| Ok(block.index()))
    }

    /// How many blocks the launch has.
    #[getter]
    fn blocks(&self) -> PyResult<u32> {
        self.ask(|block| Ok(block.blocks()))
    }

    /// How many threads a block would have on a GPU.
    #[getter]
    fn threads(&self) -> PyResult<u32> {
        self.ask(|block| Ok(block.threads()))
    }

    /// The integer that is argument `argument` of the launch. Raises InvalidArgumentError where there is no such argument,
    /// or it is something else; so for all arguments.
    fn integer(&self, argument: usize) -> PyResult<i128> {
        self.ask(|block| match block.i64(argument) {
            Ok(value) => Ok(value.into()),
            Err(_) => block.u64(argument).map(i128::from),
        })
    }

    /// The float or double that is argument `argument`.
    fn real(&self, argument: usize) -> PyResult<f64> {
        self.ask(|block| match block.f64(argument) {
            Ok(value) => Ok(value),
            Err(_) => block.f32(argument).map(f64::from),
        })
    }

    /// The memory that is argument `argument`. A kernel is not kept from writing to what a read-only array was given for.
    fn memory(&self, argument: usize) -> PyResult<Memory> {
        let slice = self.ask(|block| block.slice(argument).cloned())?;
        Ok(Memory::new(slice, &self.place))
    }

    /// The channel that is argument `argument`.
    fn channel(&self, argument: usize) -> PyResult<BlockChannel> {
        self.ask(|block| block.channel(argument).map(drop))?;
        Ok(self.of(argument, None))
    }

    /// The channels that are argument `argument`.
    fn channels(&self, argument: usize) -> PyResult<Vec<BlockChannel>> {
        let count = self.ask(|block| Ok(block.channels(argument)?.len()))?;
        Ok((0..count)
            .map(|index| self.of(argument, Some(index)))
            .collect())
    }

    /// Blocks until the peers of all channels that are argument `argument` have called it too. Raises what ended the
    /// device's work, such as PeerLostError, if something did.
    fn barrier(&self, py: Python<'_>, argument: usize) -> PyResult<()> {
        let number = self.number;
        py.detach(|| running(number, |block| block.barrier(&block.channels(argument)?)))
            .map_err(raise)
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
    /// Makes a call that may block.
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
        py.detach(work).map_err(raise)
    }
}

#[pymethods]
impl BlockChannel {
    /// The rank at the other end.
    fn peer(&self, py: Python<'_>) -> PyResult<u32> {
        self.call(py, |channel| Ok(channel.peer()))
    }

    /// The memory of `nbytes` bytes of this rank's region.
    fn here(&self, py: Python<'_>, at: PlaceInRegion, nbytes: u64) -> PyResult<Memory> {
        let at = At::from(at);
        let slice = self.call(py, |channel| channel.here(at, nbytes))?;
        Ok(Memory::new(slice, &self.place))
    }

    /// Copies `nbytes` from `source` here to `target` at the peer; nothing is known until a signal or a flush.
    fn put(
        &self,
        py: Python<'_>,
        target: PlaceInRegion,
        source: PlaceInRegion,
        nbytes: u64,
    ) -> PyResult<()> {
        let (target, source) = (At::from(target), At::from(source));
        self.call(py, |channel| channel.put(target, source, nbytes))
    }

    /// Copies `nbytes` from `source` at the peer to `target` here; nothing is known until a flush.
    fn get(
        &self,
        py: Python<'_>,
        target: PlaceInRegion,
        source: PlaceInRegion,
        nbytes: u64,
    ) -> PyResult<()> {
        let (target, source) = (At::from(target), At::from(source));
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
        let (target, source) = (At::from(target), At::from(source));
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
        let (target, source) = (At::from(target), At::from(source));
        self.call(py, |channel| {
            channel.put_with_signal_and_flush(target, source, nbytes)
        })
    }

    /// Counts up the peer's epoch by one, after everything that the block did before.
    fn signal(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |channel| channel.signal())
    }

    /// Blocks until sources of earlier puts may be overwritten, and what was got may be read.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |channel| channel.flush())
    }

    /// Blocks until the peer has signalled once more than was waited for.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |channel| channel.wait())
    }

    /// Blocks until the peer has signalled `epoch` times in all. Uses up no signal.
    fn wait_until(&self, py: Python<'_>, epoch: u64) -> PyResult<()> {
        self.call(py, |channel| channel.wait_until(epoch))
    }

    /// As `wait`, where that would not block; whether there was a signal to use up.
    fn poll(&self, py: Python<'_>) -> PyResult<bool> {
        self.call(py, |channel| channel.poll())
    }

    /// How often the peer has signalled so far.
    fn epoch(&self, py: Python<'_>) -> PyResult<u64> {
        self.call(py, |channel| Ok(channel.epoch()))
    }

    /// Puts `nbytes` as packets of 16 bytes, of which 8 are data, with `flag`. `nbytes` and the place of the data are
    /// multiples of 8, that of the packets of 16. Raises InvalidArgumentError for others, and UnsupportedError on a channel
    /// that is not direct.
    fn put_packets(
        &self,
        py: Python<'_>,
        target: PlaceInRegion,
        source: PlaceInRegion,
        nbytes: u64,
        flag: u32,
    ) -> PyResult<()> {
        let (target, source) = (At::from(target), At::from(source));
        self.call(py, |channel| {
            channel.put_packets16(target, source, nbytes, flag)
        })
    }

    /// Reads what the peer put here by `put_packets` with the same flag, once it is there, from `source` here
    /// to `target` here. Raises InvalidArgumentError as that does.
    fn read_packets(
        &self,
        py: Python<'_>,
        target: PlaceInRegion,
        source: PlaceInRegion,
        nbytes: u64,
        flag: u32,
    ) -> PyResult<()> {
        let (target, source) = (At::from(target), At::from(source));
        self.call(py, |channel| {
            channel.read_packets16(target, source, nbytes, flag)
        })
    }
}
