//! What holds room on a device while it waits for other ranks: kernels whose lanes wait, and what the
//! collective engine runs.
//!
//! Where two of these are in no order on a rank, its device may start either first, and the other only when
//! there is room for it. The first then waits for another rank, on which the other may have been started
//! first. So they have to be ordered, or else ranks wait for one another for ever; orders that differ among
//! ranks are a deadlock in any run. Kernels share a workspace and are ordered in any case (`kernel`), and
//! the engine's operations of a rank come one after another, which is counted on here.

use super::clock::Clock;
use super::diagnostics::{Diagnostics, place_of};
use super::state::{Mode, Run};
use super::violation::Violations;
use crate::error::Rank;
use crate::program::diagnostic::DiagnosticKind;
use crate::program::rank_program::{OperationKind, RankProgram};

/// What holds room on a rank's device while it waits.
#[derive(Clone)]
pub(super) struct Room {
    /// The last kernel whose lanes wait.
    kernel: Option<Done>,
    /// The last operation of the engine that waits for other ranks, and those that came after it.
    engine: Vec<Done>,
    /// What happened before the engine's next operation, by the engine's order too.
    before_engine: Clock,
    /// Kernels that do not come after the start of the run: the first of each stream.
    not_forked: Vec<(usize, usize)>,
}

/// What may hold room.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Holder {
    Kernel { waits: bool },
    Engine { waits: bool },
}

/// An operation that is done, as a point of its stream.
#[derive(Clone, Copy)]
struct Done {
    operation: usize,
    stream: usize,
    time: u32,
}

impl Room {
    pub(super) fn new(clock: Clock) -> Self {
        Self {
            kernel: None,
            engine: Vec::new(),
            before_engine: clock,
            not_forked: Vec::new(),
        }
    }

    /// The engine's last operation that waits, where `clock` does not know it to be done.
    fn engine_beside(&self, clock: &Clock) -> Option<usize> {
        let known = self.engine.iter().any(|done| done.precedes(clock));
        let last = self.engine.first()?;
        (!known).then_some(last.operation)
    }
}

impl Done {
    fn precedes(&self, clock: &Clock) -> bool {
        clock.get(self.stream) >= self.time
    }
}

impl Run<'_> {
    /// What an operation holds, where that is followed.
    pub(super) fn holder(&self, rank: Rank, operation: usize) -> Option<Holder> {
        if self.rooms.is_empty() || self.mode == Mode::Captured {
            return None;
        }
        let program = &self.ranks[rank];
        match &program.operations[operation].kind {
            OperationKind::Kernel(_) => {
                let waits = self.links.kernels.waits(rank, operation);
                Some(Holder::Kernel { waits })
            }
            OperationKind::Collective { .. } => {
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

    /// Finds what an operation that begins may be beside of.
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
                if let (true, Some(other)) = (waits, room.engine_beside(clock)) {
                    violations.no_room(rank, operation, other);
                }
                let forked = clock.get(self.first_stream[rank]) > 0;
                let is_first = room.not_forked.iter().all(|(_, other)| *other != stream);
                if !forked && is_first {
                    room.not_forked.push((operation, stream));
                }
            }
            Holder::Engine { waits: true } => {
                if let Some(kernel) = &room.kernel
                    && !kernel.precedes(clock)
                    && !kernel.precedes(&room.before_engine)
                {
                    violations.no_room(rank, kernel.operation, operation);
                }
            }
            Holder::Engine { waits: false } => {}
        }
    }

    /// Notes that an operation is done.
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

    /// Kernels that may begin while the run before is still under way. All that they come after in that run
    /// is what their own stream came after.
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
                diagnostics.add(DiagnosticKind::Race, places.to_vec(), |said| {
                    format!(
                        "{} may run beside {} of the run before; kernels of a program use one workspace: \
                         synchronize with the caller's stream first",
                        said.say(&places[0]),
                        said.say(&places[1])
                    )
                });
            }
        }
    }
}

/// Reports a kernel and an operation of the engine on a rank that may run side by side; the latter in the run
/// before, where `before` says so.
pub(super) fn report(
    ranks: &[RankProgram],
    (rank, kernel, engine): (Rank, usize, usize),
    before: bool,
    diagnostics: &mut Diagnostics<'_>,
) {
    let places = [kernel, engine].map(|operation| place_of(ranks, rank, operation));
    diagnostics.add(DiagnosticKind::Deadlock, places.to_vec(), |said| {
        let (of, help) = if before {
            (" of the run before", "synchronize with the caller's stream first")
        } else {
            ("", "synchronize their streams, in the same order on all ranks")
        };
        format!(
            "{} is in no order with {}{of}; both hold room on the device while they wait for other ranks, \
             and where one has to wait for the other's room, ranks that start them in different orders wait \
             for ever: {help}",
            said.say(&places[0]),
            said.say(&places[1])
        )
    });
}
