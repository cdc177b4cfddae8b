//! Lost ranks, and the communicators that they concern.

use crate::bootstrap::{Bootstrap, Group, GroupName, Health, failed_group};
use crate::deadline::Deadline;
use crate::device::Fault;
use crate::error::{Error, ErrorKind, Rank};
use crate::sync::lock;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// The longest that waits in streams go on after a loss while others are told of it, in all of the
/// communicators together. One that does not answer may have stopped.
pub(super) const MAX_TELLING: Duration = Duration::from_secs(2);

/// How long after a failure was found the others are told of it: those that find it themselves know more of it.
const HEAD_START: Duration = Duration::from_millis(100);

/// How long confirmations are waited for before the others are told again: a store that is lost may have taken what it
/// was told along.
const CONFIRMING: Duration = Duration::from_millis(500);

/// Between two looks at what is known.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The communicators of a job here, by what ends their waits.
#[derive(Debug, Default)]
pub(super) struct Losses(Mutex<Vec<(Weak<Fault>, Arc<Group>)>>);

impl Losses {
    /// Has `fault` raised when a rank of `group` is lost, or was.
    pub(super) fn add(&self, group: &Arc<Group>, fault: &Arc<Fault>, health: &Health) {
        let mut concerned = lock(&self.0);
        concerned.retain(|(fault, _)| fault.strong_count() > 0);
        concerned.push((Arc::downgrade(fault), group.clone()));
        drop(concerned);
        // A rank that is lost from now on is told of by a callback.
        if let Some(error) = health.group_failure(group.name()) {
            fault.raise(group.in_own_ranks(error));
        }
        for lost in health.lost() {
            if group.member(lost).is_some()
                && let Err(error) = health.check(&[lost])
            {
                fault.raise(group.in_own_ranks(error));
            }
        }
    }

    /// Tells the communicators that `lost` concerns; their streams do not go on yet. Returns what ends
    /// their waits.
    pub(super) fn announce(&self, lost: Rank, error: &Error) -> Vec<Arc<Fault>> {
        let concerned = self.concerned(lost).into_iter();
        let announced = concerned.map(|(fault, group)| {
            fault.announce(group.in_own_ranks(error.clone()));
            fault
        });
        announced.collect()
    }

    /// Tells the communicators whose work lies in streams that fail by `faults`, because of `error`, and
    /// all their ranks, until `deadline`: that work must not pass for done there either. Their streams do not
    /// go on yet.
    pub(super) fn spread(
        &self,
        bootstrap: &Bootstrap,
        mut faults: Vec<Arc<Fault>>,
        error: &Error,
        deadline: Deadline,
    ) -> Vec<Spoiled> {
        let mut spoiled = Vec::new();
        while let Some(fault) = faults.pop() {
            for fault in fault.spoiled() {
                let Some(group) = self.group_of(&fault) else {
                    continue;
                };
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
                failed.tell(bootstrap, deadline);
                failed.confirm(bootstrap, deadline);
                spoiled.push(failed);
            }
        }
        spoiled
    }

    /// The communicator `name` and what ends its waits.
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

    /// Ends the waits for the signals of the communicators that `lost` concerns.
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

/// A communicator that has failed, though none of its ranks was lost.
#[derive(Debug)]
pub(super) struct Spoiled {
    pub(super) fault: Arc<Fault>,
    pub(super) group: Arc<Group>,
    /// Why, where this rank is the one that tells the others.
    reason: Option<String>,
}

impl Spoiled {
    /// Tells its ranks why, if this rank has to. Blocks for as long as the store takes, until `deadline` at most.
    fn tell(&self, bootstrap: &Bootstrap, deadline: Deadline) {
        let Some(reason) = &self.reason else { return };
        if let Err(error) = bootstrap.fail_group(&self.group, reason, deadline) {
            tracing::warn!(%error, "ranks could not be told that a communicator failed");
        }
    }

    /// Tells its ranks that this one knows.
    fn confirm(&self, bootstrap: &Bootstrap, deadline: Deadline) {
        if let Err(error) = bootstrap.confirm_failure(self.group.name(), deadline) {
            tracing::debug!(%error, "a failure could not be confirmed");
        }
    }

