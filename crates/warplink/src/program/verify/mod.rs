//! The verifier: checks that a program, run by a number of ranks, always terminates with the right result.
//!
//! It unrolls the program for every rank, matches transfers and collectives, and runs hosts and streams as far as
//! they get. No step of one agent can block another permanently, so the scheduling order does not matter: an agent
//! that is blocked at the end is blocked in every run, which is a deadlock. Each stream keeps a vector clock of the
//! happens-before relation, which signals, events and collectives propagate. Two accesses to the same bytes that the
//! clocks leave unordered are a race, on whichever rank the memory is.
//!
//! # Assumptions about a run
//! - The host enqueues and never waits for a stream; only `share` blocks it, until each peer has reached the share of
//!   the matching transfer. Signals and mappings exist from then on.
//! - A signal is a word in the memory of the rank that waits for it, one per transfer and rank; the n-th post writes
//!   n. *get*: posting the send signals *ready*; posting the receive waits for it, copies, and signals *done*, which
//!   waiting for the send waits for. *put*: posting the receive signals *ready*; posting the send waits for it,
//!   copies, and signals *done*, which waiting for the receive waits for. Waiting on the side that copies waits for
//!   the copy.
//! - In a group, signals without a dependency come first; then each copy, or each matmul that is stored at a peer,
//!   after the signal of its own transfer and in any order; then the completion signals. So a completion signal
//!   covers all copies of the group, and a copy relies on no other copy's signal. No signal implies another signal of
//!   the group, because they are set one by one. So a transfer is posted again only after a wait for that transfer
//!   itself, or after later work of its stream.
//! - The collective engine runs its operations on a rank serially, in the order in which the host enqueued them,
//!   whatever their streams. Deadlock detection relies on this order; race detection does not. A receive through the
//!   engine follows the start of its send; a send implies nothing about its receive.
//! - As a graph, the program has every ordering that it has eagerly, and more: a signal that permits a peer to read
//!   or write a buffer waits, when it is posted again, for completion of the previous post. So a program that passes
//!   is simulated a second time to check that it terminates as a graph; it must also be capturable (`capture`).
//!   Otherwise it is run eagerly.
//! - A kernel whose lanes wait, and an operation of the collective engine, occupy device resources while they wait
//!   for other ranks. If two of these are unordered on a rank, it may start either first (`room`).
//! - Tensors do not alias. Pairs that `inout` permits to alias are simulated a second time as one tensor, if kernels
//!   use them (`in_place`).
//! - Runs follow one another on the caller's stream: the program's accesses must follow the stream's state at the
//!   start and precede its state at the end, also when a peer makes them.

mod advance;
mod beside;
mod blocked;
mod capture;
mod clock;
mod collective;
mod diagnostics;
mod finish;
mod group;
mod in_place;
mod kernel;
mod kernel_accesses;
mod lanes;
mod link;
mod meetings;
mod memory;
mod neighbours;
mod numbers;
mod room;
mod shared;
mod sharing;
mod simulate;
mod state;
mod violation;
mod word;

use super::diagnostic::Diagnostic;
use super::ir::Program;
use super::parameters::Parameters;
use super::rank_program::{RankProgram, TransferId};
use super::unroll::{Budget, unroll_within};
use crate::error::Rank;
use diagnostics::Diagnostics;
pub(super) use meetings::{Meeting, Meetings};
use std::fmt;

pub use super::unroll::MAX_OPERATIONS;
pub use diagnostics::MAX_DIAGNOSTICS;
pub use neighbours::verify_links;
pub use sharing::verify_sharing;

/// Statistics of a program that passed, for all ranks together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Number of ranks.
    pub world: usize,
    /// Number of enqueued operations.
    pub operations: usize,
    /// Number of streams in use, including the callers'.
    pub streams: usize,
    /// Number of shared transfers, each counted once.
    pub transfers: usize,
    /// Number of handle exchanges.
    pub exchanges: usize,
    /// Bytes that the posts copy between ranks.
    pub bytes: u128,
    /// Reason why the program cannot run as a graph and is run eagerly, if there is one.
    pub eager_only: Option<Diagnostic>,
    /// Whether a collective engine carries a transfer or collective of any rank.
    pub uses_engine: bool,
    /// Whether the engine of all ranks, which all of them must join, carries any; `false` if only engines of
    /// subgroups do.
    pub uses_engine_of_all: bool,
    /// Whether only the vendor's library can execute some engine operation ([`RankProgram::needs_library`]).
    pub needs_library: bool,
    /// Whether kernels at both ends may perform the transfers of all ranks ([`RankProgram::suits_transfer_kernels`]).
    pub suits_transfer_kernels: bool,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "verified for {} ranks: {} operations in {} streams, {} transfers of {} bytes in all, \
             {} exchanges of handles; no deadlock, no race, every output written",
            self.world, self.operations, self.streams, self.transfers, self.bytes, self.exchanges
        )?;
        match &self.eager_only {
            Some(diagnostic) => write!(f, "\n  {diagnostic}"),
            None => Ok(()),
        }
    }
}

