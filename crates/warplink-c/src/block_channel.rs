//! Channels of a kernel for the host device: the methods of `warplink::Channel` in `warplink/device.cuh`, each called
//! by a whole block.

use crate::block::running;
use crate::pointer;
use crate::status::{Failure, Outcome, Status, block_entry};
use crate::types::At;
use warplink::device::{Block, BlockChannel};

/// Flag in a channel number: the channel is an element of an array. Argument numbers are always below this bit.
const OF_ARRAY: u32 = 1 << 31;

/// Low bits of the number: the argument that is the array. The bits between these and `OF_ARRAY` are the channel's
/// index.
const ARGUMENT_BITS: u32 = 12;

const MAX_ARGUMENT: u32 = (1 << ARGUMENT_BITS) - 1;
const MAX_INDEX: u32 = (OF_ARRAY >> ARGUMENT_BITS) - 1;

/// Resolves a channel number: either a channel argument or an element of a channel array.
pub(crate) fn find<'b>(block: &'b Block<'_>, number: u32) -> Outcome<BlockChannel<'b>> {
    if number & OF_ARRAY != 0 {
        let index = (number & !OF_ARRAY) >> ARGUMENT_BITS;
        return of_array(block, number & MAX_ARGUMENT, index);
    }
    if block.channels(number as usize).is_ok() {
        return Err(Failure::invalid(
            format!("argument {number} is an array of channels; expected one channel"),
            "get one of its channels with warplink_block_channel",
        ));
    }
    Ok(block.channel(number as usize)?)
}

/// Channel `index` of the array passed as argument `argument`.
fn of_array<'b>(block: &'b Block<'_>, argument: u32, index: u32) -> Outcome<BlockChannel<'b>> {
    let channels = block.channels(argument as usize)?;
    let count = channels.len();
    channels.into_iter().nth(index as usize).ok_or_else(|| {
        Failure::invalid(
            format!("channel {index} of argument {argument}; expected one below {count}"),
            "get their number from warplink_block_channels",
        )
    })
}

/// Encodes the number of channel `index` of the array passed as argument `argument`.
fn number(argument: u32, index: u32) -> Outcome<u32> {
    if argument > MAX_ARGUMENT || index > MAX_INDEX {
        return Err(Failure::invalid(
            format!(
                "channel {index} of argument {argument}; expected at most channel {MAX_INDEX} of argument {MAX_ARGUMENT}"
            ),
            "launch the kernel with fewer arguments or channels",
        ));
    }
    Ok(OF_ARRAY | index << ARGUMENT_BITS | argument)
}

/// Runs a call on the channel with this number.
fn on_channel(
    operation: &'static str,
    number: u32,
    call: impl FnOnce(&BlockChannel<'_>) -> warplink::Result<()>,
) -> Status {
    block_entry(operation, || {
        running(|block| Ok(call(&find(block, number)?)?))
    })
}

/// Reads a property of a channel and stores it to the caller's pointer.
///
/// # Safety
/// `place` must be null or valid for a write.
unsafe fn ask<T>(
    operation: &'static str,
    number: u32,
    (place, name): (*mut T, &'static str),
    call: impl FnOnce(&BlockChannel<'_>) -> warplink::Result<T>,
) -> Status {
    block_entry(operation, || {
        pointer::check(place, name)?;
        let found = running(|block| Ok(call(&find(block, number)?)?))?;
        // SAFETY: guaranteed by the caller.
        unsafe { pointer::store(place, name, found) }
    })
}

/// In a host kernel: the number of channels in the array passed as argument `argument` (`warplink_argument_channels`).
/// Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_block_channels(argument: u32, count: *mut u32) -> Status {
    block_entry("count channels", || {
        pointer::check(count, "count")?;
        let found = running(|block| Ok(block.channels(argument as usize)?.len()))?;
        let found = u32::try_from(found).unwrap_or(u32::MAX);
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(count, "count", found) }
    })
}

/// In a host kernel: the number that identifies channel `index` (from 0) of the array passed as argument `argument` in
/// the other calls. It is valid for all blocks of the launch. Returns WARPLINK_STATUS_INVALID_ARGUMENT if the index is
/// out of range. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_block_channel(
    argument: u32,
    index: u32,
    channel: *mut u32,
) -> Status {
    block_entry("get a channel", || {
        pointer::check(channel, "channel")?;
        // Checked here, where the index is at hand, rather than at the first use of the number.
        running(|block| of_array(block, argument, index).map(drop))?;
        let made = number(argument, index)?;
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(channel, "channel", made) }
    })
}

