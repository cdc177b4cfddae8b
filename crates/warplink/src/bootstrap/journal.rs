//! A member's journal of the keys it changed, from which another rank restores the store when the server is lost.
//!
//! Each member keeps the latest state of the keys that it changed last. Together the journals contain the whole store,
//! except for keys that lost ranks set, so every change confirmed to a surviving member outlives the server. Of several
//! entries of a key, the one with the highest version, which the store counts, is valid.
//!
//! The store reports to a member the keys that others changed since, which it then drops (`Forget`). Once all have
//! been notified, everybody drops the tombstones of deleted keys (`Checkpoint`), so a journal does not grow without bound.

use super::message::{Bytes, GatherId, JournalEntry, OnReady, Reply, Request};
use std::collections::{HashMap, VecDeque};

/// How many results of gathers are kept. The server may be lost after it has answered some members of a gather and not
/// the others, which then get the result from the journals of the former. It answers all members of a gather together,
/// so only recent gathers matter.
const MAX_GATHERS: usize = 64;
/// The most bytes of these results. The last one is kept even if it is larger.
const MAX_GATHER_BYTES: usize = 16 << 20;
/// About how many bytes of entries one request contains.
const PART_BYTES: usize = 4 << 20;
/// How many keys one request contains.
const PART_KEYS: usize = 1 << 12;

/// The journal of one member.
#[derive(Debug, Default)]
pub(crate) struct Journal {
    entries: HashMap<String, (u64, Option<Bytes>)>,
    gathers: VecDeque<(GatherId, Reply)>,
    gather_bytes: usize,
}

impl Journal {
    /// Records the store's answer to a request of this member.
    pub(crate) fn record(&mut self, request: &Request, version: u64, reply: &Reply) {
        match (request, reply) {
            (Request::Set { pairs }, Reply::Done) => {
                for (key, value) in pairs {
                    self.put(key, version, Some(value.clone()));
                }
            }
            (Request::CompareAndSet { key, new, .. }, Reply::Done) => {
                self.put(key, version, Some(new.clone()));
            }
            (Request::Add { key, .. }, Reply::Number(sum)) => {
                self.put(key, version, Some(Bytes::from(&sum.to_le_bytes()[..])));
            }
            (Request::Delete { key }, Reply::Flag(true)) => self.put(key, version, None),
            (Request::Wait { keys, on_ready, .. }, Reply::Values(_))
                if *on_ready == OnReady::Take =>
            {
                // Taking deletes, and nobody may take the same value again from a restored store.
                for key in keys {
                    self.put(key, version, None);
                }
            }
            (Request::Gather { id, .. }, Reply::Done | Reply::Values(_)) => {
                self.gather_bytes += bytes_of(reply);
                self.gathers.push_back((id.clone(), reply.clone()));
                while self.gathers.len() > MAX_GATHERS
                    || (self.gather_bytes > MAX_GATHER_BYTES && self.gathers.len() > 1)
                {
                    if let Some((_, forgotten)) = self.gathers.pop_front() {
                        self.gather_bytes -= bytes_of(&forgotten);
                    }
                }
            }
            _ => {}
        }
    }

    fn put(&mut self, key: &str, version: u64, value: Option<Bytes>) {
        match self.entries.get_mut(key) {
            // A set that completes a take of another thread of this rank is answered after that take, whose version
            // is higher.
            Some(entry) if entry.0 > version => {}
            Some(entry) => *entry = (version, value),
            None => drop(self.entries.insert(key.to_owned(), (version, value))),
        }
    }

    /// Others changed these keys, at these versions.
    pub(crate) fn forget(&mut self, keys: &[(String, u64)]) {
        for (key, version) in keys {
            if self
                .entries
                .get(key)
                // A newer entry is a change of this rank that crossed the notice in flight.
                .is_some_and(|entry| entry.0 < *version)
            {
                self.entries.remove(key);
            }
        }
    }

    /// Every member has dropped its entries that deletions up to `version` superseded.
    pub(crate) fn checkpoint(&mut self, version: u64) {
        self.entries
            .retain(|_, (at, value)| value.is_some() || *at > version);
    }

