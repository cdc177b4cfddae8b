//! Communicators of some of a communicator's ranks.

use super::{Communicator, losses};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::sync::lock;
use std::sync::Arc;

impl Communicator {
    /// The communicator of `ranks` of this one, this rank among them, in their order. Ranks that are
    /// not listed need not call anything. Does not wait for others.
    ///
    /// Every rank that is listed calls it with the same list, and two ranks make all the subgroups that
    /// contain both in the same order. Where they do not, what is done in the subgroups fails soon after
    /// with [`ErrorKind::Mismatch`], naming the ranks and their lists.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] where a rank is out of range or listed twice, or where this rank
    /// is not listed.
    pub fn subgroup(&self, ranks: &[Rank]) -> Result<Self> {
        self.subgroup_of(ranks).map_err(|error| {
            let error = error.with_operation("make a subgroup");
            self.group.with_job_ranks(error)
        })
    }

    fn subgroup_of(&self, ranks: &[Rank]) -> Result<Self> {
        for (index, rank) in ranks.iter().enumerate() {
            if ranks[..index].contains(rank) {
                return Err(Error::invalid(format!(
                    "rank {rank} is listed twice; expected each rank once"
                )));
            }
        }
        if !ranks.contains(&self.rank()) {
            return Err(Error::invalid(format!(
                "this rank, {}, is not in {ranks:?}; expected a list that contains it",
                self.rank()
            )));
        }
        let members = ranks.iter().map(|&rank| self.group.job_rank(rank));
        let members = members.collect::<Result<Vec<_>>>()?;
        let number = self.number("subgroup", &members);
        let made = self.child("subgroup", &members, number)?;
        let together = |&member| self.number("together", &[member]);
        let numbers = members.iter().map(together).collect();
        let (parent, name) = (self.group.name(), made.group.name());
        let bootstrap = &self.job.bootstrap;
        bootstrap.declare_group(parent, name, &members, numbers)?;
        Ok(made)
    }

    /// The communicator of the ranks that give the same `color`, ordered by `key` and, where keys are
    /// equal, by their rank here. Every rank of this communicator calls it at the same time. Blocks
    /// until all have: one round trip to the store.
    ///
    /// # Errors
    /// Those of [`barrier`](Self::barrier).
    pub fn split(&self, color: u64, key: i64) -> Result<Self> {
        let number = self.number("split", &[]);
        let own = [color.to_le_bytes(), key.to_le_bytes()].concat();
        let all = self.all_gather_bytes(&own)?;
        let mut ranks = Vec::new();
        for (rank, bytes) in all.iter().enumerate() {
            let Some((color, key)) = bytes.split_first_chunk().and_then(|(color, rest)| {
                let key = rest.try_into().ok().map(i64::from_le_bytes);
                Some((u64::from_le_bytes(*color), key?))
            }) else {
                return Err(Error::new(
                    ErrorKind::Protocol,
                    format!("rank {rank} sent {} bytes; expected 16", bytes.len()),
                )
                .with_operation("split a communicator")
                .with_help("call split at the same time on every rank"));
            };
            ranks.push((color, key, rank));
        }
        ranks.retain(|&(theirs, ..)| theirs == color);
        ranks.sort_unstable();
        let members = ranks.iter().map(|&(.., rank)| self.group.job_rank(rank));
        self.child("split", &members.collect::<Result<Vec<_>>>()?, number)
    }

    /// The communicator of the ranks of this one that are still there, in its order. Ranks that are
    /// left call it at the same time, as a rule when an operation failed with
    /// [`ErrorKind::PeerLost`] or [`ErrorKind::PeerFailed`]; it takes the place of this communicator, also where closing this one is
    /// leaving the job. Blocks until all ranks that are left have called it.
    ///
    /// Streams that waited for a rank that was lost, and transfers and plans of this communicator,
    /// cannot be used any more; regions, the device and other streams can.
    ///
    /// # Errors
    /// [`ErrorKind::GivenUp`] when the others go on without this rank; [`ErrorKind::Timeout`] at the
    /// configured timeout.
    pub fn survivors(&self) -> Result<Self> {
        let deadline = self.deadline();
        let bootstrap = &self.job.bootstrap;
        loop {
            let left = losses::remaining(bootstrap);
            let members = self.group.members().iter().copied();
            let members: Vec<_> = members.filter(|member| left.contains(member)).collect();
            let number = self.number("survivors", &members);
            let name = self.group.name().child("survivors", &members, number);
            let group = bootstrap.named_group(&members, name)?;
            match group.barrier(deadline) {
                Ok(()) => return Ok(Self::of(&self.job, Arc::new(group), self.is_world)),
                // One more: those that are left agree on the rest.
                Err(error)
                    if error.peer().is_some_and(|peer| members.contains(&peer))
                        && losses::is_gone(bootstrap, &error, deadline) => {}
                Err(error) => {
                    let error = error.with_operation("find the ranks that are left");
                    return Err(self.group.in_own_ranks(error));
                }
            }
        }
    }

    /// How many groups of `members` (ranks of the job) were made in the way `how` before this one.
    pub(super) fn number(&self, how: &'static str, members: &[Rank]) -> u64 {
        let mut made = lock(&self.made);
        let count = made.entry((how, members.to_vec())).or_default();
        *count += 1;
        *count - 1
    }

    /// The communicator of `members`, ranks of the job.
    fn child(&self, how: &str, members: &[Rank], number: u64) -> Result<Self> {
        let name = self.group.name().child(how, members, number);
        let group = self.job.bootstrap.named_group(members, name)?;
        Ok(Self::of(&self.job, Arc::new(group), false))
    }
}
