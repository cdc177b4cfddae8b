//! Tables of published allocations, for kernels and for closures.

use super::ENTRIES;
use crate::device::{AllocationKind, Device, DeviceSlice};
use crate::error::{Error, Rank, Result};
use crate::sync::lock;
use std::sync::{Arc, Mutex};

/// Offset bits of the word that announces published memory. Must match the kernels.
const OFFSET_BITS: u32 = 48;

/// Location in a rank's published memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Published {
    /// Number of its allocation.
    pub(crate) number: u64,
    /// Byte offset in the allocation.
    pub(crate) start: u64,
}

impl Published {
    /// Encodes the location in one word, which is not 0.
    pub(crate) fn word(self) -> u64 {
        (self.number + 1) << OFFSET_BITS | self.start
    }

    /// Decodes a word; `None` for 0, which denotes unreachable memory.
    pub(crate) fn of_word(word: u64) -> Option<Self> {
        let number = (word >> OFFSET_BITS).checked_sub(1)?;
        let start = word & ((1 << OFFSET_BITS) - 1);
        Some(Self { number, start })
    }
}

/// For each rank and number, an address in the device's memory, or 0, and the allocation there.
#[derive(Debug)]
pub(crate) struct Tables {
    device: Arc<dyn Device>,
    memory: DeviceSlice,
    entries: Mutex<Vec<Option<DeviceSlice>>>,
}

impl Tables {
    /// Empty tables of `world` ranks.
    pub(super) fn new(device: &Arc<dyn Device>, world: usize) -> Result<Self> {
        let bytes = 8 * ENTRIES * world;
        let memory = device.allocate(bytes, AllocationKind::Plain)?;
        device.upload(&memory, &vec![0; bytes])?;
        Ok(Self {
            device: device.clone(),
            memory,
            entries: Mutex::new(vec![None; ENTRIES * world]),
        })
    }

    /// Address of the tables, for kernels.
    pub(crate) fn address(&self) -> u64 {
        self.memory.address()
    }

    /// Allocation of a rank, as mapped here.
    fn get(&self, rank: Rank, number: u64) -> Option<DeviceSlice> {
        let place = place(rank, number)?;
        lock(&self.entries).get(place)?.clone()
    }

    /// Announcement by `rank`, which is this one, of its memory at `address`: 0 unless all peers have it mapped there,
    /// and it is aligned to the 16-byte accesses of kernels.
    pub(crate) fn announced(&self, rank: Rank, at: Published, address: u64) -> u64 {
        let allocation = self.get(rank, at.number);
        let known = allocation.is_some_and(|known| known.address() + at.start == address);
        if known && address.is_multiple_of(16) {
            at.word()
        } else {
            0
        }
    }

    /// Local mapping of the memory that `rank` announces as `word`, to the end of its allocation; `None` if it is not
    /// mapped.
    pub(crate) fn reached(&self, rank: Rank, word: u64) -> Option<DeviceSlice> {
        let at = Published::of_word(word)?;
        let allocation = self.get(rank, at.number)?;
        allocation.slice(at.start as usize..allocation.bytes()).ok()
    }

    /// Stores an entry. Blocks until kernels see it.
    pub(super) fn set(&self, rank: Rank, number: u64, allocation: &DeviceSlice) -> Result<()> {
        let place = place(rank, number).ok_or_else(no_such_entry)?;
        if let Some(entry) = lock(&self.entries).get_mut(place) {
            *entry = Some(allocation.clone());
        }
        self.upload(place, allocation.address())
    }

    /// Clears an entry. Blocks until kernels see that.
    pub(super) fn clear(&self, rank: Rank, number: u64) -> Result<()> {
        let place = place(rank, number).ok_or_else(no_such_entry)?;
        // Kernels must have stopped to see the address before the mapping can go.
        let cleared = self.upload(place, 0);
        let gone = lock(&self.entries).get_mut(place).and_then(Option::take);
        // Dropped outside the lock: this may be the last reference to memory, and freeing it takes time.
        drop(gone);
        cleared
    }

    fn upload(&self, place: usize, address: u64) -> Result<()> {
        let word = self.memory.slice(8 * place..8 * place + 8)?;
        self.device.upload(&word, &address.to_le_bytes())
    }
}

fn place(rank: Rank, number: u64) -> Option<usize> {
    let number = usize::try_from(number).ok().filter(|n| *n < ENTRIES)?;
    Some(rank * ENTRIES + number)
}

fn no_such_entry() -> Error {
    Error::protocol(format!(
        "a rank publishes more than {ENTRIES} allocations at a time"
    ))
    .with_operation("publish memory")
}
