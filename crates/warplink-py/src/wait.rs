//! Waits that can be interrupted by Ctrl-C.
//!
//! Python runs signal handlers only on its main thread, between instructions. A wait in the library would delay them,
//! so it runs on a separate thread, which is abandoned if a handler raises.

use crate::errors::{detached, raise};
use pyo3::prelude::*;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;
use warplink::{Error, ErrorKind, Result};

/// Interval at which the main thread lets Python handle signals.
pub(crate) const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

/// Result of `wait`, called without the interpreter's lock. Raises exceptions of signal handlers that run meanwhile.
pub(crate) fn interruptible<T: Send + 'static>(
    py: Python<'_>,
    wait: impl FnOnce() -> Result<T> + Send + 'static,
) -> PyResult<T> {
    if !on_main_thread(py)? {
        // Handlers run on the main thread only, so that a thread to wait would be of no use here.
        return detached(py, wait);
    }
    let mut ended = begin(wait)?;
    loop {
        let waited = &mut ended;
        match py.detach(move || waited.recv_timeout(SIGNAL_INTERVAL)) {
            Ok(result) => return result.map_err(raise),
            // Returns early if a handler raises; the wait ends by its own deadline, on its thread.
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => return Err(raise(panicked())),
        }
    }
}

/// As [`interruptible`], for at most `limit`; `None` if it takes longer, in which case the wait is abandoned.
pub(crate) fn within<T: Send + 'static>(
    py: Python<'_>,
    limit: Duration,
    wait: impl FnOnce() -> Result<T> + Send + 'static,
) -> PyResult<Option<T>> {
    let ended = begin(wait)?;
    match py.detach(move || ended.recv_timeout(limit)) {
        Ok(result) => result.map(Some).map_err(raise),
        Err(RecvTimeoutError::Timeout) => Ok(None),
        Err(RecvTimeoutError::Disconnected) => Err(raise(panicked())),
    }
}

/// Starts a thread that waits. It is a thread of the library, since Python starts none while it is finalizing.
fn begin<T: Send + 'static>(
    wait: impl FnOnce() -> Result<T> + Send + 'static,
) -> PyResult<Receiver<Result<T>>> {
    let (sender, ended) = channel();
    let body = move || {
        // The receiver is gone if a signal interrupted the wait.
        let _ = sender.send(wait());
    };
    let thread = std::thread::Builder::new().name("warplink-py-wait".to_owned());
    thread.spawn(body).map_err(|error| {
        let text = format!("starting a thread that waits failed: {error}");
        raise(Error::new(ErrorKind::Io, text))
    })?;
    Ok(ended)
}

fn panicked() -> Error {
    Error::internal("a thread that waits panicked")
}

/// Whether Python handles signals on this thread.
fn on_main_thread(py: Python<'_>) -> PyResult<bool> {
    // Python's main thread, which need not be the first thread of a process that embeds the interpreter.
    let threading = py.import("threading")?;
    let main = threading.call_method0("main_thread")?;
    let own = threading.call_method0("get_ident")?;
    main.getattr("ident")?.eq(own)
}
