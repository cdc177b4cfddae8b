//! Windows: memory that all ranks register together, for addresses of peers' memory and for one-sided puts and signals.
//!
//! Kernels use windows through the real library's device communicators, so on a GPU windows are the real library's where it is
//! available. Otherwise they are served here: each rank maps the others' memory, and signals are words that count up.

use crate::abi::{Handle, RawStream, WaitSignal, Window, check, element_type, store};
use crate::communicator::{Comm, Joined, RealHandle, Served, find, gather, lock};
use crate::memory::{has_real, only_real};
use crate::status::{Failure, Outcome};
use crate::table::real as functions;
use crate::{group, report};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use warplink::Result;
use warplink::device::{MemoryOp, Stream, Turns, Word};
use warplink::memory::{Region, RemoteRegion};
use warplink::signal::{RemoteSignals, Signals};

/// The windows that are served here, by their handles.
static WINDOWS: Mutex<BTreeMap<usize, Arc<OwnWindow>>> = Mutex::new(BTreeMap::new());

/// Handle of the next such window: like those of communicators, no valid address and not used again.
static NEXT_WINDOW: AtomicUsize = AtomicUsize::new(0x5751_0000_0000_0000);

/// Signals that a rank has for each rank, by context.
const CONTEXTS: usize = 8;

/// A rank's contribution to a registration: whether others can map its memory.
const CAN_BE_MAPPED: &[u8] = &[1];
const CANNOT_BE_MAPPED: &[u8] = &[0];

/// A window that is served here.
#[derive(Debug)]
struct OwnWindow {
    /// Handle of its communicator.
    comm: usize,
    address: usize,
    bytes: usize,
    /// Memory of the other ranks; `None` if a rank's cannot be mapped, which only puts and addresses need.
    shared: Option<SharedWindow>,
}

#[derive(Debug)]
struct SharedWindow {
    /// Kept for the peers.
    _own: Region,
    /// By rank; `None` for this rank.
    peers: Vec<Option<RemoteRegion>>,
}

/// Signals between the ranks of a communicator, from the first window on.
#[derive(Debug, Default)]
pub(crate) struct SignalPairs(Mutex<Option<JoinedSignals>>);

#[derive(Debug)]
struct JoinedSignals {
    own: Signals,
    /// By rank; `None` for this rank.
    peers: Vec<Option<RemoteSignals>>,
    /// How many signals were sent to a rank and awaited from it, by rank and context.
    sent: Vec<u64>,
    awaited: Vec<u64>,
    /// Orders the signals sent on several streams, whose words would otherwise count down.
    turns: Turns,
}

/// # Safety Pointers of the functions of this module must be valid as NCCL's documentation requires.
pub(crate) unsafe fn register(
    comm: Handle,
    memory: *mut c_void,
    bytes: usize,
    window: *mut Window,
    flags: c_int,
) -> Outcome {
    let comm = find(comm)?;
    comm.usable()?;
    let joined = comm.joined_and_idle()?;
    check(memory, "buff")?;
    check(window, "win")?;
    if has_real()? {
        // SAFETY: the caller's pointers are passed on, with the real library's communicator in place of ours.
        return joined.by_real("ncclCommWindowRegister", |real| unsafe {
            functions::CommWindowRegister(real, memory, bytes, window, flags)
        });
    }
    let address = memory as usize;
    // Relaxed: only the number has to be unique.
    let handle = NEXT_WINDOW.fetch_add(16, Ordering::Relaxed);
    // Replaced when all ranks have registered theirs.
    lock(&WINDOWS).insert(handle, OwnWindow::new(&comm, address, bytes, None));
    // SAFETY: the caller passes null or a pointer valid for a write of a window.
    unsafe { store(window, "win", handle as Window) }?;
    let owner = comm.clone();
    let work = move || {
        let shared = joined.share(address, bytes)?;
        let mut windows = lock(&WINDOWS);
        // Unless the communicator has ended meanwhile.
        if windows.contains_key(&handle) {
            windows.insert(handle, OwnWindow::new(&owner, address, bytes, shared));
        }
        Ok(())
    };
    let undo = move || {
        lock(&WINDOWS).remove(&handle);
        // SAFETY: the caller keeps the pointer valid until the group ends, which is before this thread leaves it.
        unsafe { window.write_unaligned(std::ptr::null_mut()) };
    };
    group::run(group::Task::new(&comm, work, undo).blocking(true))
}

