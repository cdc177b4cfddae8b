//! Streams, events and graphs.

use super::{DeviceSlice, Word};
use crate::deadline::Deadline;
use crate::error::Result;
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// How urgent a stream's work is to the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Priority {
    /// As other work.
    #[default]
    Normal,
    /// Before other work; for communication, so that it is not held up by products.
    High,
}

/// An operation on a word in stream order.
#[derive(Clone, Copy, Debug)]
pub enum MemoryOp<'a> {
    /// Sets the word, after everything before it in the stream is visible everywhere.
    Write {
        /// The word, here or at a peer.
        word: &'a Word,
        /// Its new value.
        value: u64,
    },
    /// Sets the word, in this rank's own memory, to zero, after what precedes it in the stream and
    /// before every later `Write` of the stream. It orders nothing else, and so costs less.
    Reset {
        /// The word.
        word: &'a Word,
    },
    /// Holds the stream until the word is at least `value`. Values are compared as a signed
    /// difference, so they may not be 2^63 or more apart.
    Wait {
        /// The word, in this rank's own memory.
        word: &'a Word,
        /// The value to reach.
        value: u64,
    },
}

/// A member of a sequence.
#[derive(Clone, Copy, Debug)]
pub enum StreamOp<'a> {
    /// On a word.
    Memory(MemoryOp<'a>),
    /// A copy between slices of the same length, either of which may be a peer's.
    Copy {
        /// What is written.
        target: &'a DeviceSlice,
        /// What is read.
        source: &'a DeviceSlice,
    },
}

impl<'a> From<MemoryOp<'a>> for StreamOp<'a> {
    fn from(operation: MemoryOp<'a>) -> Self {
        Self::Memory(operation)
    }
}

/// A sequence by the calls one by one, with neighbouring operations on words together.
pub(crate) fn sequence_apart(stream: &dyn Stream, ops: &[StreamOp<'_>]) -> Result<()> {
    let mut pending: Vec<MemoryOp<'_>> = Vec::with_capacity(ops.len());
    for op in ops {
        match op {
            StreamOp::Memory(op) => pending.push(*op),
            StreamOp::Copy { target, source } => {
                stream.memory_ops(&pending)?;
                pending.clear();
                stream.copy(target, source)?;
            }
        }
    }
    stream.memory_ops(&pending)
}

/// An ordered queue of device work. Enqueuing never blocks; every method but
/// [`synchronize`](Stream::synchronize) only enqueues, unless it says otherwise.
pub trait Stream: Send + Sync + fmt::Debug {
    /// Copies `source` to `target`, of the same length, either of which may be a peer's.
    fn copy(&self, target: &DeviceSlice, source: &DeviceSlice) -> Result<()>;

    /// Several copies, unordered among one another, as `(target, source)`.
    fn copy_batch(&self, copies: &[(DeviceSlice, DeviceSlice)]) -> Result<()> {
        copies
            .iter()
            .try_for_each(|(target, source)| self.copy(target, source))
    }

    /// Sets every byte of `target`.
    fn fill(&self, target: &DeviceSlice, byte: u8) -> Result<()>;

    /// Writes and waits, in the order given.
    fn memory_ops(&self, ops: &[MemoryOp<'_>]) -> Result<()>;

    /// As [`memory_ops`](Self::memory_ops), but in one kernel where the device gains by that, which it
    /// does from a few on. A kernel waits for room on a multiprocessor, which products on other
    /// streams may leave none of.
    fn memory_ops_in_kernel(&self, ops: &[MemoryOp<'_>]) -> Result<()> {
        self.memory_ops(ops)
    }

    /// Copies, writes and waits, in the order given. A device may do several in one step, so this is
    /// never slower than the calls one by one.
    fn sequence(&self, ops: &[StreamOp<'_>]) -> Result<()>;

    /// Marks this point of the stream in `event`; an earlier mark is forgotten.
    fn record(&self, event: &dyn Event) -> Result<()>;

    /// Holds the stream until the point that `event` marked when this was called.
    fn wait_event(&self, event: &dyn Event) -> Result<()>;

    /// Blocks the caller until everything enqueued so far is done.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout) at the deadline; the device's fault when
    /// it is raised; [`ErrorKind::Driver`](crate::ErrorKind::Driver) when work failed.
    fn synchronize(&self, deadline: Deadline) -> Result<()>;

    /// Whether everything enqueued so far is done. Does not block.
    fn is_idle(&self) -> Result<bool>;

    /// Starts recording what is enqueued into a graph instead of doing it. Another stream joins
    /// when it waits for an event recorded in one that is recording; it must be joined back in the
    /// same way before the end.
    fn begin_capture(&self) -> Result<()>;

    /// Ends recording and makes the graph ready to launch. Blocks while it is prepared.
    fn end_capture(&self) -> Result<Arc<dyn Graph>>;

    /// The number of the capture that records what is enqueued, if one does. No two captures of a
    /// process have the same.
    fn capture_id(&self) -> Result<Option<u64>>;

    /// Whether what is enqueued is being recorded.
    fn is_capturing(&self) -> Result<bool> {
        Ok(self.capture_id()?.is_some())
    }

    /// Number that tells streams of one device apart; on a GPU the driver's handle.
    fn raw(&self) -> u64;

    /// Itself, for the device that made it.
    fn as_any(&self) -> &dyn Any;
}

/// A mark in a stream.
pub trait Event: Send + Sync + fmt::Debug {
    /// Milliseconds from `earlier` to this one, both made with timing, recorded and reached.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) without timing,
    /// [`ErrorKind::Driver`](crate::ErrorKind::Driver) if either is not reached.
    fn elapsed_since(&self, earlier: &dyn Event) -> Result<f32>;

    /// Whether the mark has been reached.
    fn is_reached(&self) -> Result<bool>;

    /// Itself, for the device that made it.
    fn as_any(&self) -> &dyn Any;
}

/// Work recorded once and launched any number of times.
pub trait Graph: Send + Sync + fmt::Debug {
    /// Enqueues the whole graph on `stream`. Launches of one graph happen one after the other.
    fn launch(&self, stream: &dyn Stream) -> Result<()>;

    /// How many operations it holds.
    fn operations(&self) -> usize;
}
