//! The store's state of every rank.

use super::message::{Refusal, RefusalKind};

/// The state of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum MemberState {
    Absent,
    Present,
    Left,
    Lost {
        reason: String,
        /// How many were lost before it.
        before: usize,
    },
}

/// Every rank's state.
pub(crate) type MemberStates = [MemberState];

/// Which of `ranks` was lost first, if any was.
///
/// When a rank is lost, others often leave because of it, in order or not, so errors name the first one: the cause.
pub(crate) fn first_lost(
    ranks: impl IntoIterator<Item = u32>,
    members: &MemberStates,
) -> Option<u32> {
    let lost = ranks
        .into_iter()
        .filter_map(|rank| match members.get(rank as usize) {
            Some(MemberState::Lost { before, .. }) => Some((*before, rank)),
            _ => None,
        });
    lost.min().map(|(_, rank)| rank)
}

/// Why a wait that depends on `rank` cannot succeed, if it cannot.
pub(crate) fn gone(rank: u32, members: &MemberStates) -> Option<Refusal> {
    match members.get(rank as usize)? {
        MemberState::Absent | MemberState::Present => None,
        MemberState::Left => Some(
            Refusal::new(RefusalKind::PeerLeft, format!("rank {rank} has left")).with_peer(rank),
        ),
        MemberState::Lost { reason, .. } => Some(
            Refusal::new(
                RefusalKind::PeerLost,
                format!("rank {rank} was lost: {reason}"),
            )
            .with_peer(rank),
        ),
    }
}