/// # Safety
/// As [`register`].
pub(crate) unsafe fn deregister(comm: Handle, window: Window) -> Outcome {
    let joined = find(comm)?.joined()?;
    if window.is_null() {
        return Ok(());
    }
    if own_window(window, comm).is_some() {
        lock(&WINDOWS).remove(&(window as usize));
        return Ok(());
    }
    let Some(RealHandle(real)) = joined.made_real() else {
        return Err(no_window(window));
    };
    // SAFETY: the window is the real library's, of this communicator.
    let code = unsafe { functions::CommWindowDeregister(real, window) }?;
    Failure::check_real(code, "ncclCommWindowDeregister")
}

/// # Safety
/// As [`register`].
pub(crate) unsafe fn user_pointer(
    comm: Handle,
    window: Window,
    memory: *mut *mut c_void,
) -> Outcome {
    let joined = find(comm)?.joined()?;
    if let Some(own) = own_window(window, comm) {
        // SAFETY: the caller passes null or a pointer valid for a write of an address.
        return unsafe { store(memory, "outUserPtr", own.address as *mut c_void) };
    }
    let Some(RealHandle(real)) = joined.made_real() else {
        return Err(no_window(window));
    };
    // SAFETY: the window is the real library's, of this communicator.
    let code = unsafe { functions::WinGetUserPtr(real, window, memory) }?;
    Failure::check_real(code, "ncclWinGetUserPtr")
}

/// # Safety
/// As [`register`].
pub(crate) unsafe fn lsa_pointer(
    window: Window,
    offset: usize,
    rank: c_int,
    pointer: *mut *mut c_void,
) -> Outcome {
    // SAFETY: the caller's pointers are passed on.
    unsafe {
        address_of_peer(window, offset, rank, pointer, || {
            functions::GetLsaDevicePointer(window, offset, rank, pointer)
        })
    }
}

/// # Safety
/// As [`register`].
pub(crate) unsafe fn peer_pointer(
    window: Window,
    offset: usize,
    rank: c_int,
    pointer: *mut *mut c_void,
) -> Outcome {
    // SAFETY: the caller's pointers are passed on.
    unsafe {
        address_of_peer(window, offset, rank, pointer, || {
            functions::GetPeerDevicePointer(window, offset, rank, pointer)
        })
    }
}

/// Stores the address at which this rank reaches `offset` in the memory of `rank`. All ranks are on one machine where windows
/// are served here; other windows are the real library's.
///
/// # Safety
/// As [`register`].
unsafe fn address_of_peer(
    window: Window,
    offset: usize,
    rank: c_int,
    pointer: *mut *mut c_void,
    by_real: impl FnOnce() -> Outcome<c_int>,
) -> Outcome {
    let found = lock(&WINDOWS).get(&(window as usize)).cloned();
    let Some(own) = found else {
        return Failure::check_real(by_real()?, "address of a window");
    };
    let comm = find(own.comm as Handle)?;
    let rank = comm.rank_of(rank, "peer")?;
    let (base, bytes) = match own.peer(rank, comm.rank())? {
        Some(remote) => (remote.memory().address() as usize, remote.memory().bytes()),
        None => (own.address, own.bytes),
    };
    // The end itself is allowed, as an address one past the end is in C.
    if offset > bytes {
        return Err(outside(offset, 0, bytes));
    }
    // SAFETY: the caller passes null or a pointer valid for a write of an address.
    unsafe { store(pointer, "outPtr", (base + offset) as *mut c_void) }
}

