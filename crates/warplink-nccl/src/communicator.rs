//! The object that an `ncclComm_t` refers to.

use crate::abi::{Handle, Wishes};
use crate::counterpart::Counterpart;
use crate::operators::{Multiplying, Operators};
use crate::signals::SignalPairs;
use crate::status::{Code, Failure, Outcome};
use crate::streams::Streams;
use crate::watch::Watch;
use crate::windows;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, OnceLock, PoisonError, RwLock};
use warplink::bootstrap::AbortHandle;
use warplink::device::{Device, DeviceSlice};
use warplink::memory::Region;
use warplink::{Collectives, Communicator, DeviceKind, Error};

/// Live communicators by handle.
static ALIVE: RwLock<BTreeMap<usize, Arc<Comm>>> = RwLock::new(BTreeMap::new());

/// Handles are not valid addresses, so that a library that dereferences one as its own fails immediately.
const FIRST: usize = 0x5750_0000_0000_0000;

/// A user's communicator.
#[derive(Debug)]
pub(crate) struct Comm {
    handle: usize,
    rank: AtomicUsize,
    ranks: AtomicUsize,
    /// The index of its GPU among those visible to the process.
    pub(crate) ordinal: usize,
    /// Whether calls may block.
    pub(crate) blocking: bool,
    pub(crate) wishes: Wishes,
    state: Mutex<CommunicatorState>,
    /// Ends joining.
    pub(crate) joining: AbortHandle,
    /// The first failure after joining.
    failure: OnceLock<Error>,
    /// Set by finalization: only calls that end the communicator may follow.
    pub(crate) finalized: AtomicBool,
    pub(crate) revoked: AtomicBool,
    pub(crate) suspended: AtomicBool,
    pub(crate) operators: Mutex<Operators>,
    /// Operations on it in the background.
    in_background: AtomicUsize,
}

/// An operation on a communicator that runs in the background: until it is dropped, the communicator is in progress.
#[derive(Debug)]
pub(crate) struct InProgress(Arc<Comm>);

impl InProgress {
    pub(crate) fn begin(comm: &Arc<Comm>) -> Self {
        // Relaxed: the thread that polls for the end made the call.
        comm.in_background.fetch_add(1, Ordering::Relaxed);
        Self(comm.clone())
    }
}

impl Drop for InProgress {
    fn drop(&mut self) {
        // Release: a failure that the operation has recorded is seen by those that see its end.
        self.0.in_background.fetch_sub(1, Ordering::Release);
    }
}

#[derive(Debug)]
enum CommunicatorState {
    Joining,
    Joined(Arc<Joined>),
    Failed(Error),
    Ended,
}

/// State of a communicator that all ranks have joined.
#[derive(Debug)]
pub(crate) struct Joined {
    pub(crate) communicator: Communicator,
    pub(crate) route: Route,
    pub(crate) real: Counterpart,
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
    /// Placeholder for memory that a rank does not use in a call.
    pub(crate) nothing: DeviceSlice,
    /// Memory used by captured graphs, kept until the communicator ends.
    pub(crate) kept: Mutex<Vec<Region>>,
    pub(crate) multiplying: Multiplying,
    pub(crate) signals: SignalPairs,
    /// Whether the real library has the windows and signals; unset before the first registration.
    pub(crate) windows_are_real: OnceLock<bool>,
}

/// A communicator of the real library.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RealHandle(pub(crate) Handle);

// SAFETY: the real library accepts its handles on any thread.
unsafe impl Send for RealHandle {}

/// Locks, ignoring poisoning: the guarded data is consistent at all times.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Set in processes that were forked after a communicator was created.
static FORKED: AtomicBool = AtomicBool::new(false);

/// Fails in processes that were forked after a communicator was created: the threads of their parent's communicators are
/// missing, locks may be held for ever, and connections are still the parent's.
pub(crate) fn check_process() -> Outcome {
    // Relaxed: set before the child's only thread runs.
    if !FORKED.load(Ordering::Relaxed) {
        return Ok(());
    }
    Err(Failure::usage(
        "this process was forked from one that had communicators, which only the parent can use",
        "fork before the first communicator is created, or start a new program",
    ))
}

/// Has forked processes notice that they were, from now on.
fn notice_forks() {
    static REGISTERED: Once = Once::new();
    unsafe extern "C" {
        fn pthread_atfork(
            before: Option<unsafe extern "C" fn()>,
            parent: Option<unsafe extern "C" fn()>,
            child: Option<unsafe extern "C" fn()>,
        ) -> c_int;
    }
    unsafe extern "C" fn forked() {
        // Relaxed: the child has a single thread.
        FORKED.store(true, Ordering::Relaxed);
    }
    REGISTERED.call_once(|| {
        // SAFETY: declared as in C; the handler only stores a flag.
        if unsafe { pthread_atfork(None, None, Some(forked)) } != 0 {
            tracing::warn!("forked processes cannot be distinguished from their parent");
        }
    });
}

