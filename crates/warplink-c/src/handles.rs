//! Handles passed to C, and the tables that resolve them.
//!
//! A handle encodes the kind of object, the index of its entry in that kind's table, and the entry's generation, which
//! is incremented each time the entry is freed. A freed handle therefore stays invalid, even after its entry is reused.

use crate::bound_call::BoundCallObject;
use crate::buffer::BufferObject;
use crate::collectives::CollectivesObject;
use crate::experts::{ExpertsObject, RoutingObject};
use crate::job::JobObject;
use crate::kernel::{KernelObject, ModuleObject};
use crate::memory::RegionObject;
use crate::status::{Failure, Outcome};
use crate::stream::StreamObject;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use warplink::Error;

/// A communicator: this rank among the others. Zero is invalid.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Comm {
    pub(crate) id: u64,
}

/// Memory of this rank that peers may access. Zero is invalid.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Region {
    pub(crate) id: u64,
}

/// An ordered queue of device work. Zero is invalid.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    pub(crate) id: u64,
}

/// A region added to all connections. Zero is invalid.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    pub(crate) id: u64,
}

/// Code loaded into the device. Zero is invalid.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Module {
    pub(crate) id: u64,
}

/// A kernel of a module. Zero is invalid.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    pub(crate) id: u64,
}

/// A group of collectives over all ranks. Zero is invalid.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Collectives {
    pub(crate) id: u64,
}

/// A layer of experts. Zero is invalid.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Experts {
    pub(crate) id: u64,
}

/// Where the rows of a dispatch are. Zero is invalid.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Routing {
    pub(crate) id: u64,
}

/// A collective bound to fixed memory. Zero is invalid.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BoundCall {
    pub(crate) id: u64,
}

/// Bit offset of a handle's generation; the index is in the bits below, the kind in those from `KIND` on.
// This leaves 24 bits for generations, and 8 for kinds.
const GENERATION: u32 = 32;
const KIND: u32 = 56;

/// The last generation of an entry. The entry is retired after it, so that old handles never become valid again.
const MAX_GENERATION: u64 = (1 << (KIND - GENERATION)) - 1;

static COMMS: Table<JobObject> = Table::new("communicator", 1);
static REGIONS: Table<RegionObject> = Table::new("region", 2);
static STREAMS: Table<StreamObject> = Table::new("stream", 3);
static BUFFERS: Table<BufferObject> = Table::new("buffer", 4);
static MODULES: Table<ModuleObject> = Table::new("module", 5);
static KERNELS: Table<KernelObject> = Table::new("kernel", 6);
static COLLECTIVES: Table<CollectivesObject> = Table::new("group of collectives", 7);
static EXPERTS: Table<ExpertsObject> = Table::new("layer of experts", 8);
static BOUND_CALLS: Table<BoundCallObject> = Table::new("bound call", 9);
static ROUTINGS: Table<RoutingObject> = Table::new("routing", 10);

/// A handle of one kind of object.
pub(crate) trait Handle: Copy {
    /// Type of the object that a handle refers to.
    type Object: 'static;

    /// Stores a new object and returns its handle.
    fn new(object: Self::Object) -> Self;

    /// The object. It stays alive while the `Arc` is held, even if the handle is freed concurrently.
    fn get(self) -> Outcome<Arc<Self::Object>>;

    /// Removes the object and invalidates its handle.
    fn take(self) -> Outcome<Arc<Self::Object>>;
}

/// Implements [`Handle`] for types backed by these tables.
macro_rules! handles {
    ($($handle:ty => $object:ty, $table:ident);* $(;)?) => {$(
        impl Handle for $handle {
            type Object = $object;

            fn new(object: $object) -> Self {
                Self { id: $table.insert(object) }
            }

            fn get(self) -> Outcome<Arc<$object>> {
                $table.get(self.id)
            }

            fn take(self) -> Outcome<Arc<$object>> {
                $table.take(self.id)
            }
        }
    )*};
}