/// Verifies `program` for `world` ranks with `streams` streams in each rank's pool.
///
/// # Errors
/// The diagnostics, most significant first. Consequences of an earlier failure are omitted: mismatched ranks are not
/// simulated, and the end state of a deadlocked program is not checked.
pub fn verify(
    program: &Program,
    world: usize,
    streams: usize,
    parameters: &Parameters,
) -> Result<Report, Vec<Diagnostic>> {
    let mut diagnostics = Diagnostics::new(program);
    let ranks = unroll_all(program, world, streams, parameters, &mut diagnostics)?;
    let mut links = link::link(&ranks, &mut diagnostics);
    diagnostics.end_of_stage()?;
    links.kernels = kernel::check(&ranks, &links, &mut diagnostics);
    diagnostics.end_of_stage()?;
    simulate::simulate(&ranks, &links, &mut diagnostics);
    diagnostics.end_of_stage()?;
    in_place::check(&ranks, &links, &mut diagnostics);
    diagnostics.end_of_stage()?;
    let eager_only = capture::eager_only(program, &ranks, &links);
    Ok(report(&ranks, eager_only))
}

/// Unrolled program of each rank.
///
/// # Errors
/// The diagnostics of the ranks; a diagnostic common to all ranks is reported once.
fn unroll_all(
    program: &Program,
    world: usize,
    streams: usize,
    parameters: &Parameters,
    diagnostics: &mut Diagnostics<'_>,
) -> Result<Vec<RankProgram>, Vec<Diagnostic>> {
    let mut ranks: Vec<RankProgram> = Vec::with_capacity(world.min(super::unroll::MAX_RANKS));
    let mut budget = Budget::default();
    // An empty world has no rank to reject it, so rank 0 is unrolled anyway.
    for rank in 0..world.max(1) {
        match unroll_within(&mut budget, program, rank, (world, streams), parameters) {
            Ok(rank_program) => ranks.push(rank_program),
            Err(diagnostic) => {
                // A diagnostic without a line, as of a parameter, does not depend on the rank.
                let global = diagnostic.places.iter().all(|place| place.site.line == 0);
                diagnostics.add_made(diagnostic);
                if global || budget.exhausted {
                    break;
                }
            }
        }
    }
    diagnostics.end_of_stage()?;
    Ok(ranks)
}

/// A valid serial order of the operations of all ranks.
pub(super) struct Order {
    /// Rank and index of each operation.
    pub(super) operations: Vec<(Rank, usize)>,
    /// For each rank and transfer, the peer's.
    pub(super) partners: Vec<Vec<TransferId>>,
    /// Collectives and kernels with their members.
    pub(super) meetings: Meetings,
}

/// Finds a valid serial order of the operations of all ranks.
///
/// # Errors
/// The diagnostics of [`verify`] that prevent the operations from completing.
pub(super) fn order(program: &Program, ranks: &[RankProgram]) -> Result<Order, Vec<Diagnostic>> {
    let mut diagnostics = Diagnostics::new(program);
    let links = link::link(ranks, &mut diagnostics);
    diagnostics.end_of_stage()?;
    let operations = simulate::order(ranks, &links, &mut diagnostics);
    diagnostics.end_of_stage()?;
    Ok(Order {
        operations,
        partners: links.partners,
        meetings: links.meetings,
    })
}

fn report(ranks: &[RankProgram], eager_only: Option<Diagnostic>) -> Report {
    let transfers: usize = ranks.iter().map(|rank| rank.transfers.len()).sum();
    let mut bytes = 0_u128;
    for rank in ranks {
        for operation in &rank.operations {
            for &id in operation.kind.posted() {
                let transfer = &rank.transfers[id];
                if transfer.direction == super::ir::Direction::Send {
                    bytes += transfer.range.bytes as u128;
                }
            }
        }
    }
    Report {
        world: ranks.len(),
        operations: ranks.iter().map(|rank| rank.operations.len()).sum(),
        streams: ranks.iter().map(|rank| rank.streams.len()).sum(),
        // Each transfer has an end on two ranks, and both ends count.
        transfers: transfers / 2,
        exchanges: ranks.iter().map(|rank| rank.exchanges.len()).sum(),
        bytes,
        eager_only,
        uses_engine: ranks.iter().any(RankProgram::uses_engine),
        uses_engine_of_all: ranks.iter().any(RankProgram::uses_engine_of_all),
        needs_library: ranks.iter().any(RankProgram::needs_library),
        suits_transfer_kernels: ranks.iter().all(RankProgram::suits_transfer_kernels),
    }
}
