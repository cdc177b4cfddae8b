//! Publication of allocations for zero-copy access by the kernels of peers.
//!
//! A kernel that is launched on any memory has to find its peers' tensors without asking a host. So each rank numbers
//! the allocations that it uses. When a call first uses one, its owner offers a handle to all peers; each maps it,
//! stores the address in a table in its device's memory, and acknowledges. When all have acknowledged, the owner
//! stores its own address in its own table. From then on its kernels announce *(number, offset)* for a tensor in that
//! allocation, and the peers' kernels look the address up ([`Tables`]). Until then they announce that the tensor is
//! unreachable, and all ranks use another path for the data. None of this blocks a call. A graph contains number and
//! offset, and reads the table at each launch.
//!
//! # Invariants
//! 1. An address in the own table implies that all peers have the allocation in theirs.
//! 2. An allocation is withdrawn when its publication holds the last reference; borrowed memory, when it is gone,
//!    since a library lends the same memory repeatedly. The own entry is cleared first. When the streams have
//!    completed all launches that may have read it, the peers are notified; when all have released it, the number is
//!    free. A peer's kernel finishes with an allocation before the owner's launch ends, as the verifier checks.
//! 3. A kernel announces an entry only if its address matches the tensor's. So a stale number in a graph, which
//!    belongs to another allocation by now, is harmless.
//! 4. Memory that cannot be shared, or that a peer cannot map, is not offered again.
//! 5. If numbers run out, the least recently used borrowed allocations are withdrawn, and those that graphs use only
//!    if few others have numbers, however late peers map them. A graph does not publish withdrawn memory again.

mod publisher;
mod tables;

pub(crate) use tables::{Published, Tables};

use super::context::RankContext;
use crate::device::{Backing, DeviceSlice, InFlight, InUse, Stream};
use crate::error::Result;
use crate::memory::{Heard, MemoryRegistry};
use crate::program::section::UNPUBLISHED;
use crate::sync::lock;
use crate::threads;
use publisher::Publisher;
use std::collections::HashMap;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

/// Number of published allocations of a rank. Must match `published_entries` of the kernels.
// 8 KiB of table per rank. Each entry pins an allocation's mapping on all peers.
const ENTRIES: usize = 1024;

/// Threshold of free numbers: below it, the least recently used allocations are withdrawn, as many at a time.
const FEW_ENTRIES: usize = ENTRIES / 8;

/// Limit on the wait of a failed allocation for the release of unused published memory.
// A caller that is out of memory waits that long at most, even if the thread is busy with a slow peer.
const MAX_RECLAIM: Duration = Duration::from_millis(200);

/// Memory that a rank publishes to a group, and that of its peers.
#[derive(Debug)]
pub(crate) struct Publication {
    memory: Arc<MemoryRegistry>,
    in_flight: Arc<InFlight>,
    number: u64,
    tables: Arc<Tables>,
    used: Arc<Mutex<UsedAllocations>>,
    events: Arc<Events>,
}

/// Allocations that calls have used, by identity.
#[derive(Debug)]
struct UsedAllocations {
    by_identity: HashMap<u64, TableEntry>,
    free: Vec<u64>,
    /// Number of uses so far, a logical clock for their age.
    met: u64,
}

#[derive(Debug)]
enum TableEntry {
    Entry {
        number: u64,
        uses: Arc<InUse<Departure>>,
        /// Logical time of the last use.
        met: u64,
        /// Whether a graph has recorded a call that uses it: launches of the graph use it without notice.
        is_recorded: bool,
    },
    /// It cannot be published.
    Never(Weak<dyn Backing>),
}

/// Events for the thread.
#[derive(Debug)]
enum PublisherEvent {
    /// A call has used a new allocation, which was given a number.
    Met {
        number: u64,
        allocation: DeviceSlice,
    },
    /// All streams that may have used it have completed.
    Past {
        number: u64,
    },
    /// A peer, by its rank in the job, offers or reports on an entry.
    Heard(Heard),
    /// Release memory without other references, and reply when done.
    Reclaim(Sender<()>),
    Stop,
}

