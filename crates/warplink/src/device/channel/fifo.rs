//! The ring through which kernels hand triggers to a proxy.
//!
//! # What holds
//! 1. A trigger is read whole or not at all: each half says in which lap of the ring it was stored, and
//!    the reader takes a trigger when both halves are of the lap that is due.
//! 2. No trigger is overwritten before it was read: a producer claims a position when the one a lap
//!    earlier has been read.
//! 3. Triggers are read in the order in which their positions were claimed.
//! 4. A producer that waits is let go when the FIFO is stopped. It may give up as well: as it has claimed
//!    nothing while it waits, the reader never waits for a trigger that does not come.
//! 5. A trigger whose producer takes it for sent was read, or is among those that the reader counts as unread after
//!    the stop: a producer asks whether the FIFO was stopped after it has claimed its position, and the reader counts
//!    what was claimed after it has said so.
//!
//! The producers' side is written a second time in the kernels' `Channel::push`, for GPUs.

use super::listener::Listener;
use super::trigger::LAP;
use crate::device::DeviceSlice;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::{AtomicU64, Ordering, fence};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The words of a FIFO: two for each slot of the ring, how many triggers were read, and whether it was
/// stopped. A load acquires what was written before the store that it sees.
pub(crate) trait FifoMemory: Send + Sync + fmt::Debug {
    /// The word.
    fn load(&self, word: usize) -> u64;

    /// Sets the word after all that this thread did before.
    fn store(&self, word: usize, value: u64);

    /// Claims `position` for a producer of this process, if it is the next one to be claimed; whether it was.
    /// Never, where only kernels produce.
    fn claim(&self, position: u64) -> bool;

    /// Whether threads of this process produce.
    fn has_host_producers(&self) -> bool;

    /// How many positions were claimed.
    fn claimed(&self) -> Result<u64>;

    /// Tells kernels, which look elsewhere than at the words after they claimed a position, that the FIFO was stopped.
    fn stop_kernels(&self) -> Result<()> {
        Ok(())
    }

    /// What kernels reach it by: the addresses of the ring and of the count of what was read, and the
    /// words (claimed, seen as read, whether somebody looks, whether it was stopped) in the device's memory.
    fn addresses(&self) -> FifoAddresses;
}

/// See [`FifoMemory::addresses`].
#[derive(Clone, Debug, Default)]
pub(crate) struct FifoAddresses {
    pub(crate) ring: u64,
    pub(crate) tail: u64,
    pub(crate) counters: Option<DeviceSlice>,
}

/// A ring of triggers with any number of producers and one reader, for a device's
/// [`create_fifo`](crate::device::Device::create_fifo).
#[derive(Debug)]
pub struct Fifo {
    slots: u64,
    memory: Box<dyn FifoMemory>,
    listener: Listener,
}

/// The only reader of a FIFO.
#[derive(Debug)]
pub struct FifoReader {
    fifo: Arc<Fifo>,
    position: u64,
}

impl Fifo {
    /// Words that a FIFO of `slots` needs.
    pub(crate) fn words(slots: usize) -> usize {
        2 * slots + 2
    }

    /// A FIFO of `slots`, which must be a power of two, in the memory that `allocate` gives, all zero.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for another number of slots.
    pub(crate) fn new(
        slots: usize,
        allocate: impl FnOnce(usize) -> Result<Box<dyn FifoMemory>>,
    ) -> Result<(Arc<Self>, FifoReader)> {
        if !slots.is_power_of_two() || slots > 1 << 20 {
            return Err(Error::invalid(format!(
                "a FIFO of {slots} slots; expected a power of two up to {}",
                1 << 20
            ))
            .with_operation("make a FIFO"));
        }
        let fifo = Arc::new(Self {
            slots: slots as u64,
            memory: allocate(slots)?,
            listener: Listener::default(),
        });
        let reader = FifoReader {
            fifo: fifo.clone(),
            position: 0,
        };
        Ok((fifo, reader))
    }

    /// How many triggers it holds.
    pub(crate) fn slots(&self) -> u64 {
        self.slots
    }

    /// What kernels reach it by.
    pub(crate) fn addresses(&self) -> FifoAddresses {
        self.memory.addresses()
    }

    /// Puts a trigger in, once there is room, and gives its position. Whatever this thread did before is
    /// done before the reader has it. `pause` is called between looks, and may give up.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`] when the FIFO is stopped, though the trigger may be counted as unread; those of `pause`.
    pub(crate) fn push(
        &self,
        [first, second]: [u64; 2],
        mut pause: impl FnMut() -> Result<()>,
    ) -> Result<u64> {
        if !self.memory.has_host_producers() {
            return Err(Error::new(
                ErrorKind::Internal,
                "only kernels put triggers into this FIFO",
            ));
        }
        let position = loop {
            let next = self.memory.claimed()?;
            // More may have been claimed and read meanwhile: then this one is not claimed.
            if next.saturating_sub(self.read()) < self.slots {
                if self.memory.claim(next) {
                    break next;
                }
                continue;
            }
            if self.is_stopped() {
                return Err(stopped());
            }
            pause()?;
        };
        let (slot, lap) = self.place(position);
        self.memory.store(slot + 1, second | lap);
        self.memory.store(slot, first | lap);
        // Also between the claim and the look at whether it was stopped.
        self.listener.wake();
        if self.is_stopped() {
            return Err(stopped());
        }
        Ok(position)
    }

