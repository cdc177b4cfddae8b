//! Owner's side: registered regions, their allocations, and the peers that may still access them.
//!
//! # Invariants
//! 1. An allocation is held by at least one of its regions until no peer maps it: memory must not be freed
//!    under a mapping.
//! 2. A region of borrowed memory is held until it is unregistered and no peer uses it, and not longer,
//!    except for 1.
//! 3. Memory is released outside the lock, and if that may run foreign code, on a thread that may block
//!    ([`Releaser`]).
//! 4. An allocation is reused ([`pool`]) only if nobody holds a slice of it, no local stream and no peer uses
//!    it, and no lost rank has mapped it.

mod pool;
#[cfg(test)]
mod tests;

pub(super) use self::pool::EnteredPool;
use self::pool::Pooled;
use super::handle::Handle;
use super::releaser::Releaser;
use crate::device::{AllocationKind, Backing, DeviceSlice, Export, Piece};
use crate::error::{Error, Rank, Result};
use crate::sync::{lock, wait_while};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// Registered allocations by generation.
#[derive(Debug)]
pub(super) struct Exports {
    table: Mutex<Table>,
    changed: Condvar,
    releaser: Releaser,
}

/// Identifiers of a registered region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RegionNumbers {
    pub(super) generation: u64,
    pub(super) region: u64,
}

/// An allocation that a peer should unmap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unwanted {
    pub(super) peer: Rank,
    pub(super) allocation: u64,
    pub(super) generation: u64,
}

/// Consequences of ending a registration.
#[derive(Debug, Default)]
pub(super) struct EndedRegistration {
    /// Allocations that are no longer registered, and those evicted from the pool.
    pub(super) unwanted: Vec<Unwanted>,
    /// Allocation that entered the pool; reusable once the device's streams have completed.
    pub(super) pooled: Option<EnteredPool>,
}

/// The data a handle needs to open an allocation.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExportedAllocation {
    pub(super) identity: u64,
    pub(super) bytes: u64,
    pub(super) ipc: Option<[u8; 64]>,
    pub(super) pieces: u32,
    pub(super) host: bool,
    /// Number of the region if the owner tracks its use; else 0.
    pub(super) region: u64,
}

#[derive(Debug, Default)]
struct Table {
    entries: HashMap<u64, Entry>,
    // Entry of each allocation that currently accepts regions.
    current: HashMap<u64, u64>,
    generations: u64,
    regions: u64,
    // Pool: generations keyed by size and order of entry.
    pool: BTreeMap<(u64, u64), u64>,
    max_pooled_bytes: u64,
    pooled_so_far: u64,
}

#[derive(Debug)]
struct Entry {
    allocation: u64,
    bytes: u64,
    ipc: Option<[u8; 64]>,
    pieces: Vec<Piece>,
    host: bool,
    regions: BTreeMap<u64, RegionEntry>,
    // Handles that each peer was sent and has not returned.
    holders: Holders,
    // Allocation kind, if the registry allocated it and may reuse it.
    reusable: Option<AllocationKind>,
    // Holds the allocation while it is pooled, when no region of it is registered.
    pooled: Option<Pooled>,
}

#[derive(Debug)]
struct RegionEntry {
    backing: Arc<dyn Backing>,
    registered: bool,
    // Handles of this region in use by each peer; tracked if the memory is borrowed or reusable.
    users: Holders,
}

/// Number of handles of each peer.
#[derive(Debug, Default)]
struct Holders(BTreeMap<Rank, u64>);

/// Values to drop outside the lock.
#[must_use]
#[derive(Debug, Default)]
struct Freed {
    entries: Vec<Entry>,
    regions: Vec<RegionEntry>,
}

impl Exports {
    /// An empty table whose pool keeps up to `max_pooled_bytes`.
    pub(super) fn new(max_pooled_bytes: u64) -> Self {
        Self {
            table: Mutex::new(Table {
                max_pooled_bytes,
                ..Table::default()
            }),
            changed: Condvar::new(),
            releaser: Releaser::default(),
        }
    }