/// Sends an event when it is dropped, which happens once no stream uses an allocation any more.
#[derive(Debug)]
struct Departure {
    number: u64,
    events: Weak<Events>,
}

/// Queue of the thread, which starts with the first event.
#[derive(Debug)]
struct Events {
    queue: Sender<PublisherEvent>,
    waiting: Mutex<Option<Publisher>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Publication {
    /// Creates tables, and registers with the peers. Blocks until all ranks do so; fails on all if it fails on one.
    pub(crate) fn join(context: &RankContext) -> Result<Self> {
        let (queue, received) = channel();
        let begun = Self::begin(context, queue);
        let number = begun.as_ref().map(|publication| &publication.number);
        let numbers = context.exchange().gather("publish memory", number)?;
        let publication = begun?;
        let publisher = Publisher::new(context, &numbers, &publication, received)?;
        *lock(&publication.events.waiting) = Some(publisher);
        // A peer's offer arrives after all ranks have exchanged their numbers, but possibly before this rank's thread
        // exists.
        publication.events.start();
        Ok(publication)
    }

    /// Creates tables, and listens to peers until it is dropped.
    fn begin(context: &RankContext, queue: Sender<PublisherEvent>) -> Result<Self> {
        let tables = Tables::new(&context.device, context.world())?;
        let used = UsedAllocations {
            by_identity: HashMap::new(),
            free: (0..ENTRIES as u64).rev().collect(),
            met: 0,
        };
        let events = Arc::new(Events {
            queue,
            waiting: Mutex::default(),
            thread: Mutex::default(),
        });
        let weak = Arc::downgrade(&events);
        // Weak: the registry outlives this publication, and its listener must not keep the queue alive.
        let number = context.memory.listen(move |heard| {
            if let Some(events) = weak.upgrade() {
                events.hear(heard);
            }
        });
        Ok(Self {
            memory: context.memory.clone(),
            in_flight: context.in_flight.clone(),
            number,
            tables: Arc::new(tables),
            used: Arc::new(Mutex::new(used)),
            events,
        })
    }

    /// Tables that kernels read.
    pub(crate) fn tables(&self) -> &Arc<Tables> {
        &self.tables
    }

    /// Location of `slice` for a launch on `stream`: the number of its allocation and the byte offset in it.
    /// Publishes a new allocation. Does not block.
    pub(crate) fn entry(
        &self,
        slice: &DeviceSlice,
        stream: &Stream,
        is_recorded: bool,
    ) -> (u64, u64) {
        let Some(slice) = slice.renewed() else {
            return (UNPUBLISHED, 0);
        };
        // Not by address, which another allocation may have had before.
        let identity = slice.backing().identity();
        let mut used = lock(&self.used);
        used.met += 1;
        let now = used.met;
        let (number, uses, is_new) = match used.by_identity.get_mut(&identity) {
            Some(TableEntry::Entry {
                number,
                uses,
                met,
                is_recorded: before,
            }) => {
                *met = now;
                // A graph may be launched at any time, so memory of graphs is withdrawn last.
                *before |= is_recorded;
                (*number, uses.clone(), false)
            }
            Some(TableEntry::Never(_)) => return (UNPUBLISHED, 0),
            None => {
                let Some(number) = used.free.pop() else {
                    return (UNPUBLISHED, 0);
                };
                let departure = Departure {
                    number,
                    events: Arc::downgrade(&self.events),
                };
                let uses = Arc::new(InUse::new(departure, &self.in_flight));
                let entry = TableEntry::Entry {
                    number,
                    uses: uses.clone(),
                    met: now,
                    is_recorded,
                };
                used.by_identity.insert(identity, entry);
                (number, uses, true)
            }
        };
        // Before noting a stream, which may wait for another lock, and before the event, whose handler takes this
        // one.
        drop(used);
        // If it is withdrawn in the meantime, the launch finds no address in the table.
        uses.note(stream);
        if is_new {
            let allocation = slice.allocation();
            self.events.send(PublisherEvent::Met { number, allocation });
        }
        (number, slice.offset() as u64)
    }
}

impl Drop for Publication {
    fn drop(&mut self) {
        self.memory.stop_listening(self.number);
        self.events.send(PublisherEvent::Stop);
        let Some(thread) = lock(&self.events.thread).take() else {
            return;
        };
        // The join takes at most as long as a peer may take to answer.
        threads::join(thread, "publisher");
    }
}

impl Drop for Departure {
    fn drop(&mut self) {
        if let Some(events) = self.events.upgrade() {
            events.send(PublisherEvent::Past {
                number: self.number,
            });
        }
    }
}

impl Events {
    fn send(&self, event: PublisherEvent) {
        // Sending fails only after the thread has ended, with the publication.
        let _ = self.queue.send(event);
        self.start();
    }

