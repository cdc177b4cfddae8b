//! LRU cache.

use rustc_hash::FxHashMap;
use std::fmt;
use std::hash::Hash;

/// LRU cache of bounded size, with lookup and insertion in constant time.
pub(super) struct Recent<K, V> {
    places: FxHashMap<K, usize>,
    entries: Vec<RecentEntry<K, V>>,
    /// Most recently used entry; its successor in the ring is the least recently used one.
    newest: usize,
    capacity: usize,
}

struct RecentEntry<K, V> {
    key: K,
    value: V,
    /// Neighbours in the ring, in order of use.
    older: usize,
    newer: usize,
}

impl<K: Copy + Eq + Hash, V> Recent<K, V> {
    /// An empty cache of at most `capacity` entries, at least one.
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            places: FxHashMap::default(),
            entries: Vec::new(),
            newest: 0,
            capacity: capacity.max(1),
        }
    }

    /// Looks up a key and marks it as used.
    pub(super) fn get(&mut self, key: &K) -> Option<&V> {
        let place = *self.places.get(key)?;
        self.renew(place);
        self.entries.get(place).map(|entry| &entry.value)
    }

    /// Adds or replaces an entry and marks it as used. Returns the evicted value, to be dropped outside
    /// locks.
    pub(super) fn insert(&mut self, key: K, value: V) -> Option<V> {
        if let Some(place) = self.places.get(&key).copied() {
            self.renew(place);
            return Some(std::mem::replace(&mut self.entries[place].value, value));
        }
        if self.entries.len() < self.capacity {
            let place = self.entries.len();
            // A ring of its own, from which it is removed below.
            let (older, newer) = (place, place);
            self.entries.push(RecentEntry {
                key,
                value,
                older,
                newer,
            });
            self.places.insert(key, place);
            self.put_first(place);
            return None;
        }
        // The least recently used slot becomes the most recent one without moving.
        let oldest = self.entries[self.newest].newer;
        let entry = &mut self.entries[oldest];
        self.places.remove(&entry.key);
        entry.key = key;
        let before = std::mem::replace(&mut entry.value, value);
        self.places.insert(key, oldest);
        self.newest = oldest;
        Some(before)
    }

    fn renew(&mut self, place: usize) {
        if place == self.newest {
            return;
        }
        let (older, newer) = (self.entries[place].older, self.entries[place].newer);
        self.entries[older].newer = newer;
        self.entries[newer].older = older;
        self.put_first(place);
    }

    /// Inserts an unlinked entry as the most recent one.
    fn put_first(&mut self, place: usize) {
        if self.entries.len() > 1 {
            let (newest, oldest) = (self.newest, self.entries[self.newest].newer);
            self.entries[newest].newer = place;
            self.entries[oldest].older = place;
            let entry = &mut self.entries[place];
            (entry.older, entry.newer) = (newest, oldest);
        }
        self.newest = place;
    }
}

impl<K, V> fmt::Debug for Recent<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Recent({} of {})", self.entries.len(), self.capacity)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn least_recently_used_is_evicted(
            capacity in 1..6_usize,
            steps in proptest::collection::vec((0..9_u8, any::<bool>()), 0..80),
        ) {
            let mut recent = Recent::new(capacity);
            // Reference implementation: the most recent at the end.
            let mut all: Vec<(u8, usize)> = Vec::new();
            for (number, (key, insert)) in steps.into_iter().enumerate() {
                let known = all.iter().position(|(other, _)| *other == key);
                let known = known.map(|place| all.remove(place));
                if insert {
                    let expected = match known {
                        Some((_, value)) => Some(value),
                        None if all.len() == capacity => Some(all.remove(0).1),
                        None => None,
                    };
                    prop_assert_eq!(recent.insert(key, number), expected);
                    all.push((key, number));
                } else {
                    prop_assert_eq!(recent.get(&key).copied(), known.map(|(_, value)| value));
                    all.extend(known);
                }
            }
        }
    }
}
