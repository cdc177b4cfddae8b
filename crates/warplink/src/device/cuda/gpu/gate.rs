//! Separates enqueuing work from returning memory to the driver.
//!
//! A driver call that frees or unmaps waits until the GPU is idle, and meanwhile blocks enqueue calls of
//! other threads, on any GPU of the process. If a stream then waits for a peer, and the peer for work that
//! one of those threads is about to enqueue, the ranks deadlock. So such calls are made only while no stream
//! has work of this process, and enqueue calls are delayed meanwhile, by at most [`MAX_HOLD`]: the gate is
//! not a lock, so waits inside the driver for work of other libraries block nobody.

use crate::sync::lock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Maximum delay of an enqueue call.
const MAX_HOLD: Duration = Duration::from_millis(100);

/// Maximum wait for enqueue calls in progress.
const MAX_CLOSING: Duration = Duration::from_millis(1);

/// Process-wide, since the driver's waits affect all GPUs of the process.
pub(crate) static GATE: Gate = Gate::new();

/// Counts threads that enqueue and threads that return memory to the driver. Both wait for each other only
/// for a bounded time.
pub(crate) struct Gate {
    enqueuing: AtomicUsize,
    giving: AtomicUsize,
    lock: Mutex<()>,
    opened: Condvar,
}

/// Guard held while enqueuing.
pub(crate) struct Passage<'a>(&'a Gate);

/// Guard that delays enqueue calls.
pub(crate) struct Closed<'a>(&'a Gate);

impl Gate {
    const fn new() -> Self {
        Self {
            enqueuing: AtomicUsize::new(0),
            giving: AtomicUsize::new(0),
            lock: Mutex::new(()),
            opened: Condvar::new(),
        }
    }

    /// Waits while the gate is closed, up to [`MAX_HOLD`].
    #[inline]
    pub(crate) fn pass(&self) -> Passage<'_> {
        // Dekker's pattern with `close`: each side increments its own counter before it reads the other's.
        // SeqCst orders store and load, so at least one side sees the other.
        self.enqueuing.fetch_add(1, Ordering::SeqCst);
        if self.giving.load(Ordering::SeqCst) > 0 {
            self.hold_back();
        }
        Passage(self)
    }

    #[cold]
    fn hold_back(&self) {
        // Step back first, or `close` would wait for this thread, which waits for it.
        self.enqueuing.fetch_sub(1, Ordering::SeqCst);
        let closed = |(): &mut ()| self.giving.load(Ordering::SeqCst) > 0;
        // Proceed even after a timeout: the gate must never block.
        drop(
            self.opened
                .wait_timeout_while(lock(&self.lock), MAX_HOLD, closed),
        );
        // No second look at `giving`: the caller proceeds in any case.
        self.enqueuing.fetch_add(1, Ordering::SeqCst);
    }

    /// Closes the gate; `None` if some thread keeps enqueuing beyond [`MAX_CLOSING`].
    pub(crate) fn close(&self) -> Option<Closed<'_>> {
        // The other side of the pattern in `pass`, hence also SeqCst.
        self.giving.fetch_add(1, Ordering::SeqCst);
        let closed = Closed(self);
        let until = Instant::now() + MAX_CLOSING;
        while self.enqueuing.load(Ordering::SeqCst) > 0 {
            if Instant::now() > until {
                return None;
            }
            std::thread::yield_now();
        }
        Some(closed)
    }
}

impl Drop for Passage<'_> {
    #[inline]
    fn drop(&mut self) {
        // In one total order with `close`, which waits for 0.
        self.0.enqueuing.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        // Before the notification, so a waiter that wakes finds the gate open.
        self.0.giving.fetch_sub(1, Ordering::SeqCst);
        // Taking the lock ensures that no waiter is between its check and its wait, so none misses the
        // notification.
        drop(self.0.lock.lock().unwrap_or_else(PoisonError::into_inner));
        self.0.opened.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn enqueued_work_waits_for_the_gate() {
        let gate = Gate::new();
        let closed = gate.close().unwrap();
        // Before the thread is started, which may take longer than the wait on a busy machine.
        let begun = Instant::now();
        std::thread::scope(|scope| {
            let passing = scope.spawn(|| {
                drop(gate.pass());
                begun.elapsed()
            });
            std::thread::sleep(MAX_HOLD / 4);
            drop(closed);
            assert!(passing.join().unwrap() >= MAX_HOLD / 4);
        });
        assert_eq!(gate.enqueuing.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn nothing_is_held_back_for_long() {
        let gate = Gate::new();
        let closed = gate.close().unwrap();
        let begun = Instant::now();
        // Simulates a driver call that never returns.
        drop(gate.pass());
        assert!(begun.elapsed() >= MAX_HOLD);
        drop(closed);
        let begun = Instant::now();
        drop(gate.pass());
        assert!(begun.elapsed() < MAX_HOLD);
    }

    #[test]
    fn the_gate_stays_open_while_something_is_being_enqueued() {
        let gate = Gate::new();
        let passage = gate.pass();
        assert!(gate.close().is_none());
        // The enqueuing thread may pass again.
        drop(gate.pass());
        drop(passage);
        assert!(gate.close().is_some());
        assert_eq!(gate.giving.load(Ordering::SeqCst), 0);
    }
}
