//! Groups of ranks, and the collectives of bytes among them.

use super::client::Client;
use super::group_name::GroupName;
use super::message::{Bytes, GatherId, Purpose, Reply, Request};
use super::store::wire_ranks;
use crate::deadline::Deadline;
use crate::debug::debug_fields;
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Rank, Result};
use crate::sync::lock;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

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
    /// This rank's position among the members.
    rank: Rank,
    name: GroupName,
    /// Whether it is registered to end with another group.
    is_dependent: bool,
}

impl Drop for Group {
    fn drop(&mut self) {
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
        let pair = (parent.name, self.name);
        lock(&self.client.state).dependents.push(pair);
        self.is_dependent = true;
        self
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
