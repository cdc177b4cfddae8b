//! The streams that this process enqueues on, and how far they are.
//!
//! Streams are never asked themselves: asking one that somebody else records spoils the recording. An
//! event of ours is recorded behind what was enqueued, and asked.

use crate::device::cuda::driver::context::Context;
use crate::device::cuda::driver::raw::{RawEvent, RawStream};
use crate::device::cuda::memory::gate::{GATE, Passage};
use crate::device::cuda::stream::capture;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::lock;
use cudarc::driver::sys::CUstream;
use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: u64 = 2;

/// Tells numbers of threads from the driver's handles of streams, and those of streams that were given back from both.
const THREAD: u64 = 1 << 63;
const GIVEN_BACK: u64 = 1 << 62;

static STREAMS: Mutex<Vec<Weak<LiveStream>>> = Mutex::new(Vec::new());

/// What was still to be done in streams that were let go of.
static LEFT: Mutex<Vec<Left>> = Mutex::new(Vec::new());

struct Left {
    bit: u64,
    event: Arc<RawEvent>,
}

/// What keeps a stream valid.
pub(crate) enum Keep {
    /// It is ours, and destroyed with this.
    Own { _stream: RawStream },
    /// It is theirs, and this holds them.
    Foreign { _owner: Arc<dyn Any + Send + Sync> },
}

/// A stream that is enqueued on.
pub(crate) struct LiveStream {
    context: Arc<Context>,
    pub(crate) raw: CUstream,
    /// Its bit in [`Uses`], which other streams may share.
    bit: u64,
    /// The number of the thread whose default stream it is.
    thread: Option<u64>,
    /// Whether something was enqueued since the last mark.
    unmarked: AtomicBool,
    /// Behind what was enqueued up to then. No one that enqueues waits for this lock.
    mark: Mutex<Option<Arc<RawEvent>>>,
    keep: Keep,
    /// Set when the stream's owner has it back, and may destroy it.
    given_back: OnceLock<GivenBack>,
    /// Held while the driver is asked about the stream by those that it was not lent to, so that it is not given back
    /// meanwhile.
    asking: Mutex<()>,
}

/// What is left of a stream that was given back.
struct GivenBack {
    /// In place of the handle, which the driver gives to other streams.
    key: u64,
    /// Behind everything in it; why there is none, where the driver failed.
    end: Result<Arc<RawEvent>>,
}

// SAFETY: the raw pointer is a handle that the driver accepts on every thread, and it is kept valid.
unsafe impl Send for LiveStream {}
// SAFETY: as above; the driver serializes what threads enqueue.
unsafe impl Sync for LiveStream {}

/// How far a stream is.
pub(crate) enum Progress {
    /// All that was enqueued is done.
    Done,
    /// It is when the event is reached.
    Until(Arc<RawEvent>),
    /// It records a graph, so that it cannot be marked now.
    Unknown,
}

/// To be held while something is enqueued.
pub(crate) struct Enqueuing<'a> {
    stream: &'a LiveStream,
    _passage: Passage<'static>,
}

/// Which streams an allocation was used on: a bit for each.
#[derive(Debug, Default)]
pub(crate) struct Uses(AtomicU64);

/// A use of memory that a stream may not be past.
pub(crate) enum PendingUse {
    Event(Arc<RawEvent>),
    Stream(Weak<LiveStream>),
}

