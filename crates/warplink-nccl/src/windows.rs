//! Windows: memory that all ranks register together, for addresses of peers' memory and for one-sided puts and signals.
//!
//! Kernels use windows through the real library's device communicators, so on a GPU windows are the real library's where it is
//! available and accepts the first one of a communicator on all ranks. Otherwise they are served here: each rank maps the
//! others' memory.

use crate::abi::{Handle, Window, check, store};
use crate::communicator::{Comm, Joined, RealHandle, find, gather, lock};
use crate::group;
use crate::memory::has_real;
use crate::status::{Failure, Outcome};
use crate::table::real as functions;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use warplink::memory::{Region, RemoteRegion};

/// The windows that are served here, by their handles.
static WINDOWS: Mutex<BTreeMap<usize, Arc<OwnWindow>>> = Mutex::new(BTreeMap::new());

/// Handle of the next such window: like those of communicators, no valid address and not used again.
static NEXT_WINDOW: AtomicUsize = AtomicUsize::new(0x5751_0000_0000_0000);

/// The function whose calls exchange values.
const CALL: &str = "ncclCommWindowRegister";

/// A rank's contribution to a registration: whether others can map its memory.
const CAN_BE_MAPPED: &[u8] = &[1];
const CANNOT_BE_MAPPED: &[u8] = &[0];

/// A window that is served here.
#[derive(Debug)]
pub(crate) struct OwnWindow {
    /// Handle of its communicator.
    comm: usize,
    pub(crate) address: usize,
    pub(crate) bytes: usize,
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

/// # Safety
/// Pointers of the functions of this module must be valid as NCCL's documentation requires.
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
    let address = memory as usize;
    // Relaxed: only the number has to be unique.
    let handle = NEXT_WINDOW.fetch_add(16, Ordering::Relaxed);
    // Replaced when all ranks have registered theirs.
    lock(&WINDOWS).insert(handle, OwnWindow::new(&comm, address, bytes, None));
    // SAFETY: the caller passes null or a pointer valid for a write of a window.
    unsafe { store(window, "win", handle as Window) }?;
    let (owner, place) = (comm.clone(), window as usize);
    let work = move || {
        // SAFETY: the caller keeps the pointers valid until it leaves the group, which waits for this.
        if unsafe { by_real(&joined, (address, bytes, flags), place as *mut Window) }? {
            lock(&WINDOWS).remove(&handle);
            return Ok(());
        }
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

/// Whether the real library has the windows and signals of a communicator.
pub(crate) fn are_real(joined: &Joined) -> Outcome<bool> {
    match joined.served() {
        None => Ok(true),
        Some(served) => Ok(has_real()? && served.windows_are_real.get() != Some(&false)),
    }
}

/// Registers memory with the real library, and stores its window to `place`. Returns false if the communicator's windows
/// are served here: the first registration decides, by whether it succeeds on all ranks. Collective: blocks until all
/// ranks have called it.
///
/// # Safety
/// `place` must be valid for a write of a window.
unsafe fn by_real(
    joined: &Joined,
    (address, bytes, flags): (usize, usize, c_int),
    place: *mut Window,
) -> Outcome<bool> {
    // One decision for all windows: signals belong to the communicator, and one library has to send and await them.
    let undecided = joined.served();
    let undecided = undecided.filter(|served| served.windows_are_real.get().is_none());
    let decide = |own: bool| -> Outcome<bool> {
        let all = gather(&joined.communicator, CALL, &[own.into()])?;
        Ok(all.iter().all(|one| *one == [1]))
    };
    let are_real = match undecided {
        Some(served) => {
            let all_have = decide(has_real()?)?;
            if !all_have {
                let _ = served.windows_are_real.set(false);
            }
            all_have
        }
        None => are_real(joined)?,
    };
    if !are_real {
        return Ok(false);
    }
    let mut window = std::ptr::null_mut();
    let registered = joined.by_real(CALL, |real| {
        let memory = address as *mut c_void;
        // SAFETY: the caller's memory is passed on, with the real library's communicator in place of ours, and `window`
        // is valid for a write.
        unsafe { functions::CommWindowRegister(real, memory, bytes, &mut window, flags) }
    });
    if let Some(served) = undecided {
        let all_have = decide(registered.is_ok())?;
        let _ = served.windows_are_real.set(all_have);
        if !all_have {
            tracing::info!(
                ?registered,
                "Warplink serves the windows of this communicator, since NCCL has not registered one on all ranks"
            );
            if let (Ok(()), Some(RealHandle(real))) = (registered, joined.made_real()) {
                // SAFETY: the window is the real library's, of this communicator.
                let code = unsafe { functions::CommWindowDeregister(real, window) }?;
                Failure::check_real(code, "ncclCommWindowDeregister")?;
            }
            return Ok(false);
        }
    }
    registered?;
    // SAFETY: guaranteed by the caller.
    unsafe { place.write_unaligned(window) };
    Ok(true)
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

/// The window of a handle, if it is served here and `comm`'s.
pub(crate) fn own_window(window: Window, comm: Handle) -> Option<Arc<OwnWindow>> {
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

pub(crate) fn no_window(window: Window) -> Failure {
    Failure::argument(
        format!("{window:p} is no window of this communicator"),
        "pass a window returned by ncclCommWindowRegister of this communicator",
    )
}

pub(crate) fn outside(offset: usize, count: usize, bytes: usize) -> Failure {
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
    pub(crate) fn peer(&self, rank: usize, own: usize) -> Outcome<Option<&RemoteRegion>> {
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
        let all = gather(&self.communicator, CALL, contribution)?;
        let (Ok(own), true) = (own, all.iter().all(|one| one == CAN_BE_MAPPED)) else {
            return Ok(None);
        };
        let peers = self.communicator.share(&own)?;
        // Here, since connecting is collective, and puts and signals are not.
        served.signals.connect(self)?;
        Ok(Some(SharedWindow { _own: own, peers }))
    }
}
