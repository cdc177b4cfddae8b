//! Calls of user callbacks.
//!
//! Callbacks must not throw: library state that a C++ exception would leave half-updated cannot be repaired. A callback
//! that throws terminates the process with a message instead of unwinding through Rust frames. Callbacks therefore have
//! the ABI `C-unwind` and run behind a guard. While a callback runs, its thread may not make calls that could wait for
//! the callback itself: [`running`] returns the current one.

use std::cell::Cell;
use std::io::Write as _;

thread_local! {
    static RUNNING: Cell<Option<Callback>> = const { Cell::new(None) };
}

/// Kinds of user callbacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Callback {
    /// The body of a host-device kernel.
    Body,
    /// The log handler.
    LogHandler,
}

impl Callback {
    /// Its name in messages.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Body => "the body of a host kernel",
            Self::LogHandler => "the log handler",
        }
    }
}

/// The user callback that runs on this thread, if any.
pub(crate) fn running() -> Option<Callback> {
    // Thread-local storage is inaccessible while the thread is destroyed; no callback runs then.
    RUNNING.try_with(Cell::get).ok().flatten()
}

/// Aborts the process when dropped by unwinding.
struct Guard(Callback);

impl Drop for Guard {
    fn drop(&mut self) {
        // Standard error may be closed.
        let _ = writeln!(
            std::io::stderr(),
            "warplink: {} threw an exception, or ended its thread; expected it to return",
            self.0.name()
        );
        std::process::abort();
    }
}

/// Calls a user callback, which must return.
pub(crate) fn call<R>(callback: Callback, function: impl FnOnce() -> R) -> R {
    // Dropped only by unwinding, by a C++ exception or by `pthread_exit`, which must not go on through the
    // library's frames: locks would be released with their data half updated.
    let guard = Guard(callback);
    // Not accessible during thread destruction, when a thread may still log.
    let outer = RUNNING
        .try_with(|running| running.replace(Some(callback)))
        .ok();
    let given = function();
    if let Some(outer) = outer {
        RUNNING.set(outer);
    }
    std::mem::forget(guard);
    given
}
