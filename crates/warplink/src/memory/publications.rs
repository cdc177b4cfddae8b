//! Dispatches peers' notices about published memory to the publications of this rank.

use super::exchanged::PeerHandle;
use super::message::Notice;
use crate::error::Rank;
use crate::sync::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Event for a publication. Handlers must not block.
#[derive(Debug)]
pub(crate) enum Heard {
    /// A peer offers an entry of its own.
    Offer {
        from: Rank,
        entry: u64,
        handle: PeerHandle,
    },
    /// A peer's notice about an entry, either the peer's or this rank's.
    Notice {
        from: Rank,
        entry: u64,
        notice: Notice,
    },
    /// Memory is exhausted: release what nobody holds.
    Reclaim,
}

type Listener = Arc<dyn Fn(Heard) + Send + Sync>;

/// Publications of this rank, by number.
#[derive(Default)]
pub(super) struct Publications(Mutex<PublicationTable>);

#[derive(Default)]
struct PublicationTable {
    so_far: u64,
    listeners: BTreeMap<u64, Listener>,
}

impl Publications {
    /// Adds a publication; returns its number, which is never reused.
    pub(super) fn add(&self, listener: Listener) -> u64 {
        let mut table = lock(&self.0);
        table.so_far += 1;
        let number = table.so_far;
        table.listeners.insert(number, listener);
        number
    }

    pub(super) fn remove(&self, number: u64) {
        let removed = lock(&self.0).listeners.remove(&number);
        // Outside the lock: dropping the listener may call back into this.
        drop(removed);
    }

    /// Delivers an event to the publication of that number, if it exists.
    pub(super) fn notify(&self, number: u64, heard: Heard) {
        let listener = lock(&self.0).listeners.get(&number).cloned();
        if let Some(listener) = listener {
            listener(heard);
        }
    }

    /// Notifies all publications that memory is exhausted.
    pub(super) fn reclaim(&self) {
        let listeners: Vec<Listener> = lock(&self.0).listeners.values().cloned().collect();
        for listener in listeners {
            listener(Heard::Reclaim);
        }
    }
}
