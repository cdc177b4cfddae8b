//! Sequence numbers of posts within their transfer, and the number of posts that a wait covers.

use crate::program::rank_program::{OperationKind, RankProgram};

/// Sequence numbers of one rank's posts and waits, in the order of their groups.
#[derive(Debug)]
pub(super) struct Numbers {
    /// For each operation, the start of its numbers.
    starts: Vec<usize>,
    numbers: Vec<u32>,
}

impl Numbers {
    pub(super) fn new(program: &RankProgram) -> Self {
        let mut posted = vec![0_u32; program.transfers.len()];
        let mut starts = Vec::with_capacity(program.operations.len() + 1);
        let mut numbers = Vec::new();
        for operation in &program.operations {
            starts.push(numbers.len());
            let group = operation.kind.posted();
            for &id in group {
                posted[id] += 1;
            }
            let group = match &operation.kind {
                OperationKind::Wait(waited) => waited,
                _ => group,
            };
            numbers.extend(group.iter().map(|&id| posted[id]));
        }
        starts.push(numbers.len());
        Self { starts, numbers }
    }

    /// Numbers of an operation, one for each transfer of its group.
    pub(super) fn of(&self, operation: usize) -> impl Iterator<Item = usize> {
        let range = self.starts[operation]..self.starts[operation + 1];
        self.numbers[range].iter().map(|number| *number as usize)
    }

    /// Number of the member at `position` of an operation's group.
    pub(super) fn at(&self, operation: usize, position: usize) -> usize {
        self.numbers[self.starts[operation] + position] as usize
    }
}
