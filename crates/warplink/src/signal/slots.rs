//! Allocates slots of signal words from pages that peers map whole.

use super::SignalWord;
use super::scratch::ScratchPool;
use crate::device::{AllocationKind, Device, DeviceSlice, Fault, Word};
use crate::error::{Error, Result};
use crate::memory::{MemoryRegistry, Region};
use crate::sync::lock;
use std::sync::{Arc, Mutex};

// Peers map whole pages, so a page serves many slots at the cost of one mapping.
const PAGE_BYTES: usize = 64 << 10;
// A cache line each, so that signals of two transfers never share one (false sharing).
const SLOT_BYTES: usize = 64;
// Offsets of the words in a slot. The two inbound words come first, as the peer maps only these.
const INBOUND: usize = 0;
const INBOUND_CAPTURED: usize = 8;
const COMPLETED: usize = 16;
const AWAITED: usize = 24;
const ABORT: usize = 32;
const COUNTER: usize = 40;

/// Size of the part of a slot that a peer accesses: its two inbound words.
const REMOTE_SLOT_BYTES: usize = 16;

/// Slot allocator of one rank.
#[derive(Debug)]
pub(crate) struct SlotPool {
    device: Arc<dyn Device>,
    /// Fault that aborts waits for its words.
    fault: Arc<Fault>,
    /// Number of the first slot, so that slot numbers are unique among the pools of a job.
    first: u64,
    state: Mutex<Pages>,
}

#[derive(Debug, Default)]
struct Pages {
    pages: Vec<Region>,
    free: Vec<u64>,
    scratch: ScratchPool,
}

/// The words that an end waits for, in its own memory. Returned to the pool by [`SlotPool::recycle`] rather
/// than on drop: a peer may still write to it.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) number: u64,
    memory: DeviceSlice,
    words: [Word; 3],
    counter: Word,
    inbound: Region,
}

/// Words of a slot as used by a channel.
#[derive(Debug)]
pub(crate) struct ChannelWords {
    /// Number of signals from the peer; the only word that it writes.
    pub(crate) inbound: Word,
    /// Number of signals that kernels have waited for.
    pub(crate) awaited: Word,
    /// Position up to which the proxy has completed requests.
    pub(crate) completed: Word,
    /// Nonzero once waits are aborted.
    pub(crate) abort: Word,
}

/// Inbound words of the peer, mapped here.
#[derive(Debug)]
pub(crate) struct RemoteSlot {
    words: [Word; 2],
}

impl SlotPool {
    pub(crate) fn new(device: &Arc<dyn Device>, fault: &Arc<Fault>, first: u64) -> Self {
        Self {
            device: device.clone(),
            fault: fault.clone(),
            first,
            state: Mutex::default(),
        }
    }

    /// Allocates a zeroed slot.
    pub(crate) fn allocate(&self, memory: &MemoryRegistry) -> Result<Slot> {
        let mut state = lock(&self.state);
        let number = match state.free.pop() {
            Some(number) => {
                let slice = state.slice(number)?;
                // Cleared now rather than when recycled, which could precede the peer's last signal. Now
                // nobody writes.
                if let Err(error) = self.device.upload(&slice, &[0; SLOT_BYTES]) {
                    state.free.push(number);
                    return Err(error);
                }
                number
            }
            None => {
                // With the lock held, unlike scratch pages: allocating signals never calls back for unused pages.
                let page = memory.allocate_signals(PAGE_BYTES, &self.fault)?;
                let first = (state.pages.len() * (PAGE_BYTES / SLOT_BYTES)) as u64;
                state.pages.push(page);
                // Lowest numbers on top of the stack.
                let rest = first + 1..first + (PAGE_BYTES / SLOT_BYTES) as u64;
                state.free.extend(rest.rev());
                first
            }
        };
        let slice = state.slice(number)?;
        let words = [
            slice.word(INBOUND)?,
            slice.word(INBOUND_CAPTURED)?,
            slice.word(COMPLETED)?,
        ];
        let (page, start) = Pages::place(number);
        let page = state.pages.get(page).ok_or_else(|| unknown_slot(number))?;
        // The peer's handle covers only the words that it may write.
        let inbound = page.slice(start..start + REMOTE_SLOT_BYTES)?;
        Ok(Slot {
            number: self.first + number,
            words,
            counter: slice.word(COUNTER)?,
            memory: slice,
            inbound,
        })
    }

