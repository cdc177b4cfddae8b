//! The verifier: whether a program, run by a number of ranks, always ends with the right bytes.
//!
//! It unrolls the program for every rank, matches transfers and collectives, and runs hosts and
//! streams as far as they get. Nothing that one of them does can hold up another for good, so the
//! order in which they are run does not matter: what is stuck at the end is stuck in every run, and
//! that is the deadlock. On the way each stream keeps a vector clock of what has happened before
//! its next operation, which signals, events and collectives hand on; two accesses to the same
//! bytes that the clocks leave unordered are a race, in whichever memory the bytes are.
//!
//! # What is assumed of a run
//! - The host enqueues and never waits for a stream; only `share` holds it, until each peer has
//!   come to the share of the matching transfer. Signals and mappings exist from then on.
//! - A signal is a word in the memory of the rank that waits for it, one per transfer and rank; the
//!   n-th post writes n. *get*: posting the send signals *ready*; posting the receive waits for it,
//!   copies, and signals *done*, for which waiting for the send waits. *put*: posting the receive
//!   signals *ready*; posting the send waits for it, copies, and signals *done*, for which waiting
//!   for the receive waits. Waiting on the side that copies waits for the copy.
//! - In a group, signals that wait for nothing come first; then each copy, or each matmul that is
//!   stored at a peer, behind the signal of its own transfer and in any order; then the signals that
//!   they are done. So each of these stands for all copies of the group, and a copy counts on no other's
//!   signal. None of them stands for another signal of the group: they are set one by one. So a transfer is
//!   posted again only behind a wait for that transfer itself, or behind what its stream did next.
//! - The collective engine runs its operations on a rank one after another, in the order in which
//!   the host gave them, whatever their streams. For a deadlock this is counted on, for an order
//!   between accesses it is not. A receive through the engine comes after its send has started; a
//!   send says nothing about its receive.
//! - As a graph, the program has every order that it has eagerly, and more: what tells a peer that a
//!   buffer may be read or written waits, where it is posted again, until it is done the time before.
//!   So a program that passes is followed once more to see whether it ends as a graph; and it has to
//!   be one that can be recorded (`capture`). Where it is not, it is run eagerly.
//! - A kernel whose lanes wait, and what the collective engine runs, hold room on a device while they wait for
//!   other ranks. Where two of these are in no order on a rank, it may start either first (`room`).
//! - Tensors are apart. What `inout` says may be one memory is followed once more as such, where kernels use it
//!   (`in_place`).
//! - Runs follow one another on the caller's stream: what the program accesses must come after the
//!   stream's state at the start and before its state at the end, also where a peer accesses it.

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

/// What a program that passed does, for all ranks together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The ranks.
    pub world: usize,
    /// Operations that are enqueued.
    pub operations: usize,
    /// Streams in use, the callers' among them.
    pub streams: usize,
    /// Transfers that are shared, each counted once.
    pub transfers: usize,
    /// Exchanges of handles.
    pub exchanges: usize,
    /// Bytes that the posts move between ranks.
    pub bytes: u128,
    /// Why the program cannot run as a graph, if it cannot: then it is run eagerly.
    pub eager_only: Option<Diagnostic>,
    /// Whether a transfer or collective of any rank is carried by a collective engine.
    pub uses_engine: bool,
    /// Whether any is carried by the engine of all ranks, which they all join then, and not by one of
    /// some ranks.
    pub uses_engine_of_all: bool,
    /// Whether kernels at both ends may do the transfers of all ranks
    /// ([`RankProgram::suits_transfer_kernels`]).
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

/// Verifies `program` for `world` ranks with `streams` streams in each one's pool.
///
/// # Errors
/// What is wrong, the most telling first. Diagnostics that others would only repeat are left out:
/// where ranks do not match there is no run to look at, and where it hangs its end is not.
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

/// The program of each rank.
///
/// # Errors
/// What is wrong with it on some ranks; once where it is wrong on all.
fn unroll_all(
    program: &Program,
    world: usize,
    streams: usize,
    parameters: &Parameters,
    diagnostics: &mut Diagnostics<'_>,
) -> Result<Vec<RankProgram>, Vec<Diagnostic>> {
    let mut ranks: Vec<RankProgram> = Vec::with_capacity(world.min(super::unroll::MAX_RANKS));
    let mut budget = Budget::default();
    // A world of none has no rank to refuse it.
    for rank in 0..world.max(1) {
        match unroll_within(&mut budget, program, rank, (world, streams), parameters) {
            Ok(rank_program) => ranks.push(rank_program),
            Err(diagnostic) => {
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

/// An order in which the operations of all ranks may be done one after another.
pub(super) struct Order {
    /// The operations.
    pub(super) operations: Vec<(Rank, usize)>,
    /// For each rank and transfer, the peer's.
    pub(super) partners: Vec<Vec<TransferId>>,
    /// The collectives, and who meets for them.
    pub(super) meetings: Meetings,
}

/// Finds an order for the operations of all ranks.
///
/// # Errors
/// As [`verify`], of what keeps the operations from being done.
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
        transfers: transfers / 2,
        exchanges: ranks.iter().map(|rank| rank.exchanges.len()).sum(),
        bytes,
        eager_only,
        uses_engine: ranks.iter().any(RankProgram::uses_engine),
        uses_engine_of_all: ranks.iter().any(RankProgram::uses_engine_of_all),
        suits_transfer_kernels: ranks.iter().all(RankProgram::suits_transfer_kernels),
    }
}
