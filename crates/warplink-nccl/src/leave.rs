//! Finalization, destruction and abort of communicators.
//!
//! Closing a Warplink job is collective: a rank that closes waits for all others. NCCL programs destroy the
//! communicators of several ranks one after the other on one thread, and in different orders on different ranks. Jobs
//! are therefore closed on background threads, which the exit handler of the process waits for. As in NCCL, ending a null
//! communicator has no effect.

use crate::abi::Handle;
use crate::communicator::{InProgress, Joined, all, find, lock};
use crate::status::{Failure, Outcome};
use crate::table::real as functions;
use crate::{log, report, streams};
use std::ffi::c_int;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, Once, PoisonError};
use std::time::Duration;
use warplink::Result;
use warplink::device::{Priority, before_exit};

/// How long the exit of the process waits for other ranks to end their communicators.
// Ranks of a program usually exit within it; one that hangs must not keep the processes of the others.
const PATIENCE: Duration = Duration::from_secs(5);

/// Number of communicators being closed by background threads.
static CLOSING: Mutex<usize> = Mutex::new(0);
static CLOSED: Condvar = Condvar::new();

/// # Safety
/// No requirements; all functions of the table have the same signature.
pub(crate) unsafe fn finalize(comm: Handle) -> Outcome {
    if comm.is_null() {
        return Ok(());
    }
    let comm = find(comm)?;
    let joined = comm.joined()?;
    comm.check_open("finalized")?;
    // Relaxed, as for the other flags of a communicator: they publish no other memory.
    comm.finalized.store(true, Ordering::Relaxed);
    if comm.blocking {
        return flush(&joined);
    }
    let in_progress = InProgress::begin(&comm);
    in_background(move || {
        let flushed = flush(&joined);
        // Before the end of the operation, after which the caller asks for its failure, and may end the communicator.
        drop(joined);
        if let Err(Failure {
            error: Some(error), ..
        }) = flushed
        {
            comm.fail(error);
        }
        drop(in_progress);
    });
    Err(Failure::IN_PROGRESS)
}

/// Waits for the calls of a communicator that is finalized.
fn flush(joined: &Joined) -> Outcome {
    finish(joined)?;
    match joined.served() {
        Some(_) => Ok(()),
        None => joined.by_real("ncclCommFinalize", |real| {
            // SAFETY: the communicator is the real library's.
            unsafe { functions::CommFinalize(real) }
        }),
    }
}

/// # Safety
/// As [`finalize`].
pub(crate) unsafe fn destroy(comm: Handle) -> Outcome {
    if comm.is_null() {
        return Ok(());
    }
    let comm = find(comm)?;
    // Relaxed: a revocation that races with the destruction of the communicator may be missed.
    let failed = comm.failure().is_some() || comm.revoked.load(Ordering::Relaxed);
    let Some(joined) = comm.end() else {
        return Ok(());
    };
    release(&joined);
    // On the caller's thread: right after this call, the caller may destroy the streams that are given back here.
    in_background(move || {
        joined.end_real(failed);
        // Calls of a failed communicator may never end.
        let finished = if failed { Ok(()) } else { finish(&joined) };
        let communicator = joined.communicator.clone();
        drop(joined);
        // Before closing: it holds mappings of peers' memory, which peers wait for when they free theirs.
        let closed = finished
            .inspect_err(|error| communicator.abort(&format!("its last calls failed: {error}")))
            .and_then(|()| communicator.close());
        if let Err(error) = closed {
            tracing::info!("a communicator was not closed cleanly: {error}");
        }
    });
    Ok(())
}

/// # Safety
/// As [`finalize`].
pub(crate) unsafe fn abort(comm: Handle) -> Outcome {
    if comm.is_null() {
        return Ok(());
    }
    if let Some(joined) = find(comm)?.end() {
        abandon(joined);
    }
    Ok(())
}

