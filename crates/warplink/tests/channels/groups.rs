//! Groups of threads that use one channel at the same time: threads, warps, blocks and a whole grid.

use super::common::{Ranks, kind, processes, world};
use super::data::rounds;
use super::group_closures;
use super::kernels::{Fixture, Kernels, TRANSPORTS};
use std::ops::Range;
use std::time::Duration;
use warplink::channel::{ConnectionRequest, Transport};
use warplink::device::{Argument, Launch, ModuleSource};
use warplink::{Communicator, DeviceKind};

/// Content of a region without puts.
const GUARD: u8 = 0xa5;

/// Stored by a group to a source that it may reuse. This and the next must match groups.cu.
pub(crate) const SPOILT: u8 = 0x5a;

/// Set in the numbers of pieces that the peer gets.
pub(crate) const READ_BY_PEER: u64 = 1 << 16;

/// Rounds of a launch: each kind of packets comes to each of its two places more than once.
const ROUNDS: u64 = 14;

/// Bytes `0..bytes` of piece `piece` of what is sent with `seed`; must match the CUDA kernels.
pub(crate) fn data(seed: u64, piece: u64, bytes: u64) -> Vec<u8> {
    let start = (seed as u32)
        .wrapping_mul(2_654_435_761)
        .wrapping_add((piece as u32).wrapping_mul(2_246_822_519));
    let byte = |i: u32| {
        let x = start.wrapping_add(i.wrapping_mul(3_266_489_917));
        ((x ^ x >> 15).wrapping_mul(2_654_435_761) >> 24) as u8
    };
    (0..bytes as u32).map(byte).collect()
}

/// How many of a piece's units there are, fewer than `most`.
fn length(at: u64, variant: u64, most: u64) -> u64 {
    1 + (at * 30_011 + variant * 7_919 + 12_345) % most
}

/// Where a piece lies in the areas that it is sent from and arrives in; must match the CUDA kernels.
#[derive(Clone, Copy)]
pub(crate) struct Piece {
    pub(crate) target: u64,
    pub(crate) source: u64,
    pub(crate) bytes: u64,
}

impl Piece {
    pub(crate) fn new(at: u64, variant: u64, slot: u64) -> Self {
        let (first, second) = match at % 3 {
            0 => ((5 * at + variant) % 16, (5 * at + variant) % 16),
            1 => ((7 * at + 1) % 16, (3 * at + variant) % 16),
            _ => (4 * (at % 4), 4 * ((at / 4 + 1) % 4)),
        };
        Self {
            target: at * slot + 16 + first,
            source: at * slot + 16 + second,
            bytes: length(at, variant, slot - 64),
        }
    }

    /// The same for what is sent as packets of a kind, of more than `least` bytes.
    pub(crate) fn of_packets(at: u64, variant: u64, slot: u64, kind: u64, least: u64) -> Self {
        let unit = if kind == 0 { 4 } else { 8 };
        Self {
            target: at * slot + unit * (1 + (at + variant) % 7),
            source: at * slot + unit * (1 + at % 5),
            bytes: least + unit * length(at, variant, (slot - least) / unit - 16),
        }
    }
}

/// A kernel that a number of groups run. On a GPU they are parts of blocks; on the host device, blocks.
struct Groups {
    kernel: &'static str,
    blocks: u32,
    threads: u32,
    /// Threads of a group; none for the whole grid.
    size: Option<u32>,
    /// Bytes for each piece.
    slot: u64,
}

impl Groups {
    const fn new(
        kernel: &'static str,
        blocks: u32,
        threads: u32,
        size: Option<u32>,
        slot: u64,
    ) -> Self {
        Self {
            kernel,
            blocks,
            threads,
            size,
            slot,
        }
    }

    fn count(&self) -> u64 {
        let threads = self.blocks * self.threads;
        u64::from(self.size.map_or(1, |size| threads / size))
    }

    /// Lower bound of the bytes of packets.
    fn least(&self) -> u64 {
        self.size.map_or(self.slot / 2, |_| 0)
    }

    /// Signals of a rank in a launch.
    fn signals(&self) -> u64 {
        let each_round = self.size.map_or(u64::from(self.blocks), |_| self.count());
        each_round * ROUNDS
    }

    fn launch(&self) -> Launch {
        match (kind(), self.size) {
            (DeviceKind::Host, Some(_)) => Launch::new(self.count() as u32, 1),
            _ => Launch::new(self.blocks, self.threads),
        }
    }
}

/// Actual or expected contents of a region: guards except for puts.
struct Contents {
    bytes: Vec<u8>,
    /// Where anything may be.
    unknown: Vec<Range<usize>>,
}

