//! Accesses of kernels to each rank's tensors, and the kernels that wait.

use super::memory::Mode;
use crate::error::Rank;
use crate::program::rank_program::Range;
use std::collections::HashMap;

/// Effects of kernels on each rank, by rank and operation.
#[derive(Debug, Default)]
pub(super) struct KernelAccesses(HashMap<(Rank, usize), OnRank>);

/// Effects of a kernel on a rank.
#[derive(Debug)]
pub(super) struct OnRank {
    /// Accesses to this rank's tensors by its own lanes and those of other ranks.
    pub(super) accesses: Vec<(Range, Mode)>,
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
