//! Process exit while threads are inside a vendor's library.
//!
//! `exit` runs the destructors of shared libraries while other threads go on. A thread that is inside such a
//! library, or returns into it then, uses what has been destroyed, and crashes the process.

use crate::error::{Error, ErrorKind, Result};
use std::ffi::{c_int, c_void};

unsafe extern "C" {
    /// Buffered output of the C library.
    static stdout: *mut c_void;
    fn on_exit(handler: unsafe extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
    fn fflush(stream: *mut c_void) -> c_int;
    fn _exit(status: c_int) -> !;
}

/// A registered handler.
struct ExitHandler {
    /// Forked child processes inherit handlers, but not the threads that these are about.
    process: u32,
    run: fn() -> bool,
}

/// Has `run` called when the process exits by `exit` or by returning from `main`, but not in forked child
/// processes. If it returns `true`, threads are still inside libraries: the process then ends with its exit code
/// at once, without the handlers that were registered earlier and without the destructors of libraries. Libraries
/// that `run` protects must be loaded before this call, and that with `run` must never be unloaded.
///
/// # Errors
/// [`ErrorKind::OutOfMemory`] if the C library cannot register another handler.
pub fn before_exit(run: fn() -> bool) -> Result<()> {
    let process = std::process::id();
    // Never freed: the handler is called at the end of the process.
    let handler: *mut ExitHandler = Box::into_raw(Box::new(ExitHandler { process, run }));
    // SAFETY: declared as in C; `called` expects what `handler` points to.
    if unsafe { on_exit(called, handler.cast()) } == 0 {
        return Ok(());
    }
    // SAFETY: created above, and the C library did not keep it.
    drop(unsafe { Box::from_raw(handler) });
    Err(
        Error::new(ErrorKind::OutOfMemory, "an exit handler was not registered")
            .with_operation("register an exit handler"),
    )
}

/// Called by the C library with the exit code.
unsafe extern "C" fn called(status: c_int, handler: *mut c_void) {
    // SAFETY: `before_exit` passed a handler that is never freed.
    let handler = unsafe { &*handler.cast::<ExitHandler>() };
    if std::process::id() != handler.process || !(handler.run)() {
        return;
    }
    // Only this stream: flushing all of them would wait for threads that read.
    // SAFETY: declared as in C; the C library initializes its stream before `main`.
    unsafe {
        fflush(stdout);
        _exit(status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    /// Set in child processes: whether their handler reports threads.
    const CASE: &str = "WARPLINK_TEST_EXIT";

    /// Exit code of a process whose destructors ran.
    const DESTROYED: c_int = 77;

    /// Stands for the destructors of libraries, which are registered when these are loaded.
    fn destructor() -> bool {
        // SAFETY: declared as in C.
        unsafe { _exit(DESTROYED) }
    }

    #[test]
    fn libraries_are_not_destroyed_while_threads_use_them() {
        if let Ok(case) = std::env::var(CASE) {
            before_exit(destructor).unwrap();
            match &*case {
                "threads" => before_exit(|| true).unwrap(),
                _ => before_exit(|| false).unwrap(),
            }
            std::process::exit(3);
        }
        for (case, code) in [("threads", 3), ("none", DESTROYED)] {
            let ended = Command::new(std::env::current_exe().unwrap())
                .args([
                    "device::exit::tests::libraries_are_not_destroyed_while_threads_use_them",
                    "--exact",
                    "--nocapture",
                ])
                .env(CASE, case)
                .stdin(Stdio::null())
                .output()
                .unwrap();
            assert_eq!(ended.status.code(), Some(code), "{case}: {ended:?}");
        }
    }
}
