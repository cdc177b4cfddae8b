//! The kernels of groups.cu for the host device: a block of the launch is a group, or a part of the grid.

use super::closures::note;
use super::groups::{Piece, READ_BY_PEER, SPOILT, data};
use super::kernels::Body;
use warplink::device::{Block, BlockChannel, DeviceSlice};
use warplink::{ErrorKind, Result};

/// Every kernel: its name, and its body on the host device.
pub(crate) const KERNELS: [(&str, Body); 8] = [
    ("pieces_by_threads", pieces),
    ("pieces_by_warps", pieces),
    ("pieces_by_blocks", pieces),
    ("pieces_by_grid", pieces_by_grid),
    ("packets_by_warps", packets),
    ("packets_by_grid", packets_by_grid),
    ("barriers_by_warps", barriers),
    ("unsupported_calls", unsupported),
];

/// Arguments of all kernels except those of barriers.
struct KernelArguments<'a> {
    block: &'a Block<'a>,
    channel: BlockChannel<'a>,
    slot: u64,
    rounds: u64,
    variant: u64,
    rank: u64,
    before: u64,
    result: &'a DeviceSlice,
}

impl<'a> KernelArguments<'a> {
    fn new(block: &'a Block<'a>) -> Result<Self> {
        Ok(Self {
            block,
            channel: block.channel(0)?,
            slot: block.u64(1)?,
            rounds: block.u64(2)?,
            variant: block.u64(3)?,
            rank: block.u64(4)?,
            before: block.u64(5)?,
            result: block.slice(6)?,
        })
    }

    fn own_seed(&self) -> u64 {
        2 * self.variant + self.rank
    }

    fn peers_seed(&self) -> u64 {
        2 * self.variant + 1 - self.rank
    }

    fn piece(&self, at: u64) -> Piece {
        Piece::new(at, self.variant, self.slot)
    }

    /// Checks a piece of the peer's that lies here.
    fn check(&self, place: u64, bytes: u64, piece: u64) -> Result<()> {
        let mut found = vec![0; bytes as usize];
        self.block
            .read(&self.channel.here(place, bytes)?, &mut found)?;
        let expected = data(self.peers_seed(), piece, bytes);
        let wrong = found.iter().zip(&expected).filter(|(a, b)| a != b);
        note(self.block, self.result, wrong.count())
    }

    /// The part of `bytes`, a multiple of `unit` but at the end, that is this block's where all of them do it together.
    fn share(&self, bytes: u64, unit: u64) -> (u64, u64) {
        let blocks = u64::from(self.block.blocks());
        let each = bytes.div_ceil(unit).div_ceil(blocks) * unit;
        let from = (each * u64::from(self.block.index())).min(bytes);
        (from, each.min(bytes - from))
    }
}

fn pieces(block: &Block<'_>) -> Result<()> {
    let given = KernelArguments::new(block)?;
    let channel = &given.channel;
    let (groups, number) = (u64::from(block.blocks()), u64::from(block.index()));
    let area = given.slot * groups * given.rounds;
    for round in 0..given.rounds {
        let at = round * groups + number;
        let piece = given.piece(at);
        let (target, source, bytes) = (area + piece.target, piece.source, piece.bytes);
        let place = channel.here(source, bytes)?;
        block.write(&place, &data(given.own_seed(), at, bytes))?;
        match (round + number) % 3 {
            0 => {
                channel.put(target, source, bytes)?;
                channel.signal()?;
            }
            1 => {
                channel.put_with_signal(target, source, bytes)?;
                channel.flush()?;
            }
            _ => channel.put_with_signal_and_flush(target, source, bytes)?,
        }
        if (round + number) % 3 != 0 {
            block.write(&place, &vec![SPOILT; bytes as usize])?;
        }
        if round % 2 == 0 {
            channel.wait()?;
        } else {
            while !channel.poll()? {
                std::thread::yield_now();
            }
        }
    }
    channel.wait_until(given.before + groups * given.rounds)?;
    for round in 0..given.rounds {
        let at = round * groups + (number + 1) % groups;
        let piece = given.piece(at);
        given.check(area + piece.target, piece.bytes, at)?;
    }
    let own = |round: u64| {
        (
            round * groups + number,
            given.piece(round * groups + number),
        )
    };
    for (_, piece) in (0..given.rounds).map(own) {
        channel.get(
            3 * area + piece.target,
            2 * area + piece.source,
            piece.bytes,
        )?;
    }
    channel.flush()?;
    for (at, piece) in (0..given.rounds).map(own) {
        given.check(3 * area + piece.target, piece.bytes, at | READ_BY_PEER)?;
    }
    Ok(())
}