    /// Zeroed scratch memory of `bytes`, a multiple of its alignment, returned with slot `number`. Blocks
    /// while it is cleared.
    pub(crate) fn allocate_scratch(
        &self,
        memory: &MemoryRegistry,
        number: u64,
        bytes: usize,
    ) -> Result<Region> {
        let mut state = lock(&self.state);
        let mut part = state.scratch.take(number, bytes)?;
        drop(state);
        if part.is_none() {
            // Outside the lock: an allocation that runs out of memory calls back for unused pages.
            let page_bytes = ScratchPool::page_bytes(bytes);
            let page = memory.allocate(page_bytes, AllocationKind::Plain)?;
            state = lock(&self.state);
            state.scratch.add_page(page);
            part = state.scratch.take(number, bytes)?;
            drop(state);
        }
        let part = part.ok_or_else(|| {
            let what = format!("a new page has no space for {bytes} bytes of scratch memory");
            Error::internal(what)
        })?;
        // Both ends of its previous transfer are gone, so nobody writes to it.
        match self.device.upload(part.memory(), &vec![0; bytes]) {
            Ok(()) => Ok(part),
            Err(error) => {
                lock(&self.state).scratch.give_back(number);
                Err(error)
            }
        }
    }

    /// Releases scratch pages without parts in use.
    pub(super) fn release_unused_scratch(&self) {
        let unused = lock(&self.state).scratch.take_unused_pages();
        // Outside the lock: dropping regions may call back into this.
        drop(unused);
    }

    /// Returns a slot that neither end will write any more.
    pub(crate) fn recycle(&self, number: u64) {
        let mut state = lock(&self.state);
        state.scratch.give_back(number);
        state.free.push(number - self.first);
    }
}

impl Pages {
    fn place(number: u64) -> (usize, usize) {
        let per_page = (PAGE_BYTES / SLOT_BYTES) as u64;
        (
            (number / per_page) as usize,
            (number % per_page) as usize * SLOT_BYTES,
        )
    }

    fn slice(&self, number: u64) -> Result<DeviceSlice> {
        let (page, start) = Self::place(number);
        let page = self.pages.get(page).ok_or_else(|| unknown_slot(number))?;
        page.memory().slice(start..start + SLOT_BYTES)
    }
}

impl Slot {
    /// Region that the peer maps to set the inbound words.
    pub(crate) fn inbound(&self) -> &Region {
        &self.inbound
    }

    /// Word that the peer sets outside of graphs.
    pub(crate) fn inbound_word(&self) -> &Word {
        &self.words[0]
    }

    /// Word that counts the own streams' completed posts outside of graphs.
    pub(crate) fn completed_word(&self) -> &Word {
        &self.words[2]
    }

    /// A word by which the blocks of a kernel of this rank synchronize; zero between uses.
    pub(crate) fn counter(&self) -> &Word {
        &self.counter
    }

    /// Nonzero once waits were aborted.
    pub(crate) fn abort(&self) -> Result<Word> {
        self.memory.word(ABORT)
    }

    /// Its words, as used by a channel.
    pub(crate) fn channel_words(&self) -> Result<ChannelWords> {
        Ok(ChannelWords {
            inbound: self.memory.word(INBOUND)?,
            awaited: self.memory.word(AWAITED)?,
            completed: self.memory.word(COMPLETED)?,
            abort: self.memory.word(ABORT)?,
        })
    }

    /// The word `name`; `None` for the one in the peer's memory.
    pub(crate) fn word(&self, name: SignalWord, captured: bool) -> Option<&Word> {
        match name {
            SignalWord::Inbound => Some(&self.words[usize::from(captured)]),
            SignalWord::Completed => Some(&self.words[2]),
            SignalWord::Outbound => None,
        }
    }
}

impl RemoteSlot {
    /// The words in the mapped inbound region of a peer's slot.
    pub(crate) fn new(inbound: &DeviceSlice) -> Result<Self> {
        Ok(Self {
            words: [inbound.word(INBOUND)?, inbound.word(INBOUND_CAPTURED)?],
        })
    }

    /// The peer's inbound word.
    pub(crate) fn word(&self, captured: bool) -> &Word {
        &self.words[usize::from(captured)]
    }
}

fn unknown_slot(number: u64) -> Error {
    Error::internal(format!("signal slot {number} is not in any page"))
}
