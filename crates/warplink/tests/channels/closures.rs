//! The kernels of the channel tests for the host device; those of CUDA C++ are in kernels.cu.

use super::kernels::{Body, contents};
use warplink::device::{At, Block, BlockChannel, DeviceSlice};
use warplink::{Error, ErrorKind, Result};

/// Every kernel: its name, and its body on the host device.
pub(crate) const KERNELS: [(&str, Body); 20] = [
    ("pass_on", pass_on),
    ("ping_pong", ping_pong),
    ("wait_by", wait_by),
    ("wait_once", |block| block.channel(0)?.wait()),
    ("signal_on", |block| {
        loop {
            block.channel(0)?.signal()?;
        }
    }),
    ("signal_and_wait", |block| {
        block.channel(0)?.signal()?;
        block.channel(0)?.wait()
    }),
    ("all_pairs", all_pairs),
    ("odd_pieces", odd_pieces),
    ("flushed_slots", flushed_slots),
    ("many_puts", many_puts),
    ("many_signals", |block| {
        let channel = block.channel(0)?;
        (0..block.u32(1)?).try_for_each(|_| channel.signal())?;
        channel.flush()
    }),
    ("wait_for", |block| {
        block.channel(0)?.wait_until(block.u64(1)?)
    }),
    ("poll_for", poll_for),
    ("packets", packets),
    ("barriers", barriers),
    ("get_region", get_region),
    ("out_of_range", out_of_range),
    ("put_when_added", put_when_added),
    ("misplaced_packets", misplaced_packets),
    ("put_half", |block| {
        let (channel, bytes) = (block.channel(0)?, block.u64(1)?);
        channel.put_with_signal_and_flush(bytes, 0, bytes)?;
        channel.wait()
    }),
];

/// Stores what is sent in `round` to the own region, from `at` on.
fn fill(
    block: &Block<'_>,
    channel: &BlockChannel<'_>,
    at: u64,
    bytes: u64,
    round: u32,
) -> Result<()> {
    block.write(&channel.here(at, bytes)?, &contents(round, bytes as usize))
}

/// Notes in `result` how many words of the own region, from `at` on, differ from what is sent in `round`.
fn check(
    block: &Block<'_>,
    channel: &BlockChannel<'_>,
    at: u64,
    bytes: u64,
    round: u32,
    result: &DeviceSlice,
) -> Result<()> {
    let mut found = vec![0; bytes as usize];
    block.read(&channel.here(at, bytes)?, &mut found)?;
    let expected = contents(round, found.len());
    let pairs = found.chunks_exact(4).zip(expected.chunks_exact(4));
    note(block, result, pairs.filter(|(a, b)| a != b).count())
}

/// Adds to the number of what is wrong.
pub(crate) fn note(block: &Block<'_>, result: &DeviceSlice, wrong: usize) -> Result<()> {
    if wrong == 0 {
        return Ok(());
    }
    // Blocks may do this at the same time: that something is wrong is enough.
    block.write(&result.slice(0..4)?, &(wrong as u32).to_ne_bytes())
}

fn ping_pong(block: &Block<'_>) -> Result<()> {
    let channels = block.channels(0)?;
    let channel = &channels[block.index() as usize];
    let (bytes, rank, rounds) = (block.u64(1)?, block.u32(2)?, block.u32(3)?);
    let result = block.slice(4)?;
    let first = rank < channel.peer();
    let start = 1_000_003_u32.wrapping_mul(channel.tag() as u32);
    let number = |index: u32| start.wrapping_add(index);
    for round in 0..rounds {
        if first {
            fill(block, channel, 0, bytes, number(2 * round))?;
            channel.put_with_signal(bytes, 0, bytes)?;
        }
        channel.wait()?;
        check(
            block,
            channel,
            bytes,
            bytes,
            number(2 * round + u32::from(first)),
            result,
        )?;
        if !first {
            fill(block, channel, 0, bytes, number(2 * round + 1))?;
            channel.put_with_signal(bytes, 0, bytes)?;
        }
    }
    channel.flush()
}

