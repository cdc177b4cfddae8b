//! Background thread that publishes allocations, maps those of the peers, and releases both.

use super::super::context::RankContext;
use super::{FEW_ENTRIES, Publication, PublisherEvent, Tables, UsedAllocations};
use crate::device::{Backing, DeviceSlice};
use crate::error::{Rank, Result};
use crate::memory::{Heard, MemoryRegistry, Message, Notice, PeerHandle, Region, RemoteRegion};
use crate::sync::lock;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Interval between checks for published memory that no one else references any more.
const SWEEP_INTERVAL: Duration = Duration::from_millis(100);

/// State of the thread.
#[derive(Debug)]
pub(super) struct Publisher {
    rank: Rank,
    /// For each rank of the group, its rank in the job and the number of its publication.
    peers: Vec<Peer>,
    memory: Arc<MemoryRegistry>,
    tables: Arc<Tables>,
    used: Arc<Mutex<UsedAllocations>>,
    events: Receiver<PublisherEvent>,
    /// Event received before the thread was started.
    first: Mutex<Option<PublisherEvent>>,
    own: BTreeMap<u64, OwnState>,
    /// Mapped allocations of peers, by rank and number.
    mapped: BTreeMap<(Rank, u64), RemoteRegion>,
}

#[derive(Debug)]
struct Peer {
    job_rank: Rank,
    publication: u64,
    in_process: bool,
}

/// State of an allocation of this rank.
#[derive(Debug)]
enum OwnState {
    /// Peers in `left` have not mapped it yet.
    Offered {
        region: Region,
        left: BTreeSet<Rank>,
    },
    Published(Region),
    /// Waits for streams that may still use it; then peers are notified.
    Leaving,
    /// Peers in `left` have not released it yet.
    Withdrawn {
        left: BTreeSet<Rank>,
    },
}

impl OwnState {
    fn is_published(&self) -> bool {
        matches!(self, Self::Published(_))
    }
}

impl Publisher {
    pub(super) fn new(
        context: &RankContext,
        numbers: &[u64],
        publication: &Publication,
        events: Receiver<PublisherEvent>,
    ) -> Result<Self> {
        let mut peers = Vec::with_capacity(numbers.len());
        for (rank, number) in numbers.iter().enumerate() {
            let job_rank = context.group.job_rank(rank)?;
            peers.push(Peer {
                job_rank,
                publication: *number,
                in_process: context.memory.is_in_process(job_rank)?,
            });
        }
        Ok(Self {
            rank: context.rank(),
            peers,
            memory: context.memory.clone(),
            tables: publication.tables.clone(),
            used: publication.used.clone(),
            events,
            first: Mutex::default(),
            own: BTreeMap::new(),
            mapped: BTreeMap::new(),
        })
    }

    /// Whether any event other than the stop is pending.
    pub(super) fn has_work(&self) -> bool {
        let mut first = lock(&self.first);
        if first.is_none() {
            *first = self.events.try_recv().ok();
        }
        !matches!(*first, None | Some(PublisherEvent::Stop))
    }

    /// Processes events until it is stopped.
    pub(super) fn run(mut self) {
        let mut next = lock(&self.first).take();
        loop {
            let event = match next.take() {
                Some(event) => Some(event),
                // Nothing to sweep, so sleep without periodic wake-ups.
                None if self.own.is_empty() => match self.events.recv() {
                    Ok(event) => Some(event),
                    Err(_) => break,
                },
                None => match self.events.recv_timeout(SWEEP_INTERVAL) {
                    Ok(event) => Some(event),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => break,
                },
            };
            match event {
                None => self.sweep(),
                Some(PublisherEvent::Met { number, allocation }) => {
                    // An application that always has new memory would never leave the thread idle for an interval.
                    self.sweep();
                    self.offer(number, allocation);
                }
                Some(PublisherEvent::Past { number }) => self.past(number),
                Some(PublisherEvent::Heard(heard)) => self.hear(heard),
                Some(PublisherEvent::Reclaim(done)) => {
                    self.sweep();
                    let _ = done.send(());
                }
                Some(PublisherEvent::Stop) => break,
            }
        }
        self.end();
    }

    fn others(&self) -> BTreeSet<Rank> {
        let all = 0..self.peers.len();
        all.filter(|rank| *rank != self.rank).collect()
    }

    fn notify(&self, rank: Rank, entry: u64, notice: Notice) {
        let peer = &self.peers[rank];
        let message = Message::Published {
            publication: peer.publication,
            entry,
            notice,
        };
        self.memory.notify(peer.job_rank, message);
    }