impl LiveStream {
    /// # Safety
    /// `raw` must be a stream of `context` that stays valid as long as `keep`.
    pub(crate) unsafe fn new(context: &Arc<Context>, raw: CUstream, keep: Keep) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let per_thread = raw as usize as u64 == PER_THREAD;
        let stream = Arc::new(Self {
            context: context.clone(),
            raw,
            bit: 1 << (NEXT.fetch_add(1, Ordering::Relaxed) % u64::BITS as u64),
            thread: per_thread.then(thread_number),
            unmarked: AtomicBool::new(false),
            mark: Mutex::default(),
            keep,
            given_back: OnceLock::new(),
            asking: Mutex::default(),
        });
        let mut streams = lock(&STREAMS);
        streams.retain(|stream| stream.strong_count() > 0);
        streams.push(Arc::downgrade(&stream));
        stream
    }

    /// A number that no other stream of the GPU has: the driver's handle, or one for the thread whose
    /// default stream it is, or for what was given back.
    pub(crate) fn key(&self) -> u64 {
        if let Some(given_back) = self.given_back.get() {
            return given_back.key;
        }
        self.thread
            .map_or(self.raw as usize as u64, |thread| THREAD | thread)
    }

    /// Gives a stream of somebody else's back: from now on the driver is not asked about it. Fails while it records a
    /// graph, and does nothing where it was given back before.
    pub(crate) fn give_back(&self) -> Result<()> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        if !self.is_foreign() {
            return Ok(());
        }
        // Of the default stream of another thread, the driver cannot be asked here.
        let elsewhere = (!self.is_here()).then(|| self.marked());
        let _asking = lock(&self.asking);
        if self.is_given_back() {
            return Ok(());
        }
        let end = match elsewhere.unwrap_or_else(|| self.record_here()) {
            Err(error) if error.kind() == ErrorKind::InvalidArgument => return Err(error),
            // A driver that fails will not take it back later either.
            end => end,
        };
        let key = GIVEN_BACK | NEXT.fetch_add(1, Ordering::Relaxed);
        let _ = self.given_back.set(GivenBack { key, end });
        Ok(())
    }

    /// Whether it records a graph; what was given back does not.
    pub(crate) fn is_capturing(&self) -> Result<bool> {
        let _asking = self.is_foreign().then(|| lock(&self.asking));
        if self.is_given_back() {
            return Ok(false);
        }
        self.check_usable()?;
        let _entered = self.context.enter()?;
        capture::is_capturing(self.context.driver, self.raw)
    }

    /// Whether it was given back.
    #[inline]
    pub(crate) fn is_given_back(&self) -> bool {
        self.given_back.get().is_some()
    }

    /// The context that it belongs to.
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Whether it is somebody else's.
    pub(crate) fn is_foreign(&self) -> bool {
        matches!(self.keep, Keep::Foreign { .. })
    }

    /// Whether the driver would take the handle for this stream on the calling thread.
    #[inline]
    pub(crate) fn is_here(&self) -> bool {
        self.thread.is_none_or(|thread| thread == thread_number())
    }

    /// Fails on a thread on which the handle means another stream, and where the stream was given back.
    #[inline]
    pub(crate) fn check_usable(&self) -> Result<()> {
        if self.is_given_back() {
            return Err(Error::invalid("the stream was given back to its owner")
                .with_help("borrow it again, or use another stream"));
        }
        if self.is_here() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::InvalidArgument,
            "the per-thread default stream was borrowed on another thread; expected the same thread",
        )
        .with_help("enqueue on the thread that borrowed it, or create a stream"))
    }

    /// Notes that something is being enqueued, until the guard is dropped.
    #[inline]
    pub(crate) fn enqueue(&self) -> Enqueuing<'_> {
        Enqueuing {
            stream: self,
            _passage: GATE.pass(),
        }
    }

    /// How far the stream is with what this process enqueued.
    pub(crate) fn progress(&self) -> Progress {
        let Ok(_entered) = self.context.enter() else {
            return Progress::Done;
        };
        let _relaxed = self.context.relax_capture();
        if self.thread.is_some() {
            // Marked by its own thread, with everything that is enqueued.
            let mark = lock(&self.mark).clone();
            return mark
                .filter(is_pending)
                .map_or(Progress::Done, Progress::Until);
        }
        let mut mark = lock(&self.mark);
        if self.unmarked.swap(false, Ordering::AcqRel) {
            match self.record() {
                Ok(event) => *mark = Some(event),
                Err(error) => {
                    tracing::debug!(%error, "a stream cannot be marked yet");
                    self.unmarked.store(true, Ordering::Release);
                    return Progress::Unknown;
                }
            }
        }
        if !mark.as_ref().is_some_and(is_pending) {
            *mark = None;
        }
        mark.clone().map_or(Progress::Done, Progress::Until)
    }

    /// An event behind everything that is in the stream, also of other libraries.
    pub(crate) fn record(&self) -> Result<Arc<RawEvent>> {
        if !self.is_here() {
            return self.marked();
        }
        let _asking = lock(&self.asking);
        if let Some(given_back) = self.given_back.get() {
            return given_back.end.clone();
        }
        self.record_here()
    }

    /// The event behind what its own thread enqueued.
    fn marked(&self) -> Result<Arc<RawEvent>> {
        let event = lock(&self.mark).clone();
        // One that was never recorded counts as reached.
        event.map_or_else(|| RawEvent::create(&self.context, false).map(Arc::new), Ok)
    }

    /// As [`record`](Self::record), on a thread on which the handle is valid, and not after the stream was given back.
    fn record_here(&self) -> Result<Arc<RawEvent>> {
        let _entered = self.context.enter()?;
        let _relaxed = self.context.relax_capture();
        if capture::is_capturing(self.context.driver, self.raw)? {
            return Err(Error::invalid("the stream is recording a graph")
                .with_operation("mark the end of a stream's work")
                .with_help("end the capture first"));
        }
        let event = RawEvent::create(&self.context, false)?;
        // SAFETY: the stream is valid, and of the event's context, which is current.
        unsafe { event.record(self.raw)? };
        Ok(Arc::new(event))
    }
}

