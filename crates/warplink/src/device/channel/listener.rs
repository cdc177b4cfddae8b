//! How the reader of a FIFO sleeps until a producer of its process has put a trigger in.
//!
//! No trigger is missed: the reader says that it listens before it looks for one last time, and a producer asks whether
//! somebody listens after its trigger is in. One of the two sees the other.

use crate::sync::{
    AtomicBool, OnceLock, Ordering::SeqCst, Thread, fence, park_timeout, this_thread,
};
use std::time::Duration;

/// The thread that waits for producers of this process. Kernels of a GPU cannot wake it.
#[derive(Debug, Default)]
pub(super) struct Listener {
    thread: OnceLock<Thread>,
    listens: AtomicBool,
}

impl Listener {
    /// Blocks the only thread that calls this, for `limit` at most, until it was woken since it listened, unless
    /// `is_there` says that what it waits for has come. Somebody may unpark the thread as well.
    pub(super) fn listen(&self, limit: Duration, is_there: impl FnOnce() -> bool) {
        if self.thread.get().is_none() {
            // The same thread each time.
            let _ = self.thread.set(this_thread());
        }
        self.listens.store(true, SeqCst);
        fence(SeqCst);
        if !is_there() {
            park_timeout(limit);
        }
        self.listens.store(false, SeqCst);
    }

    /// Wakes the thread, if it listens, after what the caller did before.
    pub(super) fn wake(&self) {
        fence(SeqCst);
        if self.listens.load(SeqCst)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }
}
