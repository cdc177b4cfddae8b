//! Matching of sends and receives across ranks.

use super::ir::Direction;
use super::rank_program::{RankProgram, TransferId};
use crate::error::Rank;
use std::collections::HashMap;

/// For each rank and transfer, the matching transfer of the peer, if any.
pub(super) fn partners(ranks: &[RankProgram]) -> Vec<Vec<Option<TransferId>>> {
    type Key = (Direction, Rank, i64, usize);
    let tables: Vec<HashMap<Key, TransferId>> = ranks
        .iter()
        .map(|program| {
            let keyed = program.transfers.iter().enumerate();
            keyed
                .map(|(id, t)| ((t.direction, t.peer, t.tag, t.ordinal), id))
                .collect()
        })
        .collect();
    let of_rank = |(rank, program): (Rank, &RankProgram)| {
        let transfers = program.transfers.iter();
        let partner = transfers.map(|transfer| {
            let key = (
                transfer.direction.reversed(),
                rank,
                transfer.tag,
                transfer.ordinal,
            );
            tables.get(transfer.peer)?.get(&key).copied()
        });
        partner.collect()
    };
    ranks.iter().enumerate().map(of_rank).collect()
}
