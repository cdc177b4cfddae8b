//! The table of mappings of peers' allocations.
//!
//! Opening is slow (14 CUDA IPC handles took 200 ms), so a mapping is kept when its last user is
//! gone, up to a bound. The table knows nothing of devices: what it holds is opened by a closure.
//!
//! # Invariants
//! 1. At most one open of a key is under way; others that want it wait for the outcome.
//! 2. A mapping of one generation is never given to a request for another.
//! 3. A mapping in use is neither evicted nor revoked.
//! 4. The table's lock is not held while a mapping is opened or closed: opening asks the owner,
//!    whose own threads may at that moment want this table.
//! 5. Every handle that was opened is counted once, and the count comes back when the mapping it
//!    was counted on is closed, so that the owner knows when none is left.

use crate::error::Result;
use crate::sync::{Arc, Condvar, Mutex, guard};
use std::collections::HashMap;
use std::hash::Hash;

/// Something that can be counted on: how many handles led to it.
pub(crate) trait Counted {
    /// Counts one more handle.
    fn count(&self);
}

#[derive(Debug)]
enum Entry<V> {
    Opening,
    Open {
        generation: u64,
        value: Arc<V>,
        used: u64,
    },
}

#[derive(Debug)]
struct Table<K, V> {
    entries: HashMap<K, Entry<V>>,
    clock: u64,
}

#[derive(Debug)]
pub(crate) struct MappingCache<K, V> {
    table: Mutex<Table<K, V>>,
    changed: Condvar,
    max_idle: usize,
}

impl<K: Copy + Eq + Hash, V: Counted> MappingCache<K, V> {
    /// A table that keeps at most `max_idle` mappings that nobody uses.
    pub(crate) fn new(max_idle: usize) -> Self {
        Self {
            table: Mutex::new(Table {
                entries: HashMap::new(),
                clock: 0,
            }),
            changed: Condvar::new(),
            max_idle,
        }
    }

    /// The mapping of `generation` under `key`, opened with `open` where there is none. An older
    /// generation is dropped from the table; its users keep it.
    pub(crate) fn open(
        &self,
        key: K,
        generation: u64,
        open: impl FnOnce() -> Result<V>,
    ) -> Result<Arc<V>> {
        let mut table = guard(&self.table);
        loop {
            table.clock += 1;
            let now = table.clock;
            match table.entries.get_mut(&key) {
                Some(Entry::Open {
                    generation: held,
                    value,
                    used,
                }) if *held == generation => {
                    *used = now;
                    value.count();
                    return Ok(value.clone());
                }
                Some(Entry::Opening) => {
                    table = self
                        .changed
                        .wait(table)
                        .unwrap_or_else(std::sync::PoisonError::into_inner);
                }
                Some(Entry::Open { .. }) | None => break,
            }
        }
        let stale = table.entries.insert(key, Entry::Opening);
        drop(table);
        drop(stale);
        let opened = open();
        let mut table = guard(&self.table);
        let result = match opened {
            Ok(value) => {
                let value = Arc::new(value);
                value.count();
                let used = table.clock;
                table.entries.insert(
                    key,
                    Entry::Open {
                        generation,
                        value: value.clone(),
                        used,
                    },
                );
                Ok(value)
            }
            Err(error) => {
                table.entries.remove(&key);
                Err(error)
            }
        };
        let evicted = table.evict(self.max_idle);
        drop(table);
        self.changed.notify_all();
        drop(evicted);
        result
    }

    /// Drops the mapping of `generation` under `key` unless it is in use. Returns whether it is
    /// gone from the table.
    pub(crate) fn revoke(&self, key: K, generation: u64) -> bool {
        let mut table = guard(&self.table);
        match table.entries.get(&key) {
            Some(Entry::Opening) => return false,
            Some(Entry::Open {
                generation: held, ..
            }) if *held != generation => return true,
            Some(Entry::Open { value, .. }) if Arc::strong_count(value) > 1 => return false,
            Some(Entry::Open { .. }) | None => {}
        }
        let revoked = table.entries.remove(&key);
        drop(table);
        drop(revoked);
        true
    }

    /// Drops every mapping that nobody uses.
    pub(crate) fn release_idle(&self) {
        let idle = guard(&self.table).evict(0);
        drop(idle);
    }

    /// How many mappings the table holds.
    pub(crate) fn len(&self) -> usize {
        guard(&self.table).entries.len()
    }
}