impl Contents {
    fn guards(bytes: u64) -> Self {
        Self {
            bytes: vec![GUARD; bytes as usize],
            unknown: Vec::new(),
        }
    }

    fn put(&mut self, at: u64, bytes: &[u8]) {
        self.bytes[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    }

    /// Fails where `found` is something else.
    fn assert_are(&self, mut found: Vec<u8>, what: &str) {
        for range in &self.unknown {
            found[range.clone()].copy_from_slice(&self.bytes[range.clone()]);
        }
        assert_eq!(found.len(), self.bytes.len());
        let differs = found.iter().zip(&self.bytes).position(|(a, b)| a != b);
        assert_eq!(differs, None, "{what}: the first wrong byte");
    }
}

/// A rank with the kernels of groups.
struct Stage<'a> {
    fixture: Fixture<'a>,
    kernels: Kernels,
}

impl<'a> Stage<'a> {
    fn new(comm: &'a Communicator) -> Self {
        let fixture = Fixture::new(comm);
        let source = ModuleSource::new("groups.cu").with_cuda(include_str!("groups.cu"));
        let kernels = Kernels::load_from(comm.device(), source, &group_closures::KERNELS);
        comm.barrier().unwrap();
        Self { fixture, kernels }
    }

    fn run(&self, name: &str, launch: &Launch, arguments: &[Argument]) {
        let mut arguments = arguments.to_vec();
        arguments.push(self.fixture.outcome.argument());
        let kernel = self.kernels.get(name);
        kernel
            .launch(&self.fixture.stream, launch, &arguments)
            .unwrap();
        self.fixture.finish();
    }

    /// Runs a kernel again and again, on new data each time: `contents` tells what a region holds before and after, for
    /// the number of the launch and the seeds of this rank's data and of the peer's.
    fn check(
        &self,
        transport: Transport,
        groups: &Groups,
        contents: impl Fn(u64, [u64; 2]) -> [Contents; 2],
    ) {
        let (comm, rank) = (self.fixture.comm, u64::from(self.fixture.rank()));
        let bytes = contents(0, [0, 0])[0].bytes.len();
        let connection = self.fixture.pair(transport, bytes);
        let region = connection.region(0).unwrap();
        for variant in 0..u64::from(rounds(100, 3)) {
            let [before, after] = contents(variant, [2 * variant + rank, 2 * variant + 1 - rank]);
            region.upload(&before.bytes).unwrap();
            comm.barrier().unwrap();
            let arguments = [
                connection.channel(),
                Argument::U64(groups.slot),
                Argument::U32(ROUNDS as u32),
                Argument::U32(variant as u32),
                Argument::U32(self.fixture.rank()),
                Argument::U64(variant * groups.signals()),
            ];
            self.run(groups.kernel, &groups.launch(), &arguments);
            // Until its kernel is over, the peer may get what lies here.
            comm.barrier().unwrap();
            let what = format!("{}, {transport}, launch {variant}", groups.kernel);
            after.assert_are(region.download().unwrap(), &what);
        }
    }

    fn check_pieces(&self, transport: Transport, groups: &Groups) {
        let count = groups.count();
        let area = groups.slot * count * ROUNDS;
        self.check(transport, groups, |variant, [own, peers]| {
            let (mut before, mut after) = (Contents::guards(4 * area), Contents::guards(4 * area));
            for at in 0..count * ROUNDS {
                let piece = Piece::new(at, variant, groups.slot);
                let bytes = piece.bytes;
                let source = data(own, at, bytes);
                // A group stores it, and something else when that may be; for a grid, the host does.
                if groups.size.is_none() {
                    before.put(piece.source, &source);
                    after.put(piece.source, &source);
                } else if (at / count + at % count).is_multiple_of(3) {
                    after.put(piece.source, &source);
                } else {
                    after.put(piece.source, &vec![SPOILT; bytes as usize]);
                }
                after.put(area + piece.target, &data(peers, at, bytes));
                let read = at | READ_BY_PEER;
                before.put(2 * area + piece.source, &data(own, read, bytes));
                after.put(2 * area + piece.source, &data(own, read, bytes));
                after.put(3 * area + piece.target, &data(peers, read, bytes));
            }
            [before, after]
        });
    }

