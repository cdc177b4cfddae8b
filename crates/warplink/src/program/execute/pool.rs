//! Memory and streams that plans take and give back.

use crate::device::{AllocationKind, Device, Priority, Stream};
use crate::error::Result;
use crate::memory::{MemoryRegistry, Region};
use crate::program::rank_program::StreamKind;
use crate::sync::lock;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

/// How many regions are kept that no plan uses: plans of ever new sizes would otherwise leave theirs.
const MAX_FREE_REGIONS: usize = 64;

#[derive(Debug)]
pub(super) struct Pool {
    device: Arc<dyn Device>,
    memory: Arc<MemoryRegistry>,
    // Registered regions, the one that was given back last at the end. They keep their registration, and
    // peers their mappings.
    free: Mutex<VecDeque<Region>>,
    streams: Mutex<BTreeMap<StreamKind, Stream>>,
}

impl Pool {
    pub(super) fn new(device: &Arc<dyn Device>, memory: &Arc<MemoryRegistry>) -> Self {
        Self {
            device: device.clone(),
            memory: memory.clone(),
            free: Mutex::default(),
            streams: Mutex::default(),
        }
    }

    /// Lets go of the regions that no plan uses.
    pub(super) fn release_free(&self) {
        let free = std::mem::take(&mut *lock(&self.free));
        drop(free);
    }

    /// A region of exactly `bytes`, with whatever the last user left in it.
    pub(super) fn take(&self, bytes: usize) -> Result<Region> {
        let mut free = lock(&self.free);
        let position = free.iter().rposition(|region| region.bytes() == bytes);
        let kept = position.and_then(|position| free.remove(position));
        drop(free);
        match kept {
            Some(region) => Ok(region),
            None => self.memory.allocate(bytes, AllocationKind::Plain),
        }
    }

    /// Takes back what no stream uses any more, and lets go of what has been free for longest.
    pub(super) fn give_back(&self, regions: impl IntoIterator<Item = Region>) {
        let mut free = lock(&self.free);
        free.extend(regions);
        let surplus = free.len().saturating_sub(MAX_FREE_REGIONS);
        let surplus: Vec<Region> = free.drain(..surplus).collect();
        drop(free);
        // Not under the lock.
        drop(surplus);
    }

    /// The stream that all plans use for `kind`; `None` for the caller's.
    pub(super) fn stream(&self, kind: StreamKind) -> Result<Option<Stream>> {
        let priority = match kind {
            StreamKind::Caller => return Ok(None),
            StreamKind::Pool(_) => Priority::Normal,
            StreamKind::High(_) => Priority::High,
        };
        let mut streams = lock(&self.streams);
        if let Some(stream) = streams.get(&kind) {
            return Ok(Some(stream.clone()));
        }
        let stream = self.device.create_stream(priority)?;
        streams.insert(kind, stream.clone());
        Ok(Some(stream))
    }
}
