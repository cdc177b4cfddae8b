//! Streams, events and graphs.

use super::fault::Fault;
use super::packets::PacketPart;
use super::slice::{DeviceSlice, Word};
use crate::deadline::Deadline;
use crate::error::Result;
use std::any::Any;
use std::fmt;
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

/// An ordered queue of device work. Clones share the queue. Every method only enqueues and does not block,
/// unless stated otherwise.
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

    /// Writes and waits, in order.
    pub fn memory_ops(&self, ops: &[MemoryOp<'_>]) -> Result<()> {
        self.0.memory_ops(ops)
    }

    /// As [`memory_ops`](Self::memory_ops), but merged into one kernel if that is faster, which it is for
    /// more than a few. A kernel needs a free multiprocessor, which a GEMM on another stream may not leave.
    pub fn memory_ops_in_kernel(&self, ops: &[MemoryOp<'_>]) -> Result<()> {
        self.0.memory_ops_in_kernel(ops)
    }

    /// Copies, writes and waits, in order. The device may merge operations, so this is never slower than
    /// individual calls.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) for kernel operations if the device has no
    /// kernel for them ([`DeviceProperties::kernel_copies`](super::DeviceProperties)).
    pub fn sequence(&self, ops: &[StreamOp<'_>]) -> Result<()> {
        self.0.sequence(ops)
    }

    /// Records that the next enqueued operation is work for `fault`'s communicator. Waits for its signals
    /// imply that; operations that only notify a peer do not. If the stream is blocked behind a wait that was
    /// aborted, ranks that rely on the work are notified.
    pub(crate) fn note_work(&self, fault: &Arc<Fault>) {
        self.0.note_work(fault);
    }

    /// Records `event` at this point of the stream, replacing its previous record.
    pub fn record(&self, event: &Event) -> Result<()> {
        self.0.record(event)
    }

    /// Records an event after everything enqueued so far, for releasing resources once the stream has
    /// completed. It can be recorded and queried even after the device's fault.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) during a capture, since the event would
    /// become part of the graph.
    pub fn record_end(&self) -> Result<Event> {
        self.0.record_end()
    }

    /// Blocks the stream until the point that `event` recorded last.
    pub fn wait_event(&self, event: &Event) -> Result<()> {
        self.0.wait_event(event)
    }

    /// Blocks the caller until everything enqueued so far is done.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout) at the deadline; the device's fault once raised;
    /// [`ErrorKind::Driver`](crate::ErrorKind::Driver) if work failed.
    pub fn synchronize(&self, deadline: Deadline) -> Result<()> {
        self.0.synchronize(deadline)
    }

    /// Fails with the stream's error, as far as this process knows. Does not query the device, so it is safe
    /// for borrowed streams.
    pub(crate) fn check(&self) -> Result<()> {
        self.0.check()
    }

    /// Whether everything enqueued so far is done. Does not block.
    pub fn is_idle(&self) -> Result<bool> {
        self.0.is_idle()
    }

    /// Starts a capture: operations are recorded into a graph instead of executed. Another stream joins when
    /// it waits for an event recorded in a capturing stream, and must be joined back in the same way before
    /// the end.
    pub fn begin_capture(&self) -> Result<()> {
        self.0.begin_capture()
    }

    /// Ends the capture and instantiates the graph. Blocks meanwhile.
    pub fn end_capture(&self) -> Result<Graph> {
        self.0.end_capture()
    }

    /// Has everything on the stream share one scratch memory, graphs that it captures included: from now on, they are
    /// launched one after another, and nothing else runs on the stream.
    pub(crate) fn share_scratch(&self) {
        self.0.share_scratch();
    }

    /// Id of the stream's capture, if it is capturing; unique in the process, and below 2^63.
    pub fn capture_id(&self) -> Result<Option<u64>> {
        self.0.capture_id()
    }

    /// Whether it is capturing.
    pub fn is_capturing(&self) -> Result<bool> {
        self.0.is_capturing()
    }

    /// Returns a borrowed stream ([`Device::borrow_stream`](super::Device::borrow_stream)): afterwards its
    /// owner may destroy it, even while resources used by its work are still held. Enqueued work still
    /// completes. Later calls that enqueue on it fail. No effect for the device's own streams; idempotent.
    /// Does not block.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) during a capture.
    pub fn give_back(&self) -> Result<()> {
        self.0.give_back()
    }

    /// Unique number among the device's streams; on a GPU the driver's handle.
    pub fn raw(&self) -> u64 {
        self.0.raw()
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// An event in a stream. Clones share the event.
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

    /// Milliseconds since `earlier`; both created with timing, recorded and reached.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) without timing,
    /// [`ErrorKind::Driver`](crate::ErrorKind::Driver) if either has not been reached.
    pub fn elapsed_since(&self, earlier: &Event) -> Result<f32> {
        self.0.elapsed_since(earlier)
    }

    /// Whether the event has been reached. True if it was never recorded.
    pub fn is_reached(&self) -> Result<bool> {
        self.0.is_reached()
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Work recorded once and launched any number of times. Clones share the graph.
#[derive(Clone)]
pub struct Graph(Arc<dyn GraphBackend>);

impl Graph {
    /// Wraps a device's graph.
    pub fn new(backend: Arc<dyn GraphBackend>) -> Self {
        Self(backend)
    }

    /// Enqueues the whole graph on `stream`. Launches of one graph are serialized.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        self.0.launch(stream)
    }

    /// Number of operations.
    pub fn operations(&self) -> usize {
        self.0.operations()
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

    /// See [`Stream::memory_ops`].
    fn memory_ops(&self, ops: &[MemoryOp<'_>]) -> Result<()>;

    /// See [`Stream::memory_ops_in_kernel`].
    fn memory_ops_in_kernel(&self, ops: &[MemoryOp<'_>]) -> Result<()> {
        self.memory_ops(ops)
    }

    /// See [`Stream::sequence`].
    fn sequence(&self, ops: &[StreamOp<'_>]) -> Result<()>;

    /// One [`StreamOp::KernelCopy`].
    fn kernel_copy(&self, copy: &KernelCopy<'_>) -> Result<()>;

    /// One [`StreamOp::Packets`].
    fn packets(&self, part: &PacketPart<'_>) -> Result<()>;

    /// Records work for `fault`'s communicator; see `Stream::note_work`.
    fn note_work(&self, fault: &Arc<Fault>);

    /// See [`Stream::record`].
    fn record(&self, event: &Event) -> Result<()>;

    /// See [`Stream::record_end`].
    fn record_end(&self) -> Result<Event>;

    /// See [`Stream::wait_event`].
    fn wait_event(&self, event: &Event) -> Result<()>;

    /// See [`Stream::synchronize`].
    fn synchronize(&self, deadline: Deadline) -> Result<()>;

    /// See `Stream::check`.
    fn check(&self) -> Result<()>;

    /// See [`Stream::is_idle`].
    fn is_idle(&self) -> Result<bool>;

    /// See [`Stream::begin_capture`].
    fn begin_capture(&self) -> Result<()>;

    /// See [`Stream::end_capture`].
    fn end_capture(&self) -> Result<Graph>;

    /// See `Stream::share_scratch`.
    fn share_scratch(&self) {}

    /// See [`Stream::capture_id`].
    fn capture_id(&self) -> Result<Option<u64>>;

    /// See [`Stream::is_capturing`].
    fn is_capturing(&self) -> Result<bool> {
        Ok(self.capture_id()?.is_some())
    }

    /// See [`Stream::give_back`].
    fn give_back(&self) -> Result<()> {
        Ok(())
    }

    /// See [`Stream::raw`].
    fn raw(&self) -> u64;
}

/// Device side of [`Event`].
pub trait EventBackend: Any + Send + Sync + fmt::Debug {
    /// See [`Event::elapsed_since`].
    fn elapsed_since(&self, earlier: &Event) -> Result<f32>;

    /// See [`Event::is_reached`].
    fn is_reached(&self) -> Result<bool>;
}

/// Device side of [`Graph`].
pub trait GraphBackend: Send + Sync + fmt::Debug {
    /// See [`Graph::launch`].
    fn launch(&self, stream: &Stream) -> Result<()>;

    /// See [`Graph::operations`].
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
