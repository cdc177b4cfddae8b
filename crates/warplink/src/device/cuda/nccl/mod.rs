//! NCCL: its functions, and communicators that another thread can abort.

pub(super) mod operator;
pub(super) mod threads;
pub(super) mod watch;

use crate::deadline::Deadline;
use crate::device::VendorCommunicator;
use crate::device::cuda::driver::context::Context;
use crate::device::library;
use crate::device::library::function_table;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::lock;
pub use operator::{NCCL_OPERATORS, NCCL_TYPES};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// Length of NCCL's unique id.
pub(super) const UNIQUE_ID: usize = 128;

/// `ncclInProgress`: no error.
const IN_PROGRESS: c_int = 7;

/// How long an abort waits for calls inside NCCL: a call may itself wait for the lost peer, and ends only by
/// the abort.
const INSIDE: Duration = Duration::from_secs(1);

/// How long a drop waits for NCCL to destroy a communicator, which may itself wait for other ranks.
const LEAVING: Duration = Duration::from_secs(5);

/// `ncclComm_t`.
pub(super) type NcclHandle = *mut c_void;

/// `ncclWindow_t`.
pub(super) type Window = *mut c_void;

/// `ncclUniqueId`, which NCCL takes by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct NcclUniqueId {
    internal: [c_char; UNIQUE_ID],
}

function_table! {
    /// NCCL's functions.
    Nccl {
        ncclGetVersion(*mut c_int) -> c_int;
        ncclGetErrorString(c_int) -> *const c_char;
        ncclGetUniqueId(*mut NcclUniqueId) -> c_int;
        ncclCommInitRank(*mut NcclHandle, c_int, NcclUniqueId, c_int) -> c_int;
        ncclCommDestroy(NcclHandle) -> c_int;
        ncclCommAbort(NcclHandle) -> c_int;
        ncclCommGetAsyncError(NcclHandle, *mut c_int) -> c_int;
        ncclCommCount(NcclHandle, *mut c_int) -> c_int;
        ncclCommUserRank(NcclHandle, *mut c_int) -> c_int;
        ncclCommCuDevice(NcclHandle, *mut c_int) -> c_int;
        ncclAllGather(*const c_void, *mut c_void, usize, c_int, NcclHandle, *mut c_void) -> c_int;
        ncclAllReduce(*const c_void, *mut c_void, usize, c_int, c_int, NcclHandle, *mut c_void) -> c_int;
        ncclReduceScatter(*const c_void, *mut c_void, usize, c_int, c_int, NcclHandle, *mut c_void) -> c_int;
        ncclBroadcast(*const c_void, *mut c_void, usize, c_int, c_int, NcclHandle, *mut c_void) -> c_int;
        ncclReduce(*const c_void, *mut c_void, usize, c_int, c_int, c_int, NcclHandle, *mut c_void) -> c_int;
        ncclSend(*const c_void, usize, c_int, c_int, NcclHandle, *mut c_void) -> c_int;
        ncclRecv(*mut c_void, usize, c_int, c_int, NcclHandle, *mut c_void) -> c_int;
        ncclRedOpCreatePreMulSum(*mut c_int, *mut c_void, c_int, c_int, NcclHandle) -> c_int;
        ncclRedOpDestroy(c_int, NcclHandle) -> c_int;
        ncclGroupStart() -> c_int;
        ncclGroupEnd() -> c_int;
    }
    optional {
        ncclGetLastError(NcclHandle) -> *const c_char;
        ncclCommWindowRegister(NcclHandle, *mut c_void, usize, *mut Window, c_int) -> c_int;
        ncclCommWindowDeregister(NcclHandle, Window) -> c_int;
    }
}

impl Nccl {
    /// NCCL, loaded with the user's configuration.
    pub(super) fn get() -> Result<&'static Self> {
        static LIBRARY: OnceLock<Nccl> = OnceLock::new();
        if let Some(library) = LIBRARY.get() {
            return Ok(library);
        }
        let library = Self::resolve(&library::load(&library::NCCL)?)?;
        Ok(LIBRARY.get_or_init(|| library))
    }

    /// Turns a code into a result.
    pub(super) fn check(&self, code: c_int, operation: &'static str) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: for every code NCCL gives a string of its own that is never freed.
        let name = text(unsafe { (self.ncclGetErrorString)(code) });
        let name = name.unwrap_or_else(|| "an unknown error".to_owned());
        // SAFETY: NCCL ignores the communicator, and gives the last error of any.
        let last = self
            .ncclGetLastError
            .and_then(|ask| text(unsafe { ask(std::ptr::null_mut()) }));
        let message = match last.filter(|last| !last.is_empty()) {
            Some(last) => format!("{name}: {last}"),
            None => name,
        };
        Err(Error::new(ErrorKind::Driver, message)
            .with_operation(operation)
            .with_code(code.into()))
    }

    /// Name and version.
    pub(super) fn name(&self) -> String {
        let mut version = 0;
        // SAFETY: `version` points to a writable integer.
        let code = unsafe { (self.ncclGetVersion)(&mut version) };
        match code {
            0 => format!(
                "NCCL {}.{}.{}",
                version / 10000,
                version % 10000 / 100,
                version % 100
            ),
            _ => "NCCL".to_owned(),
        }
    }

    /// A new unique id, by which ranks rendezvous.
    pub(super) fn unique_id(&self) -> Result<[u8; UNIQUE_ID]> {
        let mut id = NcclUniqueId {
            internal: [0; UNIQUE_ID],
        };
        // SAFETY: `id` is an output parameter for one id.
        let code = unsafe { (self.ncclGetUniqueId)(&mut id) };
        self.check(code, "create an NCCL id")?;
        Ok(id.internal.map(|byte| byte as u8))
    }
}

