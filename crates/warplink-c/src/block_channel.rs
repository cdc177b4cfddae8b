//! The channels of a kernel for the host device: the calls of `warplink::Channel` in `warplink/device.cuh`, made by a
//! whole block.

use crate::block::running;
use crate::pointer;
use crate::status::{Failure, Outcome, Status, block_entry};
use crate::types::At;
use warplink::device::{Block, BlockChannel};

/// Set in the number of a channel that is one of an array. The number of an argument is below it.
const OF_ARRAY: u32 = 1 << 31;

/// Bits of the argument that is the array; the channel's place in it is in those between.
const ARGUMENT_BITS: u32 = 12;

const MAX_ARGUMENT: u32 = (1 << ARGUMENT_BITS) - 1;
const MAX_INDEX: u32 = (OF_ARRAY >> ARGUMENT_BITS) - 1;

/// The channel that a number names: that of an argument, or one of an array.
pub(crate) fn find<'b>(block: &'b Block<'_>, number: u32) -> Outcome<BlockChannel<'b>> {
    if number & OF_ARRAY != 0 {
        let index = (number & !OF_ARRAY) >> ARGUMENT_BITS;
        return of_array(block, number & MAX_ARGUMENT, index);
    }
    if block.channels(number as usize).is_ok() {
        return Err(Failure::invalid(
            format!("argument {number} is an array of channels; expected one channel"),
            "take a channel of it with warplink_block_channel",
        ));
    }
    Ok(block.channel(number as usize)?)
}

/// Channel `index` of the array that is argument `argument`.
fn of_array<'b>(block: &'b Block<'_>, argument: u32, index: u32) -> Outcome<BlockChannel<'b>> {
    let channels = block.channels(argument as usize)?;
    let count = channels.len();
    channels.into_iter().nth(index as usize).ok_or_else(|| {
        Failure::invalid(
            format!("channel {index} of argument {argument}; expected one below {count}"),
            "ask warplink_block_channels how many there are",
        )
    })
}

/// The number of channel `index` of the array that is argument `argument`.
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

/// Makes a call on the channel of this number.
fn on_channel(
    operation: &'static str,
    number: u32,
    call: impl FnOnce(&BlockChannel<'_>) -> warplink::Result<()>,
) -> Status {
    block_entry(operation, || {
        running(|block| Ok(call(&find(block, number)?)?))
    })
}

/// Writes what a channel tells to where the caller wants it.
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
        // SAFETY: as the caller says.
        unsafe { pointer::store(place, name, found) }
    })
}

/// In a host kernel: how many channels the array has that is argument `argument` (`warplink_argument_channels`). Does not
/// block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_block_channels(argument: u32, count: *mut u32) -> Status {
    block_entry("count channels", || {
        pointer::check(count, "count")?;
        let found = running(|block| Ok(block.channels(argument as usize)?.len()))?;
        let found = u32::try_from(found).unwrap_or(u32::MAX);
        // SAFETY: the caller passes a place for a number.
        unsafe { pointer::store(count, "count", found) }
    })
}

/// In a host kernel: the number by which the other calls take channel `index`, from 0 on, of the array that is argument
/// `argument`. It is good for all blocks of the launch. An index that the array does not have is
/// WARPLINK_STATUS_INVALID_ARGUMENT. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_block_channel(
    argument: u32,
    index: u32,
    channel: *mut u32,
) -> Status {
    block_entry("take a channel", || {
        pointer::check(channel, "channel")?;
        running(|block| of_array(block, argument, index).map(drop))?;
        let made = number(argument, index)?;
        // SAFETY: the caller passes a place for a number.
        unsafe { pointer::store(channel, "channel", made) }
    })
}

/// In a host kernel: the rank at the other end of a channel. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_block_peer(channel: u32, peer: *mut i32) -> Status {
    // SAFETY: the caller passes a place for a number.
    unsafe {
        ask("get a channel's peer", channel, (peer, "peer"), |channel| {
            Ok(channel.peer().cast_signed())
        })
    }
}

/// In a host kernel: copies `bytes` bytes from `source` in this rank's regions to `target` in the peer's. Does not wait for
/// the copy: the source may be overwritten after a flush, and the peer may read after a signal.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_block_put(channel: u32, target: At, source: At, bytes: u64) -> Status {
    on_channel("put", channel, |channel| channel.put(target, source, bytes))
}

