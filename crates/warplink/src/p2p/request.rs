//! Requests to exchange a transfer.

use super::path::Path;
use super::protocol::{Protocol, Role};
use crate::error::Rank;
use crate::memory::Region;
use crate::named::named;

named! {
    /// Direction of the bytes as seen from this rank.
    pub enum Direction: "direction" {
        /// From this rank to the peer.
        Send = "send",
        /// From the peer to this rank.
        Receive = "receive",
    }
}

impl Direction {
    /// The direction as the peer sees it.
    pub fn reversed(self) -> Self {
        match self {
            Self::Send => Self::Receive,
            Self::Receive => Self::Send,
        }
    }

    /// Role of the end of this direction under `protocol`.
    pub(super) fn role(self, protocol: Protocol) -> Role {
        match (self, protocol) {
            (Self::Send, Protocol::Put) | (Self::Receive, Protocol::Get) => Role::Initiator,
            (Self::Send, Protocol::Get) | (Self::Receive, Protocol::Put) => Role::Target,
        }
    }
}

/// Location of the bytes of one end.
#[derive(Clone, Debug)]
pub(super) enum Buffer {
    /// In registered memory of this rank.
    Region(Region),
    /// None: this number of bytes is stored directly into the receiver's memory.
    Stored(usize),
}

impl Buffer {
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Region(region) => region.bytes(),
            Self::Stored(bytes) => *bytes,
        }
    }

    pub(super) fn region(&self) -> Option<&Region> {
        match self {
            Self::Region(region) => Some(region),
            Self::Stored(_) => None,
        }
    }
}

/// Key that matches the two ends of transfers; among those with the same key, the n-th matches the peer's n-th.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MatchKey {
    pub(crate) peer: Rank,
    pub(crate) tag: u64,
    pub(crate) direction: Direction,
}

/// One end of a transfer, to be matched with the other by
/// [`exchange`](super::TransferExchange::exchange).
#[derive(Clone, Debug)]
pub struct TransferRequest {
    pub(super) direction: Direction,
    pub(super) buffer: Buffer,
    pub(super) peer: Rank,
    pub(super) tag: u64,
    pub(super) protocol: Option<Protocol>,
    pub(super) path: Option<Path>,
    pub(super) most_blocks: Option<u32>,
}

impl TransferRequest {
    const fn new(direction: Direction, buffer: Buffer, peer: Rank, tag: u64) -> Self {
        Self {
            direction,
            buffer,
            peer,
            tag,
            protocol: None,
            path: None,
            most_blocks: None,
        }
    }

    pub(super) fn match_key(&self) -> MatchKey {
        MatchKey {
            peer: self.peer,
            tag: self.tag,
            direction: self.direction,
        }
    }

    /// Sends `region` to `peer`. `tag` distinguishes transfers between the same two ranks; those with the same tag
    /// and direction are matched in the order in which they are exchanged.
    pub fn send(region: &Region, peer: Rank, tag: u64) -> Self {
        Self::new(Direction::Send, Buffer::Region(region.clone()), peer, tag)
    }

    /// Receives into `region` from `peer`; see [`send`](Self::send).
    pub fn receive(region: &Region, peer: Rank, tag: u64) -> Self {
        Self::new(
            Direction::Receive,
            Buffer::Region(region.clone()),
            peer,
            tag,
        )
    }

    /// Sends `bytes` to `peer` that are not in memory of this rank: work enqueued within
    /// [`post_stores`](super::post_stores) stores them directly into the receiver's memory. The protocol is put; the
    /// receiver sees no difference.
    pub fn store(bytes: usize, peer: Rank, tag: u64) -> Self {
        Self {
            protocol: Some(Protocol::Put),
            ..Self::new(Direction::Send, Buffer::Stored(bytes), peer, tag)
        }
    }

    /// Sets the protocol of this transfer, the same on both ranks. Default: the communicator's protocol.
    pub fn with_protocol(mut self, protocol: Protocol) -> Self {
        self.protocol = Some(protocol);
        self
    }

    /// Sets the path of this transfer, the same on both ranks. Default: the communicator's path
    /// ([`Config::path`](crate::Config::path)).
    pub fn with_path(mut self, path: Path) -> Self {
        self.path = Some(path);
        self
    }

    /// Limits the multiprocessors that the kernels of this transfer occupy at each end, the same on both ranks. At
    /// least one; without a limit, the hardware model decides.
    pub fn with_multiprocessors(mut self, most: usize) -> Self {
        self.most_blocks = Some(u32::try_from(most).unwrap_or(u32::MAX));
        self
    }
}
