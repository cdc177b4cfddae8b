//! Ring buffer that carries triggers from kernels to a proxy.
//!
//! # Guarantees
//! 1. Triggers are read whole: each half carries the parity of its lap, and the reader takes a trigger only
//!    when both halves have the expected parity.
//! 2. No unread trigger is overwritten: a position is claimed only after the position one lap earlier was
//!    read.
//! 3. Triggers are read in the order in which their positions were claimed.
//! 4. Stopping the FIFO releases waiting producers. A waiting producer has claimed nothing yet, so it may
//!    also give up without leaving a gap that the reader would wait for.
//! 5. A trigger whose `push` succeeded was read or is counted as unread after a stop: a producer checks the
//!    stop flag after its claim, and the reader counts claims after it has set the flag.
//!
//! The producer side is implemented a second time for GPUs, in the kernels' `Channel::push`.

use super::listener::Listener;
use super::trigger::LAP;
use crate::deadline::Deadline;
use crate::device::DeviceSlice;
use crate::error::{Error, Result};
use crate::sync::{AtomicU64, Ordering, fence};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The words of a FIFO: two for each slot of the ring, the number of triggers read, and the stop flag. Loads
/// have acquire semantics and pair with the stores, which have release semantics.
pub(crate) trait FifoMemory: Send + Sync + fmt::Debug {
    /// Loads a word (acquire).
    fn load(&self, word: usize) -> u64;

    /// Stores a word (release).
    fn store(&self, word: usize, value: u64);

    /// Claims `position` for a producer in this process if it is the next free one, and returns whether it
    /// did. Always false if only kernels produce.
    fn claim(&self, position: u64) -> bool;

    /// Whether threads of this process produce.
    fn has_host_producers(&self) -> bool;

    /// Number of positions claimed so far.
    fn claimed(&self) -> Result<u64>;

    /// Sets or clears the stop flag that kernels check after a claim, which is not one of the words above.
    fn set_kernels_stopped(&self, _stopped: bool) -> Result<()> {
        Ok(())
    }

    /// Addresses for kernels: the ring, the read count, and in device memory the counters (claimed, known to
    /// be read, refresh lock, stopped).
    fn addresses(&self) -> FifoAddresses;
}

/// See [`FifoMemory::addresses`].
#[derive(Clone, Debug, Default)]
pub(crate) struct FifoAddresses {
    pub(crate) ring: u64,
    pub(crate) tail: u64,
    pub(crate) counters: Option<DeviceSlice>,
}

/// Ring of triggers with any number of producers and one reader. Created by
/// [`create_fifo`](crate::device::Device::create_fifo).
#[derive(Debug)]
pub struct Fifo {
    slots: u64,
    memory: Box<dyn FifoMemory>,
    listener: Listener,
}

/// The single reader of a FIFO.
#[derive(Debug)]
pub struct FifoReader {
    fifo: Arc<Fifo>,
    position: u64,
}

impl Fifo {
    /// Number of words needed for `slots` slots.
    pub(crate) fn words(slots: usize) -> usize {
        2 * slots + 2
    }

    /// Creates a FIFO of `slots` slots, a power of two, in zeroed memory from `allocate`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if `slots` is not a power of two or out of range.
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

    /// Capacity in triggers.
    pub(crate) fn slots(&self) -> u64 {
        self.slots
    }

    /// Addresses for kernels.
    pub(crate) fn addresses(&self) -> FifoAddresses {
        self.memory.addresses()
    }