fn pieces_by_grid(block: &Block<'_>) -> Result<()> {
    let given = KernelArguments::new(block)?;
    let (channel, area) = (&given.channel, given.slot * given.rounds);
    for at in 0..given.rounds {
        let piece = given.piece(at);
        let (from, bytes) = given.share(piece.bytes, 1);
        let (target, source) = (piece.target + from, piece.source + from);
        channel.put(area + target, source, bytes)?;
        channel.get(3 * area + target, 2 * area + source, bytes)?;
        channel.signal()?;
    }
    channel.wait_until(given.before + u64::from(block.blocks()) * given.rounds)?;
    (0..given.rounds).try_for_each(|at| {
        let piece = given.piece(at);
        given.check(area + piece.target, piece.bytes, at)
    })
}

/// Puts a part of the packets of a round to where the peer reads them, and reads those of the peer's.
fn exchange(
    given: &KernelArguments<'_>,
    piece: Piece,
    [round, at, groups]: [u64; 3],
    (from, bytes): (u64, u64),
) -> Result<()> {
    let (channel, kind) = (&given.channel, round % 3);
    let area = given.slot * groups * given.rounds;
    let number = at % groups;
    let place = number * 6 + kind * 2 + round / 3 % 2;
    let packed = 2 * area + place * (2 * given.slot + 128) + at % 2 * [8, 16, 128][kind as usize];
    let (target, source) = (area + piece.target + from, piece.source + from);
    let flag = (given.variant * given.rounds + round + 1) as u32;
    let long = u64::from(flag) << 32 | u64::from(flag);
    match kind {
        0 => {
            channel.put_packets8(packed + 2 * from, source, bytes, flag)?;
            channel.read_packets8(target, packed + 2 * from, bytes, flag)
        }
        1 => {
            channel.put_packets16(packed + 2 * from, source, bytes, flag)?;
            channel.read_packets16(target, packed + 2 * from, bytes, flag)
        }
        _ => {
            let lines = packed + from / 120 * 128;
            channel.put_packets128(lines, source, bytes, long)?;
            channel.read_packets128(target, lines, bytes, long)
        }
    }
}

fn packets(block: &Block<'_>) -> Result<()> {
    let given = KernelArguments::new(block)?;
    let (groups, number) = (u64::from(block.blocks()), u64::from(block.index()));
    let area = given.slot * groups * given.rounds;
    for round in 0..given.rounds {
        let at = round * groups + number;
        let piece = Piece::of_packets(at, given.variant, given.slot, round % 3, 0);
        exchange(&given, piece, [round, at, groups], (0, piece.bytes))?;
        given.check(area + piece.target, piece.bytes, at)?;
    }
    Ok(())
}

fn packets_by_grid(block: &Block<'_>) -> Result<()> {
    let given = KernelArguments::new(block)?;
    for round in 0..given.rounds {
        let (kind, least) = (round % 3, given.slot / 2);
        let piece = Piece::of_packets(round, given.variant, given.slot, kind, least);
        let share = given.share(piece.bytes, [4, 8, 120][kind as usize]);
        exchange(&given, piece, [round, round, 1], share)?;
        given.channel.signal()?;
        let blocks = u64::from(block.blocks());
        given
            .channel
            .wait_until(given.before + blocks * (round + 1))?;
    }
    Ok(())
}

fn barriers(block: &Block<'_>) -> Result<()> {
    let channels = block.channels(0)?;
    let (count, number) = (block.u64(1)? as usize, block.index() as usize);
    let (rank, rounds, result) = (block.u64(2)?, block.u64(3)?, block.slice(4)?);
    let own = &channels[number * count..(number + 1) * count];
    for round in 0..rounds {
        let value = ((round + 1) << 8 | number as u64).to_ne_bytes();
        for channel in own {
            block.write(&channel.here(0, 8)?, &value)?;
            channel.put(8 + 8 * rank, 0, 8)?;
        }
        block.barrier(own)?;
        for channel in own {
            let mut found = [0; 8];
            let place = channel.here(8 + 8 * u64::from(channel.peer()), 8)?;
            block.read(&place, &mut found)?;
            note(block, result, usize::from(found != value))?;
        }
        block.barrier(own)?;
    }
    Ok(())
}

/// Groups are the GPU's; of a proxied channel, packets are what it does not do.
fn unsupported(block: &Block<'_>) -> Result<()> {
    let (channel, result) = (block.channel(0)?, block.slice(1)?);
    let made = [
        channel.put_packets8(0, 0, 8, 1),
        channel.put_packets16(0, 0, 8, 1),
        channel.put_packets128(0, 0, 8, 1),
    ];
    let refused = made.iter().filter(|made| {
        let refusal = made.as_ref().err();
        refusal.is_some_and(|error| error.kind() == ErrorKind::Unsupported)
    });
    note(block, result, made.len() - refused.count())
}
