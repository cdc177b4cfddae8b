//! What peers say of memory that ranks publish to one another, handed on to whom it concerns.

use super::exchanged::PeerHandle;
use super::message::Notice;
use crate::error::Rank;
use crate::sync::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// What a publication is told. It must not block.
#[derive(Debug)]
pub(crate) enum Heard {
    /// A peer offers an entry of its own.
    Offer {
        from: Rank,
        entry: u64,
        handle: PeerHandle,
    },
    /// A peer tells of an entry: its own, of which it is the owner, or one of this rank's.
    Notice {
        from: Rank,
        entry: u64,
        notice: Notice,
    },
    /// Memory runs out: what is held for nobody is to be let go of.
    Reclaim,
}

type Listener = Arc<dyn Fn(Heard) + Send + Sync>;

/// The publications of this rank, by number.
#[derive(Default)]
pub(super) struct Publications(Mutex<Table>);

#[derive(Default)]
struct Table {
    so_far: u64,
    listeners: BTreeMap<u64, Listener>,
}

impl Publications {
    /// Adds one; its number, which is never used again.
    pub(super) fn add(&self, listener: Listener) -> u64 {
        let mut table = lock(&self.0);
        table.so_far += 1;
        let number = table.so_far;
        table.listeners.insert(number, listener);
        number
    }

    pub(super) fn remove(&self, number: u64) {
        let removed = lock(&self.0).listeners.remove(&number);
        // Not under the lock: what it holds may lead back here.
        drop(removed);
    }

    /// Tells the one of that number, where there is one.
    pub(super) fn tell(&self, number: u64, heard: Heard) {
        let listener = lock(&self.0).listeners.get(&number).cloned();
        if let Some(listener) = listener {
            listener(heard);
        }
    }

    /// Tells all that memory runs out.
    pub(super) fn reclaim(&self) {
        let listeners: Vec<Listener> = lock(&self.0).listeners.values().cloned().collect();
        for listener in listeners {
            listener(Heard::Reclaim);
        }
    }
}
