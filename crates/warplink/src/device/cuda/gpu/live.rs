//! Progress of the streams that this process enqueues on.
//!
//! Streams are never queried directly, since querying one that other code is capturing would invalidate the
//! capture. Instead an event is recorded after our work and queried.

use super::gate::{GATE, Passage};
use crate::device::cuda::driver::capture;
use crate::device::cuda::driver::context::Context;
use crate::device::cuda::driver::raw::{RawEvent, RawStream};
use crate::error::{Error, ErrorKind, Result};
use crate::sync::lock;
use cudarc::driver::sys::CUstream;
use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: u64 = 2;

/// Flags that keep keys of threads and of returned streams distinct from driver handles.
const THREAD: u64 = 1 << 63;
const GIVEN_BACK: u64 = 1 << 62;

static STREAMS: Mutex<Vec<Weak<LiveStream>>> = Mutex::new(Vec::new());

/// Unfinished work of streams that no longer exist.
static LEFT: Mutex<Vec<Left>> = Mutex::new(Vec::new());

struct Left {
    bit: u64,
    event: Arc<RawEvent>,
}

/// Keeps a stream valid.
pub(crate) enum Keep {
    /// Our own stream, destroyed with this.
    Own { _stream: RawStream },
    /// A borrowed stream, kept alive by its owner.
    Foreign { _owner: Arc<dyn Any + Send + Sync> },
}

/// A stream that this process enqueues on.
pub(crate) struct LiveStream {
    context: Arc<Context>,
    pub(crate) raw: CUstream,
    /// Its bit in [`Uses`]; streams may share a bit.
    bit: u64,
    /// Thread number, for a per-thread default stream.
    thread: Option<u64>,
    /// Whether something was enqueued since the last mark.
    unmarked: AtomicBool,
    /// Event after the work enqueued up to the last mark. Enqueue calls never wait for this lock.
    mark: Mutex<Option<Arc<RawEvent>>>,
    keep: Keep,
    /// Set once the owner has the stream back and may destroy it.
    given_back: OnceLock<GivenBack>,
    /// Held while threads other than the borrower query the stream, so that it is not returned to its owner
    /// meanwhile.
    asking: Mutex<()>,
}

/// Remainder of a stream that was returned to its owner.
struct GivenBack {
    /// Replaces the handle, which the driver may reuse for another stream.
    key: u64,
    /// Event after all of its work, or the error if recording it failed.
    end: Result<Arc<RawEvent>>,
}

// SAFETY: the raw pointer is a handle that the driver accepts on every thread, and it is kept valid.
unsafe impl Send for LiveStream {}
// SAFETY: as above; the driver serializes what threads enqueue.
unsafe impl Sync for LiveStream {}

/// Progress of a stream.
pub(crate) enum Progress {
    /// All enqueued work is complete.
    Done,
    /// Complete once the event is reached.
    Until(Arc<RawEvent>),
    /// Capturing, so it cannot be marked now.
    Unknown,
}

/// Guard held while enqueuing.
pub(crate) struct Enqueuing<'a> {
    stream: &'a LiveStream,
    _passage: Passage<'static>,
}

/// Streams that have used an allocation, one bit each.
#[derive(Debug, Default)]
pub(crate) struct Uses(AtomicU64);

