//! Lost ranks, and the communicators that they concern.

use crate::bootstrap::{Bootstrap, Group, GroupName, Health};
use crate::deadline::Deadline;
use crate::device::Fault;
use crate::error::{Error, ErrorKind, Rank};
use crate::sync::lock;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// The longest that waits in streams go on after a loss while others are told of it. One that does
/// not answer may have stopped.
const MAX_TELLING: Duration = Duration::from_secs(2);

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
        for lost in health.lost() {
            if group.member(lost).is_some()
                && let Err(error) = health.check(&[lost])
            {
                fault.raise(group.in_own_ranks(error));
            }
        }
    }

    /// Tells the communicators that `lost` concerns; their streams do not go on yet.
    pub(super) fn announce(&self, lost: Rank, error: &Error) {
        for (fault, group) in self.concerned(lost) {
            fault.announce(group.in_own_ranks(error.clone()));
        }
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

/// Blocks until all ranks that are left have heard of the loss of `lost`, or could have.
pub(super) fn wait_until_all_know(bootstrap: &Bootstrap, lost: Rank) {
    let deadline = Deadline::after(MAX_TELLING);
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