/// # Safety
/// As [`register`].
#[allow(clippy::too_many_arguments, reason = "they are NCCL's")]
pub(crate) unsafe fn put_signal(
    memory: *const c_void,
    count: usize,
    datatype: c_int,
    peer: c_int,
    window: Window,
    offset: usize,
    signal: c_int,
    context: c_int,
    flags: c_uint,
    comm: Handle,
    stream: RawStream,
) -> Outcome {
    let owner = find(comm)?;
    let joined = owner.usable()?;
    let Some(served) = served_here(&joined)? else {
        // SAFETY: the caller's arguments are passed on, with the real library's communicator in place of ours.
        return joined.by_real("ncclPutSignal", |real| unsafe {
            functions::PutSignal(
                memory, count, datatype, peer, window, offset, signal, context, flags, real, stream,
            )
        });
    };
    let started = report::now();
    let to = Place::new(&owner, peer, signal, context)?;
    let own = own_window(window, comm).ok_or_else(|| no_window(window))?;
    let bytes = count.checked_mul(element_type(datatype)?.size());
    let end = bytes.and_then(|bytes| offset.checked_add(bytes));
    let target = match own.peer(to.peer, owner.rank())? {
        Some(remote) => remote.memory().clone(),
        None => joined.memory(served, own.address as u64, own.bytes)?,
    };
    let end = end.filter(|end| *end <= target.bytes());
    let end = end.ok_or_else(|| outside(offset, count, target.bytes()))?;
    if end > offset {
        // A put of nothing still signals, and needs no source.
        check(memory, "localbuff")?;
    }
    let source = joined.memory(served, memory as u64, end - offset)?;
    served.signals.send(&joined, served, to, stream, |stream| {
        if end > offset {
            stream.copy(&target.slice(offset..end)?, &source)?;
        }
        Ok(())
    })?;
    report::note("warplink", "PutSignal", end - offset, started);
    Ok(())
}

/// # Safety
/// As [`register`].
pub(crate) unsafe fn signal(
    peer: c_int,
    signal: c_int,
    context: c_int,
    flags: c_uint,
    comm: Handle,
    stream: RawStream,
) -> Outcome {
    let owner = find(comm)?;
    let joined = owner.usable()?;
    let Some(served) = served_here(&joined)? else {
        // SAFETY: the caller's arguments are passed on, with the real library's communicator in place of ours.
        return joined.by_real("ncclSignal", |real| unsafe {
            functions::Signal(peer, signal, context, flags, real, stream)
        });
    };
    let started = report::now();
    let to = Place::new(&owner, peer, signal, context)?;
    served
        .signals
        .send(&joined, served, to, stream, |_| Ok(()))?;
    report::note("warplink", "Signal", 0, started);
    Ok(())
}

/// # Safety
/// As [`register`].
pub(crate) unsafe fn wait_signal(
    count: c_int,
    awaited: *mut WaitSignal,
    comm: Handle,
    stream: RawStream,
) -> Outcome {
    let owner = find(comm)?;
    let joined = owner.usable()?;
    let Some(served) = served_here(&joined)? else {
        // SAFETY: the caller's arguments are passed on, with the real library's communicator in place of ours.
        return joined.by_real("ncclWaitSignal", |real| unsafe {
            functions::WaitSignal(count, awaited, real, stream)
        });
    };
    check(awaited, "signalDescs")?;
    let count = usize::try_from(count).ok().filter(|count| *count > 0);
    let count = count.ok_or_else(|| {
        Failure::argument("no signals to wait for", "pass one description or more")
    })?;
    let started = report::now();
    let mut places = Vec::with_capacity(count);
    for at in 0..count {
        // SAFETY: the caller passes as many descriptions.
        let one = unsafe { awaited.add(at).read_unaligned() };
        let place = Place::new(&owner, one.peer, one.signal, one.context)?;
        let times = u64::try_from(one.operations).map_err(|_| {
            let given = one.operations;
            let message = format!("opCnt is {given}; expected a number of signals");
            Failure::argument(message, "pass how many signals to wait for")
        })?;
        places.push((place, times));
    }
    served.signals.wait(&joined, served, &places, stream)?;
    report::note("warplink", "WaitSignal", 0, started);
    Ok(())
}

