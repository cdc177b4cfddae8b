//! Carriers: how the host moves bytes and signals to a peer on behalf of kernels.
//!
//! Direct channels do not need one: their kernels access the peer's mapped memory themselves.

mod copy_engine;
mod network;
mod networks;
#[cfg(test)]
#[cfg(not(loom))]
mod no_peer;
mod staging;

pub(crate) use copy_engine::CopyEngine;
pub(crate) use network::NetworkCarrier;
pub use networks::NetworkPath;
pub(crate) use networks::{Exposed, NetworkLink, NetworkOffer, Networks};
pub(crate) use staging::StagedCarrier;
pub use staging::StagingConfig;
#[cfg(all(test, not(loom)))]
pub(crate) use {networks::StagingOffer, staging::RingShape};

use crate::deadline::Deadline;
use crate::device::channel::trigger::Movement;
use crate::device::{At, DeviceSlice, Word};
use crate::error::Result;
use std::fmt;

/// Moves the bytes of one connection and sets its words, in call order. No method blocks except
/// [`drain`](Self::drain).
pub(crate) trait Carrier: Send + Sync + fmt::Debug {
    /// Whether it accepts a few more calls. Operations in flight are bounded: beyond a limit a driver blocks
    /// its caller, and memory would grow.
    fn has_room(&self) -> Result<bool>;

    /// Moves bytes between `own` and a location at the peer.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if out of bounds of the peer's
    /// region.
    fn start(&self, movement: Movement, own: &DeviceSlice, peers: At) -> Result<()>;

    /// Once everything before is complete and visible, sets the peer's inbound word, then this rank's flush
    /// word.
    fn set(&self, inbound: Option<u64>, completed: Option<u64>) -> Result<()>;

    /// Once everything before is complete, sets a word of this rank. Values for one word must come in call
    /// order.
    fn answer(&self, word: &Word, value: u64) -> Result<()>;

    /// Whether everything is complete.
    fn is_idle(&self) -> Result<bool>;

    /// Blocks until everything is complete.
    fn drain(&self, deadline: Deadline) -> Result<()>;
}