/// In a host kernel: copies `bytes` bytes from `source` in the peer's regions to `target` in this rank's. Does not wait for
/// the copy: they may be read after a flush.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_block_get(channel: u32, target: At, source: At, bytes: u64) -> Status {
    on_channel("get", channel, |channel| channel.get(target, source, bytes))
}

/// In a host kernel: a put, and a signal after it. Does not wait for the copy.
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

/// In a host kernel: counts up the peer's epoch by one, after everything that the block did before. Does not wait for the
/// peer.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_block_signal(channel: u32) -> Status {
    on_channel("signal", channel, |channel| channel.signal())
}

/// In a host kernel: blocks until what was put on this channel before may be overwritten, and what was got may be read.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_block_flush(channel: u32) -> Status {
    on_channel("flush", channel, |channel| channel.flush())
}

/// In a host kernel: blocks until the peer has signalled once more than was waited for.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_block_wait(channel: u32) -> Status {
    on_channel("wait", channel, |channel| channel.wait())
}

/// In a host kernel: blocks until the peer has signalled `epoch` times in all. Uses up no signal.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_block_wait_until(channel: u32, epoch: u64) -> Status {
    on_channel("wait until an epoch", channel, |channel| {
        channel.wait_until(epoch)
    })
}

/// In a host kernel: as `warplink_block_wait`, where that would not block. Whether there was a signal to use up goes to
/// `arrived`, as 0 or 1.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_block_poll(channel: u32, arrived: *mut i32) -> Status {
    // SAFETY: the caller passes a place for a number.
    unsafe {
        ask("poll", channel, (arrived, "arrived"), |channel| {
            channel.poll().map(i32::from)
        })
    }
}

/// In a host kernel: how often the peer has signalled so far, in all. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_block_epoch(channel: u32, epoch: *mut u64) -> Status {
    // SAFETY: the caller passes a place for a number.
    unsafe {
        ask("get the epoch", channel, (epoch, "epoch"), |channel| {
            Ok(channel.epoch())
        })
    }
}

/// In a host kernel: signals on each of `count` channels, then waits for a signal on each. Blocks until all peers have made
/// the call with their channels. A number among `channels` may also be that of an argument that is an array, which stands
/// for all channels in it. Null is allowed for none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_block_barrier(channels: *const u32, count: usize) -> Status {
    block_entry("barrier", || {
        // SAFETY: the caller passes `count` numbers.
        let numbers = unsafe { pointer::values(channels, count, "channels") }?;
        running(|block| {
            let mut all = Vec::new();
            for number in numbers {
                match block.channels(*number as usize) {
                    Ok(array) => all.extend(array),
                    Err(_) => all.push(find(block, *number)?),
                }
            }
            Ok(block.barrier(&all)?)
        })
    })
}

/// In a host kernel: puts `bytes` bytes from `source` here to `target` at the peer as packets of 8 bytes, of which 4 are
/// data: they take 2 * `bytes` there. The flag differs from what was in that place before (count up, from 1). `bytes` and
/// the source's offset are multiples of 4, the target's of 8; others are WARPLINK_STATUS_INVALID_ARGUMENT. Needs a direct
/// channel, and is WARPLINK_STATUS_UNSUPPORTED on others. Does not wait for the peer.
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

/// In a host kernel: reads `bytes` bytes that the peer put to `source` here as packets of 8 bytes with the same flag, to
/// `target` here. Blocks until they have come.
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

/// In a host kernel: as `warplink_block_put_packets8`, as packets of 16 bytes, of which 8 are data: they take 2 * `bytes`.
/// `bytes` and the source's offset are multiples of 8, the target's of 16.
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

/// In a host kernel: as `warplink_block_read_packets8`, of packets of 16 bytes.
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

/// In a host kernel: as `warplink_block_put_packets8`, as packets of 128 bytes, of which 120 are data: they take 128 bytes
/// for every 120, and for what is left. `bytes` and the source's offset are multiples of 8, the target's of 128.
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

/// In a host kernel: as `warplink_block_read_packets8`, of packets of 128 bytes.
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
