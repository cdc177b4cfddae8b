//! What the members tell a new store of the one that was lost.

use super::message::{Bytes, GatherId, JournalEntry, Reply};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// What was told so far.
#[derive(Debug, Default)]
pub(crate) struct Restoring {
    /// The newest entry of every key, and whose it is.
    entries: HashMap<String, (u64, Option<Bytes>, u32)>,
    gathers: Vec<(GatherId, Reply)>,
    /// The ranks that came and have not told everything yet.
    telling: BTreeSet<u32>,
    /// The highest version that was told.
    version: u64,
}

/// What the lost store contained.
pub(crate) struct Content {
    /// Each with the rank that set it.
    pub(crate) values: Vec<(String, Arc<[u8]>, u32)>,
    pub(crate) gathers: Vec<(GatherId, Reply)>,
    /// The version to count from.
    pub(crate) version: u64,
}

impl Restoring {
    /// `rank` begins to tell.
    pub(crate) fn expect(&mut self, rank: u32) {
        self.telling.insert(rank);
    }

    /// `rank` is gone.
    pub(crate) fn forget(&mut self, rank: u32) {
        self.telling.remove(&rank);
    }

    /// `rank` has told everything.
    pub(crate) fn done(&mut self, rank: u32) {
        self.telling.remove(&rank);
    }

    /// Whether all that came have told everything.
    pub(crate) fn is_complete(&self) -> bool {
        self.telling.is_empty()
    }

    /// A part of what `rank` knows.
    pub(crate) fn add(
        &mut self,
        rank: u32,
        entries: Vec<JournalEntry>,
        gathers: Vec<(GatherId, Reply)>,
    ) {
        for JournalEntry {
            key,
            version,
            value,
        } in entries
        {
            self.version = self.version.max(version);
            let known = self.entries.get(&key).map(|known| known.0);
            if known.is_none_or(|known| known < version) {
                self.entries.insert(key, (version, value, rank));
            }
        }
        self.gathers.extend(gathers);
    }

    /// All of it, put together.
    pub(crate) fn into_content(self) -> Content {
        let values = self.entries.into_iter();
        let values = values.filter_map(|(key, (_, value, owner))| Some((key, value?.0, owner)));
        Content {
            values: values.collect(),
            gathers: self.gathers,
            version: self.version,
        }
    }
}
