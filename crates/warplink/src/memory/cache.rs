//! Cache of mappings of peers' allocations.
//!
//! Opening is slow (14 CUDA IPC handles took 200 ms), so a mapping is kept after its last use, within limits.
//! The cache knows neither devices nor clocks: a closure opens mappings, and [`MappingCache::age`] is called
//! periodically to expire idle ones.
//!
//! # Invariants
//! 1. At most one open of a key is in progress; concurrent requests wait for its result.
//! 2. A mapping of one generation never serves a request for another.
//! 3. A mapping in use is neither evicted nor closed by a revocation. If it is revoked while in use, while
//!    being opened or before it is opened, it is closed after its last use.
//! 4. The lock is not held while a mapping is opened or closed: opening asks the owner, whose threads may
//!    need this cache at that moment.
//! 5. Every opened handle is counted once, and the count is returned when its mapping is closed, so that the
//!    owner knows when none is left.

use crate::error::Result;
use crate::sync::{Arc, Condvar, Mutex, guard};
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::hash::Hash;
use std::ops::Deref;

/// Maximum number of revocations remembered for keys that are not open. Needed when a revocation overtakes
/// its handle; those that cross the closing of their mapping are never matched and would accumulate.
const MAX_EARLY_REVOCATIONS: usize = 4096;

/// A cached value.
pub(super) trait Mapping {
    /// Counts another handle that resolved to it.
    fn count_handle(&self);

    /// Mapped bytes.
    fn bytes(&self) -> u64;

    /// Whether to keep it while idle.
    fn is_kept_idle(&self) -> bool {
        true
    }
}

/// Limits of idle mappings.
#[derive(Clone, Copy, Debug)]
pub(super) struct CacheLimits {
    pub(super) idle_count: usize,
    pub(super) idle_bytes: u64,
}

/// Mappings by key.
pub(super) struct MappingCache<K: Copy + Eq + Hash, V: Mapping>(Arc<CacheShared<K, V>>);

/// A mapping in use, released on drop.
pub(super) struct Lease<K: Copy + Eq + Hash, V: Mapping> {
    cache: Arc<CacheShared<K, V>>,
    key: K,
    serial: u64,
    value: Arc<V>,
}

struct CacheShared<K, V> {
    table: Mutex<CacheTable<K, V>>,
    changed: Condvar,
    limits: CacheLimits,
}

struct CacheTable<K, V> {
    entries: HashMap<K, CacheEntry<V>>,
    // Logical clock of openings and releases, for LRU order.
    clock: u64,
    // Number of calls of `age`.
    epoch: u64,
    early_revocations: VecDeque<(K, u64)>,
}

enum CacheEntry<V> {
    Opening { generation: u64, revoked: bool },
    Open(Open<V>),
}

struct Open<V> {
    generation: u64,
    /// Distinguishes it from earlier entries with the same key.
    serial: u64,
    value: Arc<V>,
    users: usize,
    revoked: bool,
    /// Clock at its last use.
    used: u64,
    used_epoch: u64,
}

impl<K: Copy + Eq + Hash, V: Mapping> MappingCache<K, V> {
    /// An empty table.
    pub(super) fn new(limits: CacheLimits) -> Self {
        Self(Arc::new(CacheShared {
            table: Mutex::new(CacheTable {
                entries: HashMap::new(),
                clock: 0,
                epoch: 0,
                early_revocations: VecDeque::new(),
            }),
            changed: Condvar::new(),
            limits,
        }))
    }

