//! Device resources that are held while waiting for other ranks: by kernels whose lanes wait, and by operations of
//! the collective engine.
//!
//! If two of these are unordered on a rank, its device may start either first, and the other only once resources are
//! free. The first then waits for another rank, which may have started the other one first. So they have to be
//! ordered, or ranks may deadlock; orders that differ among ranks are a deadlock in any run. Kernels share a
//! workspace and must be ordered in any case (`kernel`), and the engine's operations of a rank run serially, which is
//! assumed here.

use super::clock::Clock;
use super::diagnostics::{Diagnostics, place_of};
use crate::error::Rank;
use crate::program::diagnostic::DiagnosticKind;
use crate::program::rank_program::RankProgram;

/// Operations that hold resources of a rank's device while they wait.
#[derive(Clone)]
pub(super) struct Room {
    /// Last kernel whose lanes wait.
    pub(super) kernel: Option<Done>,
    /// Last operation of the engine that waits for other ranks, followed by the later ones.
    pub(super) engine: Vec<Done>,
    /// Clock before the engine's next operation, including the engine's serial order.
    pub(super) before_engine: Clock,
    /// Kernels that do not follow the start of the run: the first of each stream.
    pub(super) not_forked: Vec<(usize, usize)>,
}

/// Kind of an operation that may hold device resources.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Holder {
    Kernel { waits: bool },
    Engine { waits: bool },
}

/// A completed operation, as a point of its stream.
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

    /// Last waiting operation of the engine, unless `clock` is ordered after its completion.
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

/// Reports a kernel and an engine operation of a rank that may run concurrently; if `before` is set, the engine
/// operation belongs to the previous run.
pub(super) fn report(
    ranks: &[RankProgram],
    (rank, kernel, engine): (Rank, usize, usize),
    before: bool,
    diagnostics: &mut Diagnostics<'_>,
) {
    let places = [kernel, engine].map(|operation| place_of(ranks, rank, operation));
    diagnostics.add(DiagnosticKind::Deadlock, places, |[kernel, engine]| {
        let (of, help) = if before {
            (" of the run before", "synchronize with the caller's stream first")
        } else {
            ("", "synchronize their streams, in the same order on all ranks")
        };
        format!(
            "{kernel} is in no order with {engine}{of}; both hold room on the device while they wait for other ranks, \
             and where one has to wait for the other's room, ranks that start them in different orders wait \
             for ever: {help}"
        )
    });
}