handles! {
    Comm => JobObject, COMMS;
    Region => RegionObject, REGIONS;
    Stream => StreamObject, STREAMS;
    Buffer => BufferObject, BUFFERS;
    Module => ModuleObject, MODULES;
    Kernel => KernelObject, KERNELS;
    Collectives => CollectivesObject, COLLECTIVES;
    Experts => ExpertsObject, EXPERTS;
    BoundCall => BoundCallObject, BOUND_CALLS;
    Routing => RoutingObject, ROUTINGS;
}

/// Removes everything that belongs to `job` from the tables.
pub(crate) fn take_all_of(job: &Arc<JobObject>) {
    // From users to what they use: an object that is dropped last is not used by any other at that time.
    BOUND_CALLS.take_where(|bound| Arc::ptr_eq(&bound.job, job));
    ROUTINGS.take_where(|routing| Arc::ptr_eq(&routing.job, job));
    EXPERTS.take_where(|experts| Arc::ptr_eq(&experts.job, job));
    COLLECTIVES.take_where(|collectives| Arc::ptr_eq(&collectives.job, job));
    KERNELS.take_where(|kernel| Arc::ptr_eq(&kernel.job, job));
    MODULES.take_where(|module| Arc::ptr_eq(&module.job, job));
    BUFFERS.take_where(|buffer| Arc::ptr_eq(&buffer.job, job));
    for stream in STREAMS.take_where(|stream| Arc::ptr_eq(&stream.job, job)) {
        // The owner of the CUDA stream may destroy it from now on. A stream that is capturing stays borrowed until the
        // capture ends.
        if let Err(error) = stream.stream.give_back() {
            tracing::warn!(%error, "a borrowed stream was not released");
        }
    }
    REGIONS.take_where(|region| Arc::ptr_eq(&region.job, job));
}

/// The table of one kind of objects.
struct Table<T> {
    name: &'static str,
    kind: u64,
    entries: Mutex<Entries<T>>,
}

struct Entries<T> {
    all: Vec<Entry<T>>,
    free: Vec<usize>,
}

struct Entry<T> {
    generation: u64,
    object: Option<Arc<T>>,
}

impl<T> Table<T> {
    const fn new(name: &'static str, kind: u64) -> Self {
        Self {
            name,
            kind,
            entries: Mutex::new(Entries {
                all: Vec::new(),
                free: Vec::new(),
            }),
        }
    }

    fn insert(&self, object: T) -> u64 {
        let mut entries = self.lock();
        let at = entries.free.pop().unwrap_or_else(|| {
            entries.all.push(Entry {
                generation: 0,
                object: None,
            });
            entries.all.len() - 1
        });
        let entry = &mut entries.all[at];
        entry.object = Some(Arc::new(object));
        // Index from 1, so that the low half of a handle is never zero.
        self.kind << KIND | entry.generation << GENERATION | (at as u64 + 1)
    }

    fn get(&self, id: u64) -> Outcome<Arc<T>> {
        let entries = self.lock();
        let at = self.find(&entries, id)?;
        // Cloned under the lock, and used without it: calls may block, and other handles must stay usable.
        entries.all[at].object.clone().ok_or_else(|| self.gone())
    }

    fn take(&self, id: u64) -> Outcome<Arc<T>> {
        let mut entries = self.lock();
        let at = self.find(&entries, id)?;
        entries.give_back(at).ok_or_else(|| self.gone())
    }

    /// Removes all matching objects and returns them, to be dropped without the lock: drops may be slow.
    fn take_where(&self, matches: impl Fn(&T) -> bool) -> Vec<Arc<T>> {
        let mut entries = self.lock();
        let found: Vec<usize> = (0..entries.all.len())
            .filter(|at| entries.all[*at].object.as_deref().is_some_and(&matches))
            .collect();
        let taken = found.into_iter().filter_map(|at| entries.give_back(at));
        taken.collect()
    }

