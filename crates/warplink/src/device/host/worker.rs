//! A queue of operations and the thread that executes it in order.

use super::operation::{Context, HostOperation};
use crate::deadline::Deadline;
use crate::device::{Delays, Fault, FaultSet};
use crate::error::{Error, ErrorKind, Result};
use crate::sync::{lock, wait_for};
use crate::threads;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// Owner of the thread. Dropping it ends the thread once the queue is empty.
#[derive(Debug)]
pub(super) struct Worker {
    shared: Arc<WorkerShared>,
}

impl Worker {
    pub(super) fn start(number: u64, fault: Arc<Fault>, delays: Option<Delays>) -> Result<Self> {
        let faults = Arc::<FaultSet>::default();
        let shared = Arc::new(WorkerShared {
            fault: fault.clone(),
            faults: faults.clone(),
            queue: Mutex::default(),
            work: Condvar::new(),
            done: Condvar::new(),
            failure: OnceLock::new(),
        });
        let worker = shared.clone();
        let name = format!("warplink-stream-{number}");
        threads::spawn(name, "start a stream's thread", move || {
            work(&worker, &Context::new(fault, faults, delays, number));
        })?;
        Ok(Self { shared })
    }

    pub(super) fn enqueue(&self, operation: HostOperation) -> Result<()> {
        self.check()?;
        self.push(operation);
        Ok(())
    }

    /// Enqueues an event record, which executes even after the stream has failed.
    pub(super) fn enqueue_mark(&self, operation: HostOperation) -> Result<()> {
        self.shared.fault.check()?;
        self.push(operation);
        Ok(())
    }

    /// Pushes `operation`, even after a failure.
    pub(super) fn push(&self, operation: HostOperation) {
        // Only an idle thread needs a wakeup, which saves system calls.
        let mut queue = lock(&self.shared.queue);
        queue.waiting.push_back(operation);
        queue.enqueued += 1;
        let was_idle = std::mem::take(&mut queue.idle);
        drop(queue);
        if was_idle {
            self.shared.work.notify_one();
        }
    }

    /// Faults that affect the enqueued work, besides the device's.
    pub(super) fn faults(&self) -> &Arc<FaultSet> {
        &self.shared.faults
    }

    /// Fails with a fault or the first error of an operation.
    pub(super) fn check(&self) -> Result<()> {
        self.shared.fault.check()?;
        let failure = self.shared.failure.get();
        // An error of a kernel is more specific than a fault reported by other ranks.
        let failure = failure.map_or(Ok(()), |error| Err(error.clone()));
        match failure {
            Err(error) if error.kind() == ErrorKind::Mismatch => Err(error),
            failure => self.shared.faults.check().and(failure),
        }
    }

    /// Waits until everything enqueued so far is done.
    pub(super) fn wait(&self, deadline: Deadline) -> Result<()> {
        let place = self.shared.faults.place();
        let mut queue = lock(&self.shared.queue);
        let end = queue.enqueued;
        while queue.completed < end {
            self.check()?;
            if deadline.passed() {
                let left = match end - queue.completed {
                    1 => "one operation is left, in progress".to_owned(),
                    left => format!("{left} operations are left, the first in progress"),
                };
                let help = format!(
                    "check that every rank performs the operations that this one waits for, such as posting its end of a transfer: {left}"
                );
                let late = deadline.expired("the end of a stream's work");
                return Err(late.with_operation("synchronize").with_help(help));
            }
            // Short naps, since faults do not notify this condition.
            let nap = deadline.remaining().min(Duration::from_millis(10));
            // The earliest of all waiting threads; those that want more set it again when they are woken.
            queue.awaited = Some(queue.awaited.map_or(end, |other| other.min(end)));
            queue = wait_for(&self.shared.done, queue, nap);
        }
        // Work after an aborted wait must not be reported as done.
        drop(queue);
        self.check()?;
        self.shared.faults.done(place);
        Ok(())
    }

