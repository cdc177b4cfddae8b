//! Moments at which no stream of this process has work.
//!
//! A driver call that frees or unmaps waits until the GPU is idle, and meanwhile holds up
//! what other threads enqueue, on any GPU of the process. If a stream waits for a peer at that time,
//! and the peer for what one of these threads is about to enqueue, nobody goes on. So such calls are
//! made when no stream has work, and until they return nothing is enqueued that might wait.

use crate::device::cuda::driver::context::Context;
use crate::device::cuda::driver::status;
use crate::sync::lock;
use cudarc::driver::sys::CUstream;
use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};
use std::time::{Duration, Instant};

/// Held for reading by who enqueues, for writing by who frees.
static GATE: RwLock<()> = RwLock::new(());

/// The streams through which this process reaches peers.
static STREAMS: Mutex<Vec<Watched>> = Mutex::new(Vec::new());

/// Between two looks: at first and at most.
const POLL_INTERVALS: [Duration; 2] = [Duration::from_micros(20), Duration::from_millis(2)];

/// How long streams may be found busy before what waits for peers is held back for a while, so that
/// they can run empty: at first, and at most.
const BUSY_LIMITS: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(5)];

/// For how long it is held back: at first, and at most. Long for a stream that only has to finish,
/// short for one that waits in vain.
const HOLD_LIMITS: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(200)];

struct Watched {
    number: u64,
    context: Arc<Context>,
    raw: usize,
    /// What kept the stream valid, once nobody else uses it; until its work is done.
    left: Option<Box<dyn Any + Send>>,
}

impl Watched {
    fn is_idle(&self) -> bool {
        let driver = self.context.driver;
        let Ok(_entered) = self.context.enter() else {
            return true;
        };
        let _relaxed = self.context.relax_capture();
        let (raw, mut capture) = (self.raw as CUstream, 0);
        // SAFETY: a stream is watched no longer than it lives; `capture` is an output parameter for
        // one integer.
        let code = unsafe { (driver.cuStreamIsCapturing)(raw, &mut capture) };
        // A stream that records must not be asked, nor a default one while another records. Both last
        // only briefly.
        if code == status::CAPTURE_IMPLICIT || (code == status::SUCCESS && capture != 0) {
            return false;
        }
        // SAFETY: as above. A stream that failed has no work.
        unsafe { (driver.cuStreamQuery)(raw) != status::NOT_READY }
    }
}

/// Watches a stream until its work is done, also after its last handle was dropped.
#[derive(Debug)]
pub(crate) struct Watch(u64);

impl Watch {
    /// # Safety
    /// `raw` must be a stream of `context` that stays valid until [`leave`](Self::leave) is called,
    /// and from then on as long as what is given to that.
    pub(crate) unsafe fn keep(context: &Arc<Context>, raw: CUstream) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        lock(&STREAMS).push(Watched {
            number,
            context: context.clone(),
            raw: raw as usize,
            left: None,
        });
        Self(number)
    }

    /// Lets go of the stream: `valid`, which keeps it so, is dropped when its work is done.
    pub(crate) fn leave(&self, valid: Box<dyn Any + Send>) {
        let mut streams = lock(&STREAMS);
        if let Some(watched) = streams.iter_mut().find(|watched| watched.number == self.0) {
            watched.left = Some(valid);
        }
        drop(streams);
        sweep();
    }

    /// Lets go of a stream that must not be looked at any more.
    pub(crate) fn end(&self) {
        let own = |watched: &mut Watched| watched.number == self.0;
        let gone: Vec<Watched> = lock(&STREAMS).extract_if(.., own).collect();
        // Not under the lock, which the context's end could need.
        drop(gone);
    }
}

/// Drops streams that were let go of and have no work any more.
fn sweep() {
    let over = |watched: &mut Watched| watched.left.is_some() && watched.is_idle();
    let gone: Vec<Watched> = lock(&STREAMS).extract_if(.., over).collect();
    // Not under the lock: what kept a stream valid may be anybody's.
    drop(gone);
}

/// To be held while something is enqueued that may wait for a peer, and where a stream begins or
/// joins a capture, since one that records cannot be looked at. May be held more than once.
#[inline]
pub(crate) fn enqueuing() -> RwLockReadGuard<'static, ()> {
    // Who frees only ever tries for the lock, so that a reader never finds somebody queued for it.
    GATE.read().unwrap_or_else(PoisonError::into_inner)
}

/// Blocks until no stream has work, and gives what keeps it so: as long as it is held, nothing is
/// enqueued that may wait for a peer. Runs `meanwhile` before every look.
pub(crate) fn await_quiescence(mut meanwhile: impl FnMut()) -> RwLockWriteGuard<'static, ()> {
    let ([mut busy_limit, max_busy_limit], [mut hold, max_hold]) = (BUSY_LIMITS, HOLD_LIMITS);
    let (mut busy_since, mut pause) = (Instant::now(), POLL_INTERVALS[0]);
    loop {
        meanwhile();
        sweep();
        let holding = busy_since.elapsed() > busy_limit;
        let limit = if holding { hold } else { Duration::ZERO };
        if let Some(gate) = closed_and_idle(limit) {
            return gate;
        }
        if holding {
            busy_since = Instant::now();
            busy_limit = max_busy_limit.min(2 * busy_limit);
            hold = max_hold.min(2 * hold);
        }
        std::thread::sleep(pause);
        pause = POLL_INTERVALS[1].min(2 * pause);
    }
}

/// Closes the gate, and leaves it closed if no stream has work within `limit`.
fn closed_and_idle(limit: Duration) -> Option<RwLockWriteGuard<'static, ()>> {
    let start = Instant::now();
    let mut gate = None;
    loop {
        if gate.is_none() {
            gate = match GATE.try_write() {
                Ok(gate) => Some(gate),
                Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => None,
            };
        }
        if gate.is_some() && lock(&STREAMS).iter().all(Watched::is_idle) {
            return gate;
        }
        if start.elapsed() >= limit {
            return None;
        }
        std::thread::sleep(POLL_INTERVALS[0]);
    }
}