    /// The index of the entry that `id` refers to.
    fn find(&self, entries: &Entries<T>, id: u64) -> Outcome<usize> {
        if id == 0 {
            return Err(Failure::invalid(
                format!(
                    "the {} is zero; expected a handle that Warplink returned",
                    self.name
                ),
                format!(
                    "create the {} first, and check that it succeeded",
                    self.name
                ),
            ));
        }
        let at = (id & ((1 << GENERATION) - 1)).checked_sub(1);
        let at = at.and_then(|at| usize::try_from(at).ok());
        let entry = at.and_then(|at| Some((at, entries.all.get(at)?)));
        let Some((at, entry)) = entry.filter(|_| id >> KIND == self.kind) else {
            return Err(Failure::invalid(
                format!(
                    "{id:#x} is not a {}; expected a handle that Warplink returned",
                    self.name
                ),
                format!("pass the {} handle unchanged", self.name),
            ));
        };
        // A handle of an earlier object in the same place is stale, and must not reach the present one.
        if entry.object.is_none() || id >> GENERATION & MAX_GENERATION != entry.generation {
            return Err(self.gone());
        }
        Ok(at)
    }

    fn gone(&self) -> Failure {
        let message = match self.kind {
            1 => "the communicator was destroyed".to_owned(),
            _ => format!(
                "the {} was freed, or its communicator was destroyed",
                self.name
            ),
        };
        Error::closed(message)
            .with_help(format!("create another {}", self.name))
            .into()
    }

    /// Ignores poisoning: a panic under the lock leaves no entry half-updated.
    fn lock(&self) -> MutexGuard<'_, Entries<T>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Entries<T> {
    /// Empties an entry for reuse with the next generation.
    fn give_back(&mut self, at: usize) -> Option<Arc<T>> {
        let entry = &mut self.all[at];
        let object = entry.object.take();
        if entry.generation < MAX_GENERATION {
            entry.generation += 1;
            self.free.push(at);
        }
        object
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_was_given_back_stays_an_error() {
        let table = Table::new("thing", 9);
        let mut old = Vec::new();
        for round in 0..1000 {
            let id = table.insert(round);
            assert!(!old.contains(&id));
            assert_eq!(*table.get(id).unwrap(), round);
            assert_eq!(*table.take(id).unwrap(), round);
            old.push(id);
        }
        let kept = table.insert(7);
        assert!(old.iter().all(|id| table.get(*id).is_err()));
        assert!(old.iter().all(|id| table.take(*id).is_err()));
        assert_eq!(*table.get(kept).unwrap(), 7);
        assert_eq!(table.lock().all.len(), 1);
    }

    #[test]
    fn numbers_that_were_never_given_are_errors() {
        let table = Table::new("thing", 9);
        let other = Table::new("other", 8);
        let (id, foreign) = (table.insert(1), other.insert(1));
        let made_up = [
            0,
            1,
            u64::MAX,
            id + 1,
            id ^ 1 << GENERATION,
            id & !(0xff << KIND),
        ];
        for wrong in made_up.into_iter().chain([foreign]) {
            assert!(table.get(wrong).is_err(), "{wrong:#x}");
            assert!(table.take(wrong).is_err(), "{wrong:#x}");
        }
        assert!(table.get(id).is_ok());
    }

    #[test]
    fn an_entry_whose_generations_are_used_up_is_not_used_again() {
        let table = Table::new("thing", 9);
        let first = table.insert(1);
        table.lock().all[0].generation = MAX_GENERATION;
        assert!(table.get(first).is_err());
        let last = first | MAX_GENERATION << GENERATION;
        assert!(table.take(last).is_ok());
        let next = table.insert(2);
        assert!(table.get(first).is_err() && table.get(last).is_err());
        assert_eq!((*table.get(next).unwrap(), table.lock().all.len()), (2, 2));
    }

    #[test]
    fn what_is_held_stays_after_its_number_was_given_back() {
        let table = Table::new("thing", 9);
        let id = table.insert(String::from("text"));
        let held = table.get(id).unwrap();
        table.take_where(|text| text == "text");
        assert!(table.get(id).is_err());
        assert_eq!(*held, "text");
    }
}