    /// Registers `slice` as a region of its allocation. `export` exports the allocation if this is its first
    /// region. A `reusable` allocation is pooled after its last region.
    pub(super) fn register(
        &self,
        slice: &DeviceSlice,
        reusable: Option<AllocationKind>,
        export: impl FnOnce() -> Result<Export>,
    ) -> Result<RegionNumbers> {
        let allocation = slice.backing().identity();
        let mut table = lock(&self.table);
        let known = table.current.get(&allocation).copied();
        let generation = match known {
            Some(generation) => generation,
            None => {
                // Exported once for all of its regions.
                let export = export()?;
                table.add(allocation, slice.backing().bytes() as u64, reusable, export)
            }
        };
        let backing = slice.backing().clone();
        // Registered again while pooled: it must not be reused for another region.
        table.leave_pool(generation);
        Ok(table.add_region(generation, backing))
    }

    /// Ends a registration. If it was the allocation's last, the allocation enters the pool, or accepts no
    /// more regions and is to be unmapped by peers that hold handles.
    pub(super) fn unregister(&self, numbers: RegionNumbers) -> EndedRegistration {
        let generation = numbers.generation;
        let mut table = lock(&self.table);
        let Some(entry) = table.entries.get_mut(&generation) else {
            return EndedRegistration::default();
        };
        if let Some(region) = entry.regions.get_mut(&numbers.region) {
            region.registered = false;
        }
        let mut ended = EndedRegistration::default();
        let mut freed = Freed::default();
        if !entry.is_registered() {
            // The last region ended: pool the allocation, or let peers unmap it.
            ended.pooled = table.enter_pool(generation, numbers.region);
            if ended.pooled.is_none() {
                ended.unwanted = table.give_up(generation);
            }
            // Entering may exceed the limit.
            table.limit_pool(&mut ended.unwanted, &mut freed);
        }
        freed.extend(table.free_unused(generation));
        drop(table);
        // On the caller's thread, which gives up the memory.
        drop(freed);
        self.changed.notify_all();
        ended
    }

    /// Issues a handle for `peer` and counts it.
    pub(super) fn issue_handle(
        &self,
        numbers: RegionNumbers,
        peer: Rank,
        fill: impl FnOnce(&ExportedAllocation) -> Handle,
    ) -> Result<Handle> {
        let mut table = lock(&self.table);
        let entry = table.entries.get_mut(&numbers.generation);
        let entry = entry.ok_or_else(not_registered)?;
        let region = entry
            .regions
            .get_mut(&numbers.region)
            .ok_or_else(not_registered)?;
        // Only for these does the owner need to know when a region is no longer used.
        let reported = region.backing.is_borrowed() || entry.reusable.is_some();
        if reported {
            region.users.add(peer);
        }
        entry.holders.add(peer);
        Ok(fill(&ExportedAllocation {
            identity: entry.allocation,
            bytes: entry.bytes,
            ipc: entry.ipc,
            pieces: entry.pieces.len() as u32,
            host: entry.host,
            region: if reported { numbers.region } else { 0 },
        }))
    }

    /// Takes back a handle that never reached `peer`.
    pub(super) fn cancel_handle(&self, numbers: RegionNumbers, peer: Rank) {
        // In the order in which a peer would report it: use first, then mapping.
        self.released(numbers, peer, 1);
        self.released(
            RegionNumbers {
                region: 0,
                ..numbers
            },
            peer,
            1,
        );
    }

    /// `peer` has returned `handles` handles: it no longer uses their region or, for region 0, holds no mapping opened
    /// from them.
    pub(super) fn released(&self, numbers: RegionNumbers, peer: Rank, handles: u64) {
        let RegionNumbers { generation, region } = numbers;
        let mut table = lock(&self.table);
        if let Some(entry) = table.entries.get_mut(&generation) {
            if region == 0 {
                entry.holders.remove(peer, handles);
            } else if let Some(region) = entry.regions.get_mut(&region) {
                region.users.remove(peer, handles);
            }
        }
        let freed = table.free_unused(generation);
        drop(table);
        self.release(freed);
    }

