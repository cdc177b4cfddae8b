//! Finding out what becomes of calls, since programs wait for their streams by CUDA and not by Warplink.

use crate::communicator::{Comm, lock};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use warplink::device::Priority;
use warplink::{Collectives, Communicator, Deadline, Error, Result};

/// How long calls gather before the thread waits for them, so that not every one of many wakes it.
const GATHERING: Duration = Duration::from_millis(5);

/// How long the end of the thread is waited for.
const ENDING: Duration = Duration::from_secs(1);

/// Calls may take as long as they like: other ranks may come late.
const FOR_EVER: Duration = Duration::MAX;

/// A thread that waits for calls. It ends with the first error, which the communicator keeps.
#[derive(Debug)]
pub(crate) struct Watch(Arc<WatchShared>);

#[derive(Debug, Default)]
struct WatchShared {
    state: Mutex<WatchState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct WatchState {
    /// Calls that the thread has not waited for yet.
    new: bool,
    /// Whether the thread waits for new ones.
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
            // Nothing of the communicator is held by who finds this set.
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

    /// Another call was made.
    pub(crate) fn made(&self) {
        let mut state = self.0.state();
        state.new = true;
        if state.sleeps {
            self.0.changed.notify_all();
        }
    }

    /// Ends the thread when the calls are done, and waits for that for a moment.
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

/// Waits for calls as they are made, until closed or one fails.
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