fn text(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: NCCL's strings end with a zero and live long enough to be copied here.
    Some(
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned(),
    )
}

/// An NCCL communicator.
pub(super) struct NcclComm {
    nccl: &'static Nccl,
    context: Arc<Context>,
    /// Null once aborted.
    raw: AtomicPtr<c_void>,
    /// Held during calls: NCCL is not reentrant for one communicator.
    calls: Mutex<()>,
    /// Whether the application created it and destroys it.
    is_adopted: bool,
}

/// Rank, world and device of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Membership {
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) ordinal: usize,
}

impl NcclComm {
    /// Joins `world` ranks as `rank`, by the deadline. `go_on` is polled and ends the wait by an error.
    pub(super) fn join(
        nccl: &'static Nccl,
        context: &Arc<Context>,
        id: [u8; UNIQUE_ID],
        rank: c_int,
        world: c_int,
        deadline: Deadline,
        go_on: impl Fn() -> Result<()>,
    ) -> Result<Self> {
        // On its own thread, since NCCL waits without bound for a missing rank.
        let (done, result) = channel();
        let joining = context.clone();
        threads::spawn("join", move || {
            let joined = join_here(nccl, &joining, id, rank, world);
            // The receiver is gone if the wait was aborted; dropping the communicator destroys it.
            let _ = done.send(joined);
        })?;
        loop {
            match result.recv_timeout(Duration::from_millis(10)) {
                Ok(joined) => return joined,
                Err(RecvTimeoutError::Timeout) => go_on()?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::internal(
                        "the thread that joins NCCL ended without a result",
                    )
                    .with_operation("join NCCL"));
                }
            }
            if deadline.passed() {
                return Err(deadline
                    .expired(&format!("all {world} ranks to join"))
                    .with_operation("join NCCL")
                    .with_help("check that every rank asks for the collective engine"));
            }
        }
    }

    /// Wraps a communicator that the application created, and returns its rank and world. It is never
    /// destroyed here.
    pub(super) fn adopt(
        nccl: &'static Nccl,
        context: &Arc<Context>,
        communicator: VendorCommunicator,
    ) -> Result<(Self, Membership)> {
        let raw = communicator.as_raw();
        if raw.is_null() {
            return Err(
                Error::invalid("the communicator is null; expected an ncclComm_t")
                    .with_operation("adopt a communicator")
                    .with_help("pass one that ncclCommInitRank gave"),
            );
        }
        type Question = unsafe extern "C" fn(NcclHandle, *mut c_int) -> c_int;
        let ask = |question: Question| {
            let mut answer: c_int = -1;
            // SAFETY: the caller that made `communicator` promised that it is a live NCCL communicator; `answer` is an output
            // parameter for one integer.
            let code = unsafe { question(raw, &mut answer) };
            nccl.check(code, "adopt a communicator")?;
            usize::try_from(answer).map_err(|_| {
                Error::new(
                    ErrorKind::Driver,
                    format!("NCCL answered {answer}; expected a number"),
                )
                .with_operation("adopt a communicator")
            })
        };
        let place = Membership {
            rank: ask(nccl.ncclCommUserRank)?,
            world: ask(nccl.ncclCommCount)?,
            ordinal: ask(nccl.ncclCommCuDevice)?,
        };
        let adopted = Self {
            nccl,
            context: context.clone(),
            raw: AtomicPtr::new(raw),
            calls: Mutex::new(()),
            is_adopted: true,
        };
        Ok((adopted, place))
    }

    /// The NCCL handle; null once aborted.
    pub(super) fn raw(&self) -> NcclHandle {
        // Pairs with the swap in `abort`.
        self.raw.load(Ordering::Acquire)
    }

    /// Runs `call` exclusively.
    pub(super) fn call(
        &self,
        operation: &'static str,
        call: impl FnOnce(&Nccl, NcclHandle) -> c_int,
    ) -> Result<()> {
        let _alone = lock(&self.calls);
        // Look only now: `abort` takes the pointer before it waits for this lock.
        let raw = self.raw.load(Ordering::Acquire);
        if raw.is_null() {
            return Err(Error::closed("the NCCL communicator was aborted")
                .with_operation(operation)
                .with_help("join again with the ranks that are left"));
        }
        self.nccl.check(call(self.nccl, raw), operation)
    }

    /// Returns the asynchronous error of a collective in flight. Adopted communicators are skipped; the
    /// application queries those. Does not block.
    fn asynchronous_error(&self) -> Result<()> {
        // A call in progress returns its own error, and the query could block behind it.
        let Ok(_alone) = self.calls.try_lock() else {
            return Ok(());
        };
        let raw = self.raw.load(Ordering::Acquire);
        if raw.is_null() || self.is_adopted {
            return Ok(());
        }
        let mut failed = 0;
        // SAFETY: the communicator is ended with `calls` held, or after longer than this call takes, and dropped
        // by the last that has it; `failed` points to a writable code.
        let asked = unsafe { (self.nccl.ncclCommGetAsyncError)(raw, &mut failed) };
        self.nccl.check(asked, "ask NCCL for errors")?;
        match failed {
            IN_PROGRESS => Ok(()),
            failed => self.nccl.check(failed, "do a collective of NCCL's"),
        }
    }

    /// Aborts it and everything in flight. An adopted communicator is only marked as closed.
    pub(super) fn abort(&self) {
        // Taking the pointer makes this thread the only one to abort or destroy the communicator.
        let raw = self.raw.swap(std::ptr::null_mut(), Ordering::AcqRel);
        if raw.is_null() || self.is_adopted {
            return;
        }
        // A call that waits inside NCCL for a lost peer ends only by the abort, so wait for it only briefly.
        let start = Instant::now();
        let mut alone = self.calls.try_lock().ok();
        while alone.is_none() && start.elapsed() < INSIDE {
            std::thread::sleep(Duration::from_millis(1));
            alone = self.calls.try_lock().ok();
        }
        let entered = self.context.enter();
        let _relaxed = self.context.relax_capture();
        // SAFETY: taken above, so no other thread ends it or starts a call on it; NCCL
        // allows this while another thread is inside a call.
        let code = unsafe { (self.nccl.ncclCommAbort)(raw) };
        if code != 0 || entered.is_err() {
            tracing::warn!(code, "an NCCL communicator was not aborted");
        }
    }
}

