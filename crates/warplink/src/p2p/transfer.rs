//! An exchanged transfer, which can be posted and waited for any number of times.

use super::end::TransferEnd;
use super::path::Path;
use super::protocol::Protocol;
use super::request::Direction;
use crate::device::{DeviceSlice, InFlight, InUse};
use crate::error::{Rank, Result};
use crate::memory::Region;
use std::sync::Arc;

/// One rank's end of a transfer. It keeps its buffer registered and the peer's buffer mapped.
///
/// It may be dropped at any time: its resources are kept until the streams on which it was posted and waited for have
/// passed these operations. A graph that captured it does not keep them, and must not be launched any more.
#[derive(Debug)]
pub struct Transfer {
    pub(super) end: InUse<TransferEnd>,
}

impl Transfer {
    pub(super) fn new(end: TransferEnd, in_flight: &Arc<InFlight>) -> Self {
        Self {
            end: InUse::new(end, in_flight),
        }
    }

    /// Direction of the bytes.
    pub fn direction(&self) -> Direction {
        self.end.direction
    }

    /// The protocol that both ranks agreed on.
    pub fn protocol(&self) -> Protocol {
        self.end.protocol
    }

    /// The path that both ranks agreed on.
    pub fn path(&self) -> Path {
        self.end.path
    }

    /// The other rank, in the transfer's communicator.
    pub fn peer(&self) -> Rank {
        self.end.peer
    }

    /// The tag of the exchange.
    pub fn tag(&self) -> u64 {
        self.end.tag
    }

    /// This rank's buffer; `None` if the bytes are stored directly into the receiver's buffer.
    pub fn region(&self) -> Option<&Region> {
        self.end.buffer.region()
    }

    /// Bytes moved by each post.
    pub fn bytes(&self) -> usize {
        self.end.buffer.bytes()
    }

    /// The receiver's buffer, mapped here as the destination of work enqueued by [`post_stores`](super::post_stores).
    /// Any other access to it is a race.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) for a receive, and for a
    /// send by get or by packets.
    pub fn target(&self) -> Result<&DeviceSlice> {
        self.end.receive_buffer()
    }

    /// Fails if the last captured graph has a post without a wait: the next launch of the graph would repeat the post
    /// before the previous one is known to be done.
    pub(crate) fn check_recorded(&self) -> Result<()> {
        self.end.check_recorded()
    }
}
