//! Which ranks were lost and which have left.

use super::group_name::GroupName;
use super::pulse::help_after_loss;
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::sync::lock;
use crate::threads;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

type Callback = dyn Fn(Rank, &Error) + Send + Sync;
type GroupCallback = dyn Fn(GroupName, &Error) + Send + Sync;
type HealthTask = Box<dyn FnOnce() + Send>;
type EndCallback = dyn Fn(&Error) + Send + Sync;

/// The state of the other ranks: lost, left in order, or present.
///
/// A rank is lost when its connection to the store ends although it has not left (its process died, its
/// machine vanished, or it broke the protocol), and when it sent no heartbeat for
/// [`JoinConfig::heartbeat_limit`](super::JoinConfig::heartbeat_limit). The same applies to the rank that
/// serves the store. Cheap to clone; clones share their state. No method blocks.
#[derive(Clone)]
pub struct Health(Arc<Mutex<HealthState>>);

#[derive(Default)]
struct HealthState {
    lost: BTreeMap<Rank, Loss>,
    left: BTreeSet<Rank>,
    /// Why this rank is no longer a member, if it did not leave.
    ended: Option<Error>,
    /// The groups in which a rank can do no more work.
    failed_groups: HashMap<GroupName, Error>,
    callbacks: Vec<Arc<Callback>>,
    group_callbacks: Vec<Arc<GroupCallback>>,
    end_callbacks: Vec<Arc<EndCallback>>,
    notifier: Option<Notifier>,
    closed: bool,
}

struct Loss {
    reason: String,
    /// How many were lost before it.
    before: usize,
    error: Error,
}

struct Notifier {
    jobs: Sender<HealthTask>,
    thread: JoinHandle<()>,
}

impl Health {
    /// Starts the thread that calls callbacks: at the time of a loss the system may have none left.
    pub(crate) fn start() -> Result<Self> {
        let (jobs, queue) = mpsc::channel::<HealthTask>();
        let run = move || queue.iter().for_each(|job| job());
        let operation = "start the thread that reports lost ranks";
        let thread = threads::spawn("warplink-health", operation, run)?;
        let state = HealthState {
            notifier: Some(Notifier { jobs, thread }),
            ..HealthState::default()
        };
        Ok(Self(Arc::new(Mutex::new(state))))
    }

    /// The lost ranks, in ascending order.
    pub fn lost(&self) -> Vec<Rank> {
        lock(&self.0).lost.keys().copied().collect()
    }

    /// The ranks that left in order, in ascending order.
    pub fn left(&self) -> Vec<Rank> {
        lock(&self.0).left.iter().copied().collect()
    }

    /// Whether all of `dependencies` can still be counted on.
    ///
    /// # Errors
    /// [`ErrorKind::PeerLost`], naming the one of them that was lost first, since others often end because of it;
    /// otherwise [`ErrorKind::PeerLeft`], naming the first of them that has left.
    pub fn check(&self, dependencies: &[Rank]) -> Result<()> {
        let inner = lock(&self.0);
        let lost = dependencies.iter().filter_map(|rank| inner.lost.get(rank));
        if let Some(first) = lost.min_by_key(|loss| loss.before) {
            return Err(first.error.clone());
        }
        match dependencies.iter().find(|&rank| inner.left.contains(rank)) {
            Some(&rank) => {
                let message = format!("rank {rank} has left");
                Err(Error::new(ErrorKind::PeerLeft, message).with_peer(rank))
            }
            None => Ok(()),
        }
    }

    /// Calls `callback` once for every rank that is lost, including those already lost.
    ///
    /// Calls come from a background thread, one after another, and end when the
    /// [`Bootstrap`](super::Bootstrap) is closed. A callback should return soon, since it delays the next
    /// one; it may use the store.
    pub fn when_lost(&self, callback: impl Fn(Rank, &Error) + Send + Sync + 'static) {
        let callback: Arc<Callback> = Arc::new(callback);
        let mut inner = lock(&self.0);
        if inner.closed {
            return;
        }
        // Under the same lock as the registration below, so that each loss is reported to the callback exactly
        // once.
        let already: Vec<_> = inner
            .lost
            .iter()
            .map(|(&rank, loss)| (rank, loss.error.clone()))
            .collect();
        for (rank, error) in already {
            let callback = callback.clone();
            inner.submit(Box::new(move || callback(rank, &error)));
        }
        inner.callbacks.push(callback);
    }

    /// Calls `callback` once for every group that fails from now on, on the thread that reports lost ranks.
    pub(crate) fn when_group_failed(
        &self,
        callback: impl Fn(GroupName, &Error) + Send + Sync + 'static,
    ) {
        let mut inner = lock(&self.0);
        if !inner.closed {
            inner.group_callbacks.push(Arc::new(callback));
        }
    }

    /// Records that a rank can do no more work in `group`, and calls the callbacks.
    pub(crate) fn fail_group(&self, group: GroupName, error: &Error) {
        let mut inner = lock(&self.0);
        if inner.closed || inner.failed_groups.contains_key(&group) {
            return;
        }
        tracing::warn!(%error, "a communicator has failed");
        inner.failed_groups.insert(group, error.clone());
        for callback in inner.group_callbacks.clone() {
            let error = error.clone();
            inner.submit(Box::new(move || callback(group, &error)));
        }
    }