    /// Group rank of the peer with job rank `from`; `None` for this rank or a rank of another group.
    fn peer(&self, from: Rank) -> Option<Rank> {
        let rank = self.peers.iter().position(|peer| peer.job_rank == from);
        let rank = rank.filter(|rank| *rank != self.rank);
        if rank.is_none() {
            tracing::warn!(from, "a rank of another group published an allocation");
        }
        rank
    }

    /// Offers an allocation to all peers.
    fn offer(&mut self, number: u64, allocation: DeviceSlice) {
        let backing = allocation.backing().clone();
        let left = backing.without_owner();
        // Two references remain: the allocation and the one taken here.
        if left.is_none() && Arc::strong_count(&backing) <= 2 {
            // The allocation was freed in the meantime.
            self.free(number, None);
            return;
        }
        // Borrowed memory may be lent again by a later call, and its owner frees it without notice.
        let published = left.map_or(allocation, DeviceSlice::whole);
        let region = self.memory.register(&published);
        // All handles before the first message: an allocation that one peer cannot get is offered to none.
        let offered = region.and_then(|region| {
            let handle = |rank: Rank| {
                self.memory
                    .export_handle(&region, self.peers[rank].job_rank)
            };
            let handles = self.others().into_iter().map(handle);
            Ok((handles.collect::<Result<Vec<_>>>()?, region))
        });
        match offered {
            Ok((handles, region)) => {
                let left = self.others();
                for (rank, handle) in left.iter().zip(handles) {
                    let peer = &self.peers[*rank];
                    let message = Message::Offered {
                        publication: peer.publication,
                        entry: number,
                        handle: handle.sent(),
                    };
                    self.memory.notify(peer.job_rank, message);
                }
                self.own.insert(number, OwnState::Offered { region, left });
            }
            Err(error) => {
                tracing::debug!(%error, "memory cannot be shared, and goes through the workspace");
                self.free(number, Some(&backing));
            }
        }
    }

    /// Frees a number that no peer knows; `never` is marked as unpublishable.
    fn free(&mut self, number: u64, never: Option<&Arc<dyn Backing>>) {
        let removed = lock(&self.used).forget(number, never);
        // The release notice arrives later and needs no reply. The number stays reserved until then.
        let left = BTreeSet::new();
        self.own.insert(number, OwnState::Withdrawn { left });
        drop(removed);
    }

    fn hear(&mut self, heard: Heard) {
        match heard {
            Heard::Offer {
                from,
                entry,
                handle,
            } => {
                if let Some(rank) = self.peer(from) {
                    self.map(rank, entry, handle);
                }
            }
            Heard::Notice {
                from,
                entry,
                notice,
            } => {
                if let Some(rank) = self.peer(from) {
                    self.notice(rank, entry, notice);
                }
            }
            Heard::Reclaim => self.sweep(),
        }
    }

    fn notice(&mut self, rank: Rank, entry: u64, notice: Notice) {
        match notice {
            Notice::Taken => self.taken(rank, entry),
            Notice::Refused => self.refused(entry),
            Notice::Withdrawn => {
                // Before the mapping goes, so that no kernel reads the address of one that is gone.
                if let Err(error) = self.tables.clear(rank, entry) {
                    tracing::debug!(%error, "an entry of a table stays");
                }
                // The owner withdraws an entry only after the peer's kernels and this rank's have completed with it.
                self.mapped.remove(&(rank, entry));
                self.notify(rank, entry, Notice::LetGo);
            }
            Notice::LetGo => self.let_go(rank, entry),
        }
    }

    /// Maps a peer's offer.
    fn map(&mut self, rank: Rank, entry: u64, handle: PeerHandle) {
        // An owner reuses a number only after all peers have released it, so this one breaks the protocol.
        if self.mapped.contains_key(&(rank, entry)) {
            self.notify(rank, entry, Notice::Refused);
            return;
        }
        let noted = handle.open().and_then(|region| {
            self.tables.set(rank, entry, region.memory())?;
            Ok(region)
        });
        match noted {
            Ok(region) => {
                self.mapped.insert((rank, entry), region);
                // Last: once all have answered, the owner's launches announce the entry, and kernels here look it up.
                self.notify(rank, entry, Notice::Taken);
            }
            Err(error) => {
                tracing::debug!(%error, rank, "a peer's memory cannot be mapped, and goes through the workspace");
                // The failure may have occurred while the device's table was updated, so clear the entry.
                let _ = self.tables.clear(rank, entry);
                self.notify(rank, entry, Notice::Refused);
            }
        }
    }

