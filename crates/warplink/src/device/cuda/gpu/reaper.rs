//! Background thread that returns memory to the driver, and waits for streams to complete.
//!
//! A driver call that frees or unmaps waits until the GPU is idle, while a stream may be waiting for a peer.
//! So destructors never make such calls: plain memory goes to a pool once streams have completed, and
//! everything else is queued for this thread, which calls the driver only while no stream has work of this
//! process ([`gate`](super::gate)). Enqueue calls are delayed, so that streams drain, only if a caller waits
//! for the memory: a failing allocation, a trim, or closing the device.

use super::block_pool::Block;
use super::gate::{Closed, GATE};
use super::live::{PendingUse, all_done};
use crate::device::cuda::driver::context::Context;
use crate::device::cuda::driver::status;
use crate::error::Result;
use crate::sync::{lock, wait_while};
use crate::threads;
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// Polling interval of streams, initial and maximum (exponential backoff).
const POLL_INTERVALS: [Duration; 2] = [Duration::from_micros(50), Duration::from_millis(2)];

/// Maximum delay of enqueue calls while streams drain, and the minimum pause before the next one.
const MAX_HOLD: Duration = Duration::from_millis(20);
const REST: Duration = Duration::from_millis(5);

/// Maximum duration of driver calls within one idle period.
const MAX_MOMENT: Duration = Duration::from_millis(10);

/// How long enqueue calls are delayed after the device was closed.
const CLOSING: Duration = Duration::from_secs(2);

/// Thread that frees the resources of one context. Clones share it.
#[derive(Clone)]
pub(crate) struct Reaper(Arc<ReaperShared>);

struct ReaperShared {
    state: Mutex<Jobs>,
    changed: Condvar,
}

#[derive(Default)]
struct Jobs {
    /// In order of submission.
    jobs: VecDeque<ReaperTask>,
    /// Number of jobs submitted and completed.
    given: u64,
    done: u64,
    uses: Vec<Awaited>,
    /// A caller waits for the jobs until then.
    urgent_until: Option<Instant>,
    stopped: bool,
}

enum ReaperTask {
    /// A call that may block until the GPU is idle.
    Driver(Box<dyn FnOnce(&Context) + Send>),
    /// A callback that runs after the preceding jobs.
    Then(Box<dyn FnOnce() + Send>),
}

struct Awaited {
    uses: Vec<PendingUse>,
    then: Box<dyn FnOnce() + Send>,
}

