//! What a rank asks for when it exchanges a transfer.

use crate::error::Rank;
use crate::memory::Region;
use crate::signal::{End, Protocol};
use std::fmt;

/// Which way the bytes go, seen from this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// To the peer.
    Send,
    /// From the peer.
    Receive,
}

impl Direction {
    /// The direction as the peer sees it.
    pub fn reversed(self) -> Self {
        match self {
            Self::Send => Self::Receive,
            Self::Receive => Self::Send,
        }
    }

    /// Which end of a transfer this direction is under `protocol`.
    pub(crate) fn end(self, protocol: Protocol) -> End {
        match (self, protocol) {
            (Self::Send, Protocol::Put) | (Self::Receive, Protocol::Get) => End::Mover,
            (Self::Send, Protocol::Get) | (Self::Receive, Protocol::Put) => End::Announcer,
        }
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Send => "send",
            Self::Receive => "receive",
        })
    }
}

/// One end of a transfer, to be matched with the other by [`exchange`](super::Transfers::exchange).
#[derive(Clone, Debug)]
pub struct TransferRequest {
    pub(super) direction: Direction,
    pub(super) region: Region,
    pub(super) peer: Rank,
    pub(super) tag: u64,
    pub(super) protocol: Option<Protocol>,
}

impl TransferRequest {
    /// Sends `region` to `peer`. `tag` tells transfers between the same two ranks apart; those with
    /// one tag and direction are matched in the order in which they are exchanged.
    pub fn send(region: &Region, peer: Rank, tag: u64) -> Self {
        Self {
            direction: Direction::Send,
            region: region.clone(),
            peer,
            tag,
            protocol: None,
        }
    }

    /// Receives into `region` from `peer`; see [`send`](Self::send).
    pub fn receive(region: &Region, peer: Rank, tag: u64) -> Self {
        Self {
            direction: Direction::Receive,
            region: region.clone(),
            peer,
            tag,
            protocol: None,
        }
    }

    /// Chooses the protocol of this transfer, the same on both ranks; otherwise it is the
    /// communicator's.
    pub fn protocol(mut self, protocol: Protocol) -> Self {
        self.protocol = Some(protocol);
        self
    }
}