fn wait_by(block: &Block<'_>) -> Result<()> {
    let (channel, signals) = (block.channel(0)?, block.signals(1)?);
    let until = |poll: &dyn Fn() -> Result<bool>| {
        while !poll()? {
            std::thread::yield_now();
        }
        Ok(())
    };
    match block.u32(2)? {
        0 => channel.wait(),
        1 => channel.wait_until(3),
        2 => until(&|| channel.poll()),
        3 => block.barrier(&[block.channel(0)?]),
        4 => signals.wait(1),
        5 => signals.wait_until(1, 3),
        6 => until(&|| signals.poll(1)),
        7 => channel.read_packets8(0, 256, 128, 1),
        8 => channel.read_packets16(0, 256, 128, 1),
        9 => channel.read_packets128(0, 256, 120, 1),
        _ => loop {
            channel.signal()?;
        },
    }?;
    note(block, block.slice(3)?, 1)
}

fn all_pairs(block: &Block<'_>) -> Result<()> {
    let channels = block.channels(0)?;
    let channel = &channels[block.index() as usize];
    let (rank, world, bytes) = (block.u32(1)?, block.u32(2)?, block.u64(3)?);
    let (rounds, result) = (block.u32(4)?, block.slice(5)?);
    let peer = channel.peer();
    let (own, at_peer) = (u64::from(peer) * bytes, u64::from(world + rank) * bytes);
    let arrived = u64::from(world + peer) * bytes;
    for round in 0..rounds {
        fill(
            block,
            channel,
            own,
            bytes,
            (round * world + rank) * world + peer,
        )?;
        channel.put_with_signal(at_peer, own, bytes)?;
        channel.wait()?;
        let expected = (round * world + peer) * world + rank;
        check(block, channel, arrived, bytes, expected, result)?;
        channel.signal()?;
        channel.wait()?;
    }
    Ok(())
}

fn odd_pieces(block: &Block<'_>) -> Result<()> {
    let channel = block.channel(0)?;
    let (half, pieces) = (block.u64(1)?, block.u32(2)?);
    for i in (block.index()..pieces).step_by(block.blocks() as usize) {
        let i = u64::from(i);
        channel.put(half + 97 * i, 97 * i + i % 5, 61 + i % 31)?;
    }
    channel.signal()?;
    if block.index() == 0 {
        for _ in 0..block.blocks() {
            channel.wait()?;
        }
    }
    channel.flush()
}

fn flushed_slots(block: &Block<'_>) -> Result<()> {
    let channel = block.channel(0)?;
    let (bytes, slots, result) = (block.u64(1)?, block.u32(2)?, block.slice(3)?);
    let place = |slot: u32| u64::from(1 + slot) * bytes;
    for slot in 0..slots {
        fill(block, &channel, 0, bytes, slot)?;
        if slot % 2 == 0 {
            channel.put(place(slot), 0, bytes)?;
            channel.flush()?;
        } else {
            channel.put_with_signal_and_flush(place(slot), 0, bytes)?;
        }
    }
    channel.signal()?;
    for _ in 0..slots / 2 + 1 {
        channel.wait()?;
    }
    (0..slots).try_for_each(|slot| check(block, &channel, place(slot), bytes, slot, result))
}

fn many_puts(block: &Block<'_>) -> Result<()> {
    let (channel, each) = (block.channel(0)?, block.u32(1)?);
    let from = u64::from(block.index()) * u64::from(each);
    (from..from + u64::from(each)).try_for_each(|i| channel.put_with_signal(8 * i, 8 * i, 8))
}

fn poll_for(block: &Block<'_>) -> Result<()> {
    let (channel, count) = (block.channel(0)?, block.u32(1)?);
    let mut found = 0;
    while found < count {
        found += u32::from(channel.poll()?);
        std::thread::yield_now();
    }
    Ok(())
}

fn packets(block: &Block<'_>) -> Result<()> {
    let channel = block.channel(0)?;
    let (bytes, rounds, kind) = (block.u64(1)?, block.u32(2)?, block.u32(3)?);
    let result = block.slice(4)?;
    let part = bytes.next_multiple_of(128);
    let packed = 3 * part + 256;
    for round in 0..rounds {
        let at = 2 * part + u64::from(round % 2) * packed;
        fill(block, &channel, 0, bytes, round)?;
        let flag = round + 1;
        let long = u64::from(flag) << 32 | u64::from(flag);
        match if kind == 3 { round % 3 } else { kind } {
            0 => {
                channel.put_packets8(at, 0, bytes, flag)?;
                channel.read_packets8(part, at, bytes, flag)?;
            }
            1 => {
                channel.put_packets16(at, 0, bytes, flag)?;
                channel.read_packets16(part, at, bytes, flag)?;
            }
            _ => {
                channel.put_packets128(at, 0, bytes, long)?;
                channel.read_packets128(part, at, bytes, long)?;
            }
        }
        check(block, &channel, part, bytes, round, result)?;
        channel.signal()?;
        channel.wait()?;
    }
    Ok(())
}

