//! Lets the reader of a FIFO sleep until a producer in its process pushes a trigger.
//!
//! There are no lost wakeups (Dekker's pattern): the reader sets `listens` and then checks the ring once
//! more; a producer pushes its trigger and then checks `listens`. The SeqCst fence between store and load on
//! both sides means that at least one sees the other.

use crate::sync::{
    AtomicBool, Mutex, Ordering::SeqCst, Thread, fence, guard, park_timeout, this_thread,
};
use std::time::Duration;

/// The thread that waits for producers of this process. GPU kernels cannot wake it.
#[derive(Debug, Default)]
pub(super) struct Listener {
    /// Set whenever `listens` is, as another thread may read after this one has ended.
    thread: Mutex<Option<Thread>>,
    listens: AtomicBool,
}

impl Listener {
    /// Sleeps for up to `limit` until woken, unless `is_there` finds that a trigger has arrived. Only one thread may
    /// listen at a time. Spurious wakeups are possible.
    pub(super) fn listen(&self, limit: Duration, is_there: impl FnOnce() -> bool) {
        *guard(&self.thread) = Some(this_thread());
        self.listens.store(true, SeqCst);
        // The ring is read with acquire only, so the store above could pass it without a fence.
        fence(SeqCst);
        if !is_there() {
            park_timeout(limit);
        }
        // Needs no order: a producer that still sees it set unparks a thread that is awake, which is harmless.
        self.listens.store(false, SeqCst);
    }

    /// Wakes the sleeping reader, if any. Orders the caller's earlier writes before the check.
    pub(super) fn wake(&self) {
        // The trigger was stored with release only, so the load below could pass it without a fence.
        fence(SeqCst);
        if self.listens.load(SeqCst)
            && let Some(thread) = &*guard(&self.thread)
        {
            thread.unpark();
        }
    }
}
