//! The object behind an `ncclComm_t`.

use crate::abi::Handle;
use crate::operators::{Multiplying, Operators};
use crate::status::{Code, Failure, Outcome};
use crate::streams::Streams;
use crate::watch::Watch;
use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use warplink::device::{Device, DeviceSlice};
use warplink::memory::Region;
use warplink::{Collectives, Communicator, DeviceKind, Error};

/// Those that are alive, by their handles.
static ALIVE: RwLock<Option<HashMap<usize, Arc<Comm>>>> = RwLock::new(None);

/// Handles are no addresses of anything, so that a library that takes one for its own fails at once.
const FIRST: usize = 0x5750_0000_0000_0000;

/// A communicator of a caller.
#[derive(Debug)]
pub(crate) struct Comm {
    handle: usize,
    rank: AtomicUsize,
    ranks: AtomicUsize,
    /// The number of its GPU among those that the process sees.
    pub(crate) ordinal: usize,
    /// Whether calls may block.
    pub(crate) blocking: bool,
    state: Mutex<CommunicatorState>,
    /// A later failure.
    failure: OnceLock<Error>,
    /// No call may follow, but those that end it.
    pub(crate) finalized: AtomicBool,
    pub(crate) revoked: AtomicBool,
    pub(crate) suspended: AtomicBool,
    pub(crate) operators: Mutex<Operators>,
}

#[derive(Debug)]
enum CommunicatorState {
    Joining,
    Joined(Arc<Joined>),
    Failed(Error),
    Ended,
}

/// A communicator that all its ranks have joined.
#[derive(Debug)]
pub(crate) struct Joined {
    pub(crate) communicator: Communicator,
    pub(crate) route: Route,
    /// The real library's, where one is needed.
    pub(crate) real: Mutex<Option<RealHandle>>,
}

/// Executor of a communicator's calls.
#[derive(Debug)]
pub(crate) enum Route {
    Warplink(Box<Served>),
    Real,
}

/// State of calls that Warplink executes.
#[derive(Debug)]
pub(crate) struct Served {
    pub(crate) collectives: Collectives,
    pub(crate) streams: Streams,
    pub(crate) watch: Watch,
    /// Stands for memory that a rank does not use in a call.
    pub(crate) nothing: DeviceSlice,
    /// Memory that graphs use.
    pub(crate) kept: Mutex<Vec<Region>>,
    pub(crate) multiplying: Multiplying,
}

/// A communicator of the real library's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RealHandle(pub(crate) Handle);

// SAFETY: the real library takes its handles on any thread.
unsafe impl Send for RealHandle {}

/// The lock, also where a thread has panicked that held it: what it guards is whole at all times.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The communicator of a handle.
pub(crate) fn find(handle: Handle) -> Outcome<Arc<Comm>> {
    let alive = ALIVE.read().unwrap_or_else(PoisonError::into_inner);
    let found = alive.as_ref().and_then(|all| all.get(&(handle as usize)));
    found.cloned().ok_or_else(|| {
        if handle.is_null() {
            return Failure::argument("comm is null", "pass a communicator");
        }
        Failure::argument(
            format!("{handle:p} is no communicator that is alive"),
            "pass one that was made by this library and not destroyed; libnccl.so.2 must be one library in the process",
        )
    })
}

/// All that are alive.
pub(crate) fn all() -> Vec<Arc<Comm>> {
    let alive = ALIVE.read().unwrap_or_else(PoisonError::into_inner);
    alive.iter().flat_map(HashMap::values).cloned().collect()
}

impl Comm {
    /// One that is being joined.
    pub(crate) fn new(rank: usize, ranks: usize, ordinal: usize, blocking: bool) -> Arc<Self> {
        static NEXT: AtomicUsize = AtomicUsize::new(FIRST);
        let comm = Arc::new(Self {
            handle: NEXT.fetch_add(16, Ordering::Relaxed) + 16,
            rank: rank.into(),
            ranks: ranks.into(),
            ordinal,
            blocking,
            state: Mutex::new(CommunicatorState::Joining),
            failure: OnceLock::new(),
            finalized: AtomicBool::new(false),
            revoked: AtomicBool::new(false),
            suspended: AtomicBool::new(false),
            operators: Mutex::default(),
        });
        let mut alive = ALIVE.write().unwrap_or_else(PoisonError::into_inner);
        let alive = alive.get_or_insert_default();
        alive.insert(comm.handle, comm.clone());
        comm
    }

    pub(crate) fn handle(&self) -> Handle {
        self.handle as Handle
    }

    /// Its number in the communicator.
    pub(crate) fn rank(&self) -> usize {
        self.rank.load(Ordering::Relaxed)
    }

    /// How many ranks the communicator has.
    pub(crate) fn ranks(&self) -> usize {
        self.ranks.load(Ordering::Relaxed)
    }

