//! Allocations, registrations and device communicators. Warplink's collectives accept any memory, so registration is a no-op
//! for them. Device communicators belong to the real library, whose communicator is created on first use.

use crate::abi::{Handle, Requirements, Team, check, store};
use crate::communicator::{Joined, RealHandle, find, lock};
use crate::real;
use crate::status::{Failure, Outcome};
use crate::table::real as functions;
use crate::{devices, group, log};
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex};
use warplink::device::{AllocationKind, DeviceSlice};

/// Memory allocated through this library, by its address.
static ALLOCATED: Mutex<Option<HashMap<usize, DeviceSlice>>> = Mutex::new(None);

/// Whether the real library is available for the process's kind of device.
pub(crate) fn has_real() -> Outcome<bool> {
    Ok(real::serves(devices::kind()?))
}

/// # Safety
/// `memory` must be null or valid for a write of an address. Pointers of the functions below must be valid as
/// NCCL's documentation requires.
pub(crate) unsafe fn allocate(memory: *mut *mut c_void, bytes: usize) -> Outcome {
    log::start();
    check(memory, "ptr")?;
    if bytes == 0 {
        // SAFETY: the caller passes null or a pointer valid for a write of an address.
        return unsafe { store(memory, "ptr", std::ptr::null_mut()) };
    }
    if has_real()? {
        // By the real library where it is there: its windows may require memory that it allocated.
        // SAFETY: the caller's pointers are passed on.
        let code = unsafe { functions::MemAlloc(memory, bytes) }?;
        return Failure::check_real(code, "ncclMemAlloc");
    }
    let device = devices::of_process(devices::current()?)?;
    // As NCCL's own: memory of the virtual memory API, which peers can map by descriptors.
    let slice = device.allocate(bytes, AllocationKind::Virtual)?;
    let address = slice.address() as usize;
    lock(&ALLOCATED)
        .get_or_insert_default()
        .insert(address, slice);
    // SAFETY: the caller passes null or a pointer valid for a write of an address.
    unsafe { store(memory, "ptr", address as *mut c_void) }
}

/// # Safety
/// As [`allocate`].
pub(crate) unsafe fn free(memory: *mut c_void) -> Outcome {
    if memory.is_null() {
        return Ok(());
    }
    let mut allocated = lock(&ALLOCATED);
    let own = allocated
        .as_mut()
        .and_then(|all| all.remove(&(memory as usize)));
    // Unlocked before `own` is dropped, since freeing memory may wait for other threads.
    drop(allocated);
    if own.is_some() {
        return Ok(());
    }
    if has_real()? {
        // SAFETY: the caller's pointer is passed on.
        let code = unsafe { functions::MemFree(memory) }?;
        return Failure::check_real(code, "ncclMemFree");
    }
    Err(Failure::argument(
        format!("{memory:p} was not allocated by ncclMemAlloc, or was freed"),
        "free memory returned by ncclMemAlloc once",
    ))
}

/// # Safety
/// As [`allocate`].
pub(crate) unsafe fn register(
    comm: Handle,
    memory: *mut c_void,
    _bytes: usize,
    handle: *mut *mut c_void,
) -> Outcome {
    find(comm)?.joined()?;
    check(memory, "buff")?;
    // Memory is published to peers when a call first uses it, so registration only returns a handle.
    // SAFETY: the caller passes null or a pointer valid for a write of a handle.
    unsafe { store(handle, "handle", memory) }
}

/// # Safety
/// As [`allocate`].
pub(crate) unsafe fn deregister(comm: Handle, _handle: *mut c_void) -> Outcome {
    find(comm)?.joined().map(drop)
}

/// Fails if the real library serves no calls of the communicator.
fn check_real(joined: &Joined, what: &str) -> Outcome {
    if joined.served().is_none() || has_real()? {
        return Ok(());
    }
    Err(only_real(what))
}

fn only_real(what: &str) -> Failure {
    let error = real::missing(what);
    Failure::usage(
        format!("{what} require NCCL itself: {}", error.message()),
        error.help().unwrap_or_default(),
    )
}

/// The real library's communicator, which owns windows.
fn of_windows(comm: Handle) -> Outcome<(Arc<Joined>, Handle)> {
    let joined = find(comm)?.usable()?;
    check_real(&joined, "signals")?;
    let RealHandle(real) = joined.real()?;
    Ok((joined, real))
}

/// # Safety
/// As [`allocate`].
pub(crate) unsafe fn device_communicator(
    comm: Handle,
    wanted: *const c_void,
    made: *mut c_void,
) -> Outcome {
    let owner = find(comm)?;
    owner.usable()?;
    let joined = owner.joined_and_idle()?;
    check_real(&joined, "device communicators")?;
    // SAFETY: the caller passes null or a structure.
    let wanted = unsafe { Requirements::read(wanted) };
    let made = made as usize;
    let work = move || {
        joined.by_real("ncclDevCommCreate", |real| {
            let made = made as *mut c_void;
            // SAFETY: the caller keeps `made` valid until it leaves the group, which waits for this.
            unsafe { functions::DevCommCreate(real, wanted.pointer(), made) }
        })
    };
    group::run(group::Task::new(&owner, work, || ()).blocking(true))
}

/// # Safety
/// As [`allocate`].
pub(crate) unsafe fn end_device_communicator(comm: Handle, made: *const c_void) -> Outcome {
    let joined = find(comm)?.joined()?;
    let Some(RealHandle(real)) = joined.made_real() else {
        return Err(only_real("device communicators"));
    };
    // SAFETY: as above.
    let code = unsafe { functions::DevCommDestroy(real, made) }?;
    Failure::check_real(code, "ncclDevCommDestroy")
}

/// # Safety
/// As [`allocate`].
pub(crate) unsafe fn gin_barrier(
    comm: Handle,
    team: Team,
    barriers: c_int,
    handle: *mut c_void,
    requirement: *mut c_void,
) -> Outcome {
    let (_joined, real) = of_windows(comm)?;
    // SAFETY: as above.
    let code = unsafe {
        functions::GinBarrierCreateRequirement(real, team, barriers, handle, requirement)
    }?;
    Failure::check_real(code, "ncclGinBarrierCreateRequirement")
}

/// `ncclLLA2ACalcSlots`: the real library's result, or 0 without it.
pub(crate) fn all_to_all_slots(most_elements: c_int, most_bytes: c_int) -> c_int {
    // SAFETY: the function takes any numbers.
    let slots = unsafe { functions::LLA2ACalcSlots(most_elements, most_bytes) };
    slots.unwrap_or(0)
}
