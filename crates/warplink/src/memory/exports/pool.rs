//! Allocations of which no region is left, kept for the next one that fits.
//!
//! An allocation in the pool stays registered, and peers keep their mappings of it as long as they
//! like: it was never freed, so that its identity and generation are the same when it is used again,
//! and a peer that is sent a region of it finds it mapped. A loop that allocates, sends and drops
//! thus neither allocates nor maps, frees nor unmaps after its first rounds, and asks no driver for
//! anything that waits until the device is idle.
//!
//! Its last region enters it into the pool. It is used again when nobody here holds a slice of it,
//! the device's streams are past it, and every peer has told that it does not use it any more. It
//! leaves the pool when this is too large, when an allocation finds no memory, on request and at
//! close: then peers are asked to unmap it, and when none maps it, it is freed.

use super::{Exports, Freed, RegionNumbers, Table, Unwanted};
use crate::deadline::Deadline;
use crate::device::{AllocationKind, Backing, DeviceSlice};
use crate::sync::lock;
use std::cmp::Reverse;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// An allocation may be longer than what is asked for by a part of so much of that.
const SLACK_DIVISOR: u64 = 8;

/// A nanosecond of waiting for each of this number of bytes, for an allocation that would fit but that a
/// peer may still use: fresh memory has to be mapped by peers, which takes longer.
const WAIT_BYTES_PER_NS: u64 = 16;
const MIN_WAIT: Duration = Duration::from_micros(200);

/// An allocation leaves the pool unused when this number of others have entered it since, and
/// [`MAX_UNUSED_EACH`] more for each that is there. Such a surplus arises when a peer was late to tell
/// that it had done with one.
const MAX_UNUSED: u64 = 64;
const MAX_UNUSED_EACH: u64 = 8;

/// An allocation that no registered region is left of.
#[derive(Debug)]
pub(super) struct Pooled {
    backing: Arc<dyn Backing>,
    /// Its place in the order in which allocations entered.
    number: u64,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Streams of this rank may still use it.
    InUse,
    /// To be used again.
    Ready,
    /// To be freed when no peer maps it any more.
    Leaving,
}

impl Pooled {
    /// Whether it is to be used again.
    pub(super) fn is_kept(&self) -> bool {
        self.stage != Stage::Leaving
    }
}

/// What has entered the pool, of which its device's streams may still use every byte of `slice`.
#[derive(Debug)]
pub(in crate::memory) struct EnteredPool {
    pub(in crate::memory) slice: DeviceSlice,
    pub(in crate::memory) numbers: PoolNumbers,
}

/// One stay of an allocation in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::memory) struct PoolNumbers {
    generation: u64,
    number: u64,
}