    fn check_packets(&self, groups: &Groups) {
        let count = groups.count();
        let (area, room) = (groups.slot * count * ROUNDS, 2 * groups.slot + 128);
        self.check(Transport::Direct, groups, |variant, [own, peers]| {
            let [mut before, mut after] =
                [(); 2].map(|()| Contents::guards(2 * area + 6 * count * room));
            for at in 0..count * ROUNDS {
                let (round, number) = (at / count, at % count);
                let kind = round % 3;
                let piece = Piece::of_packets(at, variant, groups.slot, kind, groups.least());
                for contents in [&mut before, &mut after] {
                    contents.put(piece.source, &data(own, at, piece.bytes));
                }
                after.put(area + piece.target, &data(peers, at, piece.bytes));
                let (packet, packed) = match kind {
                    0 => (8, 2 * piece.bytes),
                    1 => (16, 2 * piece.bytes),
                    _ => (128, 128 * piece.bytes.div_ceil(120)),
                };
                let place = number * 6 + kind * 2 + round / 3 % 2;
                let start = 2 * area + place * room + at % 2 * packet;
                after
                    .unknown
                    .push(start as usize..(start + packed) as usize);
            }
            [before, after]
        });
    }
}

#[test]
fn warps_of_two_blocks_put_and_get_on_one_channel() {
    pieces(&Groups::new("pieces_by_warps", 2, 224, Some(32), 4096));
}

#[test]
fn threads_of_a_warp_put_and_get_on_one_channel() {
    pieces(&Groups::new("pieces_by_threads", 1, 11, Some(1), 512));
}

/// Of a number of threads that is no multiple of a warp's.
#[test]
fn blocks_put_and_get_on_one_channel() {
    pieces(&Groups::new("pieces_by_blocks", 5, 75, Some(75), 8192));
}

#[test]
fn a_grid_puts_and_gets() {
    pieces(&Groups::new("pieces_by_grid", 5, 75, None, 1 << 16));
}

/// Puts and gets pieces, on channels that serve such groups.
fn pieces(groups: &Groups) {
    processes(world(2), |comm| {
        let stage = Stage::new(comm);
        for transport in TRANSPORTS {
            // A grid uses direct channels only.
            if groups.size.is_some() || transport == Transport::Direct {
                stage.check_pieces(transport, groups);
            }
        }
    });
}

#[test]
fn warps_of_two_blocks_exchange_packets_on_one_channel() {
    packets(&Groups::new("packets_by_warps", 2, 224, Some(32), 2048));
}

#[test]
fn a_grid_exchanges_packets() {
    packets(&Groups::new("packets_by_grid", 3, 96, None, 1 << 15));
}

/// Exchanges packets.
fn packets(groups: &Groups) {
    processes(world(2), |comm| Stage::new(comm).check_packets(groups));
}

/// Every warp on channels of its own, over all peers.
#[test]
fn warps_make_barriers_at_the_same_time() {
    let ranks = Ranks {
        delay: Some(Duration::from_micros(200)),
        ..Ranks::of(world(8))
    };
    ranks.run(|comm| {
        const WARPS: u32 = 3;
        let stage = Stage::new(comm);
        let peers = || (0..comm.world()).filter(|peer| *peer != comm.rank());
        for transport in TRANSPORTS {
            // Those of a warp follow one another.
            let tags = (0..u64::from(WARPS)).flat_map(|tag| peers().map(move |peer| (peer, tag)));
            let requests: Vec<_> = tags
                .map(|(peer, tag)| {
                    let region = comm.alloc(8 * (1 + comm.world())).unwrap();
                    ConnectionRequest::new(peer, tag, &region).with_transport(transport)
                })
                .collect();
            let connections = comm.connect(&requests).unwrap();
            let arguments = [
                connections.channels().unwrap(),
                Argument::U32(peers().count() as u32),
                Argument::U32(stage.fixture.rank()),
                Argument::U32(rounds(1_000, 5)),
            ];
            let launch = match kind() {
                DeviceKind::Host => Launch::new(WARPS, 1),
                DeviceKind::Cuda => Launch::new(1, 32 * WARPS),
            };
            stage.run("barriers_by_warps", &launch, &arguments);
        }
    });
}

#[test]
fn calls_that_a_channel_or_a_group_does_not_have_are_refused() {
    processes(world(2), |comm| {
        let stage = Stage::new(comm);
        // On the host device, calls are blocks', which make all of a direct channel.
        let transports = match kind() {
            DeviceKind::Host => &TRANSPORTS[1..],
            DeviceKind::Cuda => &TRANSPORTS[..],
        };
        for &transport in transports {
            let connection = stage.fixture.pair(transport, 256);
            let launch = Launch::new(1, 48);
            stage.run("unsupported_calls", &launch, &[connection.channel()]);
        }
    });
}