    /// The mapping of `generation` for `key`, opened with `open` on a miss. An older generation is removed;
    /// its users keep it.
    pub(super) fn open(
        &self,
        key: K,
        generation: u64,
        open: impl FnOnce() -> Result<V>,
    ) -> Result<Lease<K, V>> {
        let mut table = guard(&self.0.table);
        loop {
            table.clock += 1;
            let now = table.clock;
            match table.entries.get_mut(&key) {
                Some(CacheEntry::Open(entry)) if entry.generation == generation => {
                    entry.used = now;
                    entry.users += 1;
                    entry.value.count_handle();
                    let (serial, value) = (entry.serial, entry.value.clone());
                    return Ok(self.lease(key, serial, value));
                }
                // Another thread is opening this key: wait for its result rather than open twice (invariant
                // 1).
                Some(CacheEntry::Opening { .. }) => {
                    table = self
                        .0
                        .changed
                        .wait(table)
                        .unwrap_or_else(std::sync::PoisonError::into_inner);
                }
                Some(CacheEntry::Open(_)) | None => break,
            }
        }
        // The revocation may have overtaken the handle; then the mapping is closed after this use.
        let revoked = table.take_early_revocation(key, generation);
        let opening = CacheEntry::Opening {
            generation,
            revoked,
        };
        // Marks the key as being opened before the lock is released, so that concurrent requests wait.
        let stale = table.entries.insert(key, opening);
        drop(table);
        // Unmaps the older generation, so outside the lock (invariant 4); its remaining users hold references of
        // their own.
        drop(stale);
        let opened = open();
        let mut table = guard(&self.0.table);
        let result = match opened {
            Ok(value) => {
                let value = Arc::new(value);
                value.count_handle();
                // Unique: the clock advances with every request.
                let serial = table.clock;
                table.finish_opening(key, serial, value.clone());
                Ok((serial, value))
            }
            Err(error) => {
                // Waiters find no entry and try themselves: the failure may be specific to this handle.
                table.entries.remove(&key);
                Err(error)
            }
        };
        let evicted = table.evict(&self.0.limits);
        drop(table);
        // All: waiters for other keys share the condition variable.
        self.0.changed.notify_all();
        drop(evicted);
        result.map(|(serial, value)| self.lease(key, serial, value))
    }

    fn lease(&self, key: K, serial: u64, value: Arc<V>) -> Lease<K, V> {
        Lease {
            cache: self.0.clone(),
            key,
            serial,
            value,
        }
    }

    /// Revokes `generation` of `key`: closes the mapping now or after its last use.
    pub(super) fn revoke(&self, key: K, generation: u64) {
        let mut table = guard(&self.0.table);
        let revoked = table.revoke(key, generation);
        drop(table);
        drop(revoked);
    }

    /// Closes every idle mapping.
    pub(super) fn release_idle(&self) {
        let none = CacheLimits {
            idle_count: 0,
            idle_bytes: 0,
        };
        let idle = guard(&self.0.table).evict(&none);
        drop(idle);
    }

    /// Closes mappings that were not used since the previous call.
    pub(super) fn age(&self) {
        let mut table = guard(&self.0.table);
        let epoch = table.epoch;
        // An entry used in the current epoch survives this call, and is closed by the next one if unused.
        table.epoch += 1;
        let old: Vec<_> = table
            .entries
            .extract_if(|_, entry| {
                matches!(entry, CacheEntry::Open(open) if open.users == 0 && open.used_epoch < epoch)
            })
            .collect();
        drop(table);
        drop(old);
    }

    /// Number of mappings.
    pub(super) fn len(&self) -> usize {
        guard(&self.0.table).entries.len()
    }
}

impl<K: Copy + Eq + Hash, V: Mapping> CacheTable<K, V> {
    fn finish_opening(&mut self, key: K, serial: u64, value: Arc<V>) {
        let revoked = matches!(
            self.entries.get(&key),
            Some(CacheEntry::Opening { revoked: true, .. })
        );
        let generation = match self.entries.get(&key) {
            Some(CacheEntry::Opening { generation, .. }) => *generation,
            // Only the opening thread removes its entry.
            Some(CacheEntry::Open(_)) | None => return,
        };
        let open = Open {
            generation,
            serial,
            value,
            users: 1,
            revoked,
            used: self.clock,
            used_epoch: self.epoch,
        };
        self.entries.insert(key, CacheEntry::Open(open));
    }

