//! Memory accesses of operations.

use super::memory::{Actor, Mode as AccessMode, RecordedAccess};
use super::state::SimulatedRun;
use super::violation::Violations;
use crate::error::Rank;
use crate::program::area::Area;
use crate::program::rank_program::{OperationKind, Range};

impl SimulatedRun<'_> {
    /// Performs the effects of an operation once all its dependencies are satisfied.
    pub(super) fn finish(&mut self, stream: usize, operation: usize, violations: &mut Violations) {
        let (rank, ranks) = (self.streams[stream].rank, self.ranks);
        let mut touch = |run: &mut Self, range: Range, mode: AccessMode| {
            run.touch((stream, operation), (rank, range), mode, violations);
        };
        match &ranks[rank].operations[operation].kind {
            OperationKind::Allocate(_)
            | OperationKind::Share(_)
            | OperationKind::Synchronize(_) => {}
            OperationKind::Deallocate(tensor) => {
                let all = Range {
                    tensor: *tensor,
                    offset_bytes: 0,
                    bytes: ranks[rank].tensors[*tensor].bytes,
                };
                touch(self, all, AccessMode::Deallocate);
            }
            OperationKind::Zero(range) => touch(self, *range, AccessMode::Write),
            OperationKind::Copy { target, source } => {
                touch(self, *source, AccessMode::Read);
                touch(self, *target, AccessMode::Write);
            }
            OperationKind::Matmul {
                a,
                b,
                c,
                bias,
                spec,
            } => {
                if let Some(bias) = bias {
                    touch(self, *bias, AccessMode::Read);
                }
                let mut touch = |run: &mut Self, area: &Area, mode: AccessMode| {
                    run.touch_area((stream, operation), (rank, area), mode, violations);
                };
                touch(self, a, AccessMode::Read);
                touch(self, b, AccessMode::Read);
                let mode = if spec.accumulate {
                    AccessMode::Update
                } else {
                    AccessMode::Write
                };
                touch(self, c, mode);
            }
            OperationKind::Elementwise {
                target, sources, ..
            } => {
                let mut touch = |run: &mut Self, area: &Area, mode: AccessMode| {
                    run.touch_area((stream, operation), (rank, area), mode, violations);
                };
                for source in sources.iter().filter(|source| *source != target) {
                    touch(self, source, AccessMode::Read);
                }
                let mode = if sources.contains(target) {
                    AccessMode::Update
                } else {
                    AccessMode::Write
                };
                touch(self, target, mode);
            }
            OperationKind::Post(group) | OperationKind::PostMatmul { group, .. } => {
                self.finish_post(stream, operation, group, violations);
                self.streams[stream].signalled = true;
            }
            OperationKind::Kernel(_) => self.finish_kernel(stream, operation, violations),
            OperationKind::Wait(group) => self.finish_wait(stream, operation, group),
            OperationKind::Collective {
                collective,
                target,
                source,
                ..
            } => {
                let places = (target, source);
                self.finish_collective(stream, operation, collective, places, violations);
            }
        }
    }

    /// Records an access of a stream's operation to a range of a rank's memory, with the stream's clock.
    pub(super) fn touch(
        &mut self,
        (stream, operation): (usize, usize),
        (owner, range): (Rank, Range),
        mode: AccessMode,
        violations: &mut Violations,
    ) {
        self.touch_area(
            (stream, operation),
            (owner, &range.into()),
            mode,
            violations,
        );
    }

    /// Like [`touch`](Self::touch), for an area that need not be contiguous.
    fn touch_area(
        &mut self,
        (stream, operation): (usize, usize),
        (owner, area): (Rank, &Area),
        mode: AccessMode,
        violations: &mut Violations,
    ) {
        let state = &self.streams[stream];
        let access = RecordedAccess {
            actor: Actor::operation(state.rank, operation),
            stream: stream as u32,
            time: state.clock.get(stream),
            mode,
        };
        self.access(owner, area, access, violations);
    }

    /// Allows the engine's next operation on a rank to begin.
    pub(super) fn engine_done(&mut self, rank: Rank) {
        let engine = &mut self.engines[rank];
        engine.done += 1;
        if let Some(&next) = engine.order.get(engine.done) {
            let stream = self.first_stream[rank] + self.ranks[rank].operations[next].stream;
            self.wake(stream);
        }
    }
}