    /// Whether everything enqueued is done.
    pub(super) fn is_idle(&self) -> Result<bool> {
        self.check()?;
        let place = self.shared.faults.place();
        let queue = lock(&self.shared.queue);
        let is_idle = queue.completed == queue.enqueued;
        drop(queue);
        // Again: a fault may have aborted the last of it since.
        self.check()?;
        if is_idle {
            self.shared.faults.done(place);
        }
        Ok(is_idle)
    }
}

impl Drop for Worker {
    /// Does not wait: remaining work is still executed, as on a GPU.
    fn drop(&mut self) {
        lock(&self.shared.queue).closed = true;
        self.shared.work.notify_one();
    }
}

#[derive(Debug)]
struct WorkerShared {
    fault: Arc<Fault>,
    faults: Arc<FaultSet>,
    queue: Mutex<WorkerQueue>,
    work: Condvar,
    done: Condvar,
    // First error of an operation; later operations are skipped.
    failure: OnceLock<Error>,
}

#[derive(Debug, Default)]
struct WorkerQueue {
    waiting: VecDeque<HostOperation>,
    enqueued: u64,
    completed: u64,
    closed: bool,
    /// Whether the thread is waiting for work and has not been woken.
    idle: bool,
    /// Number of completed operations at which to wake a waiting thread, which then checks again.
    awaited: Option<u64>,
}

/// Executes operations until the stream is dropped and the queue is empty.
fn work(shared: &WorkerShared, context: &Context) {
    let mut queue = lock(&shared.queue);
    loop {
        let Some(operation) = queue.waiting.pop_front() else {
            if queue.closed {
                return;
            }
            queue.idle = true;
            queue = shared
                .work
                .wait(queue)
                .unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        drop(queue);
        let mark = matches!(operation, HostOperation::Record { .. });
        // After a failure only event records run, so that streams that wait for them end.
        if (mark || shared.failure.get().is_none())
            && let Err(error) = context.perform(&operation)
        {
            tracing::debug!(?operation, %error, "an operation in a stream failed");
            // `set` fails if an error is set; only the first one matters.
            let _ = shared.failure.set(error);
        }
        // Release the operation's resources before it counts as done.
        drop(operation);
        queue = lock(&shared.queue);
        queue.completed += 1;
        if queue.awaited.is_some_and(|end| queue.completed >= end) {
            queue.awaited = None;
            shared.done.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicI32, Ordering};
    use std::thread;

    /// Waits until the thread of this process sleeps.
    fn wait_until_asleep(thread: i32) {
        let stat = format!("/proc/self/task/{thread}/stat");
        let sleeps = || {
            let stat = std::fs::read_to_string(&stat).unwrap();
            stat.rsplit_once(") ").unwrap().1.starts_with('S')
        };
        while !sleeps() {
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_stream_that_fails_while_it_is_looked_at_is_not_idle() {
        let fault = Arc::<Fault>::default();
        let worker = Worker::start(0, Arc::default(), None).unwrap();
        let noted = worker.faults().add([&fault]);
        let mut queue = lock(&worker.shared.queue);
        queue.enqueued += 1;
        drop(noted);
        let asking = AtomicI32::new(0);
        let seen = thread::scope(|scope| {
            let ask = scope.spawn(|| {
                asking.store(rustix::thread::gettid().as_raw_pid(), Ordering::Release);
                worker.is_idle()
            });
            let asking = loop {
                match asking.load(Ordering::Acquire) {
                    0 => thread::yield_now(),
                    asking => break asking,
                }
            };
            // It has found no fault then, and waits for the queue.
            wait_until_asleep(asking);
            fault.raise(Error::new(ErrorKind::PeerLost, "lost"));
            queue.completed += 1;
            drop(queue);
            ask.join().unwrap()
        });
        assert_eq!(seen.unwrap_err().kind(), ErrorKind::PeerLost);
        assert!(worker.check().is_err(), "the aborted wait counts as done");
    }
}
