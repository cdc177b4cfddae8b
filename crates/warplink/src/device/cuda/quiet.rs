//! Moments at which no stream of this process has work.
//!
//! A call of the driver's that frees or unmaps waits until the GPU is idle, and meanwhile holds up
//! what other threads enqueue, on any GPU of the process. If a stream waits for a peer at that time,
//! and the peer for what one of these threads is about to enqueue, nobody goes on. So such calls are
//! made when no stream has work, and until they return nothing is enqueued that might wait.

use super::context::Context;
use super::driver::status;
use super::memory_ops;
use crate::sync::lock;
use cudarc::driver::sys::CUstream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, TryLockError};
use std::time::{Duration, Instant};

/// Held by who enqueues, for reading, and by who frees.
static GATE: RwLock<()> = RwLock::new(());

/// The streams through which this process reaches peers.
static STREAMS: Mutex<Vec<Watched>> = Mutex::new(Vec::new());

/// Pauses between two looks, from the first to the longest.
const PAUSES: [Duration; 2] = [Duration::from_micros(20), Duration::from_millis(2)];

/// For how long streams may be busy at every look before they get nothing new for a while.
const PATIENCE: Duration = Duration::from_secs(1);

/// That while: long for a stream that only has to be let finish, short for one that waits in vain.
const HOLD: Duration = Duration::from_millis(20);

#[derive(Debug)]
struct Watched {
    number: u64,
    context: Arc<Context>,
    raw: usize,
}

impl Watched {
    fn is_idle(&self) -> bool {
        let driver = self.context.driver;
        let Ok(_entered) = self.context.enter() else {
            return true;
        };
        let raw = self.raw as CUstream;
        // A stream that records must not be asked, and records only briefly.
        match memory_ops::is_capturing(driver, raw) {
            Ok(true) => false,
            // SAFETY: a stream is watched no longer than it lives. One that failed has no work.
            Ok(false) => unsafe { (driver.cuStreamQuery)(raw) != status::NOT_READY },
            Err(_) => true,
        }
    }
}

/// Keeps an eye on a stream until it is dropped.
#[derive(Debug)]
pub(super) struct Watch(u64);

impl Watch {
    /// # Safety
    /// `raw` must be a stream of `context` that stays valid until this is dropped.
    pub(super) unsafe fn keep(context: &Arc<Context>, raw: CUstream) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        lock(&STREAMS).push(Watched {
            number,
            context: context.clone(),
            raw: raw as usize,
        });
        Self(number)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        lock(&STREAMS).retain(|watched| watched.number != self.0);
    }
}

/// To be held while something is enqueued that may wait for a peer. May be held more than once.
#[inline]
pub(super) fn enqueuing() -> RwLockReadGuard<'static, ()> {
    // Who frees only ever tries for the lock, so that a reader never finds somebody queued for it.
    GATE.read().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `call` as soon as no stream has work. Blocks until then.
pub(super) fn when_quiet(call: impl FnOnce()) {
    let (mut busy_since, mut patience, mut pause) = (Instant::now(), PATIENCE, PAUSES[0]);
    loop {
        let hold = match busy_since.elapsed() > patience {
            true => HOLD,
            false => Duration::ZERO,
        };
        if let Some(_gate) = closed_and_idle(hold) {
            return call();
        }
        if !hold.is_zero() {
            (busy_since, patience) = (Instant::now(), 2 * patience);
        }
        std::thread::sleep(pause);
        pause = PAUSES[1].min(2 * pause);
    }
}

/// Closes the gate, and leaves it closed if no stream has work within `hold`.
fn closed_and_idle(hold: Duration) -> Option<impl Drop> {
    let gate = match GATE.try_write() {
        Ok(gate) => gate,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return None,
    };
    let start = Instant::now();
    loop {
        if lock(&STREAMS).iter().all(Watched::is_idle) {
            return Some(gate);
        }
        if start.elapsed() >= hold {
            return None;
        }
        std::thread::sleep(PAUSES[0]);
    }
}
