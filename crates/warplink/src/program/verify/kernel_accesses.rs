//! Accesses of kernels to each rank's tensors, and the kernels that wait.

use super::memory::Mode;
use crate::error::Rank;
use crate::program::rank_program::Range;
use std::collections::{BTreeSet, HashMap};

/// Accesses of a kernel to a rank's tensors: ranges that do not overlap, in the order of tensors and bytes.
pub(super) type RankAccesses = Vec<(Range, Mode)>;

/// Accesses of a kernel that makes those of `one` or those of `other`, depending on values in memory.
pub(super) fn either(one: &RankAccesses, other: &RankAccesses) -> RankAccesses {
    let both = || one.iter().chain(other);
    let ends = both()
        .flat_map(|(range, _)| [range.offset_bytes, range.end()].map(|at| (range.tensor, at)));
    let ends: Vec<(usize, usize)> = ends.collect::<BTreeSet<_>>().into_iter().collect();
    let mode = |of: &RankAccesses, tensor: usize, at: usize| {
        let is = |(range, _): &&(Range, Mode)| {
            range.tensor == tensor && range.offset_bytes <= at && at < range.end()
        };
        of.iter().find(is).map(|(_, mode)| *mode)
    };
    let mut all = RankAccesses::new();
    for pair in ends.windows(2) {
        let ((tensor, from), (of, to)) = (pair[0], pair[1]);
        let mode = match (mode(one, tensor, from), mode(other, tensor, from)) {
            // A window between two tensors is no range of either.
            _ if of != tensor => continue,
            // Bytes that only one alternative accesses become `May…`: they may race, but nothing may rely on their
            // being written.
            (Some(one), other) => one.or(other),
            (None, Some(other)) => other.or(None),
            (None, None) => continue,
        };
        match all.last_mut() {
            Some((last, same)) if (last.tensor, last.end(), *same) == (tensor, from, mode) => {
                last.bytes += to - from;
            }
            _ => all.push((Range::of(tensor, from..to), mode)),
        }
    }
    all
}

/// Effects of kernels on each rank, by rank and operation.
#[derive(Debug, Default)]
pub(super) struct KernelAccesses(HashMap<(Rank, usize), OnRank>);

/// Effects of a kernel on a rank.
#[derive(Debug)]
pub(super) struct OnRank {
    /// Accesses to this rank's tensors by its own lanes and those of other ranks.
    pub(super) accesses: RankAccesses,
    /// Whether a lane waits for another lane of any rank, or a lane of another rank waits for this rank.
    pub(super) waits: bool,
}

impl KernelAccesses {
    /// Records the effects of the kernel at an operation of a rank.
    pub(super) fn insert(&mut self, rank: Rank, operation: usize, does: OnRank) {
        self.0.insert((rank, operation), does);
    }

    /// Accesses of the kernel at an operation of a rank; empty if none are recorded.
    pub(super) fn of(&self, rank: Rank, operation: usize) -> &[(Range, Mode)] {
        let does = self.0.get(&(rank, operation));
        does.map_or(&[], |does| does.accesses.as_slice())
    }

    /// Whether lanes wait in the kernel at an operation of a rank.
    pub(super) fn waits(&self, rank: Rank, operation: usize) -> bool {
        let does = self.0.get(&(rank, operation));
        does.is_some_and(|does| does.waits)
    }

    /// Whether lanes wait in any kernel.
    pub(super) fn any_waits(&self) -> bool {
        self.0.values().any(|does| does.waits)
    }
}
