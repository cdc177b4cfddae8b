//! How bytes and signals reach a peer when a host moves them on a kernel's behalf.
//!
//! A direct channel needs none of this: its kernels reach the peer's mapped memory themselves.

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
pub(crate) use networks::{Exposed, NetworkLink, Networks, Offered, OfferedRings};
pub use staging::StagingConfig;
pub(crate) use staging::{Shape as StagingShape, StagedCarrier};

use crate::deadline::Deadline;
use crate::device::channel::trigger::Movement;
use crate::device::{At, DeviceSlice, Word};
use crate::error::Result;
use std::fmt;

/// What moves the bytes of one connection, and sets its words, in the order of the calls. None of them
/// blocks, but [`drain`](Self::drain).
pub(crate) trait Carrier: Send + Sync + fmt::Debug {
    /// Whether it takes a few more calls. What is under way is bounded: a driver may block the caller for as
    /// long as too much is, and memory would grow.
    fn has_room(&self) -> Result<bool>;

    /// Moves bytes between `own` and a place at the peer.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) where they pass the end of a
    /// region of the peer's.
    fn start(&self, movement: Movement, own: &DeviceSlice, peers: At) -> Result<()>;

    /// When everything before is done and visible: sets the peer's inbound word, and then this rank's word
    /// for flushes, to the values that are given.
    fn set(&self, inbound: Option<u64>, completed: Option<u64>) -> Result<()>;

    /// When everything before is done: sets a word of this rank. The values of a word come in the order of the
    /// calls.
    fn answer(&self, word: &Word, value: u64) -> Result<()>;

    /// Whether everything is done.
    fn is_idle(&self) -> Result<bool>;

    /// Blocks until everything is done.
    fn drain(&self, deadline: Deadline) -> Result<()>;
}
