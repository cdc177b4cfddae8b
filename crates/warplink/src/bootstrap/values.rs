//! Values by key.

use super::message::{Bytes, Refusal, RefusalKind};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// How many keys are changed by others before their former owners are notified. Amortizes the cost of the notices.
const MAX_SUPERSEDED: usize = 256;

/// Values by key, within a limit on their memory.
#[derive(Debug)]
pub(crate) struct StoreValues {
    map: HashMap<String, StoredValue>,
    used: usize,
    limit: usize,
    /// Counts changes; see `journal.rs`.
    version: u64,
    /// Journal entries of members that are superseded: the member, the key, the version that superseded it.
    superseded: Vec<(u32, String, u64)>,
}

#[derive(Debug)]
struct StoredValue {
    bytes: Arc<[u8]>,
    /// The rank that set it, whose journal has it.
    owner: u32,
}

impl StoreValues {
    /// The approximate cost of an entry beyond its key and value: a slot of the map, allocations, reference counts. Without
    /// it, a store of many empty values would count as empty.
    const ENTRY: usize = 64;

    pub(crate) fn new(limit: usize) -> Self {
        Self {
            map: HashMap::new(),
            used: 0,
            limit,
            version: 0,
            superseded: Vec::new(),
        }
    }

    /// Counts a change, or a request that may be one.
    pub(crate) fn next_version(&mut self) -> u64 {
        self.version += 1;
        self.version
    }

    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// Continues to count from `version`.
    pub(crate) fn count_from(&mut self, version: u64) {
        self.version = self.version.max(version);
    }

    pub(crate) fn get(&self, key: &str) -> Option<&Arc<[u8]>> {
        self.map.get(key).map(|value| &value.bytes)
    }

    pub(crate) fn remove(&mut self, key: &str) -> Option<Arc<[u8]>> {
        let value = self.map.remove(key)?;
        self.used -= Self::cost(key, &value.bytes);
        self.superseded
            .push((value.owner, key.to_owned(), self.version));
        Some(value.bytes)
    }

    /// Fails unless all of `pairs` can be inserted, in their order.
    pub(crate) fn check_room(&self, pairs: &[(String, Bytes)]) -> Result<(), Refusal> {
        let pairs = pairs.iter().map(|(key, value)| (&**key, &*value.0));
        self.used_after(pairs).map(drop)
    }

    /// Memory used after these pairs were inserted.
    fn used_after<'a>(
        &self,
        pairs: impl IntoIterator<Item = (&'a str, &'a [u8])>,
    ) -> Result<usize, Refusal> {
        let mut used = self.used;
        let mut inserted = HashMap::new();
        for (key, value) in pairs {
            let cost = Self::cost(key, value);
            let old = inserted.insert(key, cost).unwrap_or_else(|| {
                let old = self.map.get(key);
                old.map_or(0, |old| Self::cost(key, &old.bytes))
            });
            used = used - old + cost;
            if used > self.limit {
                let message = format!(
                    "the store would hold {used} bytes; expected at most {}",
                    self.limit
                );
                return Err(Refusal::new(RefusalKind::OutOfMemory, message).with_key(key));
            }
        }
        Ok(used)
    }

    /// Sets a key on behalf of `owner`.
    pub(crate) fn insert(
        &mut self,
        key: String,
        value: Arc<[u8]>,
        owner: u32,
    ) -> Result<(), Refusal> {
        self.used = self.used_after([(&*key, &*value)])?;
        let old = self.map.get(&key);
        // The owner's own journal replaces its entry when it reads the answer.
        if let Some(old) = old.filter(|old| old.owner != owner) {
            self.superseded.push((old.owner, key.clone(), self.version));
        }
        self.map.insert(
            key,
            StoredValue {
                bytes: value,
                owner,
            },
        );
        Ok(())
    }

    /// The superseded journal entries by member, once there are enough of them.
    pub(crate) fn take_superseded(&mut self) -> Option<BTreeMap<u32, Vec<(String, u64)>>> {
        if self.superseded.len() < MAX_SUPERSEDED {
            return None;
        }
        let mut by_owner = BTreeMap::<u32, Vec<_>>::new();
        for (owner, key, version) in std::mem::take(&mut self.superseded) {
            by_owner.entry(owner).or_default().push((key, version));
        }
        Some(by_owner)
    }

    /// Whether nothing at all is left.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.map.is_empty() && self.used == 0
    }

    fn cost(key: &str, value: &[u8]) -> usize {
        key.len() + value.len() + Self::ENTRY
    }
}
