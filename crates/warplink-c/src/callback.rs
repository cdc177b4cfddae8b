//! Calling the caller's functions.
//!
//! They must not throw: what a C++ exception leaves unfinished here cannot be made good. One that does ends the
//! process, in an orderly way and with a message, instead of going on through frames that do not expect it. So
//! the functions have the ABI `C-unwind`, and are called behind a guard.

use std::io::Write as _;

/// Ends the process when it is dropped by unwinding.
struct Guard(&'static str);

impl Drop for Guard {
    fn drop(&mut self) {
        // Standard error may be closed.
        let _ = writeln!(
            std::io::stderr(),
            "warplink: {} threw an exception, or ended its thread; expected it to return",
            self.0
        );
        std::process::abort();
    }
}

/// Calls a function of the caller's, which must return.
pub(crate) fn call<R>(what: &'static str, function: impl FnOnce() -> R) -> R {
    let guard = Guard(what);
    let given = function();
    std::mem::forget(guard);
    given
}
