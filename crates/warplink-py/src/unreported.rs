//! Termination of a process that continues after an unreported failure.
//!
//! Work after a failed call on a GPU's stream uses invalid data. An application learns of the failure by an exception
//! from its next call. An application that makes no call, or that is blocked in a wait that never ends, would continue
//! indefinitely.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use warplink::{Error, ErrorKind};

/// The time of the last exception that reported a failure.
static LAST_REPORT: Mutex<Option<Instant>> = Mutex::new(None);

/// Records that an exception reports `error`, unless the error concerns only the failing call itself and not earlier
/// work.
pub(crate) fn note(error: &Error) {
    if !matches!(
        error.kind(),
        // These are errors of the caller, found before anything was enqueued: they do not indicate a lost peer.
        ErrorKind::InvalidArgument
            | ErrorKind::Unsupported
            | ErrorKind::Parse
            | ErrorKind::Verification
    ) {
        *last_report() = Some(Instant::now());
    }
}

/// Whether an exception reported a failure less than `grace` before `found`, or at any time after it: one loss may
/// cause several failures, and reporting one of them is enough.
fn is_reported(found: Instant, grace: Duration) -> bool {
    last_report().is_some_and(|at| at + grace >= found)
}

/// Terminates the process with `SIGABRT`, unless an exception has reported a failure. `error` was found at `found`,
/// `grace` ago.
pub(crate) fn end_process(error: &Error, found: Instant, grace: Duration) {
    if is_reported(found, grace) {
        return;
    }
    eprintln!(
        "warplink: {error}; no call has raised this within {} s, and results of later work in its streams are invalid, so \
         this process is terminated (TORCH_NCCL_ASYNC_ERROR_HANDLING=2 keeps it running)",
        grace.as_secs_f64()
    );
    // Not `exit`, whose handlers could wait for the stream that has failed.
    std::process::abort();
}

fn last_report() -> MutexGuard<'static, Option<Instant>> {
    LAST_REPORT.lock().unwrap_or_else(PoisonError::into_inner)
}
