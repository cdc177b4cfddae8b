//! Memory and streams that plans take and give back.

use crate::device::{AllocationKind, Device, Priority, Stream};
use crate::error::Result;
use crate::memory::{MemoryRegistry, Region};
use crate::program::rank_program::StreamKind;
use crate::sync::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

#[derive(Debug)]
pub(super) struct Pool {
    device: Arc<dyn Device>,
    memory: Arc<MemoryRegistry>,
    // Registered regions by length. They keep their registration, and peers their mappings.
    free: Mutex<BTreeMap<usize, Vec<Region>>>,
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
        let kept = lock(&self.free).get_mut(&bytes).and_then(Vec::pop);
        match kept {
            Some(region) => Ok(region),
            None => self.memory.allocate(bytes, AllocationKind::Plain),
        }
    }

    pub(super) fn give_back(&self, regions: impl IntoIterator<Item = Region>) {
        let mut free = lock(&self.free);
        for region in regions {
            free.entry(region.bytes()).or_default().push(region);
        }
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
