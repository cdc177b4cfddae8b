//! Allocations that kernels of the peers access where they lie.
//!
//! A kernel that is launched on any memory has to find its peers' tensors without asking a host. So each rank
//! numbers the allocations that it uses: when a call first meets one, its owner offers a handle to all peers, each
//! maps it, notes the address in a table in its device's memory, and says so. When all have, the owner notes its own
//! address in its own table. From then on its kernels announce *(number, offset)* for a tensor in that allocation, and
//! the peers' kernels look the address up ([`Tables`]). Until then they announce that the tensor is not reachable, and
//! all ranks move the data another way. Nothing of it blocks a call; a graph has number and offset, and reads the table
//! at each launch.
//!
//! # What holds
//! 1. An address in the own table means that all peers have the allocation in theirs.
//! 2. An allocation that nobody holds any more but its publication is withdrawn, and borrowed memory when it is not there
//!    any more: a library lends the same memory again and again. The own entry goes first; when the
//!    streams are past all launches that may have read it, the peers are told; when all have let go of it, the number
//!    is free. A peer's kernel is done with an allocation before the launch of its owner ends, as the verifier checks.
//! 3. A kernel announces what it finds only where the address is the tensor's: a number that a graph recorded, and that
//!    is another allocation's by now, is of no use and does no harm.
//! 4. Memory that cannot be shared, or that a peer cannot map, is not offered again.

mod keeper;
mod tables;

pub(crate) use tables::{Published, Tables};

use super::context::RankContext;
use crate::device::{Backing, DeviceSlice, InFlight, InUse, Stream};
use crate::error::{Rank, Result};
use crate::memory::{Heard, MemoryRegistry, Notice, PeerHandle};
use crate::program::section::UNPUBLISHED;
use crate::sync::lock;
use keeper::Keeper;
use std::collections::HashMap;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

/// Allocations of a rank that are published at a time. Must match `published_entries` of the kernels.
const ENTRIES: usize = 1024;

/// Free numbers below which what was not used for longest makes room, as many at a time.
const FEW_ENTRIES: usize = ENTRIES / 8;

/// How long an allocation that finds no memory waits for what is held for nobody.
const MAX_RECLAIM: Duration = Duration::from_millis(200);

/// What a rank publishes to a group, and what it reaches of its peers'.
#[derive(Debug)]
pub(crate) struct Publication {
    memory: Arc<MemoryRegistry>,
    in_flight: Arc<InFlight>,
    number: u64,
    tables: Arc<Tables>,
    known: Arc<Mutex<Known>>,
    events: Arc<Events>,
}

/// The allocations that calls have met, by identity.
#[derive(Debug)]
struct Known {
    by_identity: HashMap<u64, Place>,
    free: Vec<u64>,
    /// How often calls have met allocations.
    met: u64,
}

#[derive(Debug)]
enum Place {
    Entry {
        number: u64,
        uses: Arc<InUse<Departure>>,
        /// The number of the last call that met it.
        met: u64,
        /// Whether a graph has recorded a call that met it: its launches use it, and tell nobody.
        is_recorded: bool,
    },
    /// It cannot be published.
    Never(Weak<dyn Backing>),
}

/// What the thread is told.
#[derive(Debug)]
enum Event {
    /// A call has met an allocation, which was given a number.
    Met {
        number: u64,
        allocation: DeviceSlice,
    },
    /// Streams are past what may have used it.
    Past {
        number: u64,
    },
    /// A peer, by its rank in the job, offers an entry.
    Offer {
        from: Rank,
        entry: u64,
        handle: PeerHandle,
    },
    /// A peer tells of an entry.
    Notice {
        from: Rank,
        entry: u64,
        notice: Notice,
    },
    /// What is held for nobody is to be let go of.
    Reclaim(Sender<()>),
    Stop,
}

/// Tells the thread when it is dropped, which is when no stream uses an allocation any more.
#[derive(Debug)]
struct Departure {
    number: u64,
    events: Weak<Events>,
}