impl<K: Copy + Eq + Hash, V> Table<K, V> {
    /// Takes out the mappings unused for longest until at most `max_idle` that nobody uses are left.
    fn evict(&mut self, max_idle: usize) -> Vec<Entry<V>> {
        let idle = self.entries.iter().filter_map(|(key, entry)| match entry {
            Entry::Open { value, used, .. } if Arc::strong_count(value) == 1 => Some((*used, *key)),
            _ => None,
        });
        let mut idle: Vec<(u64, K)> = idle.collect();
        idle.sort_unstable_by_key(|(used, _)| *used);
        let surplus = idle.len().saturating_sub(max_idle);
        idle[..surplus]
            .iter()
            .filter_map(|(_, key)| self.entries.remove(key))
            .collect()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::error::{Error, ErrorKind};
    use std::sync::atomic::{AtomicUsize, Ordering};

    struct Value(u64, AtomicUsize);

    impl Counted for Value {
        fn count(&self) {
            self.1.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn value(number: u64) -> Result<Value> {
        Ok(Value(number, AtomicUsize::new(0)))
    }

    #[test]
    fn a_hit_does_not_open_and_is_counted() {
        let cache = MappingCache::new(4);
        let first = cache.open(1, 10, || value(100)).unwrap();
        let again = cache.open(1, 10, || panic!("opened twice")).unwrap();
        assert_eq!((again.0, again.1.load(Ordering::Relaxed)), (100, 2));
        drop((first, again));
        assert_eq!(cache.len(), 1);
    }

    #[test]
    fn another_generation_is_opened_anew() {
        let cache = MappingCache::new(4);
        let old = cache.open(1, 10, || value(100)).unwrap();
        let new = cache.open(1, 11, || value(101)).unwrap();
        assert_eq!((old.0, new.0), (100, 101));
    }

    #[test]
    fn a_failed_open_leaves_nothing() {
        let cache = MappingCache::<u32, Value>::new(4);
        let error = cache
            .open(1, 10, || Err(Error::new(ErrorKind::Driver, "no")))
            .err()
            .unwrap();
        assert_eq!(error.kind(), ErrorKind::Driver);
        assert_eq!(cache.open(1, 10, || value(5)).unwrap().0, 5);
    }

    #[test]
    fn the_bound_evicts_what_was_unused_longest_and_nothing_in_use() {
        let cache = MappingCache::new(2);
        let kept = cache.open(0, 1, || value(0)).unwrap();
        for key in 1..=3 {
            drop(cache.open(key, 1, || value(key)).unwrap());
        }
        // The third is still held while the eviction runs, so one more than the bound may stay.
        assert!(cache.len() <= 4);
        drop(cache.open(4, 1, || value(4)).unwrap());
        assert!(cache.len() <= 4);
        let hit = cache
            .open(0, 1, || panic!("the one in use was evicted"))
            .unwrap();
        assert!(Arc::ptr_eq(&kept, &hit));
        assert!(!cache.revoke(0, 1));
        drop((kept, hit));
        assert!(cache.revoke(0, 1));
        cache.release_idle();
        assert_eq!(cache.len(), 0);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::atomic::{AtomicUsize, Ordering};
    use loom::thread;

    /// Counts opens under way and handles, and gives the count back when it is closed.
    struct Value {
        generation: u64,
        handles: AtomicUsize,
        back: Arc<AtomicUsize>,
    }

    impl Counted for Value {
        fn count(&self) {
            self.handles.fetch_add(1, Ordering::Relaxed);
        }
    }

    impl Drop for Value {
        fn drop(&mut self) {
            self.back
                .fetch_add(self.handles.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// Invariants 1, 2 and 5 with two ranks' threads that open while the owner revokes.
    #[test]
    fn loom_open_and_revoke() {
        loom::model(|| {
            let cache = Arc::new(MappingCache::<u32, Value>::new(1));
            let opening = Arc::new(AtomicUsize::new(0));
            let back = Arc::new(AtomicUsize::new(0));
            let opener = |generation: u64| {
                let (cache, opening, back) = (cache.clone(), opening.clone(), back.clone());
                move || {
                    let opened = cache.open(1, generation, || {
                        assert_eq!(
                            opening.fetch_add(1, Ordering::SeqCst),
                            0,
                            "two opens of one key"
                        );
                        opening.fetch_sub(1, Ordering::SeqCst);
                        Ok(Value {
                            generation,
                            handles: AtomicUsize::new(0),
                            back: back.clone(),
                        })
                    });
                    assert_eq!(opened.unwrap().generation, generation, "a stale mapping");
                }
            };
            let first = thread::spawn(opener(1));
            let second = thread::spawn(opener(2));
            cache.revoke(1, 1);
            first.join().unwrap();
            second.join().unwrap();
            cache.release_idle();
            assert_eq!(cache.len(), 0);
            assert_eq!(
                back.load(Ordering::SeqCst),
                2,
                "a handle was not given back"
            );
        });
    }
}