/// In a host kernel: the rank at the other end of a channel. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_block_peer(channel: u32, peer: *mut i32) -> Status {
    // SAFETY: the caller passes null or a pointer valid for a write.
    unsafe {
        ask("get a channel's peer", channel, (peer, "peer"), |channel| {
            Ok(channel.peer().cast_signed())
        })
    }
}

/// In a host kernel: copies `bytes` bytes from `source` in this rank's regions to `target` in the peer's. Does not wait
/// for the copy: the source may be overwritten after a flush, and the peer may read the data after a signal.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_block_put(channel: u32, target: At, source: At, bytes: u64) -> Status {
    on_channel("put", channel, |channel| channel.put(target, source, bytes))
}

/// In a host kernel: copies `bytes` bytes from `source` in the peer's regions to `target` in this rank's. Does not wait
/// for the copy: the data may be read after a flush.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_block_get(channel: u32, target: At, source: At, bytes: u64) -> Status {
    on_channel("get", channel, |channel| channel.get(target, source, bytes))
}

/// In a host kernel: a put followed by a signal. Does not wait for the copy.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_block_put_with_signal(
    channel: u32,
    target: At,
    source: At,
    bytes: u64,
) -> Status {
    on_channel("put with signal", channel, |channel| {
        channel.put_with_signal(target, source, bytes)
    })
}

/// In a host kernel: a put, a signal and a flush. Blocks until the source may be overwritten.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_block_put_with_signal_and_flush(
    channel: u32,
    target: At,
    source: At,
    bytes: u64,
) -> Status {
    on_channel("put with signal and flush", channel, |channel| {
        channel.put_with_signal_and_flush(target, source, bytes)
    })
}

/// In a host kernel: increments the peer's epoch by one, ordered after all earlier operations of the block. Does not
/// wait for the peer.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_block_signal(channel: u32) -> Status {
    on_channel("signal", channel, |channel| channel.signal())
}

/// In a host kernel: blocks until sources of earlier puts on this channel may be overwritten and the data of earlier
/// gets may be read.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_block_flush(channel: u32) -> Status {
    on_channel("flush", channel, |channel| channel.flush())
}

/// In a host kernel: blocks until the peer has sent one signal more than this side has consumed, and consumes it.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_block_wait(channel: u32) -> Status {
    on_channel("wait", channel, |channel| channel.wait())
}

/// In a host kernel: blocks until the peer has signalled `epoch` times in total. Consumes no signal.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_block_wait_until(channel: u32, epoch: u64) -> Status {
    on_channel("wait until an epoch", channel, |channel| {
        channel.wait_until(epoch)
    })
}

/// In a host kernel: the non-blocking form of `warplink_block_wait`. Sets `arrived` to 1 if a signal was consumed, else
/// to 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_block_poll(channel: u32, arrived: *mut i32) -> Status {
    // SAFETY: the caller passes null or a pointer valid for a write.
    unsafe {
        ask("poll", channel, (arrived, "arrived"), |channel| {
            channel.poll().map(i32::from)
        })
    }
}

/// In a host kernel: the total number of signals received from the peer so far. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_block_epoch(channel: u32, epoch: *mut u64) -> Status {
    // SAFETY: the caller passes null or a pointer valid for a write.
    unsafe {
        ask("get the epoch", channel, (epoch, "epoch"), |channel| {
            Ok(channel.epoch())
        })
    }
}

