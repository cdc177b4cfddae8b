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
        match &ranks[rank].operations[operation].kind {
            OperationKind::Allocate(_)
            | OperationKind::Share(_)
            | OperationKind::Synchronize(_) => {}
            OperationKind::Deallocate(tensor) => {
                let place = (rank, ranks[rank].whole(*tensor));
                let mode = AccessMode::Deallocate;
                self.touch((stream, operation), place, mode, violations);
            }
            kind @ (OperationKind::Zero(_)
            | OperationKind::Copy { .. }
            | OperationKind::Matmul(_)
            | OperationKind::Elementwise(_)) => {
                for access in ranks[rank].accesses(kind) {
                    let mode = match (access.reads, access.writes) {
                        (true, true) => AccessMode::Update,
                        (_, false) => AccessMode::Read,
                        (false, true) => AccessMode::Write,
                    };
                    let place = (rank, &access.area);
                    self.touch_area((stream, operation), place, mode, violations);
                }
            }
            kind @ (OperationKind::Post(_) | OperationKind::PostMatmul(_)) => {
                self.finish_post(stream, operation, kind.posted(), violations);
                // The next record of an event then gets a later time, since the words of a group are set one by one
                // and a point inside the group must not count as after all of them.
                self.streams[stream].signalled = true;
            }
            OperationKind::Kernel(_) => self.finish_kernel(stream, operation, violations),
            OperationKind::Wait(group) => self.finish_wait(stream, operation, group),
            OperationKind::Collective(it) => {
                self.finish_collective(stream, operation, it, violations);
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
        // If its host has not enqueued it yet, the stream's queue is empty or blocked elsewhere, and this wake-up
        // does nothing.
        if let Some(&next) = engine.order.get(engine.done) {
            let stream = self.first_stream[rank] + self.ranks[rank].operations[next].stream;
            self.wake(stream);
        }
    }
}
