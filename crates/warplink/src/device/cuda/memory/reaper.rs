//! Freeing on a thread of its own.
//!
//! The driver may hold a call that frees or unmaps until the GPU is idle, and a stream may wait for
//! a peer at that time. So that dropping a slice never blocks without bound, a thread does it, at a
//! moment when no stream has work, and the caller waits for that thread only briefly: in the ordinary
//! case the memory is back when the drop returns.

use super::quiescence::await_quiescence;
use crate::device::cuda::driver::context::Context;
use crate::error::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// How long a drop waits for its memory to be freed.
const MAX_WAIT: Duration = Duration::from_millis(100);

/// Something to free.
struct Job {
    /// What may be done at once, and may take a while.
    first: Box<dyn FnOnce() + Send>,
    free: Box<dyn FnOnce(&Context) + Send>,
    done: Sender<()>,
}

/// The thread that frees what belongs to one context. It ends after its last work when this is
/// dropped.
#[derive(Debug)]
pub(crate) struct Reaper {
    sender: Sender<Job>,
    /// Whether the thread is held up, so that waiting for it is in vain.
    late: Arc<AtomicBool>,
}

impl Reaper {
    pub(crate) fn start(context: &Arc<Context>) -> Result<Self> {
        let (sender, receiver) = channel();
        let late = Arc::new(AtomicBool::new(false));
        let (context, held_up) = (context.clone(), late.clone());
        std::thread::Builder::new()
            .name(format!("warplink-free-{}", context.ordinal))
            .spawn(move || work(&context, &receiver, &held_up))
            .map_err(|error| Error::io("start the thread that frees device memory", &error))?;
        Ok(Self { sender, late })
    }

    /// Has the thread run `free` with the context current, and waits for it briefly.
    pub(crate) fn run(&self, free: impl FnOnce(&Context) + Send + 'static) {
        self.run_after(|| (), free);
    }

    /// As [`run`](Self::run), with `first` before, while streams may still have work.
    pub(crate) fn run_after(
        &self,
        first: impl FnOnce() + Send + 'static,
        free: impl FnOnce(&Context) + Send + 'static,
    ) {
        let (done, wait) = channel();
        let job = Job {
            first: Box::new(first),
            free: Box::new(free),
            done,
        };
        if self.sender.send(job).is_err() {
            tracing::warn!("the thread that frees device memory has ended; memory is leaked");
            return;
        }
        if !self.late.load(Ordering::Acquire) && wait.recv_timeout(MAX_WAIT).is_err() {
            self.late.store(true, Ordering::Release);
            tracing::debug!("device memory is freed later: the GPU is busy");
        }
    }

    /// Has the thread run `then` once everything given to it so far is freed. Does not wait.
    pub(crate) fn after(&self, then: impl FnOnce() + Send + 'static) {
        // Jobs are done in order; nobody listens for the end of this one.
        let (done, _) = channel();
        let job = Job {
            first: Box::new(|| ()),
            free: Box::new(|_| then()),
            done,
        };
        if self.sender.send(job).is_err() {
            tracing::warn!("the thread that frees device memory has ended");
        }
    }

    /// Waits, up to `limit`, until everything given to the thread so far is freed; whether it is.
    pub(crate) fn flush(&self, limit: Duration) -> bool {
        let (done, wait) = channel();
        let job = Job {
            first: Box::new(|| ()),
            free: Box::new(|_| ()),
            done,
        };
        self.sender.send(job).is_ok() && wait.recv_timeout(limit).is_ok()
    }
}

fn work(context: &Context, queue: &Receiver<Job>, late: &AtomicBool) {
    while let Ok(next) = queue.recv() {
        let (mut free, mut done) = (Vec::new(), Vec::new());
        let mut start = |job: Job| {
            (job.first)();
            free.push(job.free);
            done.push(job.done);
        };
        start(next);
        // What comes meanwhile may end what streams wait for, and there may be few quiet moments.
        let gate = await_quiescence(|| queue.try_iter().for_each(&mut start));
        match context.enter() {
            Ok(_entered) => {
                let _relaxed = context.relax_capture();
                free.into_iter().for_each(|free| free(context));
            }
            Err(error) => tracing::warn!(%error, "device memory is leaked"),
        }
        drop(gate);
        late.store(false, Ordering::Release);
        for done in done {
            // Nobody listens any more where the caller's patience has ended.
            let _ = done.send(());
        }
    }
}