    /// `peer` is gone: stops waiting for it. Returns allocations that other peers should unmap.
    pub(super) fn forget_peer(&self, peer: Rank) -> Vec<Unwanted> {
        let mut table = lock(&self.table);
        let (mut unwanted, mut freed) = (Vec::new(), Freed::default());
        let generations: Vec<u64> = table.entries.keys().copied().collect();
        for generation in generations {
            if let Some(entry) = table.entries.get_mut(&generation) {
                for region in entry.regions.values_mut() {
                    region.users.0.remove(&peer);
                }
                // The lost rank may still write to memory that it has mapped.
                if entry.holders.0.remove(&peer).is_some() {
                    unwanted.extend(table.never_reuse(generation));
                }
            }
            freed.extend(table.free_unused(generation));
        }
        drop(table);
        self.release(freed);
        unwanted
    }

    /// A piece of the allocation, for a peer that holds a handle.
    pub(super) fn piece(&self, generation: u64, allocation: u64, index: u64) -> Result<Piece> {
        let table = lock(&self.table);
        let entry = table.entries.get(&generation);
        // The identity guards against a stale generation of a reused number.
        let entry = entry.filter(|entry| entry.allocation == allocation);
        let entry = entry.ok_or_else(not_registered)?;
        let piece = usize::try_from(index).ok();
        let piece = piece.and_then(|index| entry.pieces.get(index));
        let piece = piece.ok_or_else(|| {
            let pieces = entry.pieces.len();
            Error::unsupported(format!(
                "the allocation has no piece {index}; expected less than {pieces}"
            ))
        })?;
        piece.try_clone()
    }

    /// Waits up to `limit` until an unregistered region is freed. Otherwise returns the peers that hold it.
    pub(super) fn wait_freed(&self, numbers: RegionNumbers, limit: Duration) -> Option<Vec<Rank>> {
        let is_held = |table: &mut Table| table.holds(numbers).is_some();
        let table = wait_while(&self.changed, lock(&self.table), limit, is_held);
        table.holds(numbers).map(Entry::peers)
    }

    /// Allocations that exist only because peers map them.
    pub(super) fn unregistered(&self) -> Vec<Unwanted> {
        let table = lock(&self.table);
        let left = table.unregistered();
        left.flat_map(|(generation, entry)| entry.unwanted(*generation))
            .collect()
    }

    /// Peers that map or use such allocations; `None` if there are none.
    pub(super) fn unregistered_at(&self) -> Option<Vec<Rank>> {
        let table = lock(&self.table);
        let mut left = table.unregistered().peekable();
        left.peek()?;
        Some(left.flat_map(|(_, entry)| entry.peers()).collect())
    }

    /// Waits for a free, up to `limit`.
    pub(super) fn wait_for_change(&self, limit: Duration) {
        let table = lock(&self.table);
        let count = table.entries.len();
        // Callers check again whatever ended the wait.
        drop(wait_while(&self.changed, table, limit, |table| {
            table.entries.len() >= count
        }));
    }

    /// Number of allocations that are registered or still used or mapped by a peer, excluding unused ones in
    /// the pool.
    pub(super) fn len(&self) -> usize {
        let table = lock(&self.table);
        let entries = table.entries.values();
        entries
            .filter(|entry| !entry.regions.is_empty() || !entry.is_kept())
            .count()
    }

    /// Drops values freed by a peer's message.
    fn release(&self, freed: Freed) {
        self.releaser.release(freed.is_borrowed(), freed);
        self.changed.notify_all();
    }
}

impl Table {
    /// Adds an entry for an allocation and returns its generation.
    fn add(
        &mut self,
        allocation: u64,
        bytes: u64,
        reusable: Option<AllocationKind>,
        export: Export,
    ) -> u64 {
        self.generations += 1;
        let generation = self.generations;
        self.entries.insert(
            generation,
            Entry {
                allocation,
                bytes,
                ipc: export.ipc,
                host: export.host,
                pieces: export.pieces,
                regions: BTreeMap::new(),
                holders: Holders::default(),
                reusable,
                pooled: None,
            },
        );
        self.current.insert(allocation, generation);
        generation
    }

    /// Adds a region to an entry.
    fn add_region(&mut self, generation: u64, backing: Arc<dyn Backing>) -> RegionNumbers {
        self.regions += 1;
        let region = self.regions;
        if let Some(entry) = self.entries.get_mut(&generation) {
            let registered = RegionEntry {
                backing,
                registered: true,
                users: Holders::default(),
            };
            entry.regions.insert(region, registered);
        }
        RegionNumbers { generation, region }
    }

