//! Groups of ranks: the collectives of bytes and the queries among them.

use super::client::Client;
use super::group_name::GroupName;
use super::message::{Bytes, GatherId, Purpose, Reply, Request, wire_ranks};
use super::query::Respondent;
use crate::deadline::Deadline;
use crate::debug::debug_fields;
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::sync::lock;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// How long the report of a failed attempt waits for the store.
const REPORT_TIMEOUT: Duration = Duration::from_secs(1);

/// Some or all of the ranks, for all-gathers and barriers among them.
///
/// Calls on one group are matched by their order on each rank, so the members must make the same calls
/// in the same order. Threads that call concurrently need separate groups.
pub struct Group {
    pub(super) client: Arc<Client>,
    members: Vec<Rank>,
    /// In ascending order, as the store expects them.
    sorted: Vec<u32>,
    instance: u64,
    sequence: AtomicU64,
    /// How many attempts at each operation were begun.
    attempts: Mutex<HashMap<&'static str, u64>>,
    /// This rank's position among the members.
    rank: Rank,
    name: GroupName,
    /// Whether it is registered to end with another group.
    is_dependent: bool,
}

impl Drop for Group {
    fn drop(&mut self) {
        // Every attempt makes such a group, so the list would grow for the rest of the job.
        if self.is_dependent {
            let mut state = lock(&self.client.state);
            state.dependents.retain(|(_, group)| *group != self.name);
        }
    }
}

impl Group {
    /// The group of these members, also given in ascending order. `instance` counts the groups of the same members.
    pub(crate) fn new(
        client: Arc<Client>,
        rank: Rank,
        members: Vec<Rank>,
        sorted: Vec<u32>,
        instance: u64,
    ) -> Self {
        let position = members.iter().position(|&member| member == rank);
        Self {
            client,
            // Callers have checked that the group contains this rank.
            rank: position.unwrap_or_default(),
            members,
            sorted,
            instance,
            sequence: AtomicU64::new(0),
            attempts: Mutex::default(),
            name: GroupName::WORLD,
            is_dependent: false,
        }
    }

    /// Sets the group's name.
    pub(crate) fn named(mut self, name: GroupName) -> Self {
        self.instance = name.instance();
        self.name = name;
        self
    }

    /// Lets the group end when `parent` does: calls that wait in it fail with the parent's error.
    pub(crate) fn depending_on(mut self, parent: &Self) -> Self {
        lock(&self.client.state).depend(parent.name, self.name);
        self.is_dependent = true;
        self
    }

    /// Calls `attempt` with a group of the same members that exists for this attempt only: if ranks give up at different
    /// points, the gathers of their next attempts still match. It ends when this group does, and if the attempt fails on
    /// one rank, it ends on all, with the error of that rank. Every member makes its attempts at an operation in
    /// the same order.
    pub(crate) fn attempt<T>(
        &self,
        operation: &'static str,
        attempt: impl FnOnce(Arc<Self>) -> Result<T>,
    ) -> Result<T> {
        let number = {
            let mut attempts = lock(&self.attempts);
            let number = attempts.entry(operation).or_default();
            *number += 1;
            *number
        };
        let job_rank = self.job_rank(self.rank)?;
        let members = self.members.clone();
        let name = self.name.child(operation, &members, number);
        let group = Self::new(
            self.client.clone(),
            job_rank,
            members,
            self.sorted.clone(),
            0,
        );
        let group = Arc::new(group.named(name).depending_on(self));
        attempt(group.clone()).inspect_err(|error| {
            // The peer that failed has reported itself. A second report would name this rank as the cause.
            if !error.is_by_peer() {
                group.report_failure(error);
            }
        })
    }

    /// Ends the calls of this rank in the group and in its attempts, those in flight and later ones, except gathers and
    /// barriers among all ranks of the job.
    pub(crate) fn end_calls(&self, error: &Error) {
        self.client.end_group(self.name, error);
    }

    /// Reports to the members that this rank has failed in the group, which ends their calls in it. Blocks until the store
    /// has passed it on.
    fn report_failure(&self, error: &Error) {
        let deadline = Deadline::after(REPORT_TIMEOUT);
        let (members, reason) = (self.sorted.clone(), error.message());
        let reported = self
            .client
            .fail_group(self.name, members, reason, true, deadline);
        if let Err(error) = reported {
            tracing::debug!(%error, "a failed attempt could not be reported to the other ranks");
        }
    }

    /// This rank's position among the members.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// How many members there are.
    pub fn world(&self) -> usize {
        self.members.len()
    }

    pub(crate) fn name(&self) -> GroupName {
        self.name
    }

    /// The rank in the job of the member `rank`.
    pub(crate) fn job_rank(&self, rank: Rank) -> Result<Rank> {
        self.members.get(rank).copied().ok_or_else(|| {
            Error::invalid(format!(
                "rank {rank} is out of range; expected less than {}",
                self.world()
            ))
            .with_peer(rank)
        })
    }

    /// The member that has `rank` in the job.
    pub(crate) fn member(&self, rank: Rank) -> Option<Rank> {
        self.members.iter().position(|&member| member == rank)
    }

