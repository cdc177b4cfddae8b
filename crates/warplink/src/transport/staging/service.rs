//! Thread that serves the staged ends of a rank.

use super::end::StagedEnd;
use crate::error::Result;
use crate::sync::lock;
use crate::threads;
use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Keep polling without sleeping for this long after progress: replies usually follow soon.
const BUSY: Duration = Duration::from_millis(2);

/// Sleep between polls, shortly after progress and after `LONG` without it. Arrivals do not wake the thread.
const NAPS: [Duration; 2] = [Duration::from_micros(50), Duration::from_millis(1)];
const LONG: Duration = Duration::from_millis(200);

/// Serves ends while there are any.
#[derive(Default)]
pub(crate) struct Service {
    state: Mutex<ServedEnds>,
}

#[derive(Default)]
struct ServedEnds {
    ends: Vec<Weak<StagedEnd>>,
    thread: Option<JoinHandle<()>>,
    is_stopped: bool,
}

impl Service {
    /// Serves another end, until it is finished or dropped.
    pub(super) fn add(self: &Arc<Self>, end: &Arc<StagedEnd>) -> Result<()> {
        let mut state = lock(&self.state);
        state.ends.push(Arc::downgrade(end));
        let runs = state.thread.as_ref();
        if runs.is_some_and(|thread| !thread.is_finished()) {
            // The running thread picks up the new end in its next iteration.
            return Ok(());
        }
        let own = self.clone();
        let run = move || own.run();
        let thread = threads::spawn("warplink-staging", "start the thread of staging", run)?;
        state.thread = Some(thread);
        Ok(())
    }

    /// Wakes the thread.
    pub(crate) fn wake(&self) {
        if let Some(thread) = &lock(&self.state).thread {
            thread.thread().unpark();
        }
    }

    /// Stops the thread. Blocks until it has ended, which is soon: it never waits for a peer.
    pub(crate) fn stop(&self) {
        let mut state = lock(&self.state);
        state.is_stopped = true;
        let thread = state.thread.take();
        // The thread takes the lock itself, so release it before joining.
        drop(state);
        if let Some(thread) = thread {
            thread.thread().unpark();
            // A panic was already reported.
            let _ = thread.join();
        }
    }

    fn run(&self) {
        let mut last = Instant::now();
        while let Some(ends) = self.ends() {
            // `any` would skip the remaining ends.
            let mut worked = false;
            for end in &ends {
                worked |= end.advance();
            }
            drop(ends);
            // Before sleeping, so that the thread does not keep an end alive whose link was dropped.
            let idle = last.elapsed();
            if worked {
                last = Instant::now();
            } else if idle < BUSY {
                std::thread::yield_now();
            } else {
                // Nothing wakes the thread for arrivals, so sleep longer the longer nothing happened.
                std::thread::park_timeout(NAPS[usize::from(idle > LONG)]);
            }
        }
    }

    /// The ends; none if the thread should end.
    fn ends(&self) -> Option<Vec<Arc<StagedEnd>>> {
        let mut state = lock(&self.state);
        // Only weak references are kept, so that dropped ends disappear.
        let mut ends: Vec<_> = state.ends.iter().filter_map(Weak::upgrade).collect();
        ends.retain(|end| !end.is_over());
        state.ends = ends.iter().map(Arc::downgrade).collect();
        if state.is_stopped || ends.is_empty() {
            // An end added after this starts a new thread.
            state.thread = None;
            return None;
        }
        Some(ends)
    }
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ends = lock(&self.state).ends.len();
        f.debug_struct("Service").field("ends", &ends).finish()
    }
}
