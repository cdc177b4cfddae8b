//! What kernels access of each rank's tensors, and which of them wait.

use super::memory::Mode;
use crate::error::Rank;
use crate::program::rank_program::Range;
use std::collections::HashMap;

/// What kernels do on each rank, by rank and operation.
#[derive(Debug, Default)]
pub(super) struct KernelAccesses(HashMap<(Rank, usize), OnRank>);

/// What a kernel does on a rank.
#[derive(Debug)]
pub(super) struct OnRank {
    /// What its lanes, and those of other ranks, access of this rank's tensors.
    pub(super) accesses: Vec<(Range, Mode)>,
    /// Whether a lane waits for another lane, of this rank or of another, or one of another rank for this rank.
    pub(super) waits: bool,
}

impl KernelAccesses {
    /// Notes what the kernel that is an operation of a rank does there.
    pub(super) fn insert(&mut self, rank: Rank, operation: usize, does: OnRank) {
        self.0.insert((rank, operation), does);
    }

    /// What the kernel that is an operation of a rank accesses; nothing where none is noted.
    pub(super) fn of(&self, rank: Rank, operation: usize) -> &[(Range, Mode)] {
        let does = self.0.get(&(rank, operation));
        does.map_or(&[], |does| does.accesses.as_slice())
    }

    /// Whether lanes wait in the kernel that is an operation of a rank.
    pub(super) fn waits(&self, rank: Rank, operation: usize) -> bool {
        let does = self.0.get(&(rank, operation));
        does.is_some_and(|does| does.waits)
    }

    /// Whether lanes wait in any kernel.
    pub(super) fn any_waits(&self) -> bool {
        self.0.values().any(|does| does.waits)
    }
}