/// The thread's queue; it starts with the first event.
#[derive(Debug)]
struct Events {
    queue: Sender<Event>,
    waiting: Mutex<Option<Keeper>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Publication {
    /// Makes tables, and tells the peers how to reach this. Blocks until all ranks do so, and fails on all where it does
    /// on one.
    pub(crate) fn join(context: &RankContext) -> Result<Self> {
        let (queue, received) = channel();
        let begun = Self::begin(context, queue);
        let number = begun.as_ref().map(|publication| &publication.number);
        let numbers = context.exchange().gather("publish memory", number)?;
        let publication = begun?;
        let keeper = Keeper::new(context, &numbers, &publication, received)?;
        *lock(&publication.events.waiting) = Some(keeper);
        // A peer's offer comes after all ranks have their numbers, but maybe before this one has its thread.
        publication.events.start();
        Ok(publication)
    }

    /// Makes tables, and listens to peers. Dropping it ends that.
    fn begin(context: &RankContext, queue: Sender<Event>) -> Result<Self> {
        let tables = Tables::new(&context.device, context.world())?;
        let known = Known {
            by_identity: HashMap::new(),
            free: (0..ENTRIES as u64).rev().collect(),
            met: 0,
        };
        let events = Arc::new(Events {
            queue,
            waiting: Mutex::default(),
            thread: Mutex::default(),
        });
        let told = Arc::downgrade(&events);
        let number = context.memory.listen(move |heard| {
            if let Some(events) = told.upgrade() {
                events.hear(heard);
            }
        });
        Ok(Self {
            memory: context.memory.clone(),
            in_flight: context.in_flight.clone(),
            number,
            tables: Arc::new(tables),
            known: Arc::new(Mutex::new(known)),
            events,
        })
    }

    /// The tables that kernels read.
    pub(crate) fn tables(&self) -> &Arc<Tables> {
        &self.tables
    }

    /// Where a launch on `stream` says that `slice` lies: the number of its allocation and the first byte in that.
    /// Publishes an allocation that was not met before. Does not block.
    pub(crate) fn place(
        &self,
        slice: &DeviceSlice,
        stream: &Stream,
        is_recorded: bool,
    ) -> (u64, u64) {
        let identity = slice.backing().identity();
        let mut known = lock(&self.known);
        known.met += 1;
        let now = known.met;
        let (number, uses, is_new) = match known.by_identity.get_mut(&identity) {
            Some(Place::Entry {
                number,
                uses,
                met,
                is_recorded: before,
            }) => {
                *met = now;
                *before |= is_recorded;
                (*number, uses.clone(), false)
            }
            Some(Place::Never(_)) => return (UNPUBLISHED, 0),
            None => {
                let Some(number) = known.free.pop() else {
                    return (UNPUBLISHED, 0);
                };
                let departure = Departure {
                    number,
                    events: Arc::downgrade(&self.events),
                };
                let uses = Arc::new(InUse::new(departure, &self.in_flight));
                let place = Place::Entry {
                    number,
                    uses: uses.clone(),
                    met: now,
                    is_recorded,
                };
                known.by_identity.insert(identity, place);
                (number, uses, true)
            }
        };
        drop(known);
        // Where it is withdrawn meanwhile, the launch finds no address in the table.
        uses.note(stream);
        if is_new {
            let allocation = slice.allocation();
            self.events.send(Event::Met { number, allocation });
        }
        (number, slice.offset() as u64)
    }
}

impl Drop for Publication {
    fn drop(&mut self) {
        self.memory.stop_listening(self.number);
        self.events.send(Event::Stop);
        let Some(thread) = lock(&self.events.thread).take() else {
            return;
        };
        // What it does takes as long as a peer may take to answer at most.
        if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
            tracing::error!("the thread that publishes memory panicked");
        }
    }
}

impl Drop for Departure {
    fn drop(&mut self) {
        if let Some(events) = self.events.upgrade() {
            events.send(Event::Past {
                number: self.number,
            });
        }
    }
}

impl Events {
    fn send(&self, event: Event) {
        // The thread is gone only when the publication is.
        let _ = self.queue.send(event);
        self.start();
    }

    fn hear(&self, heard: Heard) {
        match heard {
            Heard::Offer {
                from,
                entry,
                handle,
            } => self.send(Event::Offer {
                from,
                entry,
                handle,
            }),
            Heard::Notice {
                from,
                entry,
                notice,
            } => self.send(Event::Notice {
                from,
                entry,
                notice,
            }),
            Heard::Reclaim => {
                // Without a thread, nothing is held.
                if lock(&self.thread).is_none() {
                    return;
                }
                let (done, wait) = channel();
                self.send(Event::Reclaim(done));
                let _ = wait.recv_timeout(MAX_RECLAIM);
            }
        }
    }

    /// Starts the thread where there is something to do for it.
    fn start(&self) {
        let mut waiting = lock(&self.waiting);
        let Some(keeper) = waiting.take_if(|keeper| keeper.has_work()) else {
            return;
        };
        let thread = std::thread::Builder::new()
            .name("warplink-publication".to_owned())
            .spawn(move || keeper.run());
        match thread {
            Ok(thread) => *lock(&self.thread) = Some(thread),
            Err(error) => {
                tracing::warn!(%error, "memory is not published, and goes through the workspace");
            }
        }
    }
}

impl Known {
    /// The numbers in use, from the one that was not met for longest on, where few are free or among the `leaving`, which
    /// will be; else none. Those that graphs use come last.
    fn by_age(&self, leaving: usize) -> Vec<u64> {
        if self.free.len() + leaving >= FEW_ENTRIES {
            return Vec::new();
        }
        let entries = self.by_identity.values().filter_map(|place| match place {
            Place::Entry {
                number,
                met,
                is_recorded,
                ..
            } => Some((*is_recorded, *met, *number)),
            Place::Never(_) => None,
        });
        let mut entries: Vec<(bool, u64, u64)> = entries.collect();
        entries.sort_unstable();
        entries.into_iter().map(|(_, _, number)| number).collect()
    }

    /// Takes the entry of a number out; whether it may still be in use.
    fn forget(&mut self, number: u64) -> Option<Place> {
        let of =
            |place: &Place| matches!(place, Place::Entry { number: other, .. } if *other == number);
        let identity = self.by_identity.iter().find(|(_, place)| of(place));
        let identity = *identity?.0;
        self.by_identity.remove(&identity)
    }

    /// Notes that an allocation cannot be published, and forgets those of these that are freed.
    fn never(&mut self, backing: &Arc<dyn Backing>) {
        self.by_identity
            .retain(|_, place| !matches!(place, Place::Never(gone) if gone.strong_count() == 0));
        let place = Place::Never(Arc::downgrade(backing));
        self.by_identity.insert(backing.identity(), place);
    }
}