    /// Stops an entry from accepting regions. Returns what peers should unmap.
    fn give_up(&mut self, generation: u64) -> Vec<Unwanted> {
        let Some(entry) = self.entries.get(&generation) else {
            return Vec::new();
        };
        // New regions of this memory start a new generation, since peers may already be unmapping this one.
        if self.current.get(&entry.allocation) == Some(&generation) {
            self.current.remove(&entry.allocation);
        }
        entry.unwanted(generation)
    }

    /// Entries that exist only because of peers.
    fn unregistered(&self) -> impl Iterator<Item = (&u64, &Entry)> {
        let entries = self.entries.iter();
        entries.filter(|(_, entry)| !entry.is_registered() && !entry.is_kept())
    }

    /// The entry that holds a region.
    fn holds(&self, numbers: RegionNumbers) -> Option<&Entry> {
        let entry = self.entries.get(&numbers.generation);
        entry.filter(|entry| entry.regions.contains_key(&numbers.region))
    }

    /// Removes entry or regions that are neither registered nor used by a peer.
    fn free_unused(&mut self, generation: u64) -> Freed {
        let mut freed = Freed::default();
        let Some(entry) = self.entries.get_mut(&generation) else {
            return freed;
        };
        let unused: Vec<u64> = entry
            .regions
            .iter()
            .filter(|(_, region)| !region.registered && region.users.0.is_empty())
            .map(|(number, _)| *number)
            .collect();
        for number in unused {
            // The last region keeps the allocation while handles are out (invariant 1).
            let last = entry.regions.len() == 1 && entry.pooled.is_none();
            if last && !entry.holders.0.is_empty() {
                break;
            }
            freed.regions.extend(entry.regions.remove(&number));
        }
        // A pooled allocation that is leaving also stays until all handles are returned.
        let held = entry.is_kept() || entry.pooled.is_some() && !entry.holders.0.is_empty();
        if entry.regions.is_empty() && !held {
            freed.entries.extend(self.entries.remove(&generation));
        }
        freed
    }
}

impl Entry {
    fn is_registered(&self) -> bool {
        self.regions.values().any(|region| region.registered)
    }

    /// Whether it is pooled for reuse.
    fn is_kept(&self) -> bool {
        self.pooled.as_ref().is_some_and(Pooled::is_kept)
    }

    /// Peers that map it, and those that have not reported the end of their use of a region.
    fn peers(&self) -> Vec<Rank> {
        let users = self.regions.values().map(|region| &region.users);
        let holders = users.chain([&self.holders]);
        let peers: BTreeSet<Rank> = holders.flat_map(Holders::peers).collect();
        peers.into_iter().collect()
    }

    /// Requests to the peers that hold handles.
    fn unwanted(&self, generation: u64) -> Vec<Unwanted> {
        let peers = self.holders.peers().into_iter();
        peers
            .map(|peer| Unwanted {
                peer,
                allocation: self.allocation,
                generation,
            })
            .collect()
    }
}

impl Holders {
    fn add(&mut self, peer: Rank) {
        *self.0.entry(peer).or_default() += 1;
    }

    fn remove(&mut self, peer: Rank, handles: u64) {
        let left = self
            .0
            .get(&peer)
            .map_or(0, |held| held.saturating_sub(handles));
        if left == 0 {
            self.0.remove(&peer);
        } else {
            self.0.insert(peer, left);
        }
    }

    fn peers(&self) -> Vec<Rank> {
        self.0.keys().copied().collect()
    }
}

impl Freed {
    fn extend(&mut self, other: Self) {
        self.entries.extend(other.entries);
        self.regions.extend(other.regions);
    }

    fn is_borrowed(&self) -> bool {
        let entries = self.entries.iter().flat_map(|entry| entry.regions.values());
        let mut regions = entries.chain(&self.regions);
        regions.any(|region| region.backing.is_borrowed())
    }
}

fn not_registered() -> Error {
    Error::closed("the region is no longer registered")
        .with_help("keep the region as long as peers open handles of it")
}
