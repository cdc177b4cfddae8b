//! Finds operations that hold device resources while another unordered operation holds some too (`room`).

use super::diagnostics::{Diagnostics, place_of};
use super::room::{Done, Holder, report};
use super::state::{Mode, SimulatedRun};
use super::violation::Violations;
use crate::error::Rank;
use crate::program::diagnostic::DiagnosticKind;
use crate::program::rank_program::OperationKind;

impl SimulatedRun<'_> {
    /// Device resources that an operation holds, if they are tracked.
    pub(super) fn holder(&self, rank: Rank, operation: usize) -> Option<Holder> {
        // Clocks do not advance in the simulation of a graph, so they could not show an order.
        if self.rooms.is_empty() || self.mode == Mode::Captured {
            return None;
        }
        let program = &self.ranks[rank];
        match &program.operations[operation].kind {
            OperationKind::Kernel(_) => {
                let waits = self.links.kernels.waits(rank, operation);
                Some(Holder::Kernel { waits })
            }
            OperationKind::Collective(_) => {
                let number = self.collective_number(rank, operation)?;
                let waits = self.links.meetings.all[number].len() > 1;
                Some(Holder::Engine { waits })
            }
            kind if program.is_engine_work(kind) => {
                let mut peers = kind.posted().iter().map(|id| program.transfers[*id].peer);
                let waits = peers.any(|peer| peer != rank);
                Some(Holder::Engine { waits })
            }
            _ => None,
        }
    }

    /// Finds operations that may run concurrently with an operation that begins.
    pub(super) fn take_room(
        &mut self,
        stream: usize,
        operation: usize,
        holder: Holder,
        violations: &mut Violations,
    ) {
        let rank = self.streams[stream].rank;
        let clock = &self.streams[stream].clock;
        let room = &mut self.rooms[rank];
        match holder {
            Holder::Kernel { waits } => {
                // Operations are visited in one valid order, so a pair is found at whichever of the two comes second:
                // each side checks against those that are done.
                if let (true, Some(other)) = (waits, room.engine_beside(clock)) {
                    violations.no_room(rank, operation, other);
                }
                // The caller's stream starts at time 1, and streams that have not synchronized with it know of 0.
                let forked = clock.get(self.first_stream[rank]) > 0;
                let is_first = room.not_forked.iter().all(|(_, other)| *other != stream);
                if !forked && is_first {
                    room.not_forked.push((operation, stream));
                }
            }
            Holder::Engine { waits: true } => {
                if let Some(kernel) = &room.kernel
                    && !kernel.precedes(clock)
                    // The engine runs serially, so an operation also follows whatever any earlier one followed.
                    && !kernel.precedes(&room.before_engine)
                {
                    violations.no_room(rank, kernel.operation, operation);
                }
            }
            Holder::Engine { waits: false } => {}
        }
    }

    /// Records completion of an operation.
    pub(super) fn leave_room(&mut self, stream: usize, operation: usize, holder: Holder) {
        let clock = &self.streams[stream].clock;
        let room = &mut self.rooms[self.streams[stream].rank];
        let done = Done {
            operation,
            stream,
            time: clock.get(stream),
        };
        match holder {
            Holder::Kernel { waits: true } => room.kernel = Some(done),
            Holder::Kernel { waits: false } => {}
            Holder::Engine { waits } => {
                // An earlier waiting operation is over when this one starts, so a kernel can overlap only with the
                // last; those behind it stay, as knowing any of them implies that the last one is over.
                if waits {
                    room.engine.clear();
                }
                if waits || !room.engine.is_empty() {
                    room.engine.push(done);
                }
                room.before_engine.join(clock);
            }
        }
    }

    /// Kernels that may begin while the previous run is still in flight. Only work their own stream follows in the
    /// previous run is ordered before them.
    pub(super) fn beside_the_run_before(&self, rank: Rank, diagnostics: &mut Diagnostics<'_>) {
        let Some(room) = self.rooms.get(rank) else {
            return;
        };
        for &(kernel, stream) in &room.not_forked {
            let end = &self.streams[stream].clock;
            let waits = self.links.kernels.waits(rank, kernel);
            if let (true, Some(other)) = (waits, room.engine_beside(end)) {
                report(self.ranks, (rank, kernel, other), true, diagnostics);
            }
            if let Some((last, done)) = &self.launched[rank]
                && !done.precedes(end)
            {
                let places = [kernel, *last].map(|operation| place_of(self.ranks, rank, operation));
                diagnostics.add(DiagnosticKind::Race, places, |[kernel, last]| {
                    format!(
                        "{kernel} may run beside {last} of the run before; kernels of a program use one workspace: \
                         synchronize with the caller's stream first"
                    )
                });
            }
        }
    }
}
