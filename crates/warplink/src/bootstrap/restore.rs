//! Merging the members' journals into the content of the store that was lost.

use super::message::{Bytes, GatherId, JournalEntry, Reply};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// The journals so far.
#[derive(Debug, Default)]
pub(crate) struct Restoring {
    /// The newest entry of every key, and the rank that sent it.
    entries: HashMap<String, (u64, Option<Bytes>, u32)>,
    gathers: Vec<(GatherId, Reply)>,
    /// The ranks that resumed and have not sent their whole journal.
    pending: BTreeSet<u32>,
    /// The highest version in the journals.
    version: u64,
}

/// The content of the lost store.
pub(crate) struct Content {
    /// Each with the rank that set it.
    pub(crate) values: Vec<(String, Arc<[u8]>, u32)>,
    pub(crate) gathers: Vec<(GatherId, Reply)>,
    /// The version to count from.
    pub(crate) version: u64,
}

impl Restoring {
    /// `rank` resumed, and will send its journal.
    pub(crate) fn expect(&mut self, rank: u32) {
        self.pending.insert(rank);
    }

    /// `rank` has sent its whole journal, or is gone.
    pub(crate) fn done(&mut self, rank: u32) {
        self.pending.remove(&rank);
    }

    /// Whether all ranks that resumed have sent their whole journals.
    pub(crate) fn is_complete(&self) -> bool {
        self.pending.is_empty()
    }

    /// Adds a part of the journal of `rank`.
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
            // Versions are the lost store's, so their order is that of the changes, whichever rank reports them.
            let known = self.entries.get(&key).map(|known| known.0);
            if known.is_none_or(|known| known < version) {
                self.entries.insert(key, (version, value, rank));
            }
        }
        self.gathers.extend(gathers);
    }

    /// The merged content.
    pub(crate) fn into_content(self) -> Content {
        let values = self.entries.into_iter();
        // Tombstones have served: no older entry of their keys can follow.
        let values = values.filter_map(|(key, (_, value, owner))| Some((key, value?.0, owner)));
        Content {
            values: values.collect(),
            gathers: self.gathers,
            version: self.version,
        }
    }
}
