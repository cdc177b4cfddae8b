//! The owner's side: which allocations are registered, and which peers may still reach them.

use super::handle::Handle;
use crate::device::{DeviceSlice, Export};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::sync::lock;
use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Registered allocations by generation. An entry outlives its last region until no peer maps it:
/// memory must not be freed under a mapping.
#[derive(Debug, Default)]
pub(super) struct Exports {
    table: Mutex<Table>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Table {
    entries: HashMap<u64, Entry>,
    // The entry of each allocation that regions are registered in.
    current: HashMap<u64, u64>,
    generations: u64,
}

#[derive(Debug)]
struct Entry {
    export: Export,
    regions: usize,
    // How many handles each peer was sent and has not given back.
    holders: BTreeMap<Rank, u64>,
}

impl Exports {
    /// Registers the allocation of `slice` once more; `export` makes the entry if it is the first.
    /// Returns its generation.
    pub(super) fn register(
        &self,
        slice: &DeviceSlice,
        export: impl FnOnce() -> Result<Export>,
    ) -> Result<u64> {
        let allocation = slice.backing().identity();
        let mut table = lock(&self.table);
        if let Some(generation) = table.current.get(&allocation).copied()
            && let Some(entry) = table.entries.get_mut(&generation)
        {
            entry.regions += 1;
            return Ok(generation);
        }
        let export = export()?;
        table.generations += 1;
        let generation = table.generations;
        table.entries.insert(
            generation,
            Entry {
                export,
                regions: 1,
                holders: BTreeMap::new(),
            },
        );
        table.current.insert(allocation, generation);
        Ok(generation)
    }

    /// Ends one registration. Where it was the last, the entry is not given to new regions any
    /// more, and the allocation and the peers that hold handles of it are returned, to be asked to
    /// let go.
    pub(super) fn unregister(&self, generation: u64) -> Option<(u64, Vec<Rank>)> {
        let mut table = lock(&self.table);
        let entry = table.entries.get_mut(&generation)?;
        entry.regions -= 1;
        if entry.regions > 0 {
            return None;
        }
        let allocation = entry.export.allocation.backing().identity();
        let holders = entry.holders.keys().copied().collect();
        table.current.remove(&allocation);
        let freed = table.take_if_free(generation);
        drop(table);
        drop(freed);
        Some((allocation, holders))
    }

    /// Makes a handle for `peer` and counts it.
    pub(super) fn issue_handle(
        &self,
        generation: u64,
        peer: Rank,
        fill: impl FnOnce(&Export) -> Handle,
    ) -> Result<Handle> {
        let mut table = lock(&self.table);
        let entry = table.entries.get_mut(&generation);
        let entry = entry.ok_or_else(not_registered)?;
        *entry.holders.entry(peer).or_default() += 1;
        Ok(fill(&entry.export))
    }

    /// `peer` has given `handles` back: it holds no mapping that they led to.
    pub(super) fn handles_released(&self, generation: u64, peer: Rank, handles: u64) {
        let mut table = lock(&self.table);
        let Some(entry) = table.entries.get_mut(&generation) else {
            return;
        };
        let left = entry
            .holders
            .get(&peer)
            .map_or(0, |held| held.saturating_sub(handles));
        if left == 0 {
            entry.holders.remove(&peer);
        } else {
            entry.holders.insert(peer, left);
        }
        let freed = table.take_if_free(generation);
        drop(table);
        self.changed.notify_all();
        drop(freed);
    }

    /// `peer` is gone and maps nothing any more.
    pub(super) fn forget_peer(&self, peer: Rank) {
        let mut table = lock(&self.table);
        for entry in table.entries.values_mut() {
            entry.holders.remove(&peer);
        }
        let free: Vec<u64> = table
            .entries
            .iter()
            .filter(|(_, entry)| entry.is_free())
            .map(|(key, _)| *key)
            .collect();
        let freed: Vec<_> = free
            .into_iter()
            .filter_map(|generation| table.entries.remove(&generation))
            .collect();
        drop(table);
        self.changed.notify_all();
        drop(freed);
    }

    /// A descriptor of the allocation, for a peer that holds a handle of it.
    pub(super) fn descriptor(&self, generation: u64, allocation: u64) -> Result<OwnedFd> {
        let table = lock(&self.table);
        let entry = table.entries.get(&generation);
        let entry =
            entry.filter(|entry| entry.export.allocation.backing().identity() == allocation);
        let entry = entry.ok_or_else(not_registered)?;
        let descriptor = entry.export.descriptor.as_ref();
        let descriptor = descriptor.ok_or_else(|| {
            Error::new(
                ErrorKind::Unsupported,
                "the region cannot be opened by descriptor",
            )
        })?;
        descriptor
            .try_clone()
            .map_err(|error| Error::io("duplicate a descriptor", &error))
    }

    /// Waits until `generation` is freed, at most for `limit`; tells which peers still hold it.
    pub(super) fn wait_freed(&self, generation: u64, limit: Duration) -> Vec<Rank> {
        let table = lock(&self.table);
        let waited = self.changed.wait_timeout_while(table, limit, |table| {
            table.entries.contains_key(&generation)
        });
        let table = waited.unwrap_or_else(PoisonError::into_inner).0;
        table
            .entries
            .get(&generation)
            .map_or_else(Vec::new, |entry| entry.holders.keys().copied().collect())
    }

    /// How many allocations are registered or still held by a peer.
    pub(super) fn len(&self) -> usize {
        lock(&self.table).entries.len()
    }
}

impl Entry {
    fn is_free(&self) -> bool {
        self.regions == 0 && self.holders.is_empty()
    }
}

impl Table {
    fn take_if_free(&mut self, generation: u64) -> Option<Entry> {
        if self.entries.get(&generation).is_some_and(Entry::is_free) {
            self.entries.remove(&generation)
        } else {
            None
        }
    }
}

fn not_registered() -> Error {
    Error::new(ErrorKind::Closed, "the region is not registered any more")
        .help("keep the region as long as peers open handles of it")
}
