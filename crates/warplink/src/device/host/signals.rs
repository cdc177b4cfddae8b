//! Signals for kernels of the host device, with the meanings of `warplink/signals.cuh`.

use super::doorbell::{self, Doorbell};
use super::kernel::Block;
use super::operation::Context;
use super::words::{self, AwaitedWord};
use crate::device::{Argument, DeviceSlice, Word};
use crate::error::{Error, ErrorKind, Result};

/// Bytes of a signal; what all of them share comes first.
const SIGNAL_BYTES: usize = 64;

/// Where the doorbell of a rank's lanes is in what its signals share, of which GPUs use the first words.
const DOORBELL: usize = 48;

/// Where the count of waits is in a signal.
const AWAITED: usize = 8;

/// The doorbell of the lanes that are launched with `arguments`.
pub(super) fn doorbell(arguments: &[Argument]) -> Result<Doorbell> {
    match arguments.get(1) {
        Some(Argument::Slice(signals)) => Doorbell::at(signals, DOORBELL),
        _ => Err(Error::new(ErrorKind::Internal, "lanes without signals")),
    }
}

/// Signals, as a block of a kernel of the host device has them: of this rank, to wait for, or a peer's, to
/// count up. The calls are those of `warplink::Signals` and `warplink::RemoteSignals`.
#[derive(Debug)]
pub struct BlockSignals<'a> {
    words: &'a DeviceSlice,
    context: &'a Context,
}

impl Block<'_> {
    /// The signals that are argument `number`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) where the launch has no such
    /// argument.
    pub fn signals(&self, number: usize) -> Result<BlockSignals<'_>> {
        Ok(self.signals_at(self.slice(number)?))
    }

    /// The signals in `words`.
    pub(crate) fn signals_at<'a>(&'a self, words: &'a DeviceSlice) -> BlockSignals<'a> {
        BlockSignals {
            words,
            context: self.context(),
        }
    }
}

impl BlockSignals<'_> {
    /// Blocks until signal `number` was counted up once more than was waited for.
    pub fn wait(&self, number: usize) -> Result<()> {
        let ticket = words::count_up(&self.word(number, AWAITED)?) + 1;
        self.wait_until(number, ticket)
    }

    /// Blocks until signal `number` was counted up `epoch` times in all. Uses up no count.
    pub fn wait_until(&self, number: usize, epoch: u64) -> Result<()> {
        self.context
            .wait(&AwaitedWord::new(&self.word(number, 0)?), epoch)
    }

    /// As [`wait`](Self::wait), where that would not block; whether there was a count to use up.
    pub fn poll(&self, number: usize) -> Result<bool> {
        self.context.check()?;
        Ok(words::take(
            &self.word(number, 0)?,
            &self.word(number, AWAITED)?,
        ))
    }

    /// How often signal `number` was counted up so far.
    pub fn epoch(&self, number: usize) -> Result<u64> {
        Ok(words::load(&self.word(number, 0)?))
    }

    /// Counts a peer's signal `number` up by one, after everything that the block did before. Several ranks may.
    pub fn add(&self, number: usize) -> Result<()> {
        self.context.check()?;
        self.context.delay();
        words::increment_at_peer(&self.word(number, 0)?).map(drop)
    }

    /// As [`wait`](Self::wait), for a lane, which lets the others go on meanwhile.
    pub(crate) async fn arrived(&self, number: usize) -> Result<()> {
        let ticket = words::count_up(&self.word(number, AWAITED)?) + 1;
        let word = self.word(number, 0)?;
        while (words::load(&word).wrapping_sub(ticket) as i64) < 0 {
            self.context.turn().await?;
        }
        Ok(())
    }

    /// Counts the signal `number` of a rank's lanes up by one, after everything that the block did before. Only this rank
    /// does.
    pub(crate) fn tell(&self, number: usize) -> Result<()> {
        self.context.check()?;
        self.context.delay();
        words::count_up_alone(&self.word(number, 0)?);
        self.ring()
    }

    /// Has the rank's lanes look for what was stored for them.
    pub(crate) fn ring(&self) -> Result<()> {
        doorbell::ring(&Doorbell::at(self.words, DOORBELL)?);
        Ok(())
    }

    fn word(&self, number: usize, offset: usize) -> Result<Word> {
        self.words.word(SIGNAL_BYTES * (1 + number) + offset)
    }
}
