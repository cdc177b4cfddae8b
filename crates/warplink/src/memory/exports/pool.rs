//! Pool of allocations without regions, for reuse.
//!
//! A pooled allocation stays registered, and peers keep their mappings: it was never freed, so its identity
//! and generation are unchanged when it is reused, and peers that receive a region of it find it mapped. A
//! loop that allocates, sends and drops thus makes no driver calls after its first iterations, which could
//! block until the device is idle.
//!
//! An allocation enters the pool with the end of its last region. It can be reused once nobody holds a slice
//! of it locally, the device's streams have completed, and every peer has reported the end of its use. It is
//! evicted when the pool exceeds its limit, when an allocation fails, on request and at close; then peers are
//! asked to unmap it, and it is freed when none maps it.

use super::{Exports, Freed, RegionNumbers, Table, Unwanted};
use crate::deadline::Deadline;
use crate::device::{AllocationKind, Backing, DeviceSlice};
use crate::sync::{lock, wait_for};
use std::cmp::Reverse;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

/// A pooled allocation may exceed the requested size by up to 1 / `SLACK_DIVISOR`, which bounds the waste.
const SLACK_DIVISOR: u64 = 8;

/// Wait 1 ns for each `WAIT_BYTES_PER_NS` bytes for a fitting allocation that a peer still uses. Fresh memory
/// must be mapped by peers, which takes longer than that.
const WAIT_BYTES_PER_NS: u64 = 16;
// Long enough for a notice between two processes, also for allocations whose share by size would be a few
// nanoseconds.
const MIN_WAIT: Duration = Duration::from_micros(200);

/// An allocation is evicted if this many others, plus [`MAX_UNUSED_EACH`] for each one in the pool, have
/// entered since. Such surplus arises when a peer was late to report the end of a use.
const MAX_UNUSED: u64 = 64;
const MAX_UNUSED_EACH: u64 = 8;

/// A pooled allocation.
#[derive(Debug)]
pub(super) struct Pooled {
    backing: Arc<dyn Backing>,
    /// Sequence number of its entry.
    number: u64,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Streams of this rank may still use it.
    InUse,
    /// Reusable.
    Ready,
    /// To be freed once no peer maps it.
    Leaving,
}

impl Pooled {
    /// Whether it will be reused.
    pub(super) fn is_kept(&self) -> bool {
        self.stage != Stage::Leaving
    }
}

/// An allocation that entered the pool; streams may still use `slice`.
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
    /// A region of `bytes` in a pooled allocation, if one fits. Contents are stale. Waits briefly, in
    /// proportion to `bytes`, for one that is still in use.
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
            // A peer's notice or a completed stream may make a fitting allocation reusable.
            table = wait_for(&self.changed, table, deadline.remaining());
        }
    }

    /// The device's streams have completed the uses of this stay. Ignored if the allocation has left the pool
    /// meanwhile, even if it has entered again.
    pub(in crate::memory) fn streams_are_past(&self, numbers: PoolNumbers) {
        let mut table = lock(&self.table);
        // The number of the stay shows whether the allocation has been reused since.
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

    /// Evicts everything; returns the handles that peers should unmap. Allocations that no peer maps are freed now.
    pub(in crate::memory) fn empty_pool(&self) -> Vec<Unwanted> {
        self.shrink_pool(None)
    }

    /// As [`empty_pool`](Self::empty_pool), and disables the pool.
    pub(in crate::memory) fn close_pool(&self) -> Vec<Unwanted> {
        self.shrink_pool(Some(0))
    }

    /// Frees the allocation after its last region instead of pooling it.
    pub(in crate::memory) fn keep_out_of_pool(&self, generation: u64) {
        if let Some(entry) = lock(&self.table).entries.get_mut(&generation) {
            entry.reusable = None;
        }
    }

    /// Number of pooled allocations, and their bytes.
    pub(in crate::memory) fn pooled(&self) -> (usize, u64) {
        let table = lock(&self.table);
        (table.pool.len(), table.pooled_bytes())
    }

    fn shrink_pool(&self, limit_from_now_on: Option<u64>) -> Vec<Unwanted> {
        let (mut unwanted, mut freed) = (Vec::new(), Freed::default());
        let mut table = lock(&self.table);
        let limit = limit_from_now_on.unwrap_or(table.max_pooled_bytes);
        // A limit of zero evicts everything; the lasting limit is restored below.
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
    /// Pools an allocation whose last registered region was `region`, if it is reusable and within the limit.
    pub(super) fn enter_pool(&mut self, generation: u64, region: u64) -> Option<EnteredPool> {
        let max = self.max_pooled_bytes;
        let entry = self.entries.get_mut(&generation)?;
        // A larger allocation would evict the whole pool and then itself.
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

    /// Removes an allocation from the pool for reuse.
    pub(super) fn leave_pool(&mut self, generation: u64) -> Option<Arc<dyn Backing>> {
        let entry = self.entries.get_mut(&generation)?;
        let pooled = entry.pooled.take_if(|pooled| pooled.is_kept())?;
        self.pool.remove(&(entry.bytes, pooled.number));
        Some(pooled.backing)
    }

    /// Bars an allocation from reuse, since a lost rank has mapped it and may still write to it. Returns what
    /// other peers should unmap.
    pub(super) fn never_reuse(&mut self, generation: u64) -> Vec<Unwanted> {
        let Some(entry) = self.entries.get_mut(&generation) else {
            return Vec::new();
        };
        // Set before any later check, so that no race can return it to the pool.
        entry.reusable = None;
        let region = entry.regions.values().next();
        let backing = region.map(|region| &region.backing);
        let pooled = entry.pooled.as_ref().map(|pooled| &pooled.backing);
        if let Some(backing) = backing.or(pooled) {
            backing.forbid_reuse();
        }
        self.start_leaving(generation)
    }

    /// Evicts the oldest allocations until the rest is within the limit and recent enough.
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
        // From here on it cannot be reused, even if its last peer unmaps it now.
        pooled.stage = Stage::Leaving;
        let number = pooled.number;
        self.pool.remove(&(bytes, number));
        self.give_up(generation)
    }

    fn pooled_bytes(&self) -> u64 {
        self.pool.keys().map(|(bytes, _)| bytes).sum()
    }

    /// Pooled allocations that fit `bytes`, smallest first, and among equals the most recent, so that surplus
    /// ones age out.
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

    /// Whether a pooled allocation is unused, here and at peers.
    fn is_unused(&self, generation: u64) -> bool {
        self.entries.get(&generation).is_some_and(|entry| {
            let pooled = entry.pooled.as_ref();
            let alone = |pooled: &Pooled| {
                // New references are only cloned from existing ones, so the count cannot rise from one.
                let alone = Arc::strong_count(&pooled.backing) == 1;
                // Pairs with the release decrements of dropped references: others' last accesses have
                // happened.
                fence(Ordering::Acquire);
                alone && pooled.stage == Stage::Ready
            };
            entry.regions.is_empty() && pooled.is_some_and(alone)
        })
    }
}
