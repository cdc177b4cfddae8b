//! Values by key.

use super::message::{Refusal, RefusalKind};
use std::collections::HashMap;
use std::sync::Arc;

/// Values by key, within a limit on their memory.
#[derive(Debug)]
pub(crate) struct Values {
    map: HashMap<String, Arc<[u8]>>,
    used: usize,
    limit: usize,
}

impl Values {
    /// What an entry costs beyond its key and value, roughly.
    const ENTRY: usize = 64;

    pub(crate) fn new(limit: usize) -> Self {
        Self {
            map: HashMap::new(),
            used: 0,
            limit,
        }
    }

    pub(crate) fn get(&self, key: &str) -> Option<&Arc<[u8]>> {
        self.map.get(key)
    }

    pub(crate) fn remove(&mut self, key: &str) -> Option<Arc<[u8]>> {
        let value = self.map.remove(key)?;
        self.used -= Self::cost(key, &value);
        Some(value)
    }

    /// Whether nothing at all is left.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.map.is_empty() && self.used == 0
    }

    fn cost(key: &str, value: &[u8]) -> usize {
        key.len() + value.len() + Self::ENTRY
    }

    pub(crate) fn insert(&mut self, key: String, value: Arc<[u8]>) -> Result<(), Refusal> {
        let old = self.map.get(&key).map_or(0, |old| Self::cost(&key, old));
        let used = self.used - old + Self::cost(&key, &value);
        if used > self.limit {
            let message = format!(
                "the store would hold {used} bytes; expected at most {}",
                self.limit
            );
            return Err(Refusal::new(RefusalKind::OutOfMemory, message).with_key(&key));
        }
        self.used = used;
        self.map.insert(key, value);
        Ok(())
    }
}
