//! User signals: words that kernels and streams of this rank wait for and peers increment.

use crate::device::{Argument, DeviceSlice, Fault, Word};
use crate::error::{Error, Result};
use crate::memory::{MemoryRegistry, Region, RemoteRegion};
use std::sync::Arc;

/// Size of a signal; the header shared by all signals comes first. Must match the kernels.
const SIGNAL_BYTES: usize = 64;

/// Zero-initialized signals of one rank, numbered from 0. Kernels receive them as `warplink::Signals`, by
/// value ([`Argument`]), and streams wait for a [`word`](Self::word). Peers access them through a handle of
/// their [`region`](Self::region). Waits are aborted when a rank of the communicator is lost. Clones share
/// the signals.
#[derive(Clone, Debug)]
pub struct Signals {
    region: Region,
}

/// A peer's signals, mapped here. Kernels receive them as `warplink::RemoteSignals`, by value.
#[derive(Clone, Debug)]
pub struct RemoteSignals {
    region: RemoteRegion,
}

impl Signals {
    /// Allocates `count` signals whose waits `fault` aborts.
    pub(crate) fn allocate(
        memory: &MemoryRegistry,
        fault: &Arc<Fault>,
        count: usize,
    ) -> Result<Self> {
        let bytes = count
            // One more than asked for: the header that precedes the signals.
            .checked_add(1)
            .and_then(|all| all.checked_mul(SIGNAL_BYTES));
        let bytes = bytes.filter(|_| count > 0).ok_or_else(|| {
            Error::invalid(format!(
                "invalid signal count {count}; expected 1 to {}",
                usize::MAX / SIGNAL_BYTES - 1
            ))
            .with_operation("allocate signals")
        })?;
        Ok(Self {
            region: memory.allocate_signals(bytes, fault)?,
        })
    }

    /// Number of signals.
    pub fn count(&self) -> usize {
        count(self.region.memory())
    }

    /// Word of signal `number`, for stream waits ([`MemoryOp::Wait`](crate::device::MemoryOp::Wait)), which
    /// do not consume the signal.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if out of range.
    pub fn word(&self, number: usize) -> Result<Word> {
        word(self.region.memory(), number)
    }

    /// Their memory, for a handle that a peer opens ([`export_handle`](crate::Communicator::export_handle)).
    pub fn region(&self) -> &Region {
        &self.region
    }
}

impl RemoteSignals {
    /// Signals in a region that a peer exported. Any rank may increment them, which requires atomic
    /// operations on the peer's memory.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) without such atomics;
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if the region is not exactly a
    /// peer's signals.
    pub fn new(region: RemoteRegion) -> Result<Self> {
        let bytes = region.memory().bytes();
        // Less than a header and one signal, or parts of one: `count` would underflow, and kernels would write past
        // the end.
        if bytes < 2 * SIGNAL_BYTES || !bytes.is_multiple_of(SIGNAL_BYTES) {
            return Err(Error::invalid(format!(
                "a region of {bytes} bytes; expected a peer's signals, a multiple of {SIGNAL_BYTES}"
            ))
            .with_operation("map a peer's signals")
            .with_peer(region.owner())
            .with_help("export Signals::region on the peer"));
        }
        // Several ranks may increment one signal, and increments that are not atomic would be lost.
        if !region.has_atomics() {
            return Err(Error::unsupported(
                "the device has no atomic operations on the peer's memory",
            )
            .with_operation("map a peer's signals")
            .with_peer(region.owner())
            .with_help("connect with the peer, by the proxy or with the transport left open"));
        }
        Ok(Self { region })
    }

    /// Number of signals.
    pub fn count(&self) -> usize {
        count(self.region.memory())
    }

    /// Word of signal `number`, to be set in a stream ([`MemoryOp::Write`](crate::device::MemoryOp::Write))
    /// if nobody else increments it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if out of range.
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
