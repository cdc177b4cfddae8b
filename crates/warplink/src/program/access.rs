//! Memory accesses of a rank's operations.

use super::area::Area;
use super::ir::{Backend, Collective, Direction, Protocol};
use super::rank_program::{OperationKind, RankProgram, TransferInstance};
use super::section::TensorId;
use super::tensor::Range;
use std::collections::HashSet;

/// Kind of access to an area of memory.
#[derive(Clone, Debug)]
pub(super) struct Access {
    pub(super) area: Area,
    pub(super) reads: bool,
    pub(super) writes: bool,
}

impl RankProgram {
    /// This rank's memory that an operation reads, writes, or exposes to a peer.
    pub(super) fn accesses(&self, kind: &OperationKind) -> Vec<Access> {
        let area = |area: &Area, reads, writes| Access {
            area: area.clone(),
            reads,
            writes,
        };
        let range = |range: &Range, reads, writes| area(&Area::from(*range), reads, writes);
        match kind {
            OperationKind::Allocate(_)
            | OperationKind::Deallocate(_)
            | OperationKind::Share(_)
            | OperationKind::Wait(_)
            | OperationKind::Synchronize(_) => Vec::new(),
            // The accesses of single lanes are not distinguished: the kernel accesses each tensor as a whole.
            OperationKind::Kernel(section) => {
                let all = section.user_tensors();
                all.map(|tensor| range(&self.whole(tensor), true, true))
                    .collect()
            }
            OperationKind::Zero(target) => vec![range(target, false, true)],
            OperationKind::Copy { target, source } => {
                vec![range(source, true, false), range(target, false, true)]
            }
            OperationKind::Collective(it) => {
                let kept =
                    // Only the root gets the result of a reduction; the targets of other ranks are left as they are.
                    matches!(it.collective, Collective::Reduce(_, root) if root != self.rank);
                vec![
                    range(&it.source, true, false),
                    range(&it.target, false, !kept),
                ]
            }
            OperationKind::Matmul(it) => {
                let bias = it.bias.iter().map(|bias| range(bias, true, false));
                let operands = [&it.a, &it.b].map(|operand| area(operand, true, false));
                // Accumulation reads the target too, which must have been written before.
                let result = area(&it.c, it.spec.accumulate, true);
                bias.chain(operands).chain([result]).collect()
            }
            // The products go to the peers' memory, whose accesses are those of their transfers.
            OperationKind::PostMatmul(it) => {
                let all = it.a.iter().chain([&it.b]).chain(&it.bias);
                all.map(|operand| range(operand, true, false)).collect()
            }
            OperationKind::Elementwise(it) => {
                // An operand equal to the target is one access that reads and writes: as two, it would conflict with
                // itself.
                let others = it.sources.iter().filter(|source| **source != it.target);
                let others = others.map(|source| area(source, true, false));
                let updates = it.sources.contains(&it.target);
                others.chain([area(&it.target, updates, true)]).collect()
            }
            OperationKind::Post(group) => {
                let transfers = group.iter().map(|id| &self.transfers[*id]);
                let end = |transfer: &TransferInstance| {
                    let sends = transfer.direction == Direction::Send;
                    range(&transfer.range, sends, !sends)
                };
                transfers.map(end).collect()
            }
        }
    }

    /// The whole tensor.
    pub(super) fn whole(&self, tensor: TensorId) -> Range {
        Range::of(tensor, 0..self.tensors[tensor].bytes)
    }

    /// The areas that an operation accesses.
    pub(super) fn areas(&self, kind: &OperationKind) -> impl Iterator<Item = Area> + Clone {
        self.accesses(kind).into_iter().map(|access| access.area)
    }

    /// Every area of this rank's memory that its operations and transfers read, write, or expose to a peer.
    pub(super) fn all_areas(&self) -> impl Iterator<Item = Area> + Clone {
        let operations = self.operations.iter();
        let areas = operations.flat_map(|operation| self.areas(&operation.kind));
        areas.chain(self.transfers.iter().map(|t| Area::from(t.range)))
    }

    /// The tensors that anything reads or writes on this rank. The others only give sends a name and a length; their
    /// bytes are stored straight into the receivers' memory.
    pub fn touched(&self) -> HashSet<TensorId> {
        let operations = self.operations.iter();
        let areas = operations.flat_map(|operation| self.areas(&operation.kind));
        let mut touched: HashSet<TensorId> = areas.map(|area| area.span.tensor).collect();
        // A peer may access the memory whether or not this rank posts the transfer.
        let stored = |transfer: &&TransferInstance| {
            (transfer.direction, transfer.backend)
                == (Direction::Send, Backend::Direct(Protocol::Put))
        };
        let others = self.transfers.iter().filter(|t| !stored(t));
        touched.extend(others.map(|transfer| transfer.range.tensor));
        touched
    }
}