/// In a host kernel: signals on each of `count` channels, then waits for a signal on each. Blocks until all peers have
/// made the matching call. An element of `channels` may also be the number of an argument that is a channel array,
/// which selects all channels of that array. `channels` may be null if `count` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_block_barrier(channels: *const u32, count: usize) -> Status {
    block_entry("barrier", || {
        // SAFETY: the caller passes `count` numbers.
        let numbers = unsafe { pointer::values(channels, count, "channels") }?;
        running(|block| {
            let mut all = Vec::new();
            for number in numbers {
                // Before `find`, which refuses the number of an array: here it means all of its channels.
                match block.channels(*number as usize) {
                    Ok(array) => all.extend(array),
                    Err(_) => all.push(find(block, *number)?),
                }
            }
            Ok(block.barrier(&all)?)
        })
    })
}

/// In a host kernel: puts `bytes` bytes from `source` here to `target` at the peer as packets of 8 bytes, each with 4
/// bytes of data, so the target takes 2 * `bytes`. The flag must differ from the flag stored there before (count up
/// from 1). `bytes` and the source's offset are multiples of 4, the target's offset of 8; otherwise returns
/// WARPLINK_STATUS_INVALID_ARGUMENT. Requires a direct channel and returns WARPLINK_STATUS_UNSUPPORTED on others. Does
/// not wait for the peer.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_block_put_packets8(
    channel: u32,
    target: At,
    source: At,
    bytes: u64,
    flag: u32,
) -> Status {
    on_channel("put packets", channel, |channel| {
        channel.put_packets8(target, source, bytes, flag)
    })
}

/// In a host kernel: unpacks `bytes` bytes that the peer put to `source` here as packets of 8 bytes with the same flag,
/// into `target` here. Blocks until the packets have arrived.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_block_read_packets8(
    channel: u32,
    target: At,
    source: At,
    bytes: u64,
    flag: u32,
) -> Status {
    on_channel("read packets", channel, |channel| {
        channel.read_packets8(target, source, bytes, flag)
    })
}

/// In a host kernel: as `warplink_block_put_packets8`, with packets of 16 bytes, each with 8 bytes of data: the target
/// takes 2 * `bytes`. `bytes` and the source's offset are multiples of 8, the target's offset of 16.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_block_put_packets16(
    channel: u32,
    target: At,
    source: At,
    bytes: u64,
    flag: u32,
) -> Status {
    on_channel("put packets", channel, |channel| {
        channel.put_packets16(target, source, bytes, flag)
    })
}

/// In a host kernel: as `warplink_block_read_packets8`, with packets of 16 bytes.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_block_read_packets16(
    channel: u32,
    target: At,
    source: At,
    bytes: u64,
    flag: u32,
) -> Status {
    on_channel("read packets", channel, |channel| {
        channel.read_packets16(target, source, bytes, flag)
    })
}

/// In a host kernel: as `warplink_block_put_packets8`, with packets of 128 bytes, each with 120 bytes of data: the
/// target takes 128 bytes for every 120 bytes of data or remainder of them. `bytes` and the source's offset are
/// multiples of 8, the target's offset of 128.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_block_put_packets128(
    channel: u32,
    target: At,
    source: At,
    bytes: u64,
    flag: u64,
) -> Status {
    on_channel("put packets", channel, |channel| {
        channel.put_packets128(target, source, bytes, flag)
    })
}

/// In a host kernel: as `warplink_block_read_packets8`, with packets of 128 bytes.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_block_read_packets128(
    channel: u32,
    target: At,
    source: At,
    bytes: u64,
    flag: u64,
) -> Status {
    on_channel("read packets", channel, |channel| {
        channel.read_packets128(target, source, bytes, flag)
    })
}
