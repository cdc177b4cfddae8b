//! Which transfers of the ranks belong together.

use crate::error::{Error, ErrorKind, Rank, Result};
use crate::program::ir::Direction;
use crate::program::{RankProgram, TransferId};
use std::collections::HashMap;

/// For each rank and transfer, the peer's other end of it.
pub(super) type Partners = Vec<Vec<TransferId>>;

/// Finds the other end of every transfer.
///
/// # Errors
/// [`ErrorKind::Verification`] for one that has none.
pub(super) fn partners(ranks: &[RankProgram]) -> Result<Partners> {
    type Key = (Direction, Rank, i64, usize);
    let tables: Vec<HashMap<Key, TransferId>> = ranks
        .iter()
        .map(|rank| {
            let keyed = rank.transfers.iter().enumerate();
            keyed
                .map(|(id, t)| ((t.direction, t.peer, t.tag, t.ordinal), id))
                .collect()
        })
        .collect();
    let of = |rank: Rank, program: &RankProgram| -> Result<Vec<TransferId>> {
        let other = |transfer: &crate::program::TransferInstance| {
            let opposite = match transfer.direction {
                Direction::Send => Direction::Receive,
                Direction::Receive => Direction::Send,
            };
            let key = (opposite, rank, transfer.tag, transfer.ordinal);
            let found = tables.get(transfer.peer).and_then(|table| table.get(&key));
            found.copied().ok_or_else(|| {
                Error::new(
                    ErrorKind::Verification,
                    format!(
                        "the {} '{}' has no other end, {}",
                        transfer.direction, transfer.name, transfer.site
                    ),
                )
                .with_operation("simulate a program")
                .with_rank(rank)
                .with_peer(transfer.peer)
                .with_help("verify the program")
            })
        };
        program.transfers.iter().map(other).collect()
    };
    ranks
        .iter()
        .enumerate()
        .map(|(rank, program)| of(rank, program))
        .collect()
}
