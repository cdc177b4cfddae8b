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
use crate::error::Rank;
use crate::program::diagnostic::DiagnosticKind;
use crate::program::rank_program::RankProgram;

/// What holds room on a rank's device while it waits.
#[derive(Clone)]
pub(super) struct Room {
    /// The last kernel whose lanes wait.
    pub(super) kernel: Option<Done>,
    /// The last operation of the engine that waits for other ranks, and those that came after it.
    pub(super) engine: Vec<Done>,
    /// What happened before the engine's next operation, by the engine's order too.
    pub(super) before_engine: Clock,
    /// Kernels that do not come after the start of the run: the first of each stream.
    pub(super) not_forked: Vec<(usize, usize)>,
}

/// What may hold room.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Holder {
    Kernel { waits: bool },
    Engine { waits: bool },
}

/// An operation that is done, as a point of its stream.
#[derive(Clone, Copy)]
pub(super) struct Done {
    pub(super) operation: usize,
    pub(super) stream: usize,
    pub(super) time: u32,
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
    pub(super) fn engine_beside(&self, clock: &Clock) -> Option<usize> {
        let known = self.engine.iter().any(|done| done.precedes(clock));
        let last = self.engine.first()?;
        (!known).then_some(last.operation)
    }
}

impl Done {
    pub(super) fn precedes(&self, clock: &Clock) -> bool {
        clock.get(self.stream) >= self.time
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