/// # Safety
/// As [`finalize`].
pub(crate) unsafe fn revoke(comm: Handle, flags: c_int) -> Outcome {
    if comm.is_null() {
        return Ok(());
    }
    if flags != 0 {
        return Err(Failure::argument(
            format!("flags are {flags}; expected 0"),
            "pass NCCL_REVOKE_DEFAULT",
        ));
    }
    let comm = find(comm)?;
    let joined = comm.joined()?;
    comm.check_open("revoked")?;
    // Relaxed: it publishes nothing. Before the calls are aborted, so that the watch takes their errors for the
    // revocation.
    comm.revoked.store(true, Ordering::Relaxed);
    // First, since the end of the real library's communicator may block.
    joined.communicator.fail("ncclCommRevoke aborted its calls");
    joined.end_real(true);
    Ok(())
}

/// # Safety
/// As [`finalize`].
pub(crate) unsafe fn suspend(comm: Handle, _flags: c_int) -> Outcome {
    let comm = find(comm)?;
    let joined = comm.usable()?;
    joined.communicator.release_idle()?;
    // Relaxed, as for the other flags: a call that races with it may pass.
    comm.suspended.store(true, Ordering::Relaxed);
    Ok(())
}

/// # Safety
/// As [`finalize`].
pub(crate) unsafe fn resume(comm: Handle) -> Outcome {
    let comm = find(comm)?;
    comm.joined()?;
    // Relaxed, as above.
    comm.suspended.store(false, Ordering::Relaxed);
    Ok(())
}

/// Ends a joined communicator with a failure: waits on the device end, and the other ranks are notified.
pub(crate) fn abandon(joined: Arc<Joined>) {
    // Before the end of the real library's communicator, which may block, and the release, which waits for the thread of
    // the watch; that may be waiting without a limit for a call.
    joined.communicator.abort("ncclCommAbort was called");
    joined.end_real(true);
    release(&joined);
    in_background(move || drop(joined));
}

/// Waits for calls in flight. A call that other ranks have not made fails after the communicator's timeout, rather than wait
/// for ever: no rank makes it after they have closed the communicator.
fn finish(joined: &Joined) -> Result<()> {
    let Some(served) = joined.served() else {
        return Ok(());
    };
    let stream = joined.communicator.create_stream(Priority::Normal)?;
    served.collectives.precede(&stream)?;
    joined.communicator.synchronize(&stream)
}

/// Releases resources that the caller may destroy next.
fn release(joined: &Joined) {
    if let Some(served) = joined.served() {
        // Before the streams are given back: the watch may still make its own stream wait for calls on them.
        served.watch.close();
        served.streams.give_back();
        lock(&served.kept).clear();
    }
}

/// Runs `body` on a background thread that the exit of the process waits for.
fn in_background(body: impl FnOnce() + Send + 'static) {
    at_exit();
    // Before the thread starts, so that an exit in between waits for it.
    *lock(&CLOSING) += 1;
    let body = move || {
        body();
        *lock(&CLOSING) -= 1;
        CLOSED.notify_all();
    };
    let thread = std::thread::Builder::new().name("warplink-close".to_owned());
    if let Err(error) = thread.spawn(body) {
        *lock(&CLOSING) -= 1;
        tracing::warn!(%error, "a communicator is not closed cleanly");
    }
}

/// Has the exit of the process wait for background threads that close communicators, and print the report.
pub(crate) fn at_exit() {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(register);
}

/// As [`at_exit`], after the real library was used. Handlers run in reverse order, and the destructors of libraries are
/// such handlers, so the real library's would run first.
pub(crate) fn at_exit_of_real() {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(register);
}

fn register() {
    log::start();
    if let Err(error) = before_exit(ending) {
        tracing::warn!(%error, "the exit of the process will not wait for communicators to close");
    }
}

/// Waits for background threads and prints the report. Returns whether threads are left, which may be inside the real
/// library or the driver.
fn ending() -> bool {
    let closing = CLOSED.wait_timeout_while(lock(&CLOSING), PATIENCE, |left| *left > 0);
    let left = *closing.unwrap_or_else(PoisonError::into_inner).0;
    if !all().is_empty() {
        tracing::debug!("the process exits with communicators that were not destroyed");
        streams::give_back_all();
    }
    report::print();
    left > 0
}
