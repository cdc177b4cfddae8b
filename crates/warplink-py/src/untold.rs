//! Ending a process that goes on after a failure which nobody told it of.
//!
//! Work after a failed call on a GPU's stream uses invalid data. An application learns that by an
//! exception, of whatever call comes next. One that makes no call, or waits for something that does not come, would go on
//! for as long as it likes.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use warplink::{Error, ErrorKind};

/// When an exception told of a failure last.
static TOLD: Mutex<Option<Instant>> = Mutex::new(None);

/// Notes that an exception tells of `error`, unless that is about a call alone and not about what calls did before.
pub(crate) fn note(error: &Error) {
    if !matches!(
        error.kind(),
        ErrorKind::InvalidArgument
            | ErrorKind::Unsupported
            | ErrorKind::Parse
            | ErrorKind::Verification
    ) {
        *told() = Some(Instant::now());
    }
}

/// Whether an exception told of a failure less than `grace` before `found`, or at any time after it: of several that one
/// loss caused, an application that is told of one knows.
fn is_told(found: Instant, grace: Duration) -> bool {
    told().is_some_and(|at| at + grace >= found)
}

/// Ends the process with the signal `SIGABRT`, unless an exception has told of a failure. `error` was found at `found`,
/// which is `grace` ago.
pub(crate) fn end_process(error: &Error, found: Instant, grace: Duration) {
    if is_told(found, grace) {
        return;
    }
    eprintln!(
        "warplink: {error}; in {} s no call has raised it, and what streams did since is not right, so this process \
         ends (TORCH_NCCL_ASYNC_ERROR_HANDLING=2 keeps it)",
        grace.as_secs_f64()
    );
    std::process::abort();
}

fn told() -> MutexGuard<'static, Option<Instant>> {
    TOLD.lock().unwrap_or_else(PoisonError::into_inner)
}
