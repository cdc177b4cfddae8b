//! A transfer that was exchanged, to be posted and waited for any number of times.

use super::end::TransferEnd;
use super::path::Path;
use super::protocol::Protocol;
use super::request::Direction;
use crate::device::{DeviceSlice, InFlight, InUse};
use crate::error::{Rank, Result};
use crate::memory::Region;
use std::sync::Arc;

/// One rank's end of a transfer. It keeps its buffer registered, and the peer's mapped.
///
/// It may be dropped at any time: what the streams need that it was posted and waited for on is kept
/// until they are past that. A graph that it was captured into does not keep it, and must not be
/// launched any more.
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

    /// Which way the bytes go.
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

    /// The other rank, in the communicator that the transfer was exchanged in.
    pub fn peer(&self) -> Rank {
        self.end.peer
    }

    /// The tag that it was exchanged with.
    pub fn tag(&self) -> u64 {
        self.end.tag
    }

    /// This rank's buffer; none where the bytes are stored straight into the receiver's.
    pub fn region(&self) -> Option<&Region> {
        self.end.buffer.region()
    }

    /// How many bytes are transferred by each post.
    pub fn bytes(&self) -> usize {
        self.end.buffer.bytes()
    }

    /// The receiver's buffer, mapped here, for what is enqueued by [`post_stores`](super::post_stores)
    /// to store into it. Anything else that touches it is a race.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) for a receive, and for a
    /// send by get or by packets.
    pub fn target(&self) -> Result<&DeviceSlice> {
        self.end.receive_buffer()
    }

    /// Fails where the graph that was recorded last has a post that it does not wait for and would
    /// meet again at its next launch.
    pub(crate) fn check_recorded(&self) -> Result<()> {
        self.end.check_recorded()
    }
}