fn barriers(block: &Block<'_>) -> Result<()> {
    let channels = block.channels(0)?;
    let (rank, rounds, result) = (block.u32(2)?, block.u32(3)?, block.slice(4)?);
    for round in 0..rounds {
        let value = u64::from(round + 1).to_ne_bytes();
        for channel in &channels {
            block.write(&channel.here(0, 8)?, &value)?;
            channel.put(8 + 8 * u64::from(rank), 0, 8)?;
        }
        block.barrier(&channels)?;
        for channel in &channels {
            let mut found = [0; 8];
            block.read(
                &channel.here(8 + 8 * u64::from(channel.peer()), 8)?,
                &mut found,
            )?;
            note(block, result, usize::from(found != value))?;
        }
        block.barrier(&channels)?;
    }
    Ok(())
}

fn get_region(block: &Block<'_>) -> Result<()> {
    let channel = block.channel(0)?;
    let (region, bytes) = (block.u32(1)?, block.u64(2)?);
    channel.signal()?;
    channel.wait()?;
    channel.get(0, (region, bytes), bytes)?;
    channel.flush()?;
    channel.put_with_signal((region, 0), 0, bytes)?;
    channel.wait()
}

fn out_of_range(block: &Block<'_>) -> Result<()> {
    let channel = block.channel(0)?;
    let (bytes, result) = (block.u64(1)?, block.slice(2)?);
    let attempts: [Result<(), Error>; 6] = [
        channel.put(1, 0, bytes),
        channel.put(0, bytes + 1, 0),
        channel.put(u64::MAX, 0, 8),
        channel.get(0, 8, u64::MAX),
        channel.put(At::from((1, 0)), 0, 8),
        channel.put_with_signal((99, 0), 0, 8),
    ];
    note(
        block,
        result,
        attempts.iter().filter(|made| made.is_ok()).count(),
    )
}

fn put_when_added(block: &Block<'_>) -> Result<()> {
    let (channel, bytes) = (block.channel(0)?, block.u64(1)?);
    loop {
        match channel.put((1, 0), 0, bytes) {
            Ok(()) => break,
            Err(error) if error.kind() == ErrorKind::InvalidArgument => std::thread::yield_now(),
            Err(error) => return Err(error),
        }
    }
    channel.flush()?;
    channel.signal()
}

fn misplaced_packets(block: &Block<'_>) -> Result<()> {
    let channel = block.channel(0)?;
    let (bytes, result) = (block.u64(1)?, block.slice(2)?);
    let attempts: [Result<(), Error>; 11] = [
        channel.put_packets8(4, 0, 8, 1),
        channel.put_packets8(0, 2, 8, 1),
        channel.put_packets16(8, 0, 8, 1),
        channel.put_packets16(0, 0, 12, 1),
        channel.put_packets128(64, 0, 120, 1),
        channel.read_packets128(0, 64, 120, 1),
        channel.put_packets8(0, 0, bytes / 2 + 4, 1),
        channel.put_packets16(16, 0, bytes / 2, 1),
        channel.put_packets128(0, 0, bytes, 1),
        channel.read_packets8(0, bytes, 8, 1),
        channel.read_packets16(bytes, 0, 8, 1),
    ];
    let refused = |made: &&Result<(), Error>| match made {
        Ok(()) => false,
        Err(error) => error.kind() == ErrorKind::InvalidArgument,
    };
    let wrong = attempts.len() - attempts.iter().filter(refused).count();
    note(block, result, wrong)
}

fn pass_on(block: &Block<'_>) -> Result<()> {
    let (own, right) = (block.signals(0)?, block.signals(1)?);
    let (rank, rounds) = (block.u32(2)?, block.u32(3)?);
    for round in 0..rounds {
        let number = round as usize % 3;
        if rank == 0 {
            right.add(number)?;
        }
        if round % 2 == 0 {
            own.wait(number)?;
        } else {
            while !own.poll(number)? {
                std::thread::yield_now();
            }
        }
        if rank != 0 {
            right.add(number)?;
        }
    }
    own.wait_until(0, own.epoch(0)?)
}
