//! Detection of failed calls on streams that no host thread waits for.

use crate::errors::{detached, raise};
use crate::owner::OfProcess;
use crate::place::Place;
use crate::region::seconds;
use crate::unreported;
use pyo3::prelude::*;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use warplink::device::{Priority, Stream};
use warplink::{Communicator, Deadline, Error, ErrorKind, Result};

/// Batching delay before the thread waits for new calls, so that a burst of calls wakes it once.
const GATHERING: Duration = Duration::from_millis(5);

/// A thread that waits for calls, since the application may never wait through Warplink.
///
/// Created by `Communicator.watch`. It queries only its own stream and events, which does not interfere with a
/// concurrent graph capture. It exits at the first error.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct Watch {
    calls: OfProcess<Arc<Calls>>,
    place: Place,
}

/// Makes a stream wait for all calls so far.
type Precede = Box<dyn Fn(&Stream) -> Result<()> + Send>;

/// State shared with the watching thread.
#[derive(Debug)]
pub(crate) struct Calls {
    state: Mutex<State>,
    changed: Condvar,
    /// Delay after which an unreported failure terminates the process; `None` never does.
    grace: Option<Duration>,
}

/// The time limit of calls, and how long the application may continue after a failed one.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) timeout: Duration,
    pub(crate) grace: Option<Duration>,
}

#[derive(Debug)]
struct State {
    /// Whether there are calls that the thread has not waited for yet.
    new: bool,
    /// Whether the thread is asleep until the next call.
    sleeps: bool,
    /// Whether the thread is to exit, and whether it has.
    closed: bool,
    ended: bool,
    timeout: Duration,
    failure: Option<Error>,
}