impl Reaper {
    pub(crate) fn start(context: &Arc<Context>) -> Result<Self> {
        let shared = Arc::new(ReaperShared {
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let (context, own) = (context.clone(), shared.clone());
        let name = format!("warplink-free-{}", context.ordinal);
        let run = move || own.run(&context);
        threads::spawn(name, "start the thread that frees device memory", run)?;
        Ok(Self(shared))
    }

    /// Runs `free` with the context current while no stream has work. Asynchronous.
    pub(crate) fn run(&self, free: impl FnOnce(&Context) + Send + 'static) {
        self.give(ReaperTask::Driver(Box::new(free)));
    }

    /// Returns an unused block to the driver while no stream has work. Asynchronous.
    pub(crate) fn free(&self, block: Block) {
        self.run(move |context| {
            // SAFETY: allocated once and freed once; nothing names it any more.
            let code = unsafe { (context.driver.cuMemFree_v2)(block.address) };
            let failure = format_args!("device memory at {:#x} was not freed", block.address);
            status::warn_unless_gone(code, failure);
        });
    }

    /// Runs `then` after everything submitted to [`run`](Self::run) so far. Asynchronous.
    pub(crate) fn after(&self, then: impl FnOnce() + Send + 'static) {
        self.give(ReaperTask::Then(Box::new(then)));
    }

    /// Runs `then` once streams have completed `uses`. Asynchronous.
    pub(crate) fn when_past(&self, uses: Vec<PendingUse>, then: impl FnOnce() + Send + 'static) {
        let then = Box::new(then);
        lock(&self.0.state).uses.push(Awaited { uses, then });
        self.0.changed.notify_all();
    }

    /// Waits until `until` for all jobs submitted to [`run`](Self::run) so far, and returns whether they are
    /// complete. Enqueue calls are delayed at times meanwhile.
    pub(crate) fn flush(&self, until: Instant) -> bool {
        let mut state = lock(&self.0.state);
        let given = state.given;
        if state.done >= given {
            return true;
        }
        // Keep the latest limit of all waiting callers.
        state.urgent_until = state.urgent_until.max(Some(until));
        self.0.changed.notify_all();
        let limit = until.saturating_duration_since(Instant::now());
        let state = wait_while(&self.0.changed, state, limit, |state| state.done < given);
        state.done >= given
    }

    /// Ends the thread once all jobs are done and no other handle exists.
    pub(crate) fn stop(&self) {
        let mut state = lock(&self.0.state);
        state.stopped = true;
        // Delay enqueue calls for a while, so that the device's resources are freed soon.
        state.urgent_until = state.urgent_until.max(Some(Instant::now() + CLOSING));
        drop(state);
        self.0.changed.notify_all();
    }

    fn give(&self, job: ReaperTask) {
        let mut state = lock(&self.0.state);
        state.jobs.push_back(job);
        state.given += 1;
        drop(state);
        self.0.changed.notify_all();
    }
}

impl ReaperShared {
    fn run(self: &Arc<Self>, context: &Context) {
        let [first_interval, max_interval] = POLL_INTERVALS;
        let mut interval = first_interval;
        loop {
            self.do_what_streams_are_past();
            self.do_without_the_driver();
            if self.give_to_the_driver(context) {
                continue;
            }
            let state = lock(&self.state);
            let urgent = state.is_urgent();
            if state.jobs.is_empty() && state.uses.is_empty() {
                interval = first_interval;
                // Check the jobs whatever ended the wait.
                if !state.stopped {
                    drop(self.changed.wait(state));
                // No other handle can submit jobs any more.
                } else if Arc::strong_count(self) == 1 {
                    return;
                } else {
                    drop(self.changed.wait_timeout(state, max_interval));
                }
            } else {
                // Exponential backoff; with urgency, a fixed pause between attempts to close the gate.
                let pause = if urgent { REST } else { interval };
                drop(self.changed.wait_timeout(state, pause));
                interval = max_interval.min(2 * interval);
            }
        }
    }

    fn do_what_streams_are_past(&self) {
        // Outside the lock: this queries the driver.
        let mut awaited = std::mem::take(&mut lock(&self.state).uses);
        let past: Vec<Awaited> = awaited
            .extract_if(.., |awaited| {
                // An empty list of uses is complete.
                awaited.uses.retain_mut(|pending| !pending.is_past());
                awaited.uses.is_empty()
            })
            .collect();
        lock(&self.state).uses.extend(awaited);
        past.into_iter().for_each(|past| (past.then)());
    }

    /// Runs jobs up to the next one that needs the driver.
    fn do_without_the_driver(&self) {
        let next = || {
            let mut state = lock(&self.state);
            match state.jobs.pop_front()? {
                ReaperTask::Then(then) => Some(then),
                job => {
                    state.jobs.push_front(job);
                    None
                }
            }
        };
        while let Some(then) = next() {
            then();
            self.note_done();
        }
    }

    /// Runs driver jobs if there are any and no stream has work; returns whether it did.
    fn give_to_the_driver(&self, context: &Context) -> bool {
        let (idle, urgent) = {
            let state = lock(&self.state);
            (state.jobs.is_empty(), state.is_urgent())
        };
        if idle {
            return false;
        }
        // Keeps the gate closed during the driver calls below.
        let Some(_closed) = moment_without_work(urgent) else {
            return false;
        };
        let Ok(_entered) = context.enter() else {
            return false;
        };
        let _relaxed = context.relax_capture();
        // Bounded, since enqueue calls are delayed meanwhile.
        let until = Instant::now() + MAX_MOMENT;
        while Instant::now() < until {
            let Some(job) = lock(&self.state).jobs.pop_front() else {
                break;
            };
            match job {
                ReaperTask::Driver(free) => free(context),
                ReaperTask::Then(then) => then(),
            }
            self.note_done();
        }
        true
    }

    fn note_done(&self) {
        lock(&self.state).done += 1;
        self.changed.notify_all();
    }
}

impl Jobs {
    fn is_urgent(&self) -> bool {
        self.urgent_until
            .is_some_and(|until| Instant::now() < until)
    }
}

/// Closes the gate if no stream has work. If `urgent`, also waits briefly for streams to drain.
fn moment_without_work(urgent: bool) -> Option<Closed<'static>> {
    // Without urgency, do not delay anyone: only use periods that are idle anyway.
    if !urgent && !all_done() {
        return None;
    }
    let closed = GATE.close()?;
    let until = Instant::now() + MAX_HOLD;
    // Work enqueued before the gate closed must still complete.
    while !all_done() {
        if !urgent || Instant::now() > until {
            return None;
        }
        std::thread::sleep(POLL_INTERVALS[0]);
    }
    Some(closed)
}

impl fmt::Debug for Reaper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = lock(&self.0.state);
        f.debug_struct("Reaper")
            .field("jobs", &state.jobs.len())
            .field("uses", &state.uses.len())
            .finish_non_exhaustive()
    }
}