    /// Removes the entry, or marks it for removal after its last use.
    fn revoke(&mut self, key: K, of: u64) -> Option<CacheEntry<V>> {
        match self.entries.get_mut(&key) {
            Some(CacheEntry::Opening {
                generation,
                revoked,
            }) if *generation == of => *revoked = true,
            // A stream may still be reading through it, so unmapping waits for `release`.
            Some(CacheEntry::Open(open)) if open.generation == of && open.users > 0 => {
                open.revoked = true;
            }
            Some(CacheEntry::Open(open)) if open.generation == of => {
                return self.entries.remove(&key);
            }
            // The handle is still in transit, or its mapping was just closed.
            _ => {
                if self.early_revocations.len() == MAX_EARLY_REVOCATIONS {
                    self.early_revocations.pop_front();
                }
                self.early_revocations.push_back((key, of));
            }
        }
        None
    }

    fn take_early_revocation(&mut self, key: K, generation: u64) -> bool {
        let found = self
            .early_revocations
            .iter()
            .position(|early| *early == (key, generation));
        found.is_some_and(|index| self.early_revocations.remove(index).is_some())
    }

    /// Ends one use of a mapping. Returns entries to close as a result.
    fn release(&mut self, key: K, serial: u64, limits: &CacheLimits) -> Vec<CacheEntry<V>> {
        self.clock += 1;
        let (now, epoch) = (self.clock, self.epoch);
        let Some(CacheEntry::Open(open)) = self.entries.get_mut(&key) else {
            return Vec::new();
        };
        // The key was reused by a newer generation; this lease's mapping is no longer in the table.
        if open.serial != serial {
            return Vec::new();
        }
        open.users -= 1;
        (open.used, open.used_epoch) = (now, epoch);
        if open.users > 0 {
            return Vec::new();
        }
        if open.revoked || !open.value.is_kept_idle() {
            return self.entries.remove(&key).into_iter().collect();
        }
        self.evict(limits)
    }

    /// Removes the least recently used idle mappings until the rest is within `limits`.
    fn evict(&mut self, limits: &CacheLimits) -> Vec<CacheEntry<V>> {
        let idle = self.entries.iter().filter_map(|(key, entry)| match entry {
            CacheEntry::Open(open) if open.users == 0 => {
                Some((open.used, *key, open.value.bytes()))
            }
            _ => None,
        });
        let mut idle: Vec<(u64, K, u64)> = idle.collect();
        // Least recently used first.
        idle.sort_unstable_by_key(|(used, ..)| *used);
        let mut count = idle.len();
        let mut bytes: u64 = idle.iter().map(|(.., bytes)| *bytes).sum();
        let mut evicted = Vec::new();
        for (_, key, size) in idle {
            if count <= limits.idle_count && bytes <= limits.idle_bytes {
                break;
            }
            count -= 1;
            bytes -= size;
            evicted.extend(self.entries.remove(&key));
        }
        evicted
    }
}

impl<K: Copy + Eq + Hash, V: Mapping> Deref for Lease<K, V> {
    type Target = V;

    fn deref(&self) -> &V {
        &self.value
    }
}

impl<K: Copy + Eq + Hash, V: Mapping> fmt::Debug for MappingCache<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MappingCache").finish_non_exhaustive()
    }
}

impl<K: Copy + Eq + Hash, V: Mapping> fmt::Debug for Lease<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").finish_non_exhaustive()
    }
}

impl<K: Copy + Eq + Hash, V: Mapping> Drop for Lease<K, V> {
    fn drop(&mut self) {
        let mut table = guard(&self.cache.table);
        let closed = table.release(self.key, self.serial, &self.cache.limits);
        // Close mappings outside the lock: evicted ones, and this one if it is no longer in the cache.
        drop(table);
        drop(closed);
    }
}