    fn hear(&self, heard: Heard) {
        match heard {
            Heard::Reclaim => {
                // Without a thread, no memory is held.
                if lock(&self.thread).is_none() {
                    return;
                }
                let (done, wait) = channel();
                self.send(PublisherEvent::Reclaim(done));
                // In vain is no error: the allocation is tried again and then fails by itself.
                let _ = wait.recv_timeout(MAX_RECLAIM);
            }
            _ => self.send(PublisherEvent::Heard(heard)),
        }
    }

    /// Starts the thread if it has work.
    fn start(&self) {
        let mut waiting = lock(&self.waiting);
        // Most communicators publish nothing, and a thread for each would only cost memory.
        let Some(publisher) = waiting.take_if(|publisher| publisher.has_work()) else {
            return;
        };
        let run = move || publisher.run();
        match threads::spawn("warplink-publication", "start a thread", run) {
            Ok(thread) => *lock(&self.thread) = Some(thread),
            Err(error) => {
                tracing::warn!(%error, "memory is not published, and goes through the workspace");
            }
        }
    }
}

impl UsedAllocations {
    /// Numbers in use, least recently used first and those used by graphs last, if few numbers are free or `leaving`,
    /// which will be free soon; otherwise empty.
    fn by_age(&self, leaving: usize) -> Vec<u64> {
        if self.free.len() + leaving >= FEW_ENTRIES {
            return Vec::new();
        }
        let entries = self.by_identity.values().filter_map(|entry| match entry {
            TableEntry::Entry {
                number,
                met,
                is_recorded,
                ..
            } => Some((*is_recorded, *met, *number)),
            TableEntry::Never(_) => None,
        });
        let mut entries: Vec<(bool, u64, u64)> = entries.collect();
        entries.sort_unstable();
        entries.into_iter().map(|(_, _, number)| number).collect()
    }

    /// Removes the entry of a number, and returns it if it was in use; marks `never` as unpublishable.
    fn forget(&mut self, number: u64, never: Option<&Arc<dyn Backing>>) -> Option<TableEntry> {
        let of = |entry: &TableEntry| matches!(entry, TableEntry::Entry { number: other, .. } if *other == number);
        let identity = self.by_identity.iter().find(|(_, entry)| of(entry));
        let identity = identity.map(|(identity, _)| *identity);
        let removed = identity.and_then(|identity| self.by_identity.remove(&identity));
        if let Some(backing) = never {
            // Marks of freed allocations are dropped.
            self.by_identity.retain(
                |_, entry| !matches!(entry, TableEntry::Never(gone) if gone.strong_count() == 0),
            );
            let entry = TableEntry::Never(Arc::downgrade(backing));
            self.by_identity.insert(backing.identity(), entry);
        }
        removed
    }
}
