//! Streams, events and graphs.

use super::fault::Fault;
use super::packets::PacketPart;
use super::slice::{DeviceSlice, Word};
use crate::deadline::Deadline;
use crate::error::Result;
use std::any::Any;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// Scheduling priority of a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Priority {
    /// Default.
    #[default]
    Normal,
    /// Before other work; for communication, so that matmuls do not delay it.
    High,
}

/// A stream-ordered operation on a word.
#[derive(Clone, Copy, Debug)]
pub enum MemoryOp<'a> {
    /// Stores the word once everything before it in the stream is visible system-wide.
    Write {
        /// The word, local or a peer's.
        word: &'a Word,
        /// New value.
        value: u64,
    },
    /// Sets a word in this rank's own memory to zero, after preceding operations of the stream and before
    /// every later `Write` of it. Has no other ordering, and is therefore cheaper.
    Reset {
        /// The word.
        word: &'a Word,
    },
    /// Blocks the stream until the word is at least `value`. Values are compared as a signed difference, so
    /// they must be less than 2^63 apart.
    Wait {
        /// The word, in this rank's own memory.
        word: &'a Word,
        /// The value to reach.
        value: u64,
    },
}

impl<'a> MemoryOp<'a> {
    /// A `Write`.
    pub const fn write(word: &'a Word, value: u64) -> Self {
        Self::Write { word, value }
    }

    /// A `Wait`.
    pub const fn wait(word: &'a Word, value: u64) -> Self {
        Self::Wait { word, value }
    }
}

/// Hardware that executes a word operation of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// The stream's memory operations, which need no multiprocessor.
    Stream,
    /// The one-block copy kernel just before or after it, if there is one, else the stream.
    Beside,
    /// A kernel.
    Kernel,
}

