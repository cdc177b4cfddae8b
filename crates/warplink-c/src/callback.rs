//! Calling the caller's functions.
//!
//! They must not throw: what a C++ exception leaves unfinished here cannot be made good. One that does ends the
//! process, in an orderly way and with a message, instead of going on through frames that do not expect it. So
//! the functions have the ABI `C-unwind`, and are called behind a guard. While one runs, its thread makes no calls that
//! could wait for what itself holds up: [`running`] tells which one runs.

use std::cell::Cell;
use std::io::Write as _;

thread_local! {
    static RUNNING: Cell<Option<Callback>> = const { Cell::new(None) };
}

/// A function that the caller gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Callback {
    /// The body of a kernel of the host device.
    Body,
    /// The handler of the log.
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

/// The caller's function that runs on this thread.
pub(crate) fn running() -> Option<Callback> {
    // While a thread ends, nothing runs on it.
    RUNNING.try_with(Cell::get).ok().flatten()
}

/// Ends the process when it is dropped by unwinding.
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

/// Calls a function of the caller's, which must return.
pub(crate) fn call<R>(callback: Callback, function: impl FnOnce() -> R) -> R {
    let guard = Guard(callback);
    // A thread that ends may still log.
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
