//! Streams, events and graphs.

use super::fault::Fault;
use super::packets::PacketPart;
use super::slice::{DeviceSlice, Word};
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
    /// Before other work; for communication, so that it is not held up by matmuls.
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

/// What does an operation on a word in a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Not a kernel, so that it needs no multiprocessor.
    Stream,
    /// The kernel of one block that copies just before or after it, if there is one; else no kernel.
    Beside,
    /// A kernel.
    Kernel,
}

/// A member of a sequence.
#[derive(Clone, Copy, Debug)]
pub enum StreamOp<'a> {
    /// On a word.
    Memory(MemoryOp<'a>, Unit),
    /// A copy between slices of the same length, either of which may be a peer's, by no kernel.
    Copy {
        /// What is written.
        target: &'a DeviceSlice,
        /// What is read.
        source: &'a DeviceSlice,
    },
    /// A copy by a kernel.
    KernelCopy(KernelCopy<'a>),
    /// One end's part of a transfer by packets, by a kernel.
    Packets(PacketPart<'a>),
}

/// A copy between slices of the same length, either of which may be a peer's, by the blocks of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct KernelCopy<'a> {
    /// What is written.
    pub target: &'a DeviceSlice,
    /// What is read.
    pub source: &'a DeviceSlice,
    /// How many blocks copy.
    pub blocks: u32,
    /// Words that each block adds one to when what it copied is visible everywhere.
    pub arrivals: [Option<&'a Word>; 2],
    /// A word of this rank's own memory that is zero, for several blocks to agree in, and is left zero. Only
    /// one copy at a time uses it.
    pub counter: &'a Word,
}

/// An ordered queue of device work. A clone is another handle of the same queue. Enqueuing never
/// blocks; every method but [`synchronize`](Self::synchronize) only enqueues, unless it says
/// otherwise.
#[derive(Clone)]
pub struct Stream(Arc<dyn StreamBackend>);

impl Stream {
    /// The handle of a device's own stream.
    pub fn new(backend: Arc<dyn StreamBackend>) -> Self {
        Self(backend)
    }

    /// What the device made, if it is of type `T`.
    pub fn backend<T: StreamBackend>(&self) -> Option<&T> {
        let backend: &dyn Any = &*self.0;
        backend.downcast_ref()
    }

    /// Copies `source` to `target`, of the same length, either of which may be a peer's.
    pub fn copy(
        &self,
        target: impl AsRef<DeviceSlice>,
        source: impl AsRef<DeviceSlice>,
    ) -> Result<()> {
        self.0.copy(target.as_ref(), source.as_ref())
    }

    /// Sets every byte of `target`.
    pub fn fill(&self, target: impl AsRef<DeviceSlice>, byte: u8) -> Result<()> {
        self.0.fill(target.as_ref(), byte)
    }

    /// Writes and waits, in the order given.
    pub fn memory_ops(&self, ops: &[MemoryOp<'_>]) -> Result<()> {
        self.0.memory_ops(ops)
    }

    /// As [`memory_ops`](Self::memory_ops), but in one kernel where the device gains by that, which
    /// it does from a few on. A kernel waits for room on a multiprocessor, which a GEMM on another
    /// stream may leave none of.
    pub fn memory_ops_in_kernel(&self, ops: &[MemoryOp<'_>]) -> Result<()> {
        self.0.memory_ops_in_kernel(ops)
    }

    /// Copies, writes and waits, in the order given. A device may do several in one step, so this is
    /// never slower than the calls one by one.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) for what a kernel is to do where the
    /// device has none for it ([`DeviceProperties::kernel_copies`](super::DeviceProperties)).
    pub fn sequence(&self, ops: &[StreamOp<'_>]) -> Result<()> {
        self.0.sequence(ops)
    }

    /// Notes that what is enqueued next is work for what `fault` concerns. Waits for its signals say so
    /// by themselves; what only tells a peer does not. Where the stream turns out to stand behind a wait
    /// that never ends, those that rely on the work are told.
    pub(crate) fn note_work(&self, fault: &Arc<Fault>) {
        self.0.note_work(fault);
    }

    /// Marks this point of the stream in `event`; an earlier mark is forgotten.
    pub fn record(&self, event: &Event) -> Result<()> {
        self.0.record(event)
    }

    /// A mark behind everything that was enqueued so far, for what is to be kept until the stream is
    /// past it: it can be recorded, and asked whether it is reached, after the device's fault too.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) while the stream records a
    /// graph, of which the mark would become a part.
    pub fn record_end(&self) -> Result<Event> {
        self.0.record_end()
    }

    /// Holds the stream until the point that `event` marked when this was called.
    pub fn wait_event(&self, event: &Event) -> Result<()> {
        self.0.wait_event(event)
    }

    /// Blocks the caller until everything enqueued so far is done.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout) at the deadline; the device's fault when
    /// it is raised; [`ErrorKind::Driver`](crate::ErrorKind::Driver) when work failed.
    pub fn synchronize(&self, deadline: Deadline) -> Result<()> {
        self.0.synchronize(deadline)
    }

    /// Fails with what the stream has failed with, as far as this process knows; nothing is asked of the device,
    /// so a stream of somebody else may be checked too.
    pub(crate) fn check(&self) -> Result<()> {
        self.0.check()
    }

    /// Whether everything enqueued so far is done. Does not block.
    pub fn is_idle(&self) -> Result<bool> {
        self.0.is_idle()
    }

    /// Starts recording what is enqueued into a graph instead of doing it. Another stream joins
    /// when it waits for an event recorded in one that is recording; it must be joined back in the
    /// same way before the end.
    pub fn begin_capture(&self) -> Result<()> {
        self.0.begin_capture()
    }

    /// Ends recording and makes the graph ready to launch. Blocks while it is prepared.
    pub fn end_capture(&self) -> Result<Graph> {
        self.0.end_capture()
    }

    /// The number of the capture that records what is enqueued, if one does. No two captures of a
    /// process have the same.
    pub fn capture_id(&self) -> Result<Option<u64>> {
        self.0.capture_id()
    }

    /// Whether what is enqueued is being recorded.
    pub fn is_capturing(&self) -> Result<bool> {
        self.0.is_capturing()
    }

    /// Gives a stream that was borrowed ([`Device::borrow_stream`](super::Device::borrow_stream)) back: when this returns,
    /// its owner may destroy it, also while what holds what the stream uses has not let go of it. What was enqueued is
    /// done all the same. Every later call that enqueues on it fails. Does nothing for a stream of the device's own, and for
    /// one that was given back before. Does not block.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) while the stream records a graph.
    pub fn give_back(&self) -> Result<()> {
        self.0.give_back()
    }

    /// Number that tells streams of one device apart; on a GPU the driver's handle.
    pub fn raw(&self) -> u64 {
        self.0.raw()
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A mark in a stream. A clone is another handle of the same mark.
#[derive(Clone)]
pub struct Event(Arc<dyn EventBackend>);

impl Event {
    /// The handle of a device's own event.
    pub fn new(backend: Arc<dyn EventBackend>) -> Self {
        Self(backend)
    }

    /// What the device made, if it is of type `T`.
    pub fn backend<T: EventBackend>(&self) -> Option<&T> {
        let backend: &dyn Any = &*self.0;
        backend.downcast_ref()
    }

    /// Milliseconds from `earlier` to this one, both made with timing, recorded and reached.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) without timing,
    /// [`ErrorKind::Driver`](crate::ErrorKind::Driver) if either is not reached.
    pub fn elapsed_since(&self, earlier: &Event) -> Result<f32> {
        self.0.elapsed_since(earlier)
    }

    /// Whether the mark has been reached. An event that was never recorded counts as reached: waiting for it is
    /// waiting for nothing.
    pub fn is_reached(&self) -> Result<bool> {
        self.0.is_reached()
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Work recorded once and launched any number of times. A clone is another handle of the same
/// graph.
#[derive(Clone)]
pub struct Graph(Arc<dyn GraphBackend>);

impl Graph {
    /// The handle of a device's own graph.
    pub fn new(backend: Arc<dyn GraphBackend>) -> Self {
        Self(backend)
    }

    /// Enqueues the whole graph on `stream`. Launches of one graph happen one after the other.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        self.0.launch(stream)
    }

    /// How many operations it holds.
    pub fn operations(&self) -> usize {
        self.0.operations()
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A stream as a device makes it; the methods are those of [`Stream`].
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

    /// Notes that what `fault` concerns has work in the stream; see `Stream::note_work`.
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

/// An event as a device makes it; the methods are those of [`Event`].
pub trait EventBackend: Any + Send + Sync + fmt::Debug {
    /// See [`Event::elapsed_since`].
    fn elapsed_since(&self, earlier: &Event) -> Result<f32>;

    /// See [`Event::is_reached`].
    fn is_reached(&self) -> Result<bool>;
}

/// A graph as a device makes it; the methods are those of [`Graph`].
pub trait GraphBackend: Send + Sync + fmt::Debug {
    /// See [`Graph::launch`].
    fn launch(&self, stream: &Stream) -> Result<()>;

    /// See [`Graph::operations`].
    fn operations(&self) -> usize;
}

/// A sequence by the calls one by one, with neighbouring operations on words together.
pub(crate) fn sequence_apart(stream: &dyn StreamBackend, ops: &[StreamOp<'_>]) -> Result<()> {
    let mut pending: Vec<MemoryOp<'_>> = Vec::with_capacity(ops.len());
    for op in ops {
        if let StreamOp::Memory(op, _) = op {
            pending.push(*op);
            continue;
        }
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
