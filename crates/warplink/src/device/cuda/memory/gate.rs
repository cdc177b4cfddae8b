//! What is enqueued, and what is given to the driver, kept apart for moments.
//!
//! A driver call that frees or unmaps waits until the GPU is idle, and meanwhile holds up what other
//! threads enqueue, on any GPU of the process. If a stream waits for a peer at that time, and the
//! peer for what one of these threads is about to enqueue, nobody goes on. So such calls are made when
//! no stream has work of this process, and what is enqueued just then is held back, but for
//! [`MAX_HOLD`] at most: it is no lock, and the driver's own waits for other libraries' work do not
//! hold up anybody through it.

use crate::sync::lock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The longest that something is held back before it is enqueued.
const MAX_HOLD: Duration = Duration::from_millis(100);

/// How long those that are enqueuing are waited for.
const MAX_CLOSING: Duration = Duration::from_millis(1);

/// The gate of the process: the driver's waits concern all of its GPUs.
pub(crate) static GATE: Gate = Gate::new();

/// Counts those that enqueue and those that give memory to the driver. Both only ever wait for the
/// other for a bounded time.
pub(crate) struct Gate {
    enqueuing: AtomicUsize,
    giving: AtomicUsize,
    lock: Mutex<()>,
    opened: Condvar,
}

/// To be held while something is enqueued.
pub(crate) struct Passage<'a>(&'a Gate);

/// While it is held, what is to be enqueued is held back.
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

    /// Waits while the gate is closed, but not for long.
    #[inline]
    pub(crate) fn pass(&self) -> Passage<'_> {
        self.enqueuing.fetch_add(1, Ordering::SeqCst);
        if self.giving.load(Ordering::SeqCst) > 0 {
            self.hold_back();
        }
        Passage(self)
    }

    #[cold]
    fn hold_back(&self) {
        self.enqueuing.fetch_sub(1, Ordering::SeqCst);
        let closed = |(): &mut ()| self.giving.load(Ordering::SeqCst) > 0;
        // Whatever ends the wait, the caller goes on.
        drop(
            self.opened
                .wait_timeout_while(lock(&self.lock), MAX_HOLD, closed),
        );
        self.enqueuing.fetch_add(1, Ordering::SeqCst);
    }

    /// Closes the gate, unless somebody is enqueuing for longer than a moment.
    pub(crate) fn close(&self) -> Option<Closed<'_>> {
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
        self.0.enqueuing.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.0.giving.fetch_sub(1, Ordering::SeqCst);
        // Taken and released, so that nobody is between looking and waiting.
        drop(self.0.lock.lock().unwrap_or_else(PoisonError::into_inner));
        self.0.opened.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_enqueued_is_held_back_and_let_go_when_the_gate_opens() {
        let gate = Gate::new();
        let closed = gate.close().unwrap();
        std::thread::scope(|scope| {
            let passing = scope.spawn(|| {
                let begun = Instant::now();
                drop(gate.pass());
                begun.elapsed()
            });
            std::thread::sleep(MAX_HOLD / 4);
            drop(closed);
            assert!(passing.join().unwrap() >= MAX_HOLD / 8);
        });
        assert_eq!(gate.enqueuing.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn nothing_is_held_back_for_long() {
        let gate = Gate::new();
        let closed = gate.close().unwrap();
        let begun = Instant::now();
        // As if the driver blocked for ever.
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
        // One that enqueues may do so again.
        drop(gate.pass());
        drop(passage);
        assert!(gate.close().is_some());
        assert_eq!(gate.giving.load(Ordering::SeqCst), 0);
    }
}