    /// Why `group` failed, if it did.
    pub(crate) fn group_failure(&self, group: GroupName) -> Option<Error> {
        lock(&self.0).failed_groups.get(&group).cloned()
    }

    /// Calls `callback` once when the others go on without this rank, before any call fails for that reason, or at once
    /// if it has happened. It must not block.
    pub(crate) fn when_ended(&self, callback: impl Fn(&Error) + Send + Sync + 'static) {
        let mut inner = lock(&self.0);
        if let Some(error) = inner.ended.clone() {
            drop(inner);
            callback(&error);
        } else if !inner.closed {
            inner.end_callbacks.push(Arc::new(callback));
        }
    }

    /// Records that the others go on without this rank.
    pub(crate) fn end(&self, error: &Error) {
        let mut inner = lock(&self.0);
        if inner.closed || inner.ended.is_some() {
            return;
        }
        tracing::warn!(%error, "this rank is no longer a member of its job");
        inner.ended = Some(error.clone());
        let callbacks = std::mem::take(&mut inner.end_callbacks);
        drop(inner);
        callbacks.iter().for_each(|callback| callback(error));
    }

    /// Why `rank` was lost, if it was.
    pub(crate) fn reason(&self, rank: Rank) -> Option<String> {
        let inner = lock(&self.0);
        inner.lost.get(&rank).map(|loss| loss.reason.clone())
    }

    /// Whether `rank` is neither lost nor has left.
    pub(crate) fn is_there(&self, rank: Rank) -> bool {
        let inner = lock(&self.0);
        !inner.lost.contains_key(&rank) && !inner.left.contains(&rank)
    }

    /// The lost ranks in the order of their losses, each with the reason, and the ranks that left; in the wire format.
    pub(crate) fn gone(&self) -> (Vec<(u32, String)>, Vec<u32>) {
        let inner = lock(&self.0);
        let mut lost: Vec<_> = inner.lost.iter().collect();
        lost.sort_unstable_by_key(|(_, loss)| loss.before);
        let lost = lost.into_iter();
        let lost = lost.map(|(&rank, loss)| (rank as u32, loss.reason.clone()));
        let left = inner.left.iter().map(|&rank| rank as u32);
        (lost.collect(), left.collect())
    }

    /// Records a loss, once per rank, and calls the callbacks.
    pub(crate) fn lose(&self, rank: Rank, reason: &str) {
        let mut inner = lock(&self.0);
        // A rank that left closes its connection next, which is no loss; and the first reason of a loss is its
        // cause.
        if inner.closed || inner.left.contains(&rank) || inner.lost.contains_key(&rank) {
            return;
        }
        tracing::warn!(rank, reason, "a rank was lost");
        let error = Error::new(
            ErrorKind::PeerLost,
            format!("rank {rank} was lost: {reason}"),
        )
        .with_peer(rank)
        .with_help(help_after_loss(rank, reason));
        let before = inner.lost.len();
        inner.lost.insert(
            rank,
            Loss {
                reason: reason.to_owned(),
                before,
                error: error.clone(),
            },
        );
        for callback in inner.callbacks.clone() {
            let error = error.clone();
            inner.submit(Box::new(move || callback(rank, &error)));
        }
    }

    /// Records that a rank left in order.
    pub(crate) fn leave(&self, rank: Rank) {
        lock(&self.0).left.insert(rank);
    }

    /// Runs `task` on the thread that calls callbacks, after the one in progress; on this thread if that has ended.
    pub(crate) fn run(&self, task: HealthTask) {
        let refused = match &lock(&self.0).notifier {
            Some(notifier) => notifier.jobs.send(task).err().map(|refused| refused.0),
            None => Some(task),
        };
        if let Some(task) = refused {
            task();
        }
    }

    /// Whether this rank has ended its membership, so that callbacks need not continue.
    pub(crate) fn is_closed(&self) -> bool {
        lock(&self.0).closed
    }

    /// Ends the notifications. Returns their thread, which ends after the callback in progress.
    pub(crate) fn close(&self) -> Option<JoinHandle<()>> {
        let mut inner = lock(&self.0);
        inner.closed = true;
        inner.callbacks.clear();
        inner.group_callbacks.clear();
        inner.end_callbacks.clear();
        // Dropping the sender ends the thread's loop.
        inner.notifier.take().map(|notifier| notifier.thread)
    }
}

impl HealthState {
    /// Queues a call for the notifying thread.
    fn submit(&self, job: HealthTask) {
        if let Some(notifier) = &self.notifier
            && notifier.jobs.send(job).is_err()
        {
            tracing::error!(
                "a callback for lost ranks panicked; later losses are not reported to it"
            );
        }
    }
}

impl fmt::Debug for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = lock(&self.0);
        f.debug_struct("Health")
            .field("lost", &inner.lost.keys())
            .field("left", &inner.left)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn losses_are_reported_where_the_system_has_no_thread_left() {
        let health = Health::start().unwrap();
        let (lost, losses) = mpsc::channel();
        health.when_lost(move |rank, _| {
            let _ = lost.send(rank);
        });
        threads::without_threads(|| health.lose(1, "for the test"));
        assert_eq!(losses.recv_timeout(Duration::from_secs(20)), Ok(1));
        health.close().unwrap().join().unwrap();
    }
}
