//! Lost ranks, and their effect on communicators.

use crate::bootstrap::{Bootstrap, Group, GroupName, Health, failed_group};
use crate::deadline::Deadline;
use crate::device::Fault;
use crate::error::{Error, ErrorKind, Rank};
use crate::sync::lock;
use crate::threads;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// Total time for which waits in streams are held after a loss while other ranks are notified. A rank that
/// does not confirm may be stopped.
pub(super) const NOTIFY_TIMEOUT: Duration = Duration::from_secs(2);

/// Delay before other ranks are notified of a failure: ranks that detect it themselves report it more
/// precisely.
const HEAD_START: Duration = Duration::from_millis(100);

/// How long to wait for confirmations before notifying again: a failing store may have lost the notification.
const CONFIRMATION_INTERVAL: Duration = Duration::from_millis(500);

/// Polling interval.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// This rank's communicators, with the faults that abort their waits.
#[derive(Debug, Default)]
pub(super) struct Losses(Mutex<Vec<(Weak<Fault>, Arc<Group>)>>);

impl Losses {
    /// Raises `fault` when a rank of `group` is lost, or if one already is.
    pub(super) fn add(&self, group: &Arc<Group>, fault: &Arc<Fault>, health: &Health) {
        let mut concerned = lock(&self.0);
        // Remove dropped communicators.
        concerned.retain(|(fault, _)| fault.strong_count() > 0);
        concerned.push((Arc::downgrade(fault), group.clone()));
        drop(concerned);
        // Later losses are reported by callback. The list comes first, since a loss in between may be reported
        // twice, but must not be missed.
        if let Some(error) = health.group_failure(group.name()) {
            fault.raise(group.in_own_ranks(error));
        }
        let mut lost = health.lost();
        lost.retain(|&rank| group.member(rank).is_some());
        if let Err(error) = health.check(&lost) {
            fault.raise(group.in_own_ranks(error));
        }
    }

    /// First step for communicators that contain `lost`; their streams stay blocked. Returns their faults.
    pub(super) fn announce(&self, lost: Rank, error: &Error) -> Vec<Arc<Fault>> {
        let concerned = self.concerned(lost).into_iter();
        // Announce before aborting waits: a stream that resumes must find the error already set.
        let announced = concerned.map(|(fault, group)| {
            fault.announce(group.in_own_ranks(error.clone()));
            // They may wait for a rank that is not lost, but has failed as well, and so never comes.
            group.end_calls(error);
            fault
        });
        announced.collect()
    }

    /// Fails the communicators with work in streams that fail by `faults`, because of `error`, and notifies
    /// all of their ranks until `deadline`, since that work may be incomplete there too. Their streams stay
    /// blocked.
    pub(super) fn spread(
        &self,
        bootstrap: &Bootstrap,
        mut faults: Vec<Arc<Fault>>,
        error: &Error,
        deadline: Deadline,
    ) -> Vec<Spoiled> {
        // Transitive: a stream that fails may also have work of further communicators.
        let mut affected = Vec::new();
        while let Some(fault) = faults.pop() {
            for fault in fault.affected() {
                let Some(group) = self.group_of(&fault) else {
                    continue;
                };
                // Already failed; its waits are released elsewhere.
                if fault.error().is_some() {
                    continue;
                }
                let reason = format!(
                    "a stream of it waited for another communicator too: {}",
                    error.message()
                );
                let failed = failed_group(bootstrap.rank(), &reason);
                fault.announce(group.in_own_ranks(failed));
                faults.push(fault.clone());
                let reason = Some(reason);
                let failed = Spoiled {
                    fault,
                    group,
                    reason,
                };
                // Notify before confirming: a rank that waits for all confirmations must not miss the
                // failure.
                failed.notify_group(bootstrap, deadline);
                failed.confirm(bootstrap, deadline);
                affected.push(failed);
            }
        }
        affected
    }

    /// The communicator `name` and its fault.
    pub(super) fn named(&self, name: GroupName) -> Option<Spoiled> {
        let all = lock(&self.0);
        let mut alive = all
            .iter()
            .filter_map(|(fault, group)| Some((fault.upgrade()?, group.clone())));
        let (fault, group) = alive.find(|(_, group)| group.name() == name)?;
        let reason = None;
        Some(Spoiled {
            fault,
            group,
            reason,
        })
    }