    /// The whole journal, as requests to a new store.
    pub(crate) fn restoring(&self) -> Vec<Request> {
        let mut parts = Vec::new();
        let (mut entries, mut bytes) = (Vec::new(), 0);
        for (key, (version, value)) in &self.entries {
            bytes += key.len() + value.as_ref().map_or(0, |value| value.0.len());
            entries.push(JournalEntry {
                key: key.clone(),
                version: *version,
                value: value.clone(),
            });
            if bytes > PART_BYTES || entries.len() >= PART_KEYS {
                parts.push(restore(std::mem::take(&mut entries), Vec::new()));
                bytes = 0;
            }
        }
        parts.push(restore(entries, Vec::new()));
        // One per request: each may be nearly as long as a message may be.
        let gathers = self.gathers.iter().cloned();
        parts.extend(gathers.map(|gather| restore(Vec::new(), vec![gather])));
        // The store serves nobody before all members have sent this.
        parts.push(Request::Restored);
        parts
    }
}

fn restore(entries: Vec<JournalEntry>, gathers: Vec<(GatherId, Reply)>) -> Request {
    Request::Restore { entries, gathers }
}

fn bytes_of(reply: &Reply) -> usize {
    match reply {
        Reply::Values(values) => values.iter().map(|value| value.0.len()).sum(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(key: &str, value: &[u8]) -> Request {
        let pairs = vec![(key.to_owned(), Bytes::from(value))];
        Request::Set { pairs }
    }

    fn delete(key: &str) -> Request {
        Request::Delete {
            key: key.to_owned(),
        }
    }

    fn entries(journal: &Journal) -> Vec<(String, u64, bool)> {
        let mut entries: Vec<_> = journal
            .restoring()
            .into_iter()
            .filter_map(|request| match request {
                Request::Restore { entries, .. } => Some(entries),
                _ => None,
            })
            .flatten()
            .map(|entry| (entry.key, entry.version, entry.value.is_some()))
            .collect();
        entries.sort();
        entries
    }

    #[test]
    fn valid_entries_are_kept_and_superseded_ones_dropped() {
        let mut journal = Journal::default();
        journal.record(&set("a", b"1"), 5, &Reply::Done);
        journal.record(&set("b", b"1"), 6, &Reply::Done);
        journal.record(&delete("b"), 7, &Reply::Flag(true));
        journal.record(&delete("c"), 8, &Reply::Flag(false));
        let [a, b] = ["a", "b"].map(str::to_owned);
        assert_eq!(entries(&journal), [(a.clone(), 5, true), (b, 7, false)]);
        // An older entry never replaces a newer one, nor does a late notice remove one.
        journal.record(&set("b", b"0"), 4, &Reply::Done);
        journal.forget(&[("b".to_owned(), 7), ("a".to_owned(), 5)]);
        assert_eq!(entries(&journal).len(), 2);
        journal.checkpoint(6);
        assert_eq!(entries(&journal).len(), 2);
        journal.checkpoint(7);
        assert_eq!(entries(&journal), [(a, 5, true)]);
        journal.forget(&[("a".to_owned(), 9)]);
        assert!(entries(&journal).is_empty());
    }

    #[test]
    fn results_of_gathers_are_limited_except_for_the_last() {
        let mut journal = Journal::default();
        let gather = |sequence| Request::Gather {
            id: GatherId {
                members: vec![0, 1],
                instance: 0,
                sequence,
            },
            purpose: crate::bootstrap::message::Purpose::AllGather,
            value: Bytes::from(&b""[..]),
        };
        for sequence in 0..1000 {
            journal.record(&gather(sequence), 0, &Reply::Done);
        }
        assert_eq!(journal.gathers.len(), MAX_GATHERS);
        let large = Reply::Values(vec![Bytes::from(&vec![0; MAX_GATHER_BYTES + 1][..])]);
        journal.record(&gather(1000), 0, &large);
        assert_eq!(journal.gathers.len(), 1);
        journal.record(&gather(1001), 0, &Reply::Done);
        assert_eq!((journal.gathers.len(), journal.gather_bytes), (1, 0));
    }
}