    /// Pushes a trigger, waiting while the ring is full, and returns its position. Everything that this
    /// thread did before is visible to the reader of the trigger. `pause` runs between polls and may give up.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`] if the FIFO is stopped, in which case the trigger may still be counted as
    /// unread; errors of `pause`.
    pub(crate) fn push(
        &self,
        [first, second]: [u64; 2],
        mut pause: impl FnMut() -> Result<()>,
    ) -> Result<u64> {
        if !self.memory.has_host_producers() {
            return Err(Error::internal("only kernels put triggers into this FIFO"));
        }
        let position = loop {
            let next = self.memory.claimed()?;
            // If others claimed and the reader advanced meanwhile, the claim of the stale `next` fails.
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
        // The half that the reader checks first is stored last. Either order is correct, since both carry the
        // lap.
        self.memory.store(slot + 1, second | lap);
        self.memory.store(slot, first | lap);
        // Contains the SeqCst fence between the claim and the check of the stop flag; its counterpart is in
        // `stop`.
        self.listener.wake();
        if self.is_stopped() {
            return Err(stopped());
        }
        Ok(position)
    }

    /// Releases producers that wait for space, and makes later pushes fail. Triggers in the ring stay unread.
    ///
    /// # Errors
    /// Errors of the device, whose kernels may then not have been notified.
    pub(crate) fn stop(&self) -> Result<()> {
        // Host producers first: their flag cannot fail to be set, unlike that of kernels.
        self.memory.store(self.words_of_ring() + 1, 1);
        let result = self.memory.set_kernels_stopped(true);
        // Orders the stop flag before the count of claims that the caller reads next (guarantee 5).
        fence(Ordering::SeqCst);
        result
    }

    /// Accepts triggers again after a stop, once the reader has [discarded](FifoReader::discard) those that it did not
    /// read.
    ///
    /// # Errors
    /// Errors of the device; the FIFO then stays stopped for kernels.
    pub(crate) fn resume(&self) -> Result<()> {
        // Kernels first: if this fails, host producers find the FIFO stopped too rather than half of it open.
        self.memory.set_kernels_stopped(false)?;
        self.memory.store(self.words_of_ring() + 1, 0);
        Ok(())
    }

    /// Whether the FIFO was stopped.
    pub(crate) fn is_stopped(&self) -> bool {
        self.memory.load(self.words_of_ring() + 1) != 0
    }

    fn read(&self) -> u64 {
        self.memory.load(self.words_of_ring())
    }

    fn words_of_ring(&self) -> usize {
        2 * self.slots as usize
    }

    /// First word of the slot of `position`, and the lap bit of its halves.
    fn place(&self, position: u64) -> (usize, u64) {
        let slot = 2 * (position & (self.slots - 1)) as usize;
        // Memory starts zeroed, so the first lap must set the bit.
        let lap = if position & self.slots == 0 { LAP } else { 0 };
        (slot, lap)
    }
}

impl FifoReader {
    /// Takes the next trigger and its position, if there is one, and frees its slot.
    pub(crate) fn pop(&mut self) -> Option<(u64, [u64; 2])> {
        let halves = self.peek()?;
        let position = self.position;
        self.position += 1;
        let fifo = &self.fifo;
        // After both halves were loaded: from here on a producer may overwrite the slot.
        fifo.memory.store(fifo.words_of_ring(), self.position);
        Some((position, halves))
    }

    /// Whether no trigger is ready.
    pub(crate) fn is_empty(&self) -> bool {
        self.peek().is_none()
    }

    /// Sleeps for up to `limit` until a producer of this process pushes or the thread is unparked. Returns false at once
    /// if only kernels produce.
    pub(crate) fn listen(&self, limit: Duration) -> bool {
        if !self.fifo.memory.has_host_producers() {
            return false;
        }
        self.fifo.listener.listen(limit, || !self.is_empty());
        true
    }

    /// Number of triggers that were claimed but not read.
    pub(crate) fn unread(&self) -> Result<u64> {
        Ok(self.fifo.memory.claimed()?.saturating_sub(self.position))
    }

    /// Drops the triggers that were claimed after a stop, whose `push` has failed.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] if a producer does not store a trigger that it claimed, or goes on claiming.
    pub(crate) fn discard(&mut self, deadline: Deadline) -> Result<()> {
        while self.unread()? > 0 {
            // Looked at for each trigger: a kernel that ignores its status may go on claiming.
            if deadline.passed() {
                return Err(deadline.expired("the end of kernels' use of a stopped proxy"));
            }
            if self.pop().is_none() {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    fn peek(&self) -> Option<[u64; 2]> {
        let (slot, lap) = self.fifo.place(self.position);
        let memory = &self.fifo.memory;
        let halves = [memory.load(slot), memory.load(slot + 1)];
        let whole = halves.iter().all(|half| half & LAP == lap);
        whole.then(|| halves.map(|half| half & !LAP))
    }
}

/// The error for using a FIFO whose proxy has stopped.
pub(crate) fn stopped() -> Error {
    Error::closed("the proxy was stopped")
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
            // Pairs with the release store below, so a reader of a trigger sees the data written before it.
            .map_or(0, |word| word.load(Ordering::Acquire))
    }

    fn store(&self, word: usize, value: u64) {
        if let Some(word) = self.words.get(word) {
            // Release: pairs with the acquire load above.
            word.store(value, Ordering::Release);
        }
    }

    fn claim(&self, position: u64) -> bool {
        // Relaxed: the claim publishes nothing. The lap bits of the slot order the data.
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
        // Acquire keeps the reads of slots that follow after this one. A stale count only makes a claim fail.
        Ok(self.claimed.load(Ordering::Acquire))
    }

    fn addresses(&self) -> FifoAddresses {
        FifoAddresses::default()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::ErrorKind;

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
