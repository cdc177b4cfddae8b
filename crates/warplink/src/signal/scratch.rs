//! Scratch memory of the ends of transfers: parts of pages that peers map whole, as they do those of slots.

use crate::device::{AllocationKind, Device};
use crate::error::Result;
use crate::memory::{MemoryRegistry, Region};
use std::collections::{BTreeMap, HashMap};

/// Bytes of a page, unless a part is longer.
const PAGE_BYTES: usize = 4 << 20;

/// Hands out parts of pages; each belongs to a slot, and goes back with it.
#[derive(Debug, Default)]
pub(super) struct ScratchPool {
    pages: Vec<Page>,
    /// What was given back, by its length. Transfers of a program are alike, so lengths come again.
    free: BTreeMap<usize, Vec<Place>>,
    held: HashMap<u64, (Place, usize)>,
}

#[derive(Debug)]
struct Page {
    region: Region,
    used: usize,
}

/// Where a part is: the page's number, and the first byte in it.
type Place = (usize, usize);

impl ScratchPool {
    /// `bytes` for slot `number`, all zero. Blocks while they are cleared.
    pub(super) fn allocate(
        &mut self,
        (device, memory): (&dyn Device, &MemoryRegistry),
        number: u64,
        bytes: usize,
    ) -> Result<Region> {
        let (page, start) = self.place(memory, bytes)?;
        let part = self.pages[page].region.slice(start..start + bytes);
        let cleared = part.and_then(|part| {
            // Those that used it before are done with it: both ends of their transfer are gone.
            device.upload(part.memory(), &vec![0; bytes])?;
            Ok(part)
        });
        match cleared {
            Ok(part) => {
                self.held.insert(number, ((page, start), bytes));
                Ok(part)
            }
            Err(error) => {
                self.free.entry(bytes).or_default().push((page, start));
                Err(error)
            }
        }
    }

    /// Takes back what slot `number` had, if it had any. Neither end may write to it any more.
    pub(super) fn give_back(&mut self, number: u64) {
        if let Some((place, bytes)) = self.held.remove(&number) {
            self.free.entry(bytes).or_default().push(place);
        }
    }

    fn place(&mut self, memory: &MemoryRegistry, bytes: usize) -> Result<Place> {
        if let Some(place) = self.free.get_mut(&bytes).and_then(Vec::pop) {
            return Ok(place);
        }
        let fits = |page: &Page| page.used + bytes <= page.region.bytes();
        let number = match self.pages.iter().position(fits) {
            Some(number) => number,
            None => {
                let region = memory.allocate(bytes.max(PAGE_BYTES), AllocationKind::Plain)?;
                self.pages.push(Page { region, used: 0 });
                self.pages.len() - 1
            }
        };
        let start = self.pages[number].used;
        self.pages[number].used += bytes;
        Ok((number, start))
    }
}
