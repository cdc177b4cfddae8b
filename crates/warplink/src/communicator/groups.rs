//! Sub-communicators.

use super::{Communicator, losses};
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Rank, Result};
use crate::sync::lock;
use std::sync::Arc;

impl Communicator {
    /// Creates the communicator of `ranks` of this one, which include this rank, in their order. Other ranks
    /// need not call anything. Does not wait.
    ///
    /// Every listed rank calls it with the same list, and two ranks create all subgroups that contain both in
    /// the same order. Otherwise operations in the subgroups soon fail with [`ErrorKind::Mismatch`], naming
    /// the ranks and their lists.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if a rank is out of range or listed twice, or this rank is not listed.
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
        // Count groups by member list, so that ranks name a group equally without communicating.
        let number = self.number("subgroup", &members);
        let made = self.child("subgroup", &members, number)?;
        // Also count for each pair, to detect ranks that create common subgroups in different orders.
        let together = |&member| self.number("together", &[member]);
        let numbers = members.iter().map(together).collect();
        let (parent, name) = (self.group.name(), made.group.name());
        let bootstrap = &self.job.bootstrap;
        bootstrap.declare_group(parent, name, &members, numbers)?;
        Ok(made)
    }

    /// Creates the communicator of the ranks with the same `color`, ordered by `key` and then by rank.
    /// Collective; blocks until all ranks of this communicator have called it: one round trip to the store.
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
                return Err(Error::protocol(format!(
                    "rank {rank} sent {} bytes; expected 16",
                    bytes.len()
                ))
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

    /// Creates the communicator of the surviving ranks of this one, in its order. All survivors call it,
    /// usually after an operation failed with [`ErrorKind::PeerLost`] or [`ErrorKind::PeerFailed`]. It
    /// replaces this communicator, also for leaving the job by closing it. Blocks until all survivors have
    /// called it.
    ///
    /// Streams that waited for a lost rank, and transfers and plans of this communicator, are unusable;
    /// regions, the device and other streams remain usable.
    ///
    /// # Errors
    /// [`ErrorKind::GivenUp`] if the others have declared this rank lost; [`ErrorKind::Timeout`] at the
    /// configured timeout, and [`ErrorKind::PeerFailed`] if that of another survivor passed before this rank called it: all
    /// may call it again.
    pub fn survivors(&self) -> Result<Self> {
        let deadline = self.deadline();
        let bootstrap = &self.job.bootstrap;
        loop {
            let left = losses::remaining(bootstrap);
            let members = self.group.members().iter().copied();
            let members: Vec<_> = members.filter(|member| left.contains(member)).collect();
            // The list names the group: only ranks that agree on the survivors meet in it.
            let number = self.number("survivors", &members);
            let name = self.group.name().child("survivors", &members, number);
            let group = bootstrap.named_group(&members, name)?;
            // Not a barrier: a rank that no longer waits would still be counted on by those that come later, and be one
            // call ahead of them from then on.
            match group.meet_survivors(deadline) {
                Ok(()) => return Ok(Self::of(&self.job, Arc::new(group), self.is_world)),
                // Another rank was lost: retry with the remaining ones.
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

    /// Number of groups of `members` (job ranks) created by method `how` before this one.
    pub(super) fn number(&self, how: &'static str, members: &[Rank]) -> u64 {
        let mut made = lock(&self.made);
        let count = made.entry((how, members.to_vec())).or_default();
        *count += 1;
        *count - 1
    }

    /// Communicator of `members`, which are job ranks.
    fn child(&self, how: &str, members: &[Rank], number: u64) -> Result<Self> {
        let name = self.group.name().child(how, members, number);
        let group = self.job.bootstrap.named_group(members, name)?;
        Ok(Self::of(&self.job, Arc::new(group), false))
    }
}
