//! Tracks when a signal slot may be reused: once neither end will write to it.

use super::slots::{RemoteSlot, Slot, SlotPool};
use crate::device::{Device, Fault};
use crate::error::{Rank, Result};
use crate::memory::{MemoryRegistry, Message, PeerHandle, RemoteRegion};
use crate::sync::lock;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, Weak};

/// Slot numbers of a pool start at a multiple of this.
const SLOTS_OF_A_POOL: u64 = 1 << 32;

/// Slot pools of a job, two for each communicator: for transfers and for channels.
#[derive(Debug, Default)]
pub(crate) struct SlotDirectory(Mutex<Pools>);

#[derive(Debug, Default)]
struct Pools {
    next: u64,
    by_number: HashMap<u64, Weak<SlotReleases>>,
}

impl SlotDirectory {
    /// An empty directory that receives peers' slot releases and out-of-memory events.
    pub(crate) fn start(memory: &MemoryRegistry) -> Arc<Self> {
        let directory = Arc::new(Self::default());
        // Weak references: the registry's callbacks must not keep the directory alive.
        let weak = Arc::downgrade(&directory);
        memory.when_slot_released(move |_, slot| {
            if let Some(directory) = weak.upgrade() {
                directory.release(slot);
            }
        });
        let asked = Arc::downgrade(&directory);
        memory.when_out_of_memory(move || {
            if let Some(directory) = asked.upgrade() {
                directory.release_unused_scratch();
            }
        });
        directory
    }

    fn release_unused_scratch(&self) {
        // Collected first: dropping the last owner of a pool locks the directory.
        let known: Vec<_> = lock(&self.0).by_number.values().cloned().collect();
        for pool in known.iter().filter_map(Weak::upgrade) {
            pool.slots.release_unused_scratch();
        }
    }

    /// One of the two ends has released a slot of this rank.
    fn release(&self, slot: u64) {
        let pool = lock(&self.0)
            .by_number
            .get(&(slot / SLOTS_OF_A_POOL))
            .and_then(Weak::upgrade);
        if let Some(pool) = pool {
            pool.release(slot);
        }
    }
}

/// Slots of a pool that one of the two ends has released.
#[derive(Debug)]
pub(crate) struct SlotReleases {
    slots: Arc<SlotPool>,
    directory: Arc<SlotDirectory>,
    /// Number of the pool in the directory.
    number: u64,
    memory: Weak<MemoryRegistry>,
    released_once: Mutex<HashSet<u64>>,
}

/// A slot of this rank and one of a peer, which both ends write to. Each is reused once both ranks have
/// dropped their pairs.
#[derive(Debug)]
pub(crate) struct SlotPair {
    pub(crate) own: Slot,
    pub(crate) remote: RemoteSlot,
    _page: RemoteRegion,
    _end: EndOfSlots,
}

/// Notifies both ranks on drop.
#[derive(Debug)]
struct EndOfSlots {
    peer: Rank,
    /// Numbers of this rank's slot and of the peer's.
    slots: [u64; 2],
    releases: Arc<SlotReleases>,
}

impl SlotReleases {
    /// Creates a pool registered in `directory`.
    pub(crate) fn start(
        directory: &Arc<SlotDirectory>,
        device: &Arc<dyn Device>,
        fault: &Arc<Fault>,
        memory: &Arc<MemoryRegistry>,
    ) -> (Arc<SlotPool>, Arc<Self>) {
        let mut pools = lock(&directory.0);
        let number = pools.next;
        pools.next += 1;
        let slots = Arc::new(SlotPool::new(device, fault, number * SLOTS_OF_A_POOL));
        let releases = Arc::new(Self {
            slots: slots.clone(),
            directory: directory.clone(),
            number,
            memory: Arc::downgrade(memory),
            released_once: Mutex::default(),
        });
        pools.by_number.insert(number, Arc::downgrade(&releases));
        (slots, releases)
    }

    /// Pairs the slot `own` with the one of `peer`, given its number there, and maps that with the handle `inbound`. On
    /// failure, both ranks are notified that this one writes to neither.
    pub(crate) fn pair(
        self: &Arc<Self>,
        own: Slot,
        (peer, at_peer): (Rank, u64),
        inbound: PeerHandle,
    ) -> Result<SlotPair> {
        // Before the handle is opened: if that fails, dropping `end` releases both slots.
        let end = EndOfSlots {
            peer,
            slots: [own.number, at_peer],
            releases: self.clone(),
        };
        let page = inbound.open()?;
        Ok(SlotPair {
            remote: RemoteSlot::new(page.memory())?,
            own,
            _page: page,
            _end: end,
        })
    }

    /// One of the two ends has released a slot of this rank.
    fn release(&self, slot: u64) {
        // The slot is free after the second release: one comes from this end, one from the peer.
        let mut released_once = lock(&self.released_once);
        if released_once.remove(&slot) {
            drop(released_once);
            self.slots.recycle(slot);
        } else {
            released_once.insert(slot);
        }
    }
}

impl Drop for EndOfSlots {
    fn drop(&mut self) {
        let [own, slot] = self.slots;
        if let Some(memory) = self.releases.memory.upgrade() {
            // The peer's slot, which this end wrote to: notices are retransmitted, so a slot is leaked only if the
            // peer is lost.
            memory.notify(self.peer, Message::SlotReleased { slot });
        }
        self.releases.release(own);
    }
}

impl Drop for SlotReleases {
    fn drop(&mut self) {
        lock(&self.directory.0).by_number.remove(&self.number);
    }
}