/// State of the calls, unless the real library has the windows.
fn served_here(joined: &Joined) -> Outcome<Option<&Served>> {
    if has_real()? {
        return Ok(None);
    }
    joined
        .served()
        .map(Some)
        .ok_or_else(|| only_real("signals"))
}

/// The window of a handle, if it is served here and `comm`'s.
fn own_window(window: Window, comm: Handle) -> Option<Arc<OwnWindow>> {
    let found = lock(&WINDOWS).get(&(window as usize)).cloned();
    found.filter(|found| found.comm == comm as usize)
}

/// Drops the windows of a communicator that ends.
pub(crate) fn forget(comm: Handle) {
    let mut windows = lock(&WINDOWS);
    let all = std::mem::take(&mut *windows).into_iter();
    let (ended, left): (BTreeMap<_, _>, _) =
        all.partition(|(_, window)| window.comm == comm as usize);
    *windows = left;
    // Unmapping may wait for other threads.
    drop(windows);
    drop(ended);
}

fn no_window(window: Window) -> Failure {
    Failure::argument(
        format!("{window:p} is no window of this communicator"),
        "pass a window returned by ncclCommWindowRegister of this communicator",
    )
}

fn outside(offset: usize, count: usize, bytes: usize) -> Failure {
    Failure::argument(
        format!("{count} elements at offset {offset} of a window of {bytes} bytes"),
        "stay within the memory that the peer has registered",
    )
}

impl OwnWindow {
    fn new(comm: &Comm, address: usize, bytes: usize, shared: Option<SharedWindow>) -> Arc<Self> {
        Arc::new(Self {
            comm: comm.handle() as usize,
            address,
            bytes,
            shared,
        })
    }

    /// The memory of `rank`; `None` if that is this rank, which is `own`.
    fn peer(&self, rank: usize, own: usize) -> Outcome<Option<&RemoteRegion>> {
        if rank == own {
            return Ok(None);
        }
        let shared = self.shared.as_ref().ok_or_else(|| {
            Failure::usage(
                "the window's memory cannot be mapped by other ranks, or not all have registered theirs",
                "register memory of ncclMemAlloc on every rank",
            )
        })?;
        Ok(shared.peers.get(rank).and_then(Option::as_ref))
    }
}

impl Joined {
    /// Maps the memory of all ranks; `None` if that of one cannot be mapped. The first call also connects their signals.
    /// Collective: blocks until all ranks have called it.
    fn share(&self, address: usize, bytes: usize) -> Outcome<Option<SharedWindow>> {
        let Some(served) = self.served() else {
            return Ok(None);
        };
        let own = self
            .memory(served, address as u64, bytes)
            .and_then(|slice| Ok(self.communicator.register(&slice)?));
        let contribution = match &own {
            Ok(_) => CAN_BE_MAPPED,
            Err(_) => CANNOT_BE_MAPPED,
        };
        // Ranks whose memory cannot be registered take part too, or the others would wait for them.
        let call = "ncclCommWindowRegister";
        let all = gather(&self.communicator, call, contribution)?;
        let (Ok(own), true) = (own, all.iter().all(|one| one == CAN_BE_MAPPED)) else {
            return Ok(None);
        };
        let peers = self.communicator.share(&own)?;
        // Here, since connecting is collective, and puts and signals are not.
        served.signals.connect(self)?;
        Ok(Some(SharedWindow { _own: own, peers }))
    }
}

/// Peer and context of a signal.
#[derive(Clone, Copy)]
struct Place {
    peer: usize,
    context: usize,
}