impl Drop for LiveStream {
    fn drop(&mut self) {
        let event = match self.progress() {
            Progress::Done => None,
            Progress::Until(event) => Some(event),
            // What it was given before it began to record.
            Progress::Unknown => lock(&self.mark).clone().filter(is_pending),
        };
        if let Some(event) = event {
            let bit = self.bit;
            lock(&LEFT).push(Left { bit, event });
        }
    }
}

impl Drop for Enqueuing<'_> {
    #[inline]
    fn drop(&mut self) {
        self.stream.unmarked.store(true, Ordering::Release);
        if self.stream.thread.is_some()
            && let Ok(event) = self.stream.record()
        {
            *lock(&self.stream.mark) = Some(event);
        }
    }
}

impl Uses {
    /// Notes a use on `stream`.
    #[inline]
    pub(crate) fn note(&self, stream: &LiveStream) {
        if self.0.load(Ordering::Relaxed) & stream.bit == 0 {
            self.0.fetch_or(stream.bit, Ordering::Relaxed);
        }
    }

    /// Forgets the uses so far, which streams are past.
    pub(crate) fn clear(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// The uses that streams may not be past.
    pub(crate) fn pending(&self) -> Vec<PendingUse> {
        let bits = self.0.load(Ordering::Relaxed);
        if bits == 0 {
            return Vec::new();
        }
        let mut pending: Vec<PendingUse> = left()
            .into_iter()
            .filter(|left| left.bit & bits != 0)
            .map(|left| PendingUse::Event(left.event))
            .collect();
        for stream in live().iter().filter(|stream| stream.bit & bits != 0) {
            pending.extend(match stream.progress() {
                Progress::Done => None,
                Progress::Until(event) => Some(PendingUse::Event(event)),
                Progress::Unknown => Some(PendingUse::Stream(Arc::downgrade(stream))),
            });
        }
        pending
    }
}

impl PendingUse {
    /// Whether the stream is past it.
    pub(crate) fn is_past(&mut self) -> bool {
        if let Self::Stream(stream) = self {
            // One that is gone has left a mark, if it had work.
            let Some(stream) = stream.upgrade() else {
                return left().is_empty();
            };
            match stream.progress() {
                Progress::Done => return true,
                Progress::Until(event) => *self = Self::Event(event),
                Progress::Unknown => return false,
            }
        }
        matches!(self, Self::Event(event) if !is_pending(event))
    }
}

/// Whether no stream has work that this process has enqueued.
pub(crate) fn all_done() -> bool {
    let done = |stream: &Arc<LiveStream>| matches!(stream.progress(), Progress::Done);
    live().iter().all(done) && left().is_empty()
}

fn live() -> Vec<Arc<LiveStream>> {
    lock(&STREAMS).iter().filter_map(Weak::upgrade).collect()
}

/// What is still to be done in streams that were let go of.
fn left() -> Vec<Left> {
    let copied = |left: &Left| Left {
        bit: left.bit,
        event: left.event.clone(),
    };
    let all: Vec<Left> = lock(&LEFT).iter().map(copied).collect();
    let (left, done): (Vec<_>, Vec<_>) = all.into_iter().partition(|left| is_pending(&left.event));
    if !done.is_empty() {
        let is_done = |left: &Left| {
            done.iter()
                .any(|done| Arc::ptr_eq(&done.event, &left.event))
        };
        let removed: Vec<Left> = lock(&LEFT).extract_if(.., |left| is_done(left)).collect();
        // Events are destroyed outside of the lock.
        drop(removed);
    }
    left
}

/// Whether what precedes the event is still to be done. What cannot be asked counts as such: memory
/// is kept, and not used again too early.
fn is_pending(event: &Arc<RawEvent>) -> bool {
    let _relaxed = event.context.relax_capture();
    !event.is_reached().unwrap_or(false)
}

/// A number that no other thread of the process has or had.
fn thread_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static NUMBER: u64 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    NUMBER.with(|number| *number)
}
