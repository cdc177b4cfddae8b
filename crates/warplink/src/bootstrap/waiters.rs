//! Waits for keys, parked in the store until the keys exist or can no longer be set.

use super::members::{MemberStates, first_lost, gone};
use super::message::{Bytes, MAX_BODY, OnReady, Refusal, RefusalKind, Reply};
use super::values::StoreValues;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// The most waits that one member may have parked, which bounds the server's memory; a member has one per blocked thread.
const MAX_PARKED: usize = 1 << 16;

/// A wait for keys.
#[derive(Debug)]
pub(crate) struct Waiter {
    pub(crate) rank: u32,
    pub(crate) request: u64,
    keys: Vec<String>,
    on_ready: OnReady,
    /// Empty: every other rank.
    on: Vec<u32>,
    /// The position of the key that is watched. Those before it existed when last checked.
    at: usize,
}

impl Waiter {
    pub(crate) fn new(
        rank: u32,
        request: u64,
        keys: Vec<String>,
        on_ready: OnReady,
        on: Vec<u32>,
    ) -> Self {
        Self {
            rank,
            request,
            keys,
            on_ready,
            on,
            at: 0,
        }
    }

    /// Advances to the next key that does not exist; false when all do.
    ///
    /// It continues from the watched key and checks the earlier ones only at the end, since they may have been deleted
    /// meanwhile. A wait for many keys that arrive one by one thus checks each of them twice, not once for every arrival.
    fn advance(&mut self, values: &StoreValues) -> bool {
        let absent = |key: &String| values.get(key).is_none();
        if let Some(step) = self.keys.iter().skip(self.at).position(absent) {
            self.at += step;
            return true;
        }
        match self.keys.iter().position(absent) {
            Some(at) => {
                self.at = at;
                true
            }
            None => false,
        }
    }

    fn watched(&self) -> Option<&String> {
        self.keys.get(self.at)
    }

    /// The reply once every key exists.
    fn finish(&self, values: &mut StoreValues) -> Reply {
        if self.on_ready == OnReady::Nothing {
            return Reply::Done;
        }
        // Checked before anything is taken, so that a reply that is too long to send loses no value. 10 bytes is the longest
        // encoding of a length.
        let size: usize = self
            .keys
            .iter()
            .filter_map(|key| values.get(key))
            .map(|value| value.len() + 10)
            .sum();
        if size + 16 > MAX_BODY {
            let message = format!("the values take {size} bytes; expected at most {MAX_BODY}");
            return Reply::Refused(Refusal::new(RefusalKind::Invalid, message));
        }
        // A take changes keys, so it needs a version above that of the set that completed it.
        values.next_version();
        let fetch = |key: &String| match self.on_ready {
            OnReady::Take => values.remove(key),
            _ => values.get(key).cloned(),
        };
        Reply::Values(self.keys.iter().filter_map(fetch).map(Bytes).collect())
    }

    /// Why the wait can no longer succeed, if it cannot.
    fn failure(&self, members: &MemberStates) -> Option<Refusal> {
        let refusal = match self.on[..] {
            [] => self.failure_without_others(members),
            _ => match first_lost(self.on.iter().copied(), members) {
                Some(rank) => gone(rank, members),
                None => self.on.iter().find_map(|&rank| gone(rank, members)),
            },
        }?;
        Some(match self.watched() {
            Some(key) => refusal.with_key(key),
            None => refusal,
        })
    }

    /// Any other rank may set the key. One that is lost fails the wait, since it may have been the one that would set it;
    /// ranks that left in order fail it only when no other remains.
    fn failure_without_others(&self, members: &MemberStates) -> Option<Refusal> {
        let others = || (0..members.len() as u32).filter(|&rank| rank != self.rank);
        if let Some(rank) = first_lost(others(), members) {
            return gone(rank, members);
        }
        let mut last = None;
        for rank in others() {
            last = Some(gone(rank, members)?);
        }
        last
    }
}

/// All parked waits.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    /// By ticket, in the order of arrival, which is the order in which they are served.
    parked: BTreeMap<u64, Waiter>,
    /// The tickets of waits that watch a key; each watches one at a time.
    by_key: HashMap<String, BTreeSet<u64>>,
    by_request: HashMap<(u32, u64), u64>,
    count: HashMap<u32, usize>,
    next: u64,
}

