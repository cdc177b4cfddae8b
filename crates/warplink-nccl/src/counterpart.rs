//! The real library's communicator of a communicator's ranks, for calls that Warplink does not support.

use crate::abi::{Handle, RealConfig, UniqueId};
use crate::communicator::{Joined, RealHandle, gather, lock};
use crate::real::{PATH_VARIABLE, loaded};
use crate::status::{Failure, Outcome};
use crate::table::real;
use crate::{devices, leave, report};
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use warplink::{Error, ErrorKind};

/// The real library's communicator, created on first use.
#[derive(Debug)]
pub(crate) struct Counterpart {
    /// The index of its GPU among those visible to the process.
    ordinal: usize,
    config: RealConfig,
    state: Mutex<CounterpartState>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug)]
enum CounterpartState {
    /// Not needed so far, or its creation failed.
    Absent,
    /// Being created by a thread, which waits for the other ranks without holding the lock.
    Making,
    Made(RealHandle),
    /// Not to be created any more.
    Ended,
}

impl Counterpart {
    pub(crate) fn new(ordinal: usize, config: RealConfig) -> Self {
        Self {
            ordinal,
            config,
            state: Mutex::new(CounterpartState::Absent),
            changed: Condvar::new(),
        }
    }
}

impl Joined {
    /// The real library's communicator of the same ranks. The first call is collective and blocks until all ranks have
    /// made it.
    pub(crate) fn real(&self) -> Outcome<RealHandle> {
        let ended = || {
            Failure::usage(
                "NCCL's communicator was ended",
                "make calls before the communicator is ended",
            )
        };
        let own = &self.real;
        let mut state = lock(&own.state);
        loop {
            match *state {
                CounterpartState::Made(real) => return Ok(real),
                CounterpartState::Ended => return Err(ended()),
                CounterpartState::Absent => break,
                // A second thread waits for the first one's communicator.
                CounterpartState::Making => {
                    state = own
                        .changed
                        .wait(state)
                        .unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
        *state = CounterpartState::Making;
        // Other threads may end the communicator, or ask for its errors, while this one waits for the other ranks.
        drop(state);
        // Asserted: only the communicator's own state is used, which locks keep consistent.
        let made = catch_unwind(AssertUnwindSafe(|| self.make_real()));
        let made = made.unwrap_or_else(|_| Err(panicked()));
        let mut state = lock(&own.state);
        let was_ended = matches!(*state, CounterpartState::Ended);
        if !was_ended {
            *state = match &made {
                Ok(real) => CounterpartState::Made(*real),
                Err(_) => CounterpartState::Absent,
            };
        }
        drop(state);
        own.changed.notify_all();
        match made {
            Ok(real) if was_ended => {
                end(real, true);
                Err(ended())
            }
            made => made,
        }
    }

    /// Has the real library make `call` with its communicator; `name` is the function's, for errors and the report.
    pub(crate) fn by_real(
        &self,
        name: &'static str,
        call: impl FnOnce(Handle) -> Outcome<c_int>,
    ) -> Outcome {
        let started = report::now();
        let RealHandle(real) = self.real()?;
        Failure::check_real(call(real)?, name)?;
        report::note("nccl", name.trim_start_matches("nccl"), 0, started);
        Ok(())
    }

    /// The real library's communicator, if it was created before.
    pub(crate) fn made_real(&self) -> Option<RealHandle> {
        match *lock(&self.real.state) {
            CounterpartState::Made(real) => Some(real),
            _ => None,
        }
    }

    fn make_real(&self) -> Outcome<RealHandle> {
        let (rank, world) = (self.communicator.rank(), self.communicator.world());
        let mut id = UniqueId { bytes: [0; 128] };
        let made = match rank {
            // SAFETY: `id` is valid for a write of one id.
            0 => unsafe { real::GetUniqueId(&mut id) }
                .and_then(|code| Failure::check_real(code, "ncclGetUniqueId")),
            _ => loaded().map(drop).map_err(Failure::from),
        };
        // All ranks learn of a failure on any of them, so that none waits in vain.
        let own = match &made {
            Ok(()) => id.bytes.to_vec(),
            Err(_) => Vec::new(),
        };
        let call = "a function of the real NCCL";
        let all = gather(&self.communicator, call, &own)?;
        // Only after the gather, in which all ranks take part, failed or not.
        made?;
        for (peer, bytes) in all.iter().enumerate() {
            if bytes.len() != id.bytes.len() {
                return Err(Error::new(
                    ErrorKind::PeerFailed,
                    "another rank did not find the real NCCL, which executes calls that Warplink does not support",
                )
                .with_peer(peer)
                .with_help(format!("set {PATH_VARIABLE} on every rank"))
                .into());
            }
        }
        id.bytes.copy_from_slice(&all[0]);
        let join = || {
            // The real library takes the current GPU, which a thread of a group has not selected.
            devices::select(self.real.ordinal)?;
            self.real.config.with_copy(|config| {
                let (mut handle, world, rank) =
                    (std::ptr::null_mut(), world as c_int, rank as c_int);
                // SAFETY: `handle` is valid for a write of one handle, the id is that of rank 0, and the copy of the
                // caller's configuration is as long as it states.
                let code = unsafe {
                    match config {
                        None => real::CommInitRank(&mut handle, world, id, rank),
                        Some(config) => {
                            real::CommInitRankConfig(&mut handle, world, id, rank, config)
                        }
                    }
                }?;
                Failure::check_real(code, "ncclCommInitRank")?;
                Ok(RealHandle(handle))
            })
        };
        // On a thread of its own, since the caller's keeps its GPU.
        thread::scope(|scope| {
            let thread = thread::Builder::new().name("warplink-nccl".to_owned());
            let thread = thread.spawn_scoped(scope, join);
            let thread =
                thread.map_err(|error| Error::io("start the thread that joins", &error))?;
            thread.join().unwrap_or_else(|_| Err(panicked()))
        })
    }

    /// The asynchronous error of the real library's communicator, if there is one.
    pub(crate) fn real_error(&self) -> Outcome {
        let Some(RealHandle(handle)) = self.made_real() else {
            return Ok(());
        };
        let mut code = 0;
        // SAFETY: the handle is live, and `code` is valid for a write of one integer.
        let asked = unsafe { real::CommGetAsyncError(handle, &mut code) }?;
        Failure::check_real(asked, "ncclCommGetAsyncError")?;
        Failure::check_real(code, "communicator")
    }

    /// Aborts or destroys the real library's communicator, if there is one, and has none be created. One that is being
    /// created is aborted by the thread that creates it, which this does not wait for.
    pub(crate) fn end_real(&self, by_force: bool) {
        let state = std::mem::replace(&mut *lock(&self.real.state), CounterpartState::Ended);
        self.real.changed.notify_all();
        // Without the lock, which the blocking call would hold; a concurrent end finds nothing.
        if let CounterpartState::Made(real) = state {
            end(real, by_force);
        }
    }
}

/// Aborts or destroys a communicator of the real library, which no other thread finds any more.
fn end(RealHandle(handle): RealHandle, by_force: bool) {
    // Registered again: handlers run in reverse order, and one that was registered before the library was
    // loaded would run after its destructors.
    leave::at_exit_of_real();
    // SAFETY: the handle is live, and was removed from the place where other threads find it.
    let ended = unsafe {
        if by_force {
            real::CommAbort(handle)
        } else {
            real::CommDestroy(handle)
        }
    };
    if let Err(error) = ended.and_then(|code| Failure::check_real(code, "end of a communicator")) {
        tracing::warn!("{error:?}");
    }
}

fn panicked() -> Failure {
    Error::internal("the creation of NCCL's communicator panicked").into()
}
