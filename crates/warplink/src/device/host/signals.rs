//! Signals for kernels of the host device, with the semantics of `warplink/signals.cuh`.

use super::doorbell::{self, Doorbell};
use super::kernel::Block;
use super::operation::Context;
use super::words::{self, AwaitedWord};
use crate::device::{DeviceSlice, Word};
use crate::error::Result;

/// Size of a signal; the header shared by all signals comes first.
const SIGNAL_BYTES: usize = 64;

/// Offset of the wait count in a signal.
const AWAITED: usize = 8;

/// Signals as seen by a block of a host-device kernel: this rank's, to wait for, or a peer's, to increment.
/// The calls correspond to `warplink::Signals` and `warplink::RemoteSignals`.
#[derive(Debug)]
pub struct BlockSignals<'a> {
    words: &'a DeviceSlice,
    context: &'a Context,
}

impl Block<'_> {
    /// Signals in argument `number`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if the launch has no such argument.
    pub fn signals(&self, number: usize) -> Result<BlockSignals<'_>> {
        Ok(self.signals_at(self.slice(number)?))
    }

    /// Signals in `words`.
    pub(crate) fn signals_at<'a>(&'a self, words: &'a DeviceSlice) -> BlockSignals<'a> {
        BlockSignals {
            words,
            context: self.context(),
        }
    }
}

impl BlockSignals<'_> {
    /// Blocks until signal `number` arrives once more, and consumes it.
    pub fn wait(&self, number: usize) -> Result<()> {
        let ticket = words::count_up(&self.word(number, AWAITED)?) + 1;
        self.wait_until(number, ticket)
    }

    /// Blocks until signal `number` has been incremented `epoch` times in total. Consumes nothing.
    pub fn wait_until(&self, number: usize, epoch: u64) -> Result<()> {
        self.context
            .wait(&AwaitedWord::new(&self.word(number, 0)?), epoch)
    }

    /// Consumes a signal if one is available and returns whether it did; never blocks.
    pub fn poll(&self, number: usize) -> Result<bool> {
        self.context.check()?;
        Ok(words::take(
            &self.word(number, 0)?,
            &self.word(number, AWAITED)?,
        ))
    }

    /// Total number of increments of signal `number`.
    pub fn epoch(&self, number: usize) -> Result<u64> {
        Ok(words::load(&self.word(number, 0)?))
    }

    /// Increments a peer's signal `number`, after all earlier writes of the block. Several ranks may do so
    /// concurrently.
    pub fn add(&self, number: usize) -> Result<()> {
        self.context.check()?;
        self.context.delay();
        words::increment_at_peer(&self.word(number, 0)?).map(drop)
    }

    /// As [`wait`](Self::wait), for a lane; yields to others meanwhile.
    pub(crate) async fn arrived(&self, number: usize) -> Result<()> {
        let ticket = words::count_up(&self.word(number, AWAITED)?) + 1;
        let word = self.word(number, 0)?;
        while (words::load(&word).wrapping_sub(ticket) as i64) < 0 {
            self.context.turn().await?;
        }
        Ok(())
    }

    /// Increments signal `number` of another rank's lanes, after all earlier writes of the block. Only one
    /// rank may increment it.
    pub(crate) fn tell(&self, number: usize) -> Result<()> {
        self.context.check()?;
        self.context.delay();
        words::count_up_alone(&self.word(number, 0)?);
        // After the count, so that a lane woken by the bell sees the signal.
        self.ring()
    }

    /// Rings the doorbell of the rank's lanes.
    pub(crate) fn ring(&self) -> Result<()> {
        doorbell::ring(&Doorbell::at(self.words, doorbell::OFFSET)?);
        Ok(())
    }

    fn word(&self, number: usize, offset: usize) -> Result<Word> {
        self.words.word(SIGNAL_BYTES * (1 + number) + offset)
    }
}