    fn group_of(&self, fault: &Arc<Fault>) -> Option<Arc<Group>> {
        let all = lock(&self.0);
        let own = |held: &Weak<Fault>| held.as_ptr() == Arc::as_ptr(fault);
        let (_, group) = all.iter().find(|(held, _)| own(held))?;
        Some(group.clone())
    }

    /// Second step: aborts waits for signals of the communicators that contain `lost`.
    pub(super) fn release(&self, lost: Rank) {
        for (fault, _) in self.concerned(lost) {
            fault.release();
        }
    }

    fn concerned(&self, lost: Rank) -> Vec<(Arc<Fault>, Arc<Group>)> {
        let all = lock(&self.0);
        all.iter()
            .filter(|(_, group)| group.member(lost).is_some())
            .filter_map(|(fault, group)| Some((fault.upgrade()?, group.clone())))
            .collect()
    }
}

/// A communicator that failed although none of its ranks was lost.
#[derive(Debug)]
pub(super) struct Spoiled {
    pub(super) fault: Arc<Fault>,
    pub(super) group: Arc<Group>,
    /// Reason, if this rank must notify the others.
    reason: Option<String>,
}

impl Spoiled {
    /// Notifies its ranks of the reason, if this rank must. Blocks while the store is busy, until `deadline`.
    fn notify_group(&self, bootstrap: &Bootstrap, deadline: Deadline) {
        let Some(reason) = &self.reason else { return };
        if let Err(error) = bootstrap.fail_group(&self.group, reason, deadline) {
            tracing::warn!(%error, "the failure of a communicator could not be reported to its ranks");
        }
    }

    /// Confirms to its ranks that this one knows of the failure.
    fn confirm(&self, bootstrap: &Bootstrap, deadline: Deadline) {
        if let Err(error) = bootstrap.confirm_failure(self.group.name(), deadline) {
            tracing::debug!(%error, "a failure could not be confirmed");
        }
    }

    /// Aborts waits for its signals once all of its ranks have confirmed the failure, or at `deadline`.
    pub(super) fn release(&self, bootstrap: &Bootstrap, deadline: Deadline) {
        loop {
            let until = Deadline::after(deadline.remaining().min(CONFIRMATION_INTERVAL));
            // Retry the notification if confirmations are missing: the store may have been replaced.
            if bootstrap.wait_for_confirmations(&self.group, until) || deadline.passed() {
                break;
            }
            self.notify_group(bootstrap, deadline);
        }
        self.fault.release();
    }
}

/// Handles a failure of the communicator `name` reported by another rank: fails it and those with work in its
/// failing streams, and aborts their waits once all of their ranks have confirmed. Does not block for that,
/// since ranks wait for one another.
pub(super) fn end_group(
    losses: &Losses,
    bootstrap: Arc<Bootstrap>,
    name: GroupName,
    error: &Error,
) {
    let deadline = Deadline::after(NOTIFY_TIMEOUT);
    // If this rank already knew, through a loss or its own failure, that path aborts the waits.
    let failed = losses.named(name);
    let failed = failed.filter(|failed| failed.fault.error().is_none());
    let mut further = Vec::new();
    if let Some(Spoiled { fault, group, .. }) = &failed {
        fault.announce(group.in_own_ranks(error.clone()));
        further = losses.spread(&bootstrap, vec![fault.clone()], error, deadline);
    }
    let health = bootstrap.health().clone();
    release_behind(&health, move || {
        further
            .iter()
            .for_each(|one| one.release(&bootstrap, deadline));
        // Confirm only now: ranks that wait for this release streams with work of the communicators failed
        // above.
        if let Err(error) = bootstrap.confirm_failure(name, deadline) {
            tracing::debug!(%error, "a failure could not be confirmed");
        }
        failed
            .iter()
            .for_each(|one| one.release(&bootstrap, deadline));
    });
}

/// Handles a failure of this rank's communicator by `error`, with which its fault was announced. Notifies its
/// other ranks and those of communicators with work in its failing streams, and aborts their waits once all
/// have confirmed. Does not block.
pub(super) fn fail(
    losses: Arc<Losses>,
    bootstrap: Arc<Bootstrap>,
    (fault, group): (Arc<Fault>, Arc<Group>),
    error: Error,
) {
    let health = bootstrap.health().clone();
    release_behind(&health, move || {
        // Ranks that detect the failure themselves should report it with their own details.
        std::thread::sleep(HEAD_START);
        let deadline = Deadline::after(NOTIFY_TIMEOUT);
        let failed = Spoiled {
            fault,
            group,
            reason: Some(error.message().to_owned()),
        };
        let further = losses.spread(&bootstrap, vec![failed.fault.clone()], &error, deadline);
        failed.notify_group(&bootstrap, deadline);
        further
            .iter()
            .for_each(|one| one.release(&bootstrap, deadline));
        // Confirm only now: ranks that wait for this release streams with work of the communicators failed
        // above.
        failed.confirm(&bootstrap, deadline);
        failed.release(&bootstrap, deadline);
    });
}