    /// Lets go of producers that wait for room, and refuses what they put in from here on. What is in the ring stays
    /// unread.
    ///
    /// # Errors
    /// Those of the device, which may not have told its kernels.
    pub(crate) fn stop(&self) -> Result<()> {
        self.memory.store(self.words_of_ring() + 1, 1);
        let told = self.memory.stop_kernels();
        fence(Ordering::SeqCst);
        told
    }

    /// Whether it was stopped.
    pub(crate) fn is_stopped(&self) -> bool {
        self.memory.load(self.words_of_ring() + 1) != 0
    }

    fn read(&self) -> u64 {
        self.memory.load(self.words_of_ring())
    }

    fn words_of_ring(&self) -> usize {
        2 * self.slots as usize
    }

    /// The first word of the slot of `position`, and the bit that its halves have.
    fn place(&self, position: u64) -> (usize, u64) {
        let slot = 2 * (position & (self.slots - 1)) as usize;
        // Memory starts as zeros, so the first lap sets the bit.
        let lap = if position & self.slots == 0 { LAP } else { 0 };
        (slot, lap)
    }
}

impl FifoReader {
    /// The next trigger with its position, if it is there. Its slot may be used again.
    pub(crate) fn pop(&mut self) -> Option<(u64, [u64; 2])> {
        let halves = self.peek()?;
        let position = self.position;
        self.position += 1;
        let fifo = &self.fifo;
        fifo.memory.store(fifo.words_of_ring(), self.position);
        Some((position, halves))
    }

    /// Whether there is no trigger to be read.
    pub(crate) fn is_empty(&self) -> bool {
        self.peek().is_none()
    }

    /// Blocks the only thread that calls this, for `limit` at most, until a producer of this process has put
    /// a trigger in, or somebody unparks the thread. Does nothing where only kernels produce; whether it did.
    pub(crate) fn listen(&self, limit: Duration) -> bool {
        if !self.fifo.memory.has_host_producers() {
            return false;
        }
        self.fifo.listener.listen(limit, || !self.is_empty());
        true
    }

    /// How many triggers were claimed and not read.
    pub(crate) fn unread(&self) -> Result<u64> {
        Ok(self.fifo.memory.claimed()?.saturating_sub(self.position))
    }

    fn peek(&self) -> Option<[u64; 2]> {
        let (slot, lap) = self.fifo.place(self.position);
        let memory = &self.fifo.memory;
        let halves = [memory.load(slot), memory.load(slot + 1)];
        let whole = halves.iter().all(|half| half & LAP == lap);
        whole.then(|| halves.map(|half| half & !LAP))
    }
}

/// That the proxy behind a FIFO has ended.
pub(crate) fn stopped() -> Error {
    Error::new(ErrorKind::Closed, "the proxy was stopped")
        .with_operation("use a proxied channel")
        .with_help("stop the proxy when no kernel uses its channels any more")
}

/// A FIFO whose producers are threads of this process.
#[derive(Debug)]
pub(crate) struct HostFifoMemory {
    words: Box<[AtomicU64]>,
    claimed: AtomicU64,
}

impl HostFifoMemory {
    pub(crate) fn new(slots: usize) -> Self {
        Self {
            words: (0..Fifo::words(slots)).map(|_| AtomicU64::new(0)).collect(),
            claimed: AtomicU64::new(0),
        }
    }
}

impl FifoMemory for HostFifoMemory {
    fn load(&self, word: usize) -> u64 {
        self.words
            .get(word)
            .map_or(0, |word| word.load(Ordering::Acquire))
    }

    fn store(&self, word: usize, value: u64) {
        if let Some(word) = self.words.get(word) {
            word.store(value, Ordering::Release);
        }
    }

    fn claim(&self, position: u64) -> bool {
        let (relaxed, next) = (Ordering::Relaxed, position + 1);
        let claimed = &self.claimed;
        claimed
            .compare_exchange(position, next, relaxed, relaxed)
            .is_ok()
    }

    fn has_host_producers(&self) -> bool {
        true
    }

    fn claimed(&self) -> Result<u64> {
        Ok(self.claimed.load(Ordering::Acquire))
    }

    fn addresses(&self) -> FifoAddresses {
        FifoAddresses::default()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_producer_that_gives_up_leaves_no_gap() {
        let memory = |slots| Ok(Box::new(HostFifoMemory::new(slots)) as Box<dyn FifoMemory>);
        let (fifo, mut reader) = Fifo::new(2, memory).unwrap();
        let push = |number: u64| fifo.push([number, 0], || Ok(()));
        assert_eq!((push(1).unwrap(), push(2).unwrap()), (0, 1));
        let given_up = fifo.push([3, 0], || Err(Error::new(ErrorKind::PeerLost, "gone")));
        assert_eq!(given_up.unwrap_err().kind(), ErrorKind::PeerLost);
        assert_eq!(reader.unread().unwrap(), 2);
        assert_eq!(reader.pop(), Some((0, [1, 0])));
        assert_eq!(reader.pop(), Some((1, [2, 0])));
        assert_eq!(push(4).unwrap(), 2);
        assert_eq!(reader.pop(), Some((2, [4, 0])));
        assert!(reader.is_empty() && reader.unread().unwrap() == 0);
    }
}