impl Place {
    /// Checks the arguments of a call. As in NCCL, there is one signal in each context.
    fn new(comm: &Comm, peer: c_int, signal: c_int, context: c_int) -> Outcome<Self> {
        let peer = comm.rank_of(peer, "peer")?;
        let known = usize::try_from(context).ok().filter(|at| *at < CONTEXTS);
        match (signal, known) {
            (0, Some(context)) => Ok(Self { peer, context }),
            _ => Err(Failure::argument(
                format!(
                    "signal {signal} of context {context}; expected 0, of a context below {CONTEXTS}"
                ),
                "pass 0 for both",
            )),
        }
    }

    /// Number of a rank's signal for `rank`, or of its count of them.
    fn number(self, rank: usize) -> usize {
        rank * CONTEXTS + self.context
    }
}

impl SignalPairs {
    /// Connects the signals of all ranks, once. Collective.
    fn connect(&self, joined: &Joined) -> Outcome {
        let mut signals = lock(&self.0);
        if signals.is_some() {
            return Ok(());
        }
        let communicator = &joined.communicator;
        let count = communicator.world() * CONTEXTS;
        let own = communicator.signals(count)?;
        let peers = communicator.share(own.region())?;
        let peers = peers
            .into_iter()
            .map(|peer| peer.map(RemoteSignals::new).transpose());
        *signals = Some(JoinedSignals {
            peers: peers.collect::<Result<_>>()?,
            own,
            sent: vec![0; count],
            awaited: vec![0; count],
            turns: Turns::new(joined.device()),
        });
        Ok(())
    }

    /// Enqueues `before` and a signal to a peer.
    fn send(
        &self,
        joined: &Joined,
        served: &Served,
        to: Place,
        stream: RawStream,
        before: impl FnOnce(&Stream) -> Result<()>,
    ) -> Outcome {
        let stream = eager(joined, served, stream)?;
        let mut signals = lock(&self.0);
        let signals = signals.as_mut().ok_or_else(none_connected)?;
        let at = to.number(to.peer);
        let value = signals.sent[at] + 1;
        let own = joined.communicator.rank();
        let word = match &signals.peers[to.peer] {
            Some(peer) => peer.word(to.number(own))?,
            None => signals.own.word(to.number(own))?,
        };
        // Under the lock, which makes the order of values that of the turns: words count up in the order of the
        // calls.
        signals.turns.take(&stream, || {
            before(&stream)?;
            stream.memory_ops(&[MemoryOp::write(&word, value)])
        })?;
        // Only once it is enqueued: a value that is counted but never written would make the peer wait forever.
        signals.sent[at] = value;
        Ok(())
    }

    /// Makes a stream wait for signals.
    fn wait(
        &self,
        joined: &Joined,
        served: &Served,
        places: &[(Place, u64)],
        stream: RawStream,
    ) -> Outcome {
        let stream = eager(joined, served, stream)?;
        let mut signals = lock(&self.0);
        let signals = signals.as_mut().ok_or_else(none_connected)?;
        let mut awaited = signals.awaited.clone();
        let words = places.iter().map(|(place, times)| {
            let at = place.number(place.peer);
            awaited[at] += times;
            Ok((signals.own.word(at)?, awaited[at]))
        });
        let words: Vec<(Word, u64)> = words.collect::<Result<_>>()?;
        let waits = words
            .iter()
            .map(|(word, value)| MemoryOp::wait(word, *value));
        stream.memory_ops(&waits.collect::<Vec<_>>())?;
        // Only once the waits are enqueued, so that a call that failed can be repeated.
        signals.awaited = awaited;
        Ok(())
    }
}

/// The caller's stream, which must not be captured: values of signals count up from call to call.
fn eager(joined: &Joined, served: &Served, raw: RawStream) -> Outcome<Stream> {
    let stream = served.streams.find(joined.device(), raw)?;
    if stream.is_capturing()? {
        return Err(Failure::usage(
            "signals cannot be captured into a graph without the real NCCL",
            "make these calls outside of captures, or install NCCL 2.29 or later",
        ));
    }
    Ok(stream)
}

fn none_connected() -> Failure {
    Failure::usage(
        "the ranks have no window, with which their signals are connected",
        "register a window of memory of ncclMemAlloc on every rank before",
    )
}
