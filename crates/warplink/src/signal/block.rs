//! Signals that users have: words that kernels and streams of this rank wait for and peers count up.

use crate::device::{Argument, DeviceSlice, Fault, Word};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{MemoryRegistry, Region, RemoteRegion};
use std::sync::Arc;

/// Bytes of a signal; what all of them share comes first. Must match the kernels.
const SIGNAL_BYTES: usize = 64;

/// Signals of one rank, all zero at first, by number from 0. Kernels get them as `warplink::Signals`, by
/// value ([`Argument`]), and streams wait for a [`word`](Self::word). Peers reach them by a handle of their
/// [`region`](Self::region). Waits for them end when a rank of the communicator is lost. Clones are the same
/// signals.
#[derive(Clone, Debug)]
pub struct Signals {
    region: Region,
}

/// A peer's signals, mapped here. Kernels get them as `warplink::RemoteSignals`, by value.
#[derive(Clone, Debug)]
pub struct RemoteSignals {
    region: RemoteRegion,
}

impl Signals {
    /// `count` signals whose waits end when `fault` is raised.
    pub(crate) fn allocate(
        memory: &MemoryRegistry,
        fault: &Arc<Fault>,
        count: usize,
    ) -> Result<Self> {
        let bytes = count
            .checked_add(1)
            .and_then(|all| all.checked_mul(SIGNAL_BYTES));
        let bytes = bytes.filter(|_| count > 0).ok_or_else(|| {
            Error::invalid(format!("{count} signals; expected at least one, and fewer"))
                .with_operation("allocate signals")
        })?;
        Ok(Self {
            region: memory.allocate_signals(bytes, fault)?,
        })
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        count(self.region.memory())
    }

    /// The word of signal `number`, for waits in a stream
    /// ([`MemoryOp::Wait`](crate::device::MemoryOp::Wait)), which use up no count.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) where the block has fewer.
    pub fn word(&self, number: usize) -> Result<Word> {
        word(self.region.memory(), number)
    }

    /// Their memory, for a handle that a peer opens
    /// ([`export_handle`](crate::Communicator::export_handle)).
    pub fn region(&self) -> &Region {
        &self.region
    }
}

impl RemoteSignals {
    /// The signals behind a region that a peer exported. Any rank may count them up, so that this takes atomic operations
    /// on the peer's memory.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) without these;
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) for a region that is not the whole of
    /// a peer's signals.
    pub fn new(region: RemoteRegion) -> Result<Self> {
        let bytes = region.memory().bytes();
        if bytes < 2 * SIGNAL_BYTES || !bytes.is_multiple_of(SIGNAL_BYTES) {
            return Err(Error::invalid(format!(
                "a region of {bytes} bytes; expected a peer's signals, a multiple of {SIGNAL_BYTES}"
            ))
            .with_operation("map a peer's signals")
            .with_peer(region.owner())
            .with_help("export Signals::region on the peer"));
        }
        if !region.has_atomics() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "the device has no atomic operations on the peer's memory",
            )
            .with_operation("map a peer's signals")
            .with_peer(region.owner())
            .with_help("connect with the peer, by the proxy or with the transport left open"));
        }
        Ok(Self { region })
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        count(self.region.memory())
    }

    /// The word of signal `number`, to be set in a stream
    /// ([`MemoryOp::Write`](crate::device::MemoryOp::Write)) where nobody else counts it up.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) where the block has fewer.
    pub fn word(&self, number: usize) -> Result<Word> {
        word(self.region.memory(), number)
    }
}

impl From<&Signals> for Argument {
    fn from(signals: &Signals) -> Self {
        Self::Slice(signals.region.memory().clone())
    }
}

impl From<&RemoteSignals> for Argument {
    fn from(signals: &RemoteSignals) -> Self {
        Self::Slice(signals.region.memory().clone())
    }
}

fn count(words: &DeviceSlice) -> usize {
    words.bytes() / SIGNAL_BYTES - 1
}

fn word(words: &DeviceSlice, number: usize) -> Result<Word> {
    if number >= count(words) {
        return Err(Error::invalid(format!(
            "unknown signal {number}; expected less than {}",
            count(words)
        )));
    }
    words.word(SIGNAL_BYTES * (1 + number))
}