/// The communicator of a handle.
pub(crate) fn find(handle: Handle) -> Outcome<Arc<Comm>> {
    check_process()?;
    let alive = ALIVE.read().unwrap_or_else(PoisonError::into_inner);
    let found = alive.get(&(handle as usize));
    found.cloned().ok_or_else(|| {
        if handle.is_null() {
            return Failure::argument("comm is null", "pass a communicator");
        }
        Failure::argument(
            format!("{handle:p} is not a live communicator"),
            "pass a communicator that this library created and that was not destroyed; the process must load only one libnccl.so.2",
        )
    })
}

/// Gathers `bytes` of all ranks, which must all make the call of this name.
pub(crate) fn gather(
    communicator: &Communicator,
    call: &str,
    bytes: &[u8],
) -> Result<Vec<Vec<u8>>, Error> {
    let own = [call.as_bytes(), &[END], bytes].concat();
    let all = communicator.all_gather_bytes(&own)?;
    let all = all.into_iter().enumerate().map(|(peer, sent)| {
        let mut parts = sent.splitn(2, |byte| *byte == END);
        let other = parts.next().unwrap_or_default();
        if other == call.as_bytes() {
            return Ok(parts.next().unwrap_or_default().to_vec());
        }
        let other = String::from_utf8_lossy(other.get(..NAME).unwrap_or(other)).into_owned();
        let message = format!("rank {peer} calls {other}; expected {call}, as this rank calls");
        Err(Error::mismatch(message)
            .with_peer(peer)
            .with_help("make the same calls in the same order on every rank"))
    });
    all.collect()
}

/// End of the name in a rank's contribution to [`gather`], and the longest name of a peer's that is printed.
const END: u8 = 0;
const NAME: usize = 40;

/// All live communicators.
pub(crate) fn all() -> Vec<Arc<Comm>> {
    let alive = ALIVE.read().unwrap_or_else(PoisonError::into_inner);
    alive.values().cloned().collect()
}

impl Comm {
    /// A communicator whose ranks are still joining.
    pub(crate) fn new(rank: usize, ranks: usize, ordinal: usize, wishes: Wishes) -> Arc<Self> {
        static NEXT: AtomicUsize = AtomicUsize::new(FIRST);
        notice_forks();
        let comm = Arc::new(Self {
            // Relaxed: only the number has to be unique. Steps of 16 keep handles aligned, as addresses of
            // structures are.
            handle: NEXT.fetch_add(16, Ordering::Relaxed) + 16,
            rank: rank.into(),
            ranks: ranks.into(),
            ordinal,
            blocking: wishes.blocking.unwrap_or(true),
            wishes,
            state: Mutex::new(CommunicatorState::Joining),
            joining: AbortHandle::default(),
            failure: OnceLock::new(),
            finalized: AtomicBool::new(false),
            revoked: AtomicBool::new(false),
            suspended: AtomicBool::new(false),
            operators: Mutex::default(),
            in_background: AtomicUsize::new(0),
        });
        let mut alive = ALIVE.write().unwrap_or_else(PoisonError::into_inner);
        alive.insert(comm.handle, comm.clone());
        comm
    }

    pub(crate) fn handle(&self) -> Handle {
        self.handle as Handle
    }

    /// This rank's number in the communicator.
    pub(crate) fn rank(&self) -> usize {
        // Relaxed, here and below: read by calls that follow the end of the join, which the lock of the state
        // orders.
        self.rank.load(Ordering::Relaxed)
    }

    /// The number of ranks in the communicator.
    pub(crate) fn ranks(&self) -> usize {
        self.ranks.load(Ordering::Relaxed)
    }

    /// Sets rank and number of ranks, where they are only known after communication with other ranks.
    pub(crate) fn set_place(&self, rank: usize, ranks: usize) {
        self.rank.store(rank, Ordering::Relaxed);
        self.ranks.store(ranks, Ordering::Relaxed);
    }

    /// Records the result of joining. Returns the joined state if the communicator was ended in the meantime.
    pub(crate) fn set_joined(&self, joined: Result<Arc<Joined>, Error>) -> Option<Arc<Joined>> {
        let mut state = lock(&self.state);
        match joined {
            // Ended while it joined: the caller of the destruction found nothing to close, so the joining thread
            // has to.
            Ok(joined) if matches!(*state, CommunicatorState::Ended) => return Some(joined),
            Ok(joined) => *state = CommunicatorState::Joined(joined),
            Err(_) if matches!(*state, CommunicatorState::Ended) => {}
            Err(error) => *state = CommunicatorState::Failed(error),
        }
        None
    }

