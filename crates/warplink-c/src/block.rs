//! The calls of a kernel for the host device: those of `warplink::Channel` in `warplink/device.cuh`, made by a
//! whole block. Which block is known by the thread, as in CUDA.

use crate::pointer;
use crate::status::{self, Failure, Outcome, Status, entry};
use crate::types::At;
use std::cell::Cell;
use std::ffi::c_void;
use std::ptr::NonNull;
use warplink::Error;
use warplink::device::{Block, BlockChannel, DeviceSlice};

thread_local! {
    /// The block whose body runs on this thread.
    static RUNNING: Cell<Option<NonNull<Block<'static>>>> = const { Cell::new(None) };
}

/// Sets back which block runs, however a body ends.
struct Reset(Option<NonNull<Block<'static>>>);

impl Drop for Reset {
    fn drop(&mut self) {
        RUNNING.set(self.0);
    }
}

/// Runs the body of a kernel as `block`, and gives the error that it returned the status of.
pub(crate) fn run(block: &Block<'_>, body: impl FnOnce() -> i32) -> warplink::Result<()> {
    let reset = Reset(RUNNING.replace(Some(NonNull::from(block).cast())));
    let status = body();
    drop(reset);
    if status == Status::Success as i32 {
        return Ok(());
    }
    if let Some(failure) = status::last_with(status) {
        return Err(failure.into_error());
    }
    let message = format!("the kernel returned {status}; expected 0 or what a call returned");
    Err(Error::invalid(message)
        .with_operation("run a kernel")
        .with_help("return the status of the call that failed"))
}

/// What `body` gives for the block that runs on this thread.
fn running<R>(body: impl FnOnce(&Block<'_>) -> Outcome<R>) -> Outcome<R> {
    let block = RUNNING.get().ok_or_else(|| {
        Failure::usage(
            "no kernel of the host device runs on this thread; expected a call from its body",
            "make this call in the body of a host kernel, on the thread that runs it",
        )
    })?;
    // SAFETY: `run` set it, and sets it back before the block ends; its lifetime does not leave `body`.
    body(unsafe { block.as_ref() })
}

/// Makes a call on the channel that is argument `argument` of the launch.
fn on_channel(
    operation: &'static str,
    argument: u32,
    call: impl FnOnce(&BlockChannel<'_>) -> warplink::Result<()>,
) -> Status {
    entry(operation, || {
        running(|block| Ok(call(&block.channel(argument as usize)?)?))
    })
}

/// In the body of a host kernel: the block's number in the grid, and how many blocks there are. Each of the
/// places may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_block_index(index: *mut u32, blocks: *mut u32) -> Status {
    entry("get the block's number", || {
        running(|block| {
            for (place, value) in [(index, block.index()), (blocks, block.blocks())] {
                if !place.is_null() {
                    // SAFETY: the caller passes null or a place for a number.
                    unsafe { pointer::store(place, "a place", value) }?;
                }
            }
            Ok(())
        })
    })
}

/// In the body of a host kernel: the unsigned integer that is argument `argument` of the launch.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_block_u64(argument: u32, value: *mut u64) -> Status {
    entry("get an argument", || {
        let found = running(|block| Ok(block.u64(argument as usize)?))?;
        // SAFETY: the caller passes a place for a number.
        unsafe { pointer::store(value, "value", found) }
    })
}

/// In the body of a host kernel: the signed integer that is argument `argument` of the launch.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_block_i64(argument: u32, value: *mut i64) -> Status {
    entry("get an argument", || {
        let found = running(|block| Ok(block.i64(argument as usize)?))?;
        // SAFETY: the caller passes a place for a number.
        unsafe { pointer::store(value, "value", found) }
    })
}

/// In the body of a host kernel: the float or double that is argument `argument` of the launch.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_block_f64(argument: u32, value: *mut f64) -> Status {
    entry("get an argument", || {
        let found = running(|block| {
            let single = block.f32(argument as usize).map(f64::from);
            Ok(single.or_else(|_| block.f64(argument as usize))?)
        })?;
        // SAFETY: the caller passes a place for a number.
        unsafe { pointer::store(value, "value", found) }
    })
}

