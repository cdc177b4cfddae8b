//! Scratch memory of transfer ends: parts of pages that peers map whole, like slots.
//!
//! Parts come in a few size classes, four for each doubling, so that a returned part fits transfers of other
//! lengths. Pages without parts are kept until memory is exhausted.

use crate::error::Result;
use crate::memory::Region;
use std::collections::{BTreeMap, HashMap};

/// Size of a page, unless a part is longer.
// Large enough that peers map few pages.
const PAGE_BYTES: usize = 4 << 20;

/// Allocates parts of pages; each belongs to a slot and is returned with it.
#[derive(Debug, Default)]
pub(super) struct ScratchPool {
    pages: BTreeMap<u64, Page>,
    pages_so_far: u64,
    /// Returned parts by size.
    free: BTreeMap<usize, Vec<PartLocation>>,
    /// Parts of slots, and their sizes.
    held: HashMap<u64, (PartLocation, usize)>,
}

#[derive(Debug)]
struct Page {
    region: Region,
    /// Offset of the first byte not yet in any part.
    used: usize,
    /// Number of parts in use.
    held: usize,
}

/// Location of a part: page number and offset.
type PartLocation = (u64, usize);

impl ScratchPool {
    /// Size of a page for a part of `bytes`.
    pub(super) fn page_bytes(bytes: usize) -> usize {
        size(bytes).max(PAGE_BYTES)
    }

    /// `bytes` for slot `number`, with stale contents; `None` if no page has space.
    pub(super) fn take(&mut self, number: u64, bytes: usize) -> Result<Option<Region>> {
        let size = size(bytes);
        // Reuse a part of the same size class before cutting a new one.
        let free = self.free.get_mut(&size).and_then(Vec::pop);
        let Some((place, start)) = free.or_else(|| self.cut(size)) else {
            return Ok(None);
        };
        let Some(page) = self.pages.get_mut(&place) else {
            return Ok(None);
        };
        let part = page.region.slice(start..start + bytes)?;
        page.held += 1;
        self.held.insert(number, ((place, start), size));
        Ok(Some(part))
    }

    /// Adds a page.
    pub(super) fn add_page(&mut self, region: Region) {
        let page = Page {
            region,
            used: 0,
            held: 0,
        };
        self.pages.insert(self.pages_so_far, page);
        self.pages_so_far += 1;
    }

    /// Returns the part of slot `number`, if it has one. Neither end may write to it any more.
    pub(super) fn give_back(&mut self, number: u64) {
        let Some((place, size)) = self.held.remove(&number) else {
            return;
        };
        if let Some(page) = self.pages.get_mut(&place.0) {
            page.held -= 1;
        }
        self.free.entry(size).or_default().push(place);
    }

    /// Removes the pages without parts in use.
    pub(super) fn take_unused_pages(&mut self) -> Vec<Region> {
        let pages = std::mem::take(&mut self.pages).into_iter();
        let (unused, kept): (BTreeMap<u64, Page>, _) = pages.partition(|(_, page)| page.held == 0);
        // Parts of removed pages must not be handed out again.
        self.pages = kept;
        self.free.retain(|_, places| {
            places.retain(|(page, _)| self.pages.contains_key(page));
            !places.is_empty()
        });
        unused.into_values().map(|page| page.region).collect()
    }

    /// Cuts a new part of `size` from a page with space.
    fn cut(&mut self, size: usize) -> Option<PartLocation> {
        let fits = |page: &Page| page.used + size <= page.region.bytes();
        let (&number, page) = self.pages.iter_mut().find(|(_, page)| fits(page))?;
        let start = page.used;
        page.used += size;
        Some((number, start))
    }
}

/// Size class for `bytes`: at most a quarter larger, with the same alignment.
fn size(bytes: usize) -> usize {
    // An eighth of the power of two above: four classes for each doubling.
    bytes.next_multiple_of((bytes.next_power_of_two() / 8).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deadline::Deadline;
    use crate::device::{Device, DeviceConfig, DeviceKind, Fault};
    use crate::memory::{IdleMappings, MemoryRegistry};
    use crate::signal::{SlotDirectory, SlotReleases};
    use std::sync::Arc;
    use std::time::Duration;

    fn registry(device: &Arc<dyn Device>) -> Arc<MemoryRegistry> {
        let idle = IdleMappings::default();
        let gather = |own| Ok(vec![own]);
        Arc::new(MemoryRegistry::start(0, device, b"secret", idle, 1 << 30, gather).unwrap())
    }

    #[test]
    fn sizes_are_few_and_hardly_longer_than_asked_for() {
        let mut sizes = std::collections::BTreeSet::new();
        for bytes in (256..1 << 20).step_by(256) {
            let size = size(bytes);
            assert!(
                (bytes..=bytes + bytes / 4).contains(&size),
                "{bytes}: {size}"
            );
            assert_eq!(size % 256, 0);
            sizes.insert(size);
        }
        assert!(sizes.len() <= 4 * 12 + 1, "{sizes:?}");
    }

    #[test]
    fn parts_of_many_lengths_use_the_same_pages_which_go_back_when_memory_is_trimmed() {
        let device = crate::device::open(&DeviceConfig::new(DeviceKind::Host, 0)).unwrap();
        let memory = registry(&device);
        let directory = SlotDirectory::start(&memory);
        let fault = Arc::new(Fault::default());
        let (slots, _releases) = SlotReleases::start(&directory, &device, &fault, &memory);
        let trim = || {
            memory
                .trim(Deadline::after(Duration::from_secs(5)))
                .unwrap()
        };
        let first = slots.allocate(&memory).unwrap().number;
        let kept = slots.allocate_scratch(&memory, first, 4096).unwrap();
        kept.upload(&[7; 4096]).unwrap();
        let before = memory.counts().0;
        for bytes in (256..1 << 20).step_by(1280) {
            let slot = slots.allocate(&memory).unwrap();
            let part = slots.allocate_scratch(&memory, slot.number, bytes).unwrap();
            assert!(part.download().unwrap().iter().all(|byte| *byte == 0));
            part.upload(&vec![9; bytes]).unwrap();
            drop(part);
            slots.recycle(slot.number);
        }
        assert!(memory.counts().0 <= before + 4, "{:?}", memory.counts());
        assert_eq!(kept.download().unwrap(), [7; 4096]);
        trim();
        assert_eq!(
            memory.counts().0,
            before,
            "only the page with a part is left"
        );
        assert_eq!(kept.download().unwrap(), [7; 4096]);
        drop(kept);
        slots.recycle(first);
        trim();
        assert_eq!(memory.counts().0, before - 1);
    }
}