    /// A key of the store for this group alone.
    pub(crate) fn key(&self, key: &str) -> String {
        self.name.key(key)
    }

    /// An error that names ranks of the job, in the numbers of this group.
    pub(crate) fn in_own_ranks(&self, error: Error) -> Error {
        error.in_group(self.own_ranks(), None, &|peer| self.member(peer))
    }

    /// An error that names members of this group, with the job's numbers added.
    pub(crate) fn with_job_ranks(&self, error: Error) -> Error {
        let jobs = |peer| self.members.get(peer).copied();
        error.in_group(self.own_ranks(), Some(&jobs), &|_| None)
    }

    fn own_ranks(&self) -> (Rank, Rank) {
        let job_rank = self.members.get(self.rank).copied();
        (self.rank, job_rank.unwrap_or(self.rank))
    }

    /// The members, in the order in which the group was created with them.
    pub fn members(&self) -> &[Rank] {
        &self.members
    }

    /// Sends `bytes` to every member and returns the bytes of each, in the order of [`Group::members`].
    /// Lengths may differ. Blocks until all have called it.
    ///
    /// # Errors
    /// [`ErrorKind::PeerLost`] or [`ErrorKind::PeerLeft`], naming the member, when one is gone;
    /// [`ErrorKind::Timeout`] at the deadline, in which case the others still get this
    /// rank's bytes; [`ErrorKind::Mismatch`] when another member calls [`Group::barrier`] or binds a program
    /// instead;
    /// [`ErrorKind::InvalidArgument`] when all values together exceed 64 MiB;
    /// [`ErrorKind::Closed`] when this rank has left.
    pub fn all_gather(&self, bytes: &[u8], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        self.gather_values(Purpose::AllGather, bytes, deadline)
    }

    /// As [`Group::all_gather`], for the steps of binding a program: if a member stopped waiting at its deadline, the others
    /// get empty bytes from it.
    pub(crate) fn gather_votes(&self, bytes: &[u8], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        self.gather_values(Purpose::Bind, bytes, deadline)
    }

    /// Blocks until every member of this group, which is that of the ranks left after a loss, has called it.
    ///
    /// # Errors
    /// As [`Group::all_gather`]; [`ErrorKind::PeerFailed`], naming the member, if one stopped waiting at its deadline.
    pub(crate) fn meet_survivors(&self, deadline: Deadline) -> Result<()> {
        // Of any content: that of a member that no longer waits is empty.
        let votes = self.gather_values(Purpose::Survivors, &[1], deadline)?;
        let absent = votes.iter().position(Vec::is_empty);
        match absent.and_then(|absent| self.members.get(absent)) {
            Some(&member) => Err(Error::new(
                ErrorKind::PeerFailed,
                format!("the timeout of rank {member} passed while it waited for the others"),
            )
            .with_peer(member)
            .with_help("retry on every rank")),
            None => Ok(()),
        }
    }

    fn gather_values(
        &self,
        purpose: Purpose,
        bytes: &[u8],
        deadline: Deadline,
    ) -> Result<Vec<Vec<u8>>> {
        match self.gather(purpose, bytes, deadline)? {
            Reply::Values(values) if values.len() == self.members.len() => self
                .members
                .iter()
                .map(|&member| {
                    let at = self.sorted.binary_search(&(member as u32)).ok();
                    let value = at.and_then(|at| values.get(at)).ok_or_else(unexpected)?;
                    Ok(value.0.to_vec())
                })
                .collect(),
            _ => Err(unexpected()),
        }
    }

    /// Blocks until every member has called it.
    ///
    /// # Errors
    /// As [`Group::all_gather`].
    pub fn barrier(&self, deadline: Deadline) -> Result<()> {
        match self.gather(Purpose::Barrier, &[], deadline)? {
            Reply::Done => Ok(()),
            _ => Err(unexpected()),
        }
    }

    fn gather(&self, purpose: Purpose, value: &[u8], deadline: Deadline) -> Result<Reply> {
        // Only uniqueness matters: callers order the calls on a group themselves.
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        let id = GatherId {
            members: self.sorted.clone(),
            instance: self.instance,
            sequence,
        };
        let request = Request::Gather {
            id,
            purpose,
            value: Bytes::from(value),
        };
        self.client.call(&purpose.to_string(), request, deadline)
    }

    /// Lets `respondent` handle queries of members to this rank, for as long as it exists.
    pub(crate) fn respond(&self, respondent: Weak<dyn Respondent>) {
        let queries = &self.client.queries;
        queries.respond(self.name, &self.members, respondent);
    }

    /// Sends a query to `members` and returns the answers that arrive before the deadline, in any order; empty ones from
    /// members without a respondent. Blocks until all members that are neither lost nor have left have answered; their
    /// programs need not call anything.
    pub(crate) fn query(
        &self,
        members: &[Rank],
        payload: &[u8],
        deadline: Deadline,
    ) -> Vec<(Rank, Vec<u8>)> {
        let to = self.present(members);
        let number = self.client.queries.begin(&to);
        // If it cannot be sent, no answer will come.
        let until = if self.send(number, to, payload) {
            deadline
        } else {
            Deadline::after(Duration::ZERO)
        };
        let answers = self.client.queries.wait(number, until);
        let answers = answers.into_iter();
        let members = answers.map(|(by, payload)| Some((self.member(by)?, payload.0.to_vec())));
        members.flatten().collect()
    }