/// In the body of a host kernel: copies `bytes` bytes to `target` from argument `argument`: from `source` in
/// this rank's regions if it is a channel, from `source.offset` if it is a region.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_block_load(
    argument: u32,
    target: *mut c_void,
    source: At,
    bytes: usize,
) -> Status {
    entry("load", || {
        running(|block| {
            let memory = memory(block, argument, source, bytes)?;
            // SAFETY: the caller passes room for `bytes` bytes.
            let target = unsafe { pointer::new_bytes(target, bytes, "target") }?;
            Ok(block.read(&memory, target)?)
        })
    })
}

/// In the body of a host kernel: copies `bytes` bytes from `source` to argument `argument`; see
/// `warplink_block_load`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_block_store(
    argument: u32,
    target: At,
    source: *const c_void,
    bytes: usize,
) -> Status {
    entry("store", || {
        running(|block| {
            let memory = memory(block, argument, target, bytes)?;
            // SAFETY: the caller passes `bytes` bytes.
            let source = unsafe { pointer::values(source.cast::<u8>(), bytes, "source") }?;
            Ok(block.write(&memory, source)?)
        })
    })
}

/// In the body of a host kernel: `put` of the channel that is argument `argument`.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_block_put(argument: u32, target: At, source: At, bytes: u64) -> Status {
    on_channel("put", argument, |channel| {
        channel.put(target, source, bytes)
    })
}

/// In the body of a host kernel: `get` of the channel that is argument `argument`.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_block_get(argument: u32, target: At, source: At, bytes: u64) -> Status {
    on_channel("get", argument, |channel| {
        channel.get(target, source, bytes)
    })
}

/// In the body of a host kernel: `put_with_signal` of the channel that is argument `argument`.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_block_put_with_signal(
    argument: u32,
    target: At,
    source: At,
    bytes: u64,
) -> Status {
    on_channel("put with signal", argument, |channel| {
        channel.put_with_signal(target, source, bytes)
    })
}

/// In the body of a host kernel: `put_with_signal_and_flush` of the channel that is argument `argument`.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_block_put_with_signal_and_flush(
    argument: u32,
    target: At,
    source: At,
    bytes: u64,
) -> Status {
    on_channel("put with signal and flush", argument, |channel| {
        channel.put_with_signal_and_flush(target, source, bytes)
    })
}

/// In the body of a host kernel: `signal` of the channel that is argument `argument`.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_block_signal(argument: u32) -> Status {
    on_channel("signal", argument, |channel| channel.signal())
}

/// In the body of a host kernel: `flush` of the channel that is argument `argument`.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_block_flush(argument: u32) -> Status {
    on_channel("flush", argument, |channel| channel.flush())
}

/// In the body of a host kernel: `wait` of the channel that is argument `argument`.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_block_wait(argument: u32) -> Status {
    on_channel("wait", argument, |channel| channel.wait())
}

/// In the body of a host kernel: `wait_until` of the channel that is argument `argument`.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_block_wait_until(argument: u32, epoch: u64) -> Status {
    on_channel("wait until an epoch", argument, |channel| {
        channel.wait_until(epoch)
    })
}

/// In the body of a host kernel: `poll` of the channel that is argument `argument`. Whether there was a signal
/// to use up goes to `arrived`, as 0 or 1.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_block_poll(argument: u32, arrived: *mut i32) -> Status {
    entry("poll", || {
        pointer::check(arrived, "arrived")?;
        let found = running(|block| Ok(block.channel(argument as usize)?.poll()?))?;
        // SAFETY: the caller passes a place for a number.
        unsafe { pointer::store(arrived, "arrived", i32::from(found)) }
    })
}

/// The memory that a load or store names.
fn memory(block: &Block<'_>, argument: u32, at: At, bytes: usize) -> Outcome<DeviceSlice> {
    let argument = argument as usize;
    if let Ok(slice) = block.slice(argument) {
        let out_of_range = || {
            Failure::invalid(
                format!(
                    "{bytes} bytes from offset {} pass the end of argument {argument}; expected at most {}",
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
    Ok(block.channel(argument)?.here(at, bytes as u64)?)
}
