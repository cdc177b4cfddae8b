//! How communicators end.
//!
//! Warplink closes a job together: a rank that closes waits for all others. NCCL's programs end the communicators of
//! several ranks one after the other on one thread, and on different ranks in different orders. So a thread closes, and
//! the end of the process waits for it.

use crate::abi::Handle;
use crate::communicator::{Joined, all, find, lock};
use crate::status::{Failure, Outcome};
use crate::{log, report, streams};
use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, Once, PoisonError};
use std::time::Duration;

/// How long the end of the process waits for other ranks to end their communicators too.
const PATIENCE: Duration = Duration::from_secs(5);

/// How many communicators threads are closing.
static CLOSING: Mutex<usize> = Mutex::new(0);
static CLOSED: Condvar = Condvar::new();

/// # Safety
/// Always sound; functions of the table are declared alike.
pub(crate) unsafe fn finalize(comm: Handle) -> Outcome {
    let comm = find(comm)?;
    comm.usable()?;
    comm.finalized.store(true, Ordering::Relaxed);
    Ok(())
}

/// # Safety
/// As [`finalize`].
pub(crate) unsafe fn destroy(comm: Handle) -> Outcome {
    let comm = find(comm)?;
    let failed = comm.failure().is_some() || comm.revoked.load(Ordering::Relaxed);
    let Some(joined) = comm.end() else {
        return Ok(());
    };
    release(&joined);
    in_background(move || {
        joined.end_real(failed);
        let communicator = joined.communicator.clone();
        drop(joined);
        if let Err(error) = communicator.close() {
            tracing::info!("a communicator was not closed in order: {error}");
        }
    });
    Ok(())
}

/// # Safety
/// As [`finalize`].
pub(crate) unsafe fn abort(comm: Handle) -> Outcome {
    if let Some(joined) = find(comm)?.end() {
        abandon(joined);
    }
    Ok(())
}

/// # Safety
/// As [`finalize`].
pub(crate) unsafe fn revoke(comm: Handle, flags: c_int) -> Outcome {
    if flags != 0 {
        return Err(Failure::argument(
            format!("flags are {flags}; expected 0"),
            "pass NCCL_REVOKE_DEFAULT",
        ));
    }
    let comm = find(comm)?;
    let joined = comm.joined()?;
    comm.revoked.store(true, Ordering::Relaxed);
    joined.end_real(true);
    joined.communicator.fail("ncclCommRevoke ended its calls");
    Ok(())
}

/// # Safety
/// As [`finalize`].
pub(crate) unsafe fn suspend(comm: Handle, _flags: c_int) -> Outcome {
    let comm = find(comm)?;
    let joined = comm.usable()?;
    joined.communicator.release_idle()?;
    comm.suspended.store(true, Ordering::Relaxed);
    Ok(())
}

/// # Safety
/// As [`finalize`].
pub(crate) unsafe fn resume(comm: Handle) -> Outcome {
    let comm = find(comm)?;
    comm.joined()?;
    comm.suspended.store(false, Ordering::Relaxed);
    Ok(())
}

/// Ends what was joined as a failure: what waits on the device ends, and the other ranks hear of it.
pub(crate) fn abandon(joined: Arc<Joined>) {
    joined.end_real(true);
    joined.communicator.abort("ncclCommAbort was called");
    release(&joined);
    in_background(move || drop(joined));
}

/// Gives back what the caller may destroy next.
fn release(joined: &Joined) {
    if let Some(served) = joined.served() {
        served.watch.close();
        served.streams.give_back();
        lock(&served.kept).clear();
    }
}

/// Calls `body` on a thread for which the end of the process waits.
fn in_background(body: impl FnOnce() + Send + 'static) {
    at_exit();
    *lock(&CLOSING) += 1;
    let body = move || {
        body();
        *lock(&CLOSING) -= 1;
        CLOSED.notify_all();
    };
    let thread = std::thread::Builder::new().name("warplink-close".to_owned());
    if let Err(error) = thread.spawn(body) {
        *lock(&CLOSING) -= 1;
        tracing::warn!(%error, "a communicator is not closed in order");
    }
}

/// Has the end of the process wait for what threads close, and print the report. In a process that was forked of this one
/// neither is there.
pub(crate) fn at_exit() {
    static REGISTERED: Once = Once::new();
    static PROCESS: AtomicU32 = AtomicU32::new(0);
    unsafe extern "C" {
        fn atexit(body: extern "C" fn()) -> c_int;
    }
    extern "C" fn ending() {
        if std::process::id() != PROCESS.load(Ordering::Relaxed) {
            return;
        }
        let closing = CLOSED.wait_timeout_while(lock(&CLOSING), PATIENCE, |left| *left > 0);
        drop(closing.unwrap_or_else(PoisonError::into_inner));
        if !all().is_empty() {
            tracing::debug!("the process ends with communicators that were not destroyed");
            streams::give_back_all();
        }
        report::print();
    }
    REGISTERED.call_once(|| {
        PROCESS.store(std::process::id(), Ordering::Relaxed);
        log::start();
        // SAFETY: the function is C's, and what it calls has no panic that could leave it.
        if unsafe { atexit(ending) } != 0 {
            tracing::warn!("the end of the process will not wait for communicators to close");
        }
    });
}
