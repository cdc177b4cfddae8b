//! Detection of failed calls, since programs wait for their streams through CUDA and not through Warplink.

use crate::communicator::{Comm, lock};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use warplink::device::Priority;
use warplink::{Collectives, Communicator, Deadline, Error, Result};

/// Interval of the thread's queries. It must not busy-wait: its queries take the driver's locks, which delays the
/// caller's next calls.
const INTERVAL: Duration = Duration::from_millis(5);

/// Maximum time between checks while calls continue. A check reads device memory, so it is best done while there are
/// none.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

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
        // Weak: the watch belongs to the communicator, and must not keep it alive.
        let (followed, comm) = (shared.clone(), Arc::downgrade(comm));
        let (communicator, collectives) = (communicator.clone(), collectives.clone());
        let body = move || {
            let enqueued = || collectives.precede(&stream);
            // An error is explained by the check.
            let done = || stream.is_idle().unwrap_or(true);
            let check = || communicator.synchronize_until(&stream, Deadline::after(FOR_EVER));
            follow(&followed, &comm, (enqueued, done, check));
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
        // A thread that has not exited by now is inside a wait, and drops its references after that.
        drop(ended);
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // Without waiting for the thread: this runs on it if its reference to the communicator was the last.
        self.0.state().closed = true;
        self.0.changed.notify_all();
    }
}

impl WatchShared {
    fn state(&self) -> MutexGuard<'_, WatchState> {
        lock(&self.state)
    }

    /// Waits for one interval, or until closed.
    fn pause<'s>(&self, state: MutexGuard<'s, WatchState>) -> MutexGuard<'s, WatchState> {
        let paused = self
            .changed
            .wait_timeout_while(state, INTERVAL, |state| !state.closed);
        paused.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Waits for calls as they are enqueued, until closed or one fails. `enqueued` makes a stream wait for all calls so far,
/// `done` returns whether it has, and `check` whether they succeeded.
fn follow(
    shared: &WatchShared,
    comm: &Weak<Comm>,
    (enqueued, done, check): (
        impl Fn() -> Result<()>,
        impl Fn() -> bool,
        impl Fn() -> Result<()>,
    ),
) {
    let mut checked = Instant::now();
    loop {
        let mut state = shared.state();
        while !state.new && !state.closed {
            state.sleeps = true;
            state = shared
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
            state.sleeps = false;
            checked = Instant::now();
        }
        if !state.new {
            return;
        }
        // A burst of calls wakes the thread once.
        state = shared.pause(state);
        state.new = false;
        drop(state);
        let waited = enqueued().and_then(|()| {
            loop {
                // Read before the pause: calls that were enqueued during it are not covered by `done`, but leave
                // `new` set.
                let is_done = done();
                let state = shared.pause(shared.state());
                if state.closed {
                    break;
                }
                if is_done {
                    if state.new && checked.elapsed() < CHECK_INTERVAL {
                        return Ok(());
                    }
                    break;
                }
            }
            checked = Instant::now();
            check()
        });
        if let Err(error) = waited {
            let Some(comm) = comm.upgrade() else { return };
            // Relaxed: the flag publishes no other memory, and was set before the calls were aborted.
            if !comm.revoked.load(std::sync::atomic::Ordering::Relaxed) {
                tracing::warn!("a call failed: {error}");
                comm.fail(error);
            }
            return;
        }
    }
}
