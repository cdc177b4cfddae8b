//! Groups that cannot be used any more: their members disagree about them, or one of them failed.

use super::{Client, ClientState, limited};
use crate::bootstrap::group_name::GroupName;
use crate::bootstrap::message::{self, Request};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::sync::lock;

impl Client {
    /// Ranks disagree about `groups`: fails the calls that wait in them.
    pub(super) fn conflict(&self, groups: &[[u8; 16]], ranks: [u32; 2], message: String) {
        let other = ranks.map(|rank| rank as Rank);
        let other = other.into_iter().find(|&rank| rank != self.identity.rank);
        let mut error = Error::mismatch(message)
            .with_help("call subgroup with the same lists in the same order on all of their ranks");
        if let Some(other) = other {
            error = error.with_peer(other);
        }
        for &group in groups {
            self.end_group(GroupName::from_bytes(group), &error);
        }
    }

    /// `rank` can do no more work in `group`.
    pub(super) fn group_failed(
        &self,
        group: GroupName,
        rank: Rank,
        reason: &str,
        is_attempt: bool,
    ) {
        if is_attempt {
            return self.end_group(group, &failed_attempt(rank, reason));
        }
        let error = failed_group(rank, reason);
        self.end_group(group, &error);
        self.health.fail_group(group, &error);
    }

    /// Fails the calls in `group` and in its dependents with `error`, those in flight and later ones. No effect on groups
    /// that have ended already.
    pub(crate) fn end_group(&self, group: GroupName, error: &Error) {
        let mut state = lock(&self.state);
        let link = state.open_link();
        let mut names = vec![group];
        let mut at = 0;
        // `names` grows while it is walked, which covers dependents of dependents.
        while let Some(&parent) = names.get(at) {
            let pairs = state.dependents.iter();
            names.extend(pairs.filter_map(|(of, one)| (*of == parent).then_some(*one)));
            at += 1;
        }
        // The first error of a group is the cause, so a later one must not replace it.
        names.retain(|name| state.ended_groups.iter().all(|(ended, _)| ended != name));
        let ended = names.iter().map(|name| (*name, error.clone()));
        state.ended_groups.extend(ended);
        state.calls.retain(|&id, call| {
            let ends = names.iter().any(|name| name.is_of(&call.request));
            if ends {
                call.finish(Err(error.clone()));
                if let Some(link) = &link
                    && let Ok(cancel) = message::encode(&Request::Cancel { id })
                {
                    let _ = link.push(0, &cancel);
                }
            }
            !ends
        });
    }

    /// Reports to the members of `group` that this rank can do no more work in it.
    pub(crate) fn fail_group(
        &self,
        group: GroupName,
        members: Vec<u32>,
        reason: &str,
        is_attempt: bool,
        deadline: Deadline,
    ) -> Result<()> {
        let request = Request::Fail {
            group: group.to_bytes(),
            members,
            reason: limited(reason),
            is_attempt,
        };
        self.call("report a failure", request, deadline).map(drop)
    }
}

impl ClientState {
    /// Lets `group` end with `parent`, or at once if that has ended.
    pub(in crate::bootstrap) fn depend(&mut self, parent: GroupName, group: GroupName) {
        self.dependents.push((parent, group));
        let mut ended = self.ended_groups.iter();
        // `end_group` visits only the pairs registered so far, so a parent that ended earlier ends the group here.
        if let Some((_, error)) = ended.find(|(ended, _)| *ended == parent) {
            let error = error.clone();
            self.ended_groups.push((group, error));
        }
    }
}

/// The error of a group in which `rank`, of the job, can do no more work.
pub(crate) fn failed_group(rank: Rank, reason: &str) -> Error {
    let message = format!("rank {rank} of the job cannot finish its work here: {reason}");
    Error::new(ErrorKind::PeerFailed, message)
        .with_peer(rank)
        .with_help("check the log of that rank, and continue with survivors()")
}

/// The error of an attempt at a joint step that has failed on `rank`, of the job.
fn failed_attempt(rank: Rank, reason: &str) -> Error {
    let message = format!("rank {rank} of the job failed: {reason}");
    Error::new(ErrorKind::PeerFailed, message)
        .with_peer(rank)
        .with_help("fix the error of that rank, then retry on every rank")
}