fn join_here(
    nccl: &'static Nccl,
    context: &Arc<Context>,
    id: [u8; UNIQUE_ID],
    rank: c_int,
    world: c_int,
) -> Result<NcclComm> {
    let _entered = context.enter_relaxed()?;
    let id = NcclUniqueId {
        internal: id.map(|byte| byte as c_char),
    };
    let mut raw = std::ptr::null_mut();
    // SAFETY: `raw` is an output parameter for one communicator, and the GPU's context is current.
    let code = unsafe { (nccl.ncclCommInitRank)(&mut raw, world, id, rank) };
    nccl.check(code, "join NCCL")?;
    Ok(NcclComm {
        nccl,
        context: context.clone(),
        raw: AtomicPtr::new(raw),
        calls: Mutex::new(()),
        is_adopted: false,
    })
}

impl Drop for NcclComm {
    fn drop(&mut self) {
        // As in `abort`: only the thread that takes the pointer ends the communicator.
        let raw = AtomicPtr::new(self.raw.swap(std::ptr::null_mut(), Ordering::AcqRel));
        // Relaxed: `swap` above has already synchronized.
        if raw.load(Ordering::Relaxed).is_null() || self.is_adopted {
            return;
        }
        let (nccl, context) = (self.nccl, self.context.clone());
        let (done, ended) = channel();
        // On its own thread, since NCCL waits for the other ranks of the machine to destroy theirs or to exit.
        let spawned = threads::spawn("leave", move || {
            let _entered = context.enter();
            let _relaxed = context.relax_capture();
            // SAFETY: taken above, so that this is its only use.
            let code = unsafe { (nccl.ncclCommDestroy)(raw.into_inner()) };
            // The receiver is gone if the drop stopped waiting.
            let _ = done.send(code);
        });
        match spawned.map(|_| ended.recv_timeout(LEAVING)) {
            Ok(Ok(0)) => {}
            Ok(Ok(code)) => tracing::warn!(code, "an NCCL communicator was not destroyed"),
            Ok(Err(_)) => tracing::warn!("NCCL did not destroy a communicator within {LEAVING:?}"),
            Err(error) => tracing::warn!(%error, "an NCCL communicator is leaked"),
        }
    }
}

impl fmt::Debug for NcclComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Relaxed: only the value is printed.
        write!(f, "NcclComm({:p})", self.raw.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_has_every_function_where_it_is_found() {
        if let Ok(loaded) = library::load(&library::NCCL) {
            let nccl = Nccl::resolve(&loaded).unwrap();
            assert!(nccl.name().starts_with("NCCL 2."), "{}", nccl.name());
        }
    }

    #[test]
    fn the_id_has_nccls_layout() {
        assert_eq!(
            size_of::<NcclUniqueId>(),
            size_of::<cudarc::nccl::sys::ncclUniqueId>()
        );
        assert_eq!(size_of::<NcclUniqueId>(), UNIQUE_ID);
    }
}