    /// Ends the waits for its signals when all of its ranks know that it failed, or could; at `deadline` at
    /// the latest.
    pub(super) fn release(&self, bootstrap: &Bootstrap, deadline: Deadline) {
        loop {
            let until = Deadline::after(deadline.remaining().min(CONFIRMING));
            if bootstrap.wait_for_confirmations(&self.group, until) || deadline.passed() {
                break;
            }
            self.tell(bootstrap, deadline);
        }
        self.fault.release();
    }
}

/// A rank can do no more work in the communicator `name`: tells it, and those whose work lies in streams that
/// fail by it, and ends their waits when all of their ranks know. Does not block for that, since the ranks
/// wait for one another.
pub(super) fn end_group(
    losses: &Losses,
    bootstrap: Arc<Bootstrap>,
    name: GroupName,
    error: &Error,
) {
    let deadline = Deadline::after(MAX_TELLING);
    // Where this rank knew before, by a loss or by what it found itself, it ends the waits when others know of those.
    let failed = losses.named(name);
    let failed = failed.filter(|failed| failed.fault.error().is_none());
    let mut further = Vec::new();
    if let Some(Spoiled { fault, group, .. }) = &failed {
        fault.announce(group.in_own_ranks(error.clone()));
        further = losses.spread(&bootstrap, vec![fault.clone()], error, deadline);
    }
    release_behind(move || {
        further
            .iter()
            .for_each(|one| one.release(&bootstrap, deadline));
        // Only now: those that wait for this let go of what stands before the work of those.
        if let Err(error) = bootstrap.confirm_failure(name, deadline) {
            tracing::debug!(%error, "a failure could not be confirmed");
        }
        failed
            .iter()
            .for_each(|one| one.release(&bootstrap, deadline));
    });
}

/// This rank has found that its communicator cannot go on, because of `error`, which its fault was announced with. Tells
/// its other ranks, and all communicators whose work lies in streams that fail by it, and ends their waits when all of
/// their ranks know. Does not block.
pub(super) fn fail(
    losses: Arc<Losses>,
    bootstrap: Arc<Bootstrap>,
    (fault, group): (Arc<Fault>, Arc<Group>),
    error: Error,
) {
    release_behind(move || {
        std::thread::sleep(HEAD_START);
        let deadline = Deadline::after(MAX_TELLING);
        let failed = Spoiled {
            fault,
            group,
            reason: Some(error.message().to_owned()),
        };
        let further = losses.spread(&bootstrap, vec![failed.fault.clone()], &error, deadline);
        failed.tell(&bootstrap, deadline);
        further
            .iter()
            .for_each(|one| one.release(&bootstrap, deadline));
        // Only now: those that wait for this let go of what stands before the work of those.
        failed.confirm(&bootstrap, deadline);
        failed.release(&bootstrap, deadline);
    });
}

/// Runs what ends waits on a thread of its own, since it waits for other ranks.
fn release_behind(finish: impl FnOnce() + Send + 'static) {
    let started = std::thread::Builder::new()
        .name("warplink-release".into())
        .spawn(finish);
    if let Err(error) = started {
        tracing::error!(%error, "waits of a communicator that failed go on");
    }
}

/// Blocks until all ranks that are left have heard of the loss of `lost`, or `deadline`.
pub(super) fn wait_until_all_know(bootstrap: &Bootstrap, lost: Rank, deadline: Deadline) {
    let name = GroupName::WORLD.child("loss", &[lost], 0);
    loop {
        let left = remaining(bootstrap);
        let together = bootstrap
            .named_group(&left, name)
            .and_then(|group| group.barrier(deadline));
        match together {
            Err(error) if is_gone(bootstrap, &error, deadline) => {}
            Err(error) => {
                tracing::debug!(%error, lost, "some ranks may not know of a loss yet");
                return;
            }
            Ok(()) => return,
        }
    }
}

/// The ranks of the job that are neither lost nor have left, as far as is known here.
pub(super) fn remaining(bootstrap: &Bootstrap) -> Vec<Rank> {
    let health = bootstrap.health();
    let (lost, left) = (health.lost(), health.left());
    (0..bootstrap.world())
        .filter(|rank| !lost.contains(rank) && !left.contains(rank))
        .collect()
}

/// Whether `error` says that a rank is gone. Blocks until that is known here too.
pub(super) fn is_gone(bootstrap: &Bootstrap, error: &Error, deadline: Deadline) -> bool {
    let (ErrorKind::PeerLost | ErrorKind::PeerLeft, Some(peer)) = (error.kind(), error.peer())
    else {
        return false;
    };
    let health = bootstrap.health();
    while health.check(&[peer]).is_ok() {
        // Not by the membership, whose end waits for the callback that may have called this.
        if deadline.passed() || health.is_closed() {
            return false;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    !health.is_closed()
}