    /// Sends a notice to `members`. Does not block.
    pub(crate) fn notify(&self, members: &[Rank], payload: &[u8]) {
        self.send(0, self.present(members), payload);
    }

    /// The job ranks of those of `members` that are neither lost nor have left.
    fn present(&self, members: &[Rank]) -> Vec<u32> {
        let jobs = members.iter().filter_map(|&rank| self.job_rank(rank).ok());
        let health = self.client.health();
        let present: Vec<Rank> = jobs.filter(|&rank| health.is_there(rank)).collect();
        // Ranks of the job always fit.
        wire_ranks(&present).unwrap_or_default()
    }

    fn send(&self, number: u64, to: Vec<u32>, payload: &[u8]) -> bool {
        self.client.notify(&Request::Query {
            group: self.name.to_bytes(),
            number,
            to,
            payload: Bytes::from(payload),
        })
    }
}

/// Checks the members of a group and sorts them in ascending order.
pub(crate) fn sort_members(members: &[Rank], rank: Rank, world: usize) -> Result<Vec<u32>> {
    let failed = |message: String| Err(Error::invalid(message).with_operation("create a group"));
    let mut sorted = wire_ranks(members)?;
    sorted.sort_unstable();
    if let Some(twice) = sorted.windows(2).find(|pair| pair.first() == pair.last()) {
        return failed(format!(
            "rank {} is listed twice; expected each rank once",
            twice[0]
        ));
    }
    if let Some(&outside) = members.iter().find(|&&member| member >= world) {
        return failed(format!(
            "rank {outside} is out of range; expected 0 to {}",
            world - 1
        ));
    }
    if !members.contains(&rank) {
        return failed(format!(
            "this rank, {rank}, is not in {members:?}; expected a group that contains it"
        ));
    }
    Ok(sorted)
}

fn unexpected() -> Error {
    Error::protocol("the store sent a reply of an unexpected type")
}

debug_fields!(Group, |it| members: it.members);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::{Bootstrap, JoinConfig, Rendezvous, UniqueId};
    use crate::error::ErrorKind;
    use std::thread;
    use std::time::Instant;

    /// Longest that a rank may wait for one that has failed.
    const SOON: Duration = Duration::from_secs(5);

    fn late() -> Deadline {
        Deadline::after(Duration::from_secs(60))
    }

    /// Runs `body` as two ranks.
    fn pair(body: impl Fn(&Bootstrap) + Sync) {
        let id = UniqueId::create([127, 0, 0, 1].into(), 0).unwrap();
        thread::scope(|scope| {
            for rank in 0..2 {
                let (config, body) = (JoinConfig::new(Rendezvous::Id(id.clone()), rank, 2), &body);
                scope.spawn(move || {
                    let bootstrap = Bootstrap::join(&config).unwrap();
                    body(&bootstrap);
                    bootstrap.close(late()).unwrap();
                });
            }
        });
    }

    /// Checks the error of rank 1, which waited for rank 0.
    fn check(error: &Error, began: Instant, reason: &str) {
        assert!(began.elapsed() < SOON, "{error}");
        assert_eq!(error.kind(), ErrorKind::PeerFailed, "{error}");
        assert_eq!(error.peer(), Some(0), "{error}");
        assert!(error.message().contains(reason), "{error}");
    }

    #[test]
    fn an_attempt_that_fails_on_one_rank_ends_on_all() {
        pair(|bootstrap| {
            let group = bootstrap.everyone();
            for fails_at in 0..3 {
                let began = Instant::now();
                let error = group.attempt("test", |attempt| {
                    for step in 0..3 {
                        if bootstrap.rank() == 0 && step == fails_at {
                            return Err(Error::invalid("no memory"));
                        }
                        attempt.all_gather(b"step", late())?;
                    }
                    Ok(())
                });
                if bootstrap.rank() == 1 {
                    check(&error.unwrap_err(), began, "no memory");
                }
            }
            let again = group.attempt("test", |attempt| attempt.barrier(late()));
            again.unwrap();
        });
    }

    #[test]
    fn an_attempt_ends_with_the_group_around_it() {
        pair(|bootstrap| {
            let group = bootstrap.everyone();
            group.barrier(late()).unwrap();
            if bootstrap.rank() == 0 {
                thread::sleep(Duration::from_millis(100));
                let failed = bootstrap.fail_group(group, "for the test", late());
                return failed.unwrap();
            }
            let began = Instant::now();
            let inner = |outer: Arc<Group>| outer.attempt("inner", |group| group.barrier(late()));
            // Later ones end as well.
            for _ in 0..2 {
                let error = group.attempt("outer", inner).unwrap_err();
                check(&error, began, "for the test");
            }
        });
    }
}
