//! What kernels access of each rank's tensors.

use super::memory::Mode;
use crate::error::Rank;
use crate::program::rank_program::Range;
use std::collections::HashMap;

/// What kernels access of each rank's tensors, by rank and operation.
#[derive(Debug, Default)]
pub(super) struct KernelAccesses(HashMap<(Rank, usize), Vec<(Range, Mode)>>);

impl KernelAccesses {
    /// Notes what the kernel that is an operation of a rank accesses.
    pub(super) fn insert(&mut self, rank: Rank, operation: usize, accesses: Vec<(Range, Mode)>) {
        self.0.insert((rank, operation), accesses);
    }

    /// What the kernel that is an operation of a rank accesses; nothing where none is noted.
    pub(super) fn of(&self, rank: Rank, operation: usize) -> &[(Range, Mode)] {
        self.0.get(&(rank, operation)).map_or(&[], Vec::as_slice)
    }
}