    /// Records that a peer has mapped an allocation of this rank.
    fn taken(&mut self, rank: Rank, entry: u64) {
        let Some(OwnState::Offered { region, left }) = self.own.get_mut(&entry) else {
            return;
        };
        left.remove(&rank);
        if !left.is_empty() {
            return;
        }
        let region = region.clone();
        // This rank's kernels announce what is in its own table: hence not before all peers have the mapping.
        match self.tables.set(self.rank, entry, region.memory()) {
            Ok(()) => {
                self.own.insert(entry, OwnState::Published(region));
            }
            Err(error) => {
                tracing::debug!(%error, "an allocation stays unpublished");
                self.withdraw(entry, None);
            }
        }
    }

    /// Withdraws an allocation that a peer cannot map.
    fn refused(&mut self, entry: u64) {
        if let Some(OwnState::Offered { region, .. }) = self.own.get(&entry) {
            let backing = region.memory().backing().clone();
            self.withdraw(entry, Some(&backing));
        }
    }

    /// Begins to withdraw an allocation; marks `never` as unpublishable.
    fn withdraw(&mut self, entry: u64, never: Option<&Arc<dyn Backing>>) {
        // Clear the table entry first, so that no later launch announces it.
        if let Err(error) = self.tables.clear(self.rank, entry) {
            tracing::debug!(%error, "an entry of a table stays");
        }
        let removed = lock(&self.used).forget(entry, never);
        // Dropping the region ends the registration; the memory is held until all peers have released it.
        let before = self.own.insert(entry, OwnState::Leaving);
        drop(before);
        // Dropping the entry sends the release notice once no stream uses the allocation.
        drop(removed);
    }

    /// Asks peers to release an allocation: all streams that may have used it have completed.
    fn past(&mut self, entry: u64) {
        match self.own.get(&entry) {
            Some(OwnState::Leaving) => {
                let left = self.others();
                for rank in &left {
                    self.notify(*rank, entry, Notice::Withdrawn);
                }
                self.own.insert(entry, OwnState::Withdrawn { left });
            }
            Some(OwnState::Withdrawn { left }) if left.is_empty() => self.reuse(entry),
            _ => {}
        }
    }

    fn let_go(&mut self, rank: Rank, entry: u64) {
        let Some(OwnState::Withdrawn { left }) = self.own.get_mut(&entry) else {
            return;
        };
        if left.remove(&rank) && left.is_empty() {
            self.reuse(entry);
        }
    }

    /// Makes the number available for another allocation.
    fn reuse(&mut self, entry: u64) {
        self.own.remove(&entry);
        lock(&self.used).free.push(entry);
    }

    /// Withdraws allocations without other references, borrowed ones whose memory is gone, and if numbers run out, the
    /// least recently used of the borrowed ones.
    fn sweep(&mut self) {
        // The table holds a reference, and so does each peer that is a thread of this process.
        let in_process = self.peers.iter().filter(|peer| peer.in_process).count() - 1;
        let mut leaving = BTreeSet::new();
        // Not withdrawn for their age.
        let mut owned = BTreeSet::new();
        for (number, own) in &self.own {
            let (OwnState::Offered { region, .. } | OwnState::Published(region)) = own else {
                continue;
            };
            let backing = region.memory().backing();
            let stays = if backing.is_borrowed() {
                backing.is_there()
            } else {
                owned.insert(*number);
                region.is_held_elsewhere(1 + in_process)
            };
            if !stays && own.is_published() {
                leaving.insert(*number);
            }
        }
        let states = self.own.values();
        let gone =
            states.filter(|own| matches!(own, OwnState::Leaving | OwnState::Withdrawn { .. }));
        let old = lock(&self.used).by_age(gone.count() + leaving.len());
        let old = old
            .into_iter()
            .filter(|number| !owned.contains(number) && !leaving.contains(number));
        // This includes allocations that peers have not mapped yet, which can be withdrawn only in a later sweep. If
        // they were skipped while peers are slow, more recently used ones would be withdrawn, and those of graphs.
        let oldest: Vec<u64> = old.take(FEW_ENTRIES).collect();
        let is_published = |number: &u64| self.own.get(number).is_some_and(OwnState::is_published);
        leaving.extend(oldest.into_iter().filter(is_published));
        for number in leaving {
            self.withdraw(number, None);
        }
    }

    /// Releases everything. No launch uses it any more.
    fn end(&mut self) {
        for (number, own) in std::mem::take(&mut self.own) {
            // Peers have been notified of these already.
            if matches!(own, OwnState::Withdrawn { .. }) {
                continue;
            }
            // Answers are not awaited: the peers end their publications as well.
            let _ = self.tables.clear(self.rank, number);
            for rank in self.others() {
                self.notify(rank, number, Notice::Withdrawn);
            }
        }
        let mapped = std::mem::take(&mut self.mapped);
        for (rank, number) in mapped.keys() {
            let _ = self.tables.clear(*rank, *number);
        }
        let entries = std::mem::take(&mut lock(&self.used).by_identity);
        drop(entries);
    }
}