/// A member of a sequence.
#[derive(Clone, Copy, Debug)]
pub enum StreamOp<'a> {
    /// A word operation.
    Memory(MemoryOp<'a>, Unit),
    /// A copy between slices of equal length, either of which may be a peer's, by the copy engine.
    Copy {
        /// Destination.
        target: &'a DeviceSlice,
        /// Source.
        source: &'a DeviceSlice,
    },
    /// A copy by a kernel.
    KernelCopy(KernelCopy<'a>),
    /// One end's part of a packet transfer, by a kernel.
    Packets(PacketPart<'a>),
}

/// A copy between slices of equal length, either of which may be a peer's, by the blocks of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct KernelCopy<'a> {
    /// Destination.
    pub target: &'a DeviceSlice,
    /// Source.
    pub source: &'a DeviceSlice,
    /// Number of blocks.
    pub blocks: u32,
    /// Words that each block increments once its part of the copy is visible system-wide.
    pub arrivals: [Option<&'a Word>; 2],
    /// A zero word in this rank's own memory by which the blocks synchronize, and which they leave zero. Used
    /// by one copy at a time.
    pub counter: &'a Word,
}

/// An ordered queue of device work. Clones share the queue. Every method, here and in [`StreamBackend`], to which it
/// dereferences, only enqueues and does not block, unless stated otherwise.
#[derive(Clone)]
pub struct Stream(Arc<dyn StreamBackend>);

impl Stream {
    /// Wraps a device's stream.
    pub fn new(backend: Arc<dyn StreamBackend>) -> Self {
        Self(backend)
    }

    /// Downcasts to the device's stream type.
    pub fn backend<T: StreamBackend>(&self) -> Option<&T> {
        let backend: &dyn Any = &*self.0;
        backend.downcast_ref()
    }

    /// Copies `source` to `target`, of equal length; either may be a peer's.
    pub fn copy(
        &self,
        target: impl AsRef<DeviceSlice>,
        source: impl AsRef<DeviceSlice>,
    ) -> Result<()> {
        self.0.copy(target.as_ref(), source.as_ref())
    }

    /// Fills `target` with `byte`.
    pub fn fill(&self, target: impl AsRef<DeviceSlice>, byte: u8) -> Result<()> {
        self.0.fill(target.as_ref(), byte)
    }
}

impl Deref for Stream {
    type Target = dyn StreamBackend;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// An event in a stream, which dereferences to [`EventBackend`]. Clones share the event.
#[derive(Clone)]
pub struct Event(Arc<dyn EventBackend>);

impl Event {
    /// Wraps a device's event.
    pub fn new(backend: Arc<dyn EventBackend>) -> Self {
        Self(backend)
    }

    /// Downcasts to the device's event type.
    pub fn backend<T: EventBackend>(&self) -> Option<&T> {
        let backend: &dyn Any = &*self.0;
        backend.downcast_ref()
    }
}

impl Deref for Event {
    type Target = dyn EventBackend;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Work recorded once and launched any number of times, which dereferences to [`GraphBackend`]. Clones share the graph.
#[derive(Clone)]
pub struct Graph(Arc<dyn GraphBackend>);

impl Graph {
    /// Wraps a device's graph.
    pub fn new(backend: Arc<dyn GraphBackend>) -> Self {
        Self(backend)
    }
}

impl Deref for Graph {
    type Target = dyn GraphBackend;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Device side of [`Stream`].
pub trait StreamBackend: Any + Send + Sync + fmt::Debug {
    /// See [`Stream::copy`].
    fn copy(&self, target: &DeviceSlice, source: &DeviceSlice) -> Result<()>;

    /// See [`Stream::fill`].
    fn fill(&self, target: &DeviceSlice, byte: u8) -> Result<()>;

    /// Writes and waits, in order.
    fn memory_ops(&self, ops: &[MemoryOp<'_>]) -> Result<()>;

    /// As [`memory_ops`](Self::memory_ops), but merged into one kernel if that is faster, which it is for
    /// more than a few. A kernel needs a free multiprocessor, which a GEMM on another stream may not leave.
    fn memory_ops_in_kernel(&self, ops: &[MemoryOp<'_>]) -> Result<()> {
        self.memory_ops(ops)
    }

    /// Copies, writes and waits, in order. The device may merge operations, so this is never slower than
    /// individual calls.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) for kernel operations if the device has no
    /// kernel for them ([`DeviceProperties::kernel_copies`](super::DeviceProperties)).
    fn sequence(&self, ops: &[StreamOp<'_>]) -> Result<()>;

    /// One [`StreamOp::KernelCopy`].
    fn kernel_copy(&self, copy: &KernelCopy<'_>) -> Result<()>;

    /// One [`StreamOp::Packets`].
    fn packets(&self, part: &PacketPart<'_>) -> Result<()>;

    /// Records that the next enqueued operation is work for `fault`'s communicator. Waits for its signals
    /// imply that; operations that only notify a peer do not. If the stream is blocked behind a wait that was
    /// aborted, ranks that rely on the work are notified.
    fn note_work(&self, fault: &Arc<Fault>);

    /// Records `event` at this point of the stream, replacing its previous record.
    fn record(&self, event: &Event) -> Result<()>;

    /// Records an event after everything enqueued so far, for releasing resources once the stream has
    /// completed. It can be recorded and queried even after the device's fault.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) during a capture, since the event would
    /// become part of the graph.
    fn record_end(&self) -> Result<Event>;

    /// Blocks the stream until the point that `event` recorded last.
    fn wait_event(&self, event: &Event) -> Result<()>;

    /// Blocks the caller until everything enqueued so far is done.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout) at the deadline; the device's fault once raised;
    /// [`ErrorKind::Driver`](crate::ErrorKind::Driver) if work failed.
    fn synchronize(&self, deadline: Deadline) -> Result<()>;

    /// Fails with the stream's error, as far as this process knows. Does not query the device, so it is safe
    /// for borrowed streams.
    fn check(&self) -> Result<()>;

    /// Whether everything enqueued so far is done. Does not block.
    fn is_idle(&self) -> Result<bool>;

    /// Starts a capture: operations are recorded into a graph instead of executed. Another stream joins when
    /// it waits for an event recorded in a capturing stream, and must be joined back in the same way before
    /// the end.
    fn begin_capture(&self) -> Result<()>;

    /// Ends the capture and instantiates the graph. Blocks meanwhile.
    fn end_capture(&self) -> Result<Graph>;

    /// Has everything on the stream share one scratch memory, graphs that it captures included: from now on, they are
    /// launched one after another, and nothing else runs on the stream.
    fn share_scratch(&self) {}

    /// Id of the stream's capture, if it is capturing; unique in the process, and below 2^63.
    fn capture_id(&self) -> Result<Option<u64>>;

    /// Whether it is capturing.
    fn is_capturing(&self) -> Result<bool> {
        Ok(self.capture_id()?.is_some())
    }

    /// Returns a borrowed stream ([`Device::borrow_stream`](super::Device::borrow_stream)): afterwards its
    /// owner may destroy it, even while resources used by its work are still held. Enqueued work still
    /// completes. Later calls that enqueue on it fail. No effect for the device's own streams; idempotent.
    /// Does not block.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) during a capture.
    fn give_back(&self) -> Result<()> {
        Ok(())
    }

    /// Unique number among the device's streams; on a GPU the driver's handle.
    fn raw(&self) -> u64;
}

/// Device side of [`Event`].
pub trait EventBackend: Any + Send + Sync + fmt::Debug {
    /// Milliseconds since `earlier`; both created with timing, recorded and reached.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) without timing,
    /// [`ErrorKind::Driver`](crate::ErrorKind::Driver) if either has not been reached.
    fn elapsed_since(&self, earlier: &Event) -> Result<f32>;

    /// Whether the event has been reached. True if it was never recorded.
    fn is_reached(&self) -> Result<bool>;
}

/// Device side of [`Graph`].
pub trait GraphBackend: Send + Sync + fmt::Debug {
    /// Enqueues the whole graph on `stream`. Launches of one graph are serialized.
    fn launch(&self, stream: &Stream) -> Result<()>;

    /// Number of operations.
    fn operations(&self) -> usize;
}

/// Executes a sequence as individual calls, merging adjacent word operations.
pub(crate) fn sequence_apart(stream: &dyn StreamBackend, ops: &[StreamOp<'_>]) -> Result<()> {
    let mut pending: Vec<MemoryOp<'_>> = Vec::with_capacity(ops.len());
    for op in ops {
        if let StreamOp::Memory(op, _) = op {
            pending.push(*op);
            continue;
        }
        // Word operations are collected, since a device enqueues several of them in one call.
        stream.memory_ops(&pending)?;
        pending.clear();
        match op {
            StreamOp::Memory(..) => {}
            StreamOp::Copy { target, source } => stream.copy(target, source)?,
            StreamOp::KernelCopy(copy) => stream.kernel_copy(copy)?,
            StreamOp::Packets(part) => stream.packets(part)?,
        }
    }
    stream.memory_ops(&pending)
}
