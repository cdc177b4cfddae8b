//! When a signal slot may be used again: when neither end will write to it any more.

use crate::error::Rank;
use crate::memory::{MemoryRegistry, Message};
use crate::signal::SlotPool;
use crate::sync::lock;
use std::collections::HashSet;
use std::sync::{Arc, Mutex, Weak};

/// Which slots of this rank one of the two ends has let go of.
#[derive(Debug)]
pub(super) struct SlotReleases {
    slots: Arc<SlotPool>,
    memory: Weak<MemoryRegistry>,
    released_once: Mutex<HashSet<u64>>,
}

impl SlotReleases {
    /// Starts to hear of slots that peers release.
    pub(super) fn start(slots: &Arc<SlotPool>, memory: &Arc<MemoryRegistry>) -> Arc<Self> {
        let releases = Arc::new(Self {
            slots: slots.clone(),
            memory: Arc::downgrade(memory),
            released_once: Mutex::default(),
        });
        let told = Arc::downgrade(&releases);
        memory.when_slot_released(move |_, slot| {
            if let Some(releases) = told.upgrade() {
                releases.release(slot);
            }
        });
        releases
    }

    /// This rank dropped its end of a transfer: it will write neither to the slot `own` nor to the
    /// slot `at_peer` of `peer` any more.
    pub(super) fn end_dropped(&self, peer: Rank, own: u64, at_peer: u64) {
        if let Some(memory) = self.memory.upgrade() {
            memory.tell(peer, Message::SlotReleased { slot: at_peer });
        }
        self.release(own);
    }

    /// One of the two ends let go of a slot of this rank.
    fn release(&self, slot: u64) {
        let mut released_once = lock(&self.released_once);
        if released_once.remove(&slot) {
            drop(released_once);
            self.slots.recycle(slot);
        } else {
            released_once.insert(slot);
        }
    }
}