impl Exports {
    /// A region of `bytes` in an allocation of the pool, if one fits; its content is what its last
    /// user left. Waits briefly, in proportion to `bytes`, for one that is still in use.
    pub(in crate::memory) fn reuse(
        &self,
        bytes: usize,
        kind: AllocationKind,
    ) -> Option<(DeviceSlice, RegionNumbers)> {
        let patience = Duration::from_nanos(bytes as u64 / WAIT_BYTES_PER_NS);
        let deadline = Deadline::after(patience.max(MIN_WAIT));
        let mut table = lock(&self.table);
        loop {
            let fitting = table.fitting(bytes, kind);
            let unused = fitting
                .iter()
                .find(|generation| table.is_unused(**generation));
            if let Some(&generation) = unused {
                let backing = table.leave_pool(generation)?;
                let slice = DeviceSlice::whole(backing.clone()).slice(0..bytes).ok()?;
                return Some((slice, table.add_region(generation, backing)));
            }
            if fitting.is_empty() || deadline.passed() {
                return None;
            }
            let waited = self.changed.wait_timeout(table, deadline.remaining());
            table = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The device's streams are past what was in use when it entered the pool. It may have left it since,
    /// and entered it again after further use: that is another stay.
    pub(in crate::memory) fn streams_are_past(&self, numbers: PoolNumbers) {
        let mut table = lock(&self.table);
        let entry = table.entries.get_mut(&numbers.generation);
        if let Some(pooled) = entry.and_then(|entry| entry.pooled.as_mut())
            && pooled.number == numbers.number
            && pooled.stage == Stage::InUse
        {
            pooled.stage = Stage::Ready;
        }
        drop(table);
        self.changed.notify_all();
    }

    /// Has everything leave the pool; what peers are to be asked to unmap. What no peer maps is freed
    /// at once.
    pub(in crate::memory) fn empty_pool(&self) -> Vec<Unwanted> {
        self.shrink_pool(None)
    }

    /// As [`empty_pool`](Self::empty_pool), and nothing enters it any more.
    pub(in crate::memory) fn close_pool(&self) -> Vec<Unwanted> {
        self.shrink_pool(Some(0))
    }

    /// Has the allocation freed after its last region, and not used again.
    pub(in crate::memory) fn keep_out_of_pool(&self, generation: u64) {
        if let Some(entry) = lock(&self.table).entries.get_mut(&generation) {
            entry.reusable = None;
        }
    }

    /// How many allocations are in the pool, and their bytes.
    pub(in crate::memory) fn pooled(&self) -> (usize, u64) {
        let table = lock(&self.table);
        (table.pool.len(), table.pooled_bytes())
    }

    fn shrink_pool(&self, limit_from_now_on: Option<u64>) -> Vec<Unwanted> {
        let (mut unwanted, mut freed) = (Vec::new(), Freed::default());
        let mut table = lock(&self.table);
        let limit = limit_from_now_on.unwrap_or(table.max_pooled_bytes);
        table.max_pooled_bytes = 0;
        table.limit_pool(&mut unwanted, &mut freed);
        table.max_pooled_bytes = limit;
        drop(table);
        drop(freed);
        self.changed.notify_all();
        unwanted
    }
}

impl Table {
    /// Enters an allocation into the pool, where it may be used again and is not too large; it is
    /// one of which `region` was the last to be registered.
    pub(super) fn enter_pool(&mut self, generation: u64, region: u64) -> Option<EnteredPool> {
        let max = self.max_pooled_bytes;
        let entry = self.entries.get_mut(&generation)?;
        entry.reusable.filter(|_| entry.bytes <= max)?;
        let backing = entry.regions.get(&region)?.backing.clone();
        self.pooled_so_far += 1;
        let number = self.pooled_so_far;
        entry.pooled = Some(Pooled {
            backing: backing.clone(),
            number,
            stage: Stage::InUse,
        });
        self.pool.insert((entry.bytes, number), generation);
        Some(EnteredPool {
            slice: DeviceSlice::whole(backing),
            numbers: PoolNumbers { generation, number },
        })
    }

    /// Takes an allocation out of the pool, to be used again.
    pub(super) fn leave_pool(&mut self, generation: u64) -> Option<Arc<dyn Backing>> {
        let entry = self.entries.get_mut(&generation)?;
        let pooled = entry.pooled.take_if(|pooled| pooled.is_kept())?;
        self.pool.remove(&(entry.bytes, pooled.number));
        Some(pooled.backing)
    }

    /// A rank that had mapped the allocation was lost, and may still write to it; what other peers
    /// are to be asked to unmap.
    pub(super) fn never_reuse(&mut self, generation: u64) -> Vec<Unwanted> {
        let Some(entry) = self.entries.get_mut(&generation) else {
            return Vec::new();
        };
        entry.reusable = None;
        let region = entry.regions.values().next();
        let backing = region.map(|region| &region.backing);
        let pooled = entry.pooled.as_ref().map(|pooled| &pooled.backing);
        if let Some(backing) = backing.or(pooled) {
            backing.forbid_reuse();
        }
        self.start_leaving(generation)
    }

    /// Has the allocations that entered first leave until the rest is within the limit, and used.
    pub(super) fn limit_pool(&mut self, unwanted: &mut Vec<Unwanted>, freed: &mut Freed) {
        let mut bytes = self.pooled_bytes();
        while let Some((&(size, number), &generation)) =
            self.pool.iter().min_by_key(|((_, number), _)| *number)
        {
            let max_unused = MAX_UNUSED + MAX_UNUSED_EACH * self.pool.len() as u64;
            let is_unused = self.pooled_so_far - number > max_unused;
            if bytes <= self.max_pooled_bytes && !is_unused {
                break;
            }
            bytes -= size;
            unwanted.extend(self.start_leaving(generation));
            freed.extend(self.free_unused(generation));
        }
    }

    fn start_leaving(&mut self, generation: u64) -> Vec<Unwanted> {
        let entry = self.entries.get_mut(&generation);
        let Some((bytes, pooled)) = entry.and_then(|entry| {
            let bytes = entry.bytes;
            entry.pooled.as_mut().map(|pooled| (bytes, pooled))
        }) else {
            return Vec::new();
        };
        pooled.stage = Stage::Leaving;
        let number = pooled.number;
        self.pool.remove(&(bytes, number));
        self.give_up(generation)
    }

    fn pooled_bytes(&self) -> u64 {
        self.pool.keys().map(|(bytes, _)| bytes).sum()
    }

    /// The allocations in the pool that `bytes` fit into, the shortest first, and of these the one
    /// that entered last: what is too much is then not used at all.
    fn fitting(&self, bytes: usize, kind: AllocationKind) -> Vec<u64> {
        let wanted = bytes as u64;
        let longest = wanted.saturating_add(wanted / SLACK_DIVISOR);
        let mut fitting: Vec<_> = self
            .pool
            .range((wanted, 0)..=(longest, u64::MAX))
            .filter(|(_, generation)| {
                let entry = self.entries.get(generation);
                entry.is_some_and(|entry| entry.reusable == Some(kind))
            })
            .collect();
        fitting.sort_unstable_by_key(|((bytes, number), _)| (*bytes, Reverse(*number)));
        fitting
            .into_iter()
            .map(|(_, generation)| *generation)
            .collect()
    }

    /// Whether nobody uses an allocation of the pool, here or at a peer.
    fn is_unused(&self, generation: u64) -> bool {
        self.entries.get(&generation).is_some_and(|entry| {
            let pooled = entry.pooled.as_ref();
            let alone = |pooled: &Pooled| {
                // Who could make another reference to it would hold one.
                let alone = Arc::strong_count(&pooled.backing) == 1;
                // What others did with the memory before they let go of it has happened.
                fence(Ordering::Acquire);
                alone && pooled.stage == Stage::Ready
            };
            entry.regions.is_empty() && pooled.is_some_and(alone)
        })
    }
}