impl Waiters {
    /// Answers a wait at once, or parks it (`None`).
    pub(crate) fn wait(
        &mut self,
        mut waiter: Waiter,
        values: &mut StoreValues,
        members: &MemberStates,
    ) -> Result<Option<Reply>, Refusal> {
        // Before `failure`: a value that is there satisfies the wait even if the rank that set it is gone.
        if !waiter.advance(values) {
            return Ok(Some(waiter.finish(values)));
        }
        if let Some(refusal) = waiter.failure(members) {
            return Err(refusal);
        }
        if self.by_request.contains_key(&(waiter.rank, waiter.request)) {
            return Err(Refusal::new(
                RefusalKind::Protocol,
                "the number of a request is in use",
            ));
        }
        if self.count.get(&waiter.rank) >= Some(&MAX_PARKED) {
            let message = format!("too many waits at once; expected at most {MAX_PARKED}");
            return Err(Refusal::new(RefusalKind::OutOfMemory, message));
        }
        let ticket = self.next;
        self.next += 1;
        self.park(ticket, waiter);
        Ok(None)
    }

    /// `key` was set. Returns the answers of waits that this completes, in the order of the waits.
    pub(crate) fn arrived(
        &mut self,
        key: &str,
        values: &mut StoreValues,
    ) -> Vec<(u32, u64, Reply)> {
        let mut answers = Vec::new();
        for ticket in self
            .by_key
            .get(key)
            .into_iter()
            .flatten()
            .copied()
            .collect::<Vec<_>>()
        {
            // An earlier wait may have taken the value.
            if values.get(key).is_none() {
                break;
            }
            let Some(mut waiter) = self.remove(ticket) else {
                continue;
            };
            if waiter.advance(values) {
                // Under its old ticket, so that it keeps its place in the order of arrival.
                self.park(ticket, waiter);
            } else {
                answers.push((waiter.rank, waiter.request, waiter.finish(values)));
            }
        }
        answers
    }

    /// Removes the waits that can no longer succeed.
    pub(crate) fn take_failed(&mut self, members: &MemberStates) -> Vec<(Waiter, Refusal)> {
        let take_failed: Vec<_> = self
            .parked
            .iter()
            .filter_map(|(&ticket, waiter)| Some((ticket, waiter.failure(members)?)))
            .collect();
        take_failed
            .into_iter()
            .filter_map(|(ticket, refusal)| Some((self.remove(ticket)?, refusal)))
            .collect()
    }

    /// Removes the waits of a rank that is gone.
    pub(crate) fn forget(&mut self, rank: u32) {
        let of_rank = self.parked.iter().filter(|(_, waiter)| waiter.rank == rank);
        for ticket in of_rank.map(|(&ticket, _)| ticket).collect::<Vec<_>>() {
            self.remove(ticket);
        }
    }

    /// Removes a wait. Returns the refusal that names the key it waited for, or `None` when there is no such wait.
    pub(crate) fn cancel(&mut self, rank: u32, request: u64) -> Option<Refusal> {
        let ticket = self.by_request.get(&(rank, request)).copied()?;
        let waiter = self.remove(ticket)?;
        let refusal = match waiter.on[..] {
            [rank] => {
                let awaited = format!("rank {rank} to set the key");
                Refusal::new(RefusalKind::Cancelled, awaited).with_peer(rank)
            }
            _ => Refusal::new(RefusalKind::Cancelled, "a rank to set the key"),
        };
        Some(match waiter.watched() {
            Some(key) => refusal.with_key(key),
            None => refusal,
        })
    }

    /// Whether nothing at all is left.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.parked.is_empty() && self.by_key.is_empty() && self.by_request.is_empty()
    }

    fn park(&mut self, ticket: u64, waiter: Waiter) {
        *self.count.entry(waiter.rank).or_default() += 1;
        let request = (waiter.rank, waiter.request);
        self.by_request.insert(request, ticket);
        if let Some(key) = waiter.watched() {
            self.by_key.entry(key.clone()).or_default().insert(ticket);
        }
        self.parked.insert(ticket, waiter);
    }

    fn remove(&mut self, ticket: u64) -> Option<Waiter> {
        let waiter = self.parked.remove(&ticket)?;
        self.by_request.remove(&(waiter.rank, waiter.request));
        if let Some(count) = self.count.get_mut(&waiter.rank) {
            *count = count.saturating_sub(1);
        }
        if let Some(key) = waiter.watched()
            && let Some(tickets) = self.by_key.get_mut(key)
        {
            tickets.remove(&ticket);
            if tickets.is_empty() {
                self.by_key.remove(key);
            }
        }
        Some(waiter)
    }
}
