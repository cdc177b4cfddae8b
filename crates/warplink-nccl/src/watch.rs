//! Detection of failed calls, since programs wait for their streams through CUDA and not through Warplink.

use crate::communicator::{Comm, lock};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use warplink::device::Priority;
use warplink::{Collectives, Communicator, Deadline, Error, Result};

/// Batching delay before the thread waits for new calls, so that a burst of calls wakes it once.
const GATHERING: Duration = Duration::from_millis(5);

/// How long closing waits for the thread to exit.
const ENDING: Duration = Duration::from_secs(1);

/// No timeout: other ranks may arrive arbitrarily late.
const FOR_EVER: Duration = Duration::MAX;

/// A thread that waits for calls. It exits at the first error, which is recorded in the communicator.
#[derive(Debug)]
pub(crate) struct Watch(Arc<WatchShared>);

#[derive(Debug, Default)]
struct WatchShared {
    state: Mutex<WatchState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct WatchState {
    /// Whether there are calls that the thread has not waited for yet.
    new: bool,
    /// Whether the thread is asleep until the next call.
    sleeps: bool,
    closed: bool,
    ended: bool,
}

impl Watch {
    /// Watches the calls of `collectives` for `comm`.
    pub(crate) fn start(
        comm: &Arc<Comm>,
        communicator: &Communicator,
        collectives: &Collectives,
    ) -> Result<Self> {
        let shared = Arc::<WatchShared>::default();
        let stream = communicator.create_stream(Priority::Normal)?;
        let (followed, comm) = (shared.clone(), Arc::downgrade(comm));
        let (communicator, collectives) = (communicator.clone(), collectives.clone());
        let body = move || {
            let wait = || {
                collectives.precede(&stream)?;
                communicator.synchronize_until(&stream, Deadline::after(FOR_EVER))
            };
            follow(&followed, &comm, wait);
            // Dropped before `ended` is set, which means that the thread holds no reference to the communicator any more.
            drop((communicator, collectives, stream));
            followed.state().ended = true;
            followed.changed.notify_all();
        };
        let thread = std::thread::Builder::new().name("warplink-watch".to_owned());
        thread
            .spawn(body)
            .map_err(|error| Error::io("start the thread that watches calls", &error))?;
        Ok(Self(shared))
    }

    /// Notifies the thread of another call.
    pub(crate) fn made(&self) {
        let mut state = self.0.state();
        state.new = true;
        if state.sleeps {
            self.0.changed.notify_all();
        }
    }

    /// Makes the thread exit when the calls are done, and waits briefly for that.
    pub(crate) fn close(&self) {
        let mut state = self.0.state();
        state.closed = true;
        self.0.changed.notify_all();
        let ended = self
            .0
            .changed
            .wait_timeout_while(state, ENDING, |state| !state.ended);
        drop(ended);
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.state().closed = true;
        self.0.changed.notify_all();
    }
}

impl WatchShared {
    fn state(&self) -> MutexGuard<'_, WatchState> {
        lock(&self.state)
    }
}

/// Waits for calls as they are enqueued, until closed or one fails.
fn follow(shared: &WatchShared, comm: &Weak<Comm>, wait: impl Fn() -> Result<()>) {
    loop {
        let mut state = shared.state();
        while !state.new && !state.closed {
            state.sleeps = true;
            state = shared
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
            state.sleeps = false;
        }
        if !state.new {
            return;
        }
        if !state.closed {
            drop(state);
            std::thread::sleep(GATHERING);
            state = shared.state();
        }
        state.new = false;
        drop(state);
        if let Err(error) = wait() {
            let Some(comm) = comm.upgrade() else { return };
            if !comm.revoked.load(std::sync::atomic::Ordering::Relaxed) {
                tracing::warn!("a call failed: {error}");
                comm.fail(error);
            }
            return;
        }
    }
}