    /// Says both, where they were not known before other ranks were asked.
    pub(crate) fn set_place(&self, rank: usize, ranks: usize) {
        self.rank.store(rank, Ordering::Relaxed);
        self.ranks.store(ranks, Ordering::Relaxed);
    }

    /// Notes how joining ended. What was joined is given back where the communicator was ended meanwhile.
    pub(crate) fn set_joined(&self, joined: Result<Arc<Joined>, Error>) -> Option<Arc<Joined>> {
        let mut state = lock(&self.state);
        match joined {
            Ok(joined) if matches!(*state, CommunicatorState::Ended) => return Some(joined),
            Ok(joined) => *state = CommunicatorState::Joined(joined),
            Err(_) if matches!(*state, CommunicatorState::Ended) => {}
            Err(error) => *state = CommunicatorState::Failed(error),
        }
        None
    }

    /// Takes it out of the table, and what was joined out of it.
    pub(crate) fn end(&self) -> Option<Arc<Joined>> {
        let mut alive = ALIVE.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(alive) = &mut *alive {
            alive.remove(&self.handle);
        }
        drop(alive);
        match std::mem::replace(&mut *lock(&self.state), CommunicatorState::Ended) {
            CommunicatorState::Joined(joined) => Some(joined),
            _ => None,
        }
    }

    /// The joined communicator, even if it has failed since.
    pub(crate) fn joined(&self) -> Outcome<Arc<Joined>> {
        match &*lock(&self.state) {
            CommunicatorState::Joined(joined) => Ok(joined.clone()),
            CommunicatorState::Failed(error) => Err(error.clone().into()),
            CommunicatorState::Joining => Err(Failure::argument(
                "the communicator is not joined yet",
                "wait until ncclCommGetAsyncError no longer gives ncclInProgress",
            )),
            CommunicatorState::Ended => Err(Failure::argument(
                "the communicator was ended by another thread",
                "end a communicator after its last call",
            )),
        }
    }

    /// The same, for a call that needs all of it.
    pub(crate) fn usable(&self) -> Outcome<Arc<Joined>> {
        for (is_so, what, help) in [
            (
                &self.finalized,
                "was finalized",
                "make calls before ncclCommFinalize",
            ),
            (
                &self.revoked,
                "was revoked",
                "make another from it by ncclCommShrink or ncclCommSplit",
            ),
            (
                &self.suspended,
                "is suspended",
                "call ncclCommResume before",
            ),
        ] {
            if is_so.load(Ordering::Relaxed) {
                return Err(Failure::usage(format!("the communicator {what}"), help));
            }
        }
        if let Some(error) = self.failure.get() {
            return Err(error.clone().into());
        }
        self.joined()
    }

    /// Notes what became of it; the first is kept.
    pub(crate) fn fail(&self, error: Error) {
        let _ = self.failure.set(error);
    }

    /// The error of a communicator that failed.
    pub(crate) fn failure(&self) -> Option<Error> {
        if let CommunicatorState::Failed(error) = &*lock(&self.state) {
            return Some(error.clone());
        }
        self.failure.get().cloned()
    }

    /// Result of `ncclCommGetAsyncError`.
    pub(crate) fn progress(&self) -> Outcome<Code> {
        let joined = match &*lock(&self.state) {
            CommunicatorState::Joining => return Ok(Code::InProgress),
            CommunicatorState::Failed(error) => return Err(error.clone().into()),
            CommunicatorState::Joined(joined) => joined.clone(),
            CommunicatorState::Ended => return Ok(Code::Success),
        };
        if let Some(error) = self.failure.get() {
            return Err(error.clone().into());
        }
        // A revoked one is quiet, and not failed.
        if self.revoked.load(Ordering::Relaxed) {
            return Ok(Code::Success);
        }
        if let Err(error) = joined.communicator.check() {
            self.fail(error.clone());
            return Err(error.into());
        }
        joined.real_error()?;
        Ok(Code::Success)
    }

    /// The rank that a caller means.
    pub(crate) fn rank_of(&self, rank: c_int, name: &str) -> Outcome<usize> {
        let known = usize::try_from(rank).ok().filter(|at| *at < self.ranks());
        known.ok_or_else(|| {
            Failure::argument(
                format!("{name} is {rank}; expected a rank below {}", self.ranks()),
                "name a rank of the communicator",
            )
        })
    }
}

impl Joined {
    /// Its device.
    pub(crate) fn device(&self) -> &Arc<dyn Device> {
        self.communicator.device()
    }

    pub(crate) fn is_on_gpu(&self) -> bool {
        self.device().kind() == DeviceKind::Cuda
    }

    /// State of calls that Warplink executes, if this communicator's calls are.
    pub(crate) fn served(&self) -> Option<&Served> {
        match &self.route {
            Route::Warplink(served) => Some(served),
            Route::Real => None,
        }
    }
}
