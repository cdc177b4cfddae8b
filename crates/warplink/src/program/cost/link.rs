//! Matches the transfers of the ranks.

use crate::error::{Error, ErrorKind, Result};
use crate::program::{RankProgram, TransferId, partners};

/// For each rank and transfer, the peer's matching transfer.
pub(super) type Partners = Vec<Vec<TransferId>>;

/// Finds the matching end of every transfer.
///
/// # Errors
/// [`ErrorKind::Verification`] for a transfer without one.
pub(super) fn partners(ranks: &[RankProgram]) -> Result<Partners> {
    let of_rank = |(program, partners): (&RankProgram, Vec<Option<TransferId>>)| {
        let both = program.transfers.iter().zip(partners);
        let partner = both.map(|(transfer, partner)| {
            partner.ok_or_else(|| {
                let message = format!(
                    "the {} '{}' has no other end, {}",
                    transfer.direction, transfer.name, transfer.site
                );
                Error::new(ErrorKind::Verification, message)
                    .with_operation("simulate a program")
                    .with_rank(program.rank)
                    .with_peer(transfer.peer)
                    .with_help("verify the program")
            })
        });
        partner.collect()
    };
    ranks
        .iter()
        .zip(partners::partners(ranks))
        .map(of_rank)
        .collect()
}