/// Runs `finish` on its own thread, since it waits for other ranks. If the system has none left, runs it on the thread of
/// `health`, which holds up what that has to do, at most until the deadline of `finish`.
fn release_behind(health: &Health, finish: impl FnOnce() + Send + 'static) {
    // Shared, since a thread that cannot be started drops what it was to run.
    let finish = Arc::new(Mutex::new(Some(finish)));
    let shared = finish.clone();
    let finish_here = move || call_once(&shared);
    if let Err(error) = threads::spawn("warplink-release", "start a thread", finish_here) {
        tracing::warn!(%error, "the ranks of a failed communicator are told later");
        health.run(Box::new(move || call_once(&finish)));
    }
}

/// Calls `body` unless it was called before.
fn call_once(body: &Mutex<Option<impl FnOnce()>>) {
    let body = lock(body).take();
    if let Some(body) = body {
        body();
    }
}

/// Blocks until all survivors know of the loss of `lost`, or until `deadline`.
pub(super) fn wait_until_all_know(bootstrap: &Bootstrap, lost: Rank, deadline: Deadline) {
    // A barrier among the survivors: once it completes, each of them has announced the loss.
    let name = GroupName::WORLD.child("loss", &[lost], 0);
    loop {
        let left = remaining(bootstrap);
        let together = bootstrap
            .named_group(&left, name)
            .and_then(|group| group.barrier(deadline));
        match together {
            // A further loss: start again with the ranks that remain.
            Err(error) if is_gone(bootstrap, &error, deadline) => {}
            Err(error) => {
                tracing::debug!(%error, lost, "some ranks may not know of a loss yet");
                return;
            }
            Ok(()) => return,
        }
    }
}

/// Job ranks that, as far as is known here, have neither been lost nor left.
pub(super) fn remaining(bootstrap: &Bootstrap) -> Vec<Rank> {
    let health = bootstrap.health();
    let (lost, left) = (health.lost(), health.left());
    (0..bootstrap.world())
        .filter(|rank| !lost.contains(rank) && !left.contains(rank))
        .collect()
}

/// Whether `error` means that a rank is gone. Blocks until that is known here too.
pub(super) fn is_gone(bootstrap: &Bootstrap, error: &Error, deadline: Deadline) -> bool {
    let (ErrorKind::PeerLost | ErrorKind::PeerLeft, Some(peer)) = (error.kind(), error.peer())
    else {
        return false;
    };
    let health = bootstrap.health();
    while health.check(&[peer]).is_ok() {
        // Do not wait for the membership thread: it may be running the callback that called this.
        if deadline.passed() || health.is_closed() {
            return false;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    !health.is_closed()
}

#[cfg(test)]
mod tests {
    use crate::bootstrap::{JoinConfig, Rendezvous, UniqueId};
    use crate::device::DeviceKind;
    use crate::error::{ErrorKind, Result};
    use crate::{Communicator, Config, threads};
    use std::net::Ipv4Addr;
    use std::time::Duration;

    #[test]
    fn a_failure_is_reported_where_the_system_has_no_thread_left() -> Result<()> {
        let id = UniqueId::create(Ipv4Addr::LOCALHOST.into(), 0)?;
        let run = |rank| -> Result<()> {
            let join = JoinConfig::new(Rendezvous::Id(id.clone()), rank, 2);
            let mut config = Config::new(join, DeviceKind::Host);
            config.timeout = Duration::from_secs(20);
            let comm = Communicator::join(&config)?;
            if rank == 0 {
                threads::without_threads(|| comm.fail("for the test"));
            } else {
                let region = comm.alloc(64)?;
                let error = comm.share(&region).map(drop).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::PeerFailed, "{error}");
            }
            let deadline = comm.deadline();
            while !comm.fault.is_released() {
                assert!(!deadline.passed(), "waits were not aborted");
                std::thread::sleep(Duration::from_millis(1));
            }
            comm.survivors()?.close()
        };
        std::thread::scope(|scope| {
            let other = scope.spawn(|| run(1));
            run(0).and(other.join().unwrap())
        })
    }
}