impl Calls {
    /// Notifies the thread of another call.
    pub(crate) fn made(&self) {
        let mut state = self.state();
        // Set under the lock that the thread checks it with before it sleeps, so that no call is missed.
        state.new = true;
        // A system call per enqueue is avoided while the thread is awake anyway.
        if state.sleeps {
            self.changed.notify_all();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed
            .wait(state)
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Terminates the process once the grace period after `failure` is over, unless the watch was closed or the failure
    /// was reported by then.
    fn end_process(&self, failure: &Error) {
        let Some(grace) = self.grace else { return };
        let found = Instant::now();
        let is_open = |state: &mut State| !state.closed;
        let waited = self
            .changed
            .wait_timeout_while(self.state(), grace, is_open);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let closed = state.closed;
        drop(state);
        // After an orderly close nobody is left who would use the results.
        if !closed {
            unreported::end_process(failure, found, grace);
        }
    }

    /// Waits for calls as they are enqueued, until closed or one fails, and returns the failure.
    fn follow(
        &self,
        communicator: &Communicator,
        precede: &Precede,
        stream: &Stream,
    ) -> Option<Error> {
        loop {
            let mut state = self.state();
            while !state.new && !state.closed {
                state.sleeps = true;
                state = self.wait(state);
                state.sleeps = false;
            }
            // Only if closed: calls that were made before the close are still waited for.
            if !state.new {
                return None;
            }
            if !state.closed {
                drop(state);
                std::thread::sleep(GATHERING);
                state = self.state();
            }
            // Cleared before the wait starts: a call made meanwhile sets it again and gets its own wait.
            state.new = false;
            let timeout = state.timeout;
            drop(state);
            // The thread waits on its own stream, ordered after the last call's; the streams of calls may be gone by
            // then.
            let waited = precede(stream)
                .and_then(|()| communicator.synchronize_until(stream, Deadline::after(timeout)));
            if let Err(error) = waited {
                let timed_out = error.kind() == ErrorKind::Timeout;
                let reason = format!(
                    "a call took longer than {} s: {error}",
                    timeout.as_secs_f64()
                );
                // Set before the abort, whose consequences on other threads would otherwise be reported first.
                self.state().failure.get_or_insert(error.clone());
                if timed_out {
                    // Kernels would wait indefinitely, and the host for them.
                    communicator.abort(&reason);
                }
                return Some(error);
            }
        }
    }
}

/// Starts watching calls, which must be reported to the second part of the result.
fn start(
    communicator: Communicator,
    precede: Precede,
    place: &Place,
    limits: Limits,
) -> Result<(Watch, Arc<Calls>)> {
    let state = State {
        new: false,
        sleeps: false,
        closed: false,
        ended: false,
        timeout: limits.timeout,
        failure: None,
    };
    let calls = Arc::new(Calls {
        state: Mutex::new(state),
        changed: Condvar::new(),
        grace: limits.grace,
    });
    let stream = communicator.create_stream(Priority::Normal)?;
    let watch = Watch {
        calls: OfProcess::new(calls.clone()),
        place: place.clone(),
    };
    let followed = calls.clone();
    let body = move || {
        let failure = followed.follow(&communicator, &precede, &stream);
        // Dropped before `ended` is set, which means that the thread holds no reference to the job any more.
        drop((communicator, precede, stream));
        followed.state().ended = true;
        followed.changed.notify_all();
        if let Some(failure) = failure {
            followed.end_process(&failure);
        }
    };
    let thread = std::thread::Builder::new().name("warplink-watch".to_owned());
    thread.spawn(body).map_err(|error| {
        Error::new(
            ErrorKind::Io,
            format!("cannot start the thread that watches calls: {error}"),
        )
    })?;
    Ok((watch, calls))
}

impl Watch {
    /// Whether `check` raises.
    pub(crate) fn has_failed(&self) -> bool {
        let failed = |calls: &Arc<Calls>| calls.state().failure.is_some();
        // In a forked process everything counts as failed, so that the fast path is left.
        self.calls.get().map_or(true, failed) || self.place.device.fault().error().is_some()
    }
}

#[pymethods]
impl Watch {
    /// The time limit of a call in seconds, including earlier work of its stream.
    #[getter]
    fn timeout(&self) -> PyResult<f64> {
        Ok(self.calls.get()?.state().timeout.as_secs_f64())
    }

    #[setter]
    fn set_timeout(&self, timeout: f64) -> PyResult<()> {
        self.calls.get()?.state().timeout = seconds(timeout)?;
        Ok(())
    }

    /// Whether calls are watched, or will be once the thread has started. Does not block.
    #[getter]
    fn waits(&self) -> PyResult<bool> {
        let state = self.calls.get()?.state();
        Ok(!state.ended && (state.new || !state.sleeps))
    }

    /// Raises the first failure of the calls or of the communicator, if there is one.
    pub(crate) fn check(&self) -> PyResult<()> {
        // Creating an exception may switch to another thread of the interpreter, which must not find the state locked.
        let failure = self.calls.get()?.state().failure.clone();
        if let Some(failure) = failure {
            return Err(raise(failure));
        }
        self.place.device.fault().check().map_err(raise)
    }

    /// Makes the thread exit when the calls are done, and waits at most `limit` seconds for that.
    #[pyo3(signature = (limit=1.0))]
    fn close(&self, py: Python<'_>, limit: f64) -> PyResult<()> {
        let calls = self.calls.get()?.clone();
        let end = Deadline::after(seconds(limit)?);
        py.detach(|| {
            let mut state = calls.state();
            state.closed = true;
            calls.changed.notify_all();
            // Waits so that the thread does not enqueue on, or synchronize with, a job that is being torn down.
            while !state.ended {
                let left = end.remaining();
                if left.is_zero() {
                    return;
                }
                let waited = calls.changed.wait_timeout(state, left);
                (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
            }
        });
        Ok(())
    }
}

/// Notifies the watch, if there is one, of calls made through an object.
#[derive(Debug, Default)]
pub(crate) struct Watched(Mutex<Option<Arc<Calls>>>);

impl Watched {
    /// Starts a thread that waits for subsequent calls, replacing any earlier one.
    pub(crate) fn watch(
        &self,
        py: Python<'_>,
        communicator: Communicator,
        precede: impl Fn(&Stream) -> Result<()> + Send + 'static,
        (place, limits): (&Place, Limits),
    ) -> PyResult<Watch> {
        let (watch, calls) =
            detached(py, || start(communicator, Box::new(precede), place, limits))?;
        // The replaced watch's thread ends with its `Watch`.
        *self.lock() = Some(calls);
        Ok(watch)
    }

    /// Notifies the watch of a call.
    pub(crate) fn made(&self) {
        if let Some(calls) = &*self.lock() {
            calls.made();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<Calls>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // A forked process has no thread to stop.
        if let Ok(calls) = self.calls.get() {
            calls.state().closed = true;
            calls.changed.notify_all();
        }
    }
}