/// A use of memory that may still be in flight.
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
            // Relaxed: any distribution over bits is correct. Shared bits only delay reuse.
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

    /// Unique key among the GPU's streams: the driver's handle, or a number for the thread's default stream
    /// or for a returned stream.
    pub(crate) fn key(&self) -> u64 {
        if let Some(given_back) = self.given_back.get() {
            return given_back.key;
        }
        self.thread
            .map_or(self.raw as usize as u64, |thread| THREAD | thread)
    }

    /// Returns a borrowed stream to its owner; the driver is not queried about it afterwards. Fails during a
    /// capture. Idempotent.
    pub(crate) fn give_back(&self) -> Result<()> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        if !self.is_foreign() {
            return Ok(());
        }
        // The default stream of another thread cannot be queried from this one.
        let elsewhere = (!self.is_here()).then(|| self.marked());
        let _asking = lock(&self.asking);
        if self.is_given_back() {
            return Ok(());
        }
        let end = match elsewhere.unwrap_or_else(|| self.record_here()) {
            Err(error) if error.kind() == ErrorKind::InvalidArgument => return Err(error),
            // A failing driver would fail a later attempt too.
            end => end,
        };
        // Relaxed: only uniqueness matters. A key of its own, since the owner may create another stream with the
        // same handle.
        let key = GIVEN_BACK | NEXT.fetch_add(1, Ordering::Relaxed);
        let _ = self.given_back.set(GivenBack { key, end });
        Ok(())
    }

    /// Whether it is capturing; false for a returned stream.
    pub(crate) fn is_capturing(&self) -> Result<bool> {
        let _asking = self.is_foreign().then(|| lock(&self.asking));
        if self.is_given_back() {
            return Ok(false);
        }
        self.check_usable()?;
        let _entered = self.context.enter()?;
        capture::is_capturing(self.context.driver, self.raw)
    }

    /// Whether it was returned to its owner.
    #[inline]
    pub(crate) fn is_given_back(&self) -> bool {
        self.given_back.get().is_some()
    }

    /// Context of the stream.
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Whether other code created it.
    pub(crate) fn is_foreign(&self) -> bool {
        matches!(self.keep, Keep::Foreign { .. })
    }

    /// Whether the handle denotes this stream on the calling thread.
    #[inline]
    pub(crate) fn is_here(&self) -> bool {
        self.thread.is_none_or(|thread| thread == thread_number())
    }

    /// Fails on a thread where the handle denotes another stream, and after the stream was returned.
    #[inline]
    pub(crate) fn check_usable(&self) -> Result<()> {
        if self.is_given_back() {
            return Err(Error::invalid("the stream was given back to its owner")
                .with_help("borrow it again, or use another stream"));
        }
        if self.is_here() {
            return Ok(());
        }
        Err(Error::invalid("the per-thread default stream was borrowed on another thread; expected the same thread",
        )
        .with_help("enqueue on the thread that borrowed it, or create a stream"))
    }

    /// Marks the stream as having new work until the guard is dropped.
    #[inline]
    pub(crate) fn enqueue(&self) -> Enqueuing<'_> {
        Enqueuing {
            stream: self,
            _passage: GATE.pass(),
        }
    }

    /// Progress of the work that this process enqueued.
    pub(crate) fn progress(&self) -> Progress {
        let Ok(_entered) = self.context.enter() else {
            return Progress::Done;
        };
        let _relaxed = self.context.relax_capture();
        if self.thread.is_some() {
            // Its own thread records a mark with each enqueue call.
            let mark = lock(&self.mark).clone();
            return mark
                .filter(is_pending)
                .map_or(Progress::Done, Progress::Until);
        }
        let mut mark = lock(&self.mark);
        // Cleared before recording: work enqueued concurrently sets it again and gets a new mark.
        if self.unmarked.swap(false, Ordering::AcqRel) {
            match self.record() {
                Ok(event) => *mark = Some(event),
                Err(error) => {
                    tracing::debug!(%error, "a stream cannot be marked yet");
                    // Release: pairs with the swap above in the next attempt.
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

    /// Records an event after everything in the stream, including other libraries' work.
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

    /// The event that its own thread recorded last.
    fn marked(&self) -> Result<Arc<RawEvent>> {
        let event = lock(&self.mark).clone();
        // A never recorded event counts as reached.
        event.map_or_else(|| RawEvent::create(&self.context, false).map(Arc::new), Ok)
    }

    /// As [`record`](Self::record), on a thread where the handle is valid and before the stream was returned.
    fn record_here(&self) -> Result<Arc<RawEvent>> {
        let _entered = self.context.enter_relaxed()?;
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
            // Work enqueued before the capture began.
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
        // Release: pairs with the swap in `progress`, so the mark is recorded after this work.
        self.stream.unmarked.store(true, Ordering::Release);
        if self.stream.thread.is_some()
            && let Ok(event) = self.stream.record()
        {
            *lock(&self.stream.mark) = Some(event);
        }
    }
}

impl Uses {
    /// Records a use on `stream`.
    #[inline]
    pub(crate) fn note(&self, stream: &LiveStream) {
        // Relaxed: the thread that drops the memory is ordered after its uses by the reference count. The load avoids
        // a read-modify-write in the common case.
        if self.0.load(Ordering::Relaxed) & stream.bit == 0 {
            self.0.fetch_or(stream.bit, Ordering::Relaxed);
        }
    }

    /// Clears uses that streams have completed.
    pub(crate) fn clear(&self) {
        // Relaxed, as in `note`: the caller has waited for the streams, and owns the memory.
        self.0.store(0, Ordering::Relaxed);
    }

    /// Uses that may still be in flight.
    pub(crate) fn pending(&self) -> Vec<PendingUse> {
        // Relaxed, as in `note`: at the drop of the memory, all uses precede.
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
    /// Whether the stream has completed the use.
    pub(crate) fn is_past(&mut self) -> bool {
        if let Self::Stream(stream) = self {
            // A destroyed stream left an event if it had work.
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

/// Whether all work that this process enqueued, on any stream, is complete.
pub(crate) fn all_done() -> bool {
    let done = |stream: &Arc<LiveStream>| matches!(stream.progress(), Progress::Done);
    live().iter().all(done) && left().is_empty()
}

fn live() -> Vec<Arc<LiveStream>> {
    lock(&STREAMS).iter().filter_map(Weak::upgrade).collect()
}

/// Unfinished work of streams that no longer exist.
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
        // Destroy events outside the lock.
        drop(removed);
    }
    left
}

/// Whether work before the event is unfinished. Errors count as unfinished, so memory is never reused too
/// early.
fn is_pending(event: &Arc<RawEvent>) -> bool {
    let _relaxed = event.context.relax_capture();
    !event.is_reached().unwrap_or(false)
}

/// Number of this thread, unique over the process lifetime.
fn thread_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        // Relaxed: only uniqueness matters.
        static NUMBER: u64 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    NUMBER.with(|number| *number)
}
