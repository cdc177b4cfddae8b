//! Calls of a kernel for the host device that need no channel: the running block, its arguments and their memory. The
//! running block is thread-local, as in CUDA.

use crate::block_channel;
use crate::pointer;
use crate::status::{self, Failure, Outcome, Status, block_entry};
use crate::types::At;
use std::cell::Cell;
use std::ffi::c_void;
use std::ptr::NonNull;
use warplink::Error;
use warplink::device::{Block, DeviceSlice};

thread_local! {
    /// The block whose body runs on this thread.
    static RUNNING: Cell<Option<NonNull<Block<'static>>>> = const { Cell::new(None) };
}

/// Restores the previous running block when a body returns or unwinds.
struct Reset(Option<NonNull<Block<'static>>>);

impl Drop for Reset {
    fn drop(&mut self) {
        RUNNING.set(self.0);
    }
}

/// Runs the body of a kernel as `block`. If the body returns the status of a failed call, returns that call's error.
pub(crate) fn run(block: &Block<'_>, body: impl FnOnce() -> i32) -> warplink::Result<()> {
    // Reset by a guard, so that an unwinding body leaves no pointer to a block that is gone.
    let reset = Reset(RUNNING.replace(Some(NonNull::from(block).cast())));
    let status = body();
    drop(reset);
    if status == Status::SUCCESS.number() {
        return Ok(());
    }
    // A body that returns the status of a failed call fails with that call's error rather than with a bare number.
    if let Some(failure) = status::last_with(status) {
        return Err(failure.into_error());
    }
    let message =
        format!("the kernel returned {status}; expected 0 or the status of a failed call");
    Err(Error::invalid(message)
        .with_operation("run a kernel")
        .with_help("return the status of the call that failed"))
}

/// Calls `body` with the block that runs on this thread.
pub(crate) fn running<R>(body: impl FnOnce(&Block<'_>) -> Outcome<R>) -> Outcome<R> {
    let block = RUNNING.get().ok_or_else(|| {
        Failure::usage(
            "no kernel of the host device runs on this thread; expected a call from its body",
            "make this call in the body of a host kernel, on the thread that runs it",
        )
    })?;
    // SAFETY: `run` set the pointer and resets it before the block ends; the lifetime does not escape `body`.
    body(unsafe { block.as_ref() })
}

/// In a host kernel: returns the block's index in the grid, starting at 0, and the number of blocks. Either pointer may
/// be null. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_block_index(index: *mut u32, blocks: *mut u32) -> Status {
    block_entry("get the block's number", || {
        running(|block| {
            for (place, value) in [(index, block.index()), (blocks, block.blocks())] {
                if !place.is_null() {
                    // SAFETY: the caller passes null or a pointer valid for a write.
                    unsafe { pointer::store(place, "a place", value) }?;
                }
            }
            Ok(())
        })
    })
}

/// In a host kernel: the number of threads that a block of this launch would have on a GPU. The body itself runs on one
/// thread. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_block_threads(threads: *mut u32) -> Status {
    block_entry("get the block's threads", || {
        let found = running(|block| Ok(block.threads()))?;
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(threads, "threads", found) }
    })
}

/// In a host kernel: reads argument `argument` of the launch, an unsigned integer of 32 or 64 bits. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_block_u64(argument: u32, value: *mut u64) -> Status {
    block_entry("get an argument", || {
        let found = running(|block| Ok(block.u64(argument as usize)?))?;
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(value, "value", found) }
    })
}

/// In a host kernel: reads argument `argument` of the launch, a signed integer of 32 or 64 bits. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_block_i64(argument: u32, value: *mut i64) -> Status {
    block_entry("get an argument", || {
        let found = running(|block| Ok(block.i64(argument as usize)?))?;
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(value, "value", found) }
    })
}

/// In a host kernel: reads argument `argument` of the launch, a float or double. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_block_f64(argument: u32, value: *mut f64) -> Status {
    block_entry("get an argument", || {
        let found = running(|block| {
            // C converts a `float` to `double` without loss, so one function serves both.
            let single = block.f32(argument as usize).map(f64::from);
            Ok(single.or_else(|_| block.f64(argument as usize))?)
        })?;
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(value, "value", found) }
    })
}

/// In a host kernel: copies `bytes` bytes to `target`, in ordinary host memory, and returns when the copy is complete.
/// If `argument` is a channel, given by either kind of number, the bytes are read from `source` in this rank's regions;
/// if it is a region, from byte `source.offset` of the region. Returns WARPLINK_STATUS_INVALID_ARGUMENT if the range
/// passes the end of the region. `target` may be null if `bytes` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_block_load(
    argument: u32,
    target: *mut c_void,
    source: At,
    bytes: usize,
) -> Status {
    block_entry("load", || {
        running(|block| {
            let memory = memory(block, argument, source, bytes)?;
            // SAFETY: the caller passes a buffer of `bytes` bytes.
            let target = unsafe { pointer::new_bytes(target, bytes, "target") }?;
            Ok(block.read(&memory, target)?)
        })
    })
}

/// In a host kernel: copies `bytes` bytes from `source`, in ordinary host memory, to `argument`, and returns when the
/// copy is complete; see `warplink_block_load`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_block_store(
    argument: u32,
    target: At,
    source: *const c_void,
    bytes: usize,
) -> Status {
    block_entry("store", || {
        running(|block| {
            let memory = memory(block, argument, target, bytes)?;
            // SAFETY: the caller passes `bytes` bytes.
            let source = unsafe { pointer::values(source.cast::<u8>(), bytes, "source") }?;
            Ok(block.write(&memory, source)?)
        })
    })
}

/// The memory range addressed by a load or store.
fn memory(block: &Block<'_>, number: u32, at: At, bytes: usize) -> Outcome<DeviceSlice> {
    if let Ok(slice) = block.slice(number as usize) {
        let out_of_range = || {
            Failure::invalid(
                format!(
                    "{bytes} bytes from offset {} pass the end of argument {number}; expected at most {}",
                    at.offset,
                    slice.bytes()
                ),
                "name a range within the region",
            )
        };
        let start = usize::try_from(at.offset).map_err(|_| out_of_range())?;
        let end = start.checked_add(bytes).filter(|end| *end <= slice.bytes());
        return Ok(slice.slice(start..end.ok_or_else(out_of_range)?)?);
    }
    Ok(block_channel::find(block, number)?.here(at, bytes as u64)?)
}