    /// Removes the communicator from the table, and takes its joined state. If its ranks are still joining, that ends.
    pub(crate) fn end(&self) -> Option<Arc<Joined>> {
        let mut alive = ALIVE.write().unwrap_or_else(PoisonError::into_inner);
        alive.remove(&self.handle);
        drop(alive);
        // After the removal from the table, so that later calls find neither the communicator nor its windows.
        windows::forget(self.handle());
        let state = std::mem::replace(&mut *lock(&self.state), CommunicatorState::Ended);
        match state {
            CommunicatorState::Joined(joined) => return Some(joined),
            CommunicatorState::Joining => {
                self.joining
                    .abort("its communicator was ended while ranks were joining");
            }
            CommunicatorState::Failed(_) | CommunicatorState::Ended => {}
        }
        None
    }

    /// The joined state, even if the communicator has failed since.
    pub(crate) fn joined(&self) -> Outcome<Arc<Joined>> {
        match &*lock(&self.state) {
            CommunicatorState::Joined(joined) => Ok(joined.clone()),
            CommunicatorState::Failed(error) => Err(error.clone().into()),
            CommunicatorState::Joining => Err(Failure::argument(
                "the communicator is not joined yet",
                "wait until ncclCommGetAsyncError no longer reports ncclInProgress",
            )),
            CommunicatorState::Ended => Err(Failure::argument(
                "the communicator was ended by another thread",
                "end a communicator after its last call",
            )),
        }
    }

    /// As [`joined`](Self::joined), for calls that require a communicator that was neither finalized, suspended,
    /// revoked nor failed.
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
                "create a new communicator from it with ncclCommShrink or ncclCommSplit",
            ),
            (&self.suspended, "is suspended", "call ncclCommResume first"),
        ] {
            // Relaxed: the flags publish no other memory, and a call that races with one may pass.
            if is_so.load(Ordering::Relaxed) {
                return Err(Failure::usage(format!("the communicator {what}"), help));
            }
        }
        if let Some(error) = self.failure.get() {
            return Err(error.clone().into());
        }
        self.joined()
    }

    /// The joined state, for calls that exchange values with other ranks: not while an operation in the background
    /// does, whose exchanges those of the call could be taken for.
    pub(crate) fn joined_and_idle(&self) -> Outcome<Arc<Joined>> {
        let joined = self.joined()?;
        if self.is_in_progress() {
            return Err(Failure::argument(
                "an earlier operation on the communicator is in progress",
                "wait until ncclCommGetAsyncError no longer reports ncclInProgress",
            ));
        }
        Ok(joined)
    }

    fn is_in_progress(&self) -> bool {
        self.in_background.load(Ordering::Acquire) > 0
    }

    /// Fails if it was finalized or revoked, after which it cannot be `ended` in either way again.
    pub(crate) fn check_open(&self, ended: &str) -> Outcome {
        let was = [(&self.finalized, "finalized"), (&self.revoked, "revoked")];
        let was = was.iter().find(|(is_so, _)| is_so.load(Ordering::Relaxed));
        was.map_or(Ok(()), |(_, was)| {
            Err(Failure::argument(
                format!("the communicator was {was}, and cannot be {ended}"),
                "destroy it",
            ))
        })
    }

    /// Records a failure; the first one is kept.
    pub(crate) fn fail(&self, error: Error) {
        let _ = self.failure.set(error);
    }

    /// The error of a failed communicator.
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
            // Cloned out of the lock, which the check below would hold while it communicates with the device.
            CommunicatorState::Joined(joined) => joined.clone(),
            CommunicatorState::Ended => return Ok(Code::Success),
        };
        // Before the failure, which an operation records before it ends.
        let ended = if self.is_in_progress() {
            Code::InProgress
        } else {
            Code::Success
        };
        if let Some(error) = self.failure.get() {
            return Err(error.clone().into());
        }
        // A revoked communicator has no calls in flight, and has not failed.
        if self.revoked.load(Ordering::Relaxed) {
            return Ok(ended);
        }
        if let Err(error) = joined.communicator.check() {
            self.fail(error.clone());
            return Err(error.into());
        }
        joined.real_error()?;
        Ok(ended)
    }

    /// Checks a rank passed by the caller.
    pub(crate) fn rank_of(&self, rank: c_int, name: &str) -> Outcome<usize> {
        let known = usize::try_from(rank).ok().filter(|at| *at < self.ranks());
        known.ok_or_else(|| {
            Failure::argument(
                format!("{name} is {rank}; expected a rank below {}", self.ranks()),
                "pass a rank of the communicator",
            )
        })
    }
}

impl Joined {
    /// The device of this rank.
    pub(crate) fn device(&self) -> &Arc<dyn Device> {
        self.communicator.device()
    }

    pub(crate) fn is_on_gpu(&self) -> bool {
        self.device().kind() == DeviceKind::Cuda
    }

    /// State of calls that Warplink executes; `None` if the real library executes this communicator's calls.
    pub(crate) fn served(&self) -> Option<&Served> {
        match &self.route {
            Route::Warplink(served) => Some(served),
            Route::Real => None,
        }
    }
}
