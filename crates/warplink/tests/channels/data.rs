//! Put data has arrived when the wait for it returns.

use super::common::{
    Ranks, delays, kind, number_from_env, processes, tell, threads, threads_with, world,
};
use super::kernels::{Fixture, TRANSPORTS, contents};
use std::time::{Duration, Instant};
use warplink::channel::Transport;
use warplink::device::{Argument, MemoryOp};
use warplink::signal::RemoteSignals;
use warplink::{Communicator, DeviceKind};

/// Fewer on the host device, whose blocks share the CPUs with everything else, unless `WARPLINK_TEST_LONG` is set;
/// and under tools that slow kernels down (`scripts/device-sanitizer.sh`).
pub(crate) fn rounds(on_gpus: u32, on_host: u32) -> u32 {
    match kind() {
        _ if is_long() => on_gpus,
        _ if std::env::var_os("WARPLINK_TEST_SHORT").is_some() => on_gpus.min(on_host).min(20),
        DeviceKind::Cuda => on_gpus,
        DeviceKind::Host => on_host,
    }
}

/// Longer than a million rounds take on any machine.
const HOUR: Duration = Duration::from_secs(3600);

fn is_long() -> bool {
    std::env::var_os("WARPLINK_TEST_LONG").is_some()
}

fn back_and_forth(comm: &Communicator, tags: u64, bytes: u64, rounds: [u32; 2]) {
    let fixture = Fixture::new(comm);
    for (transport, rounds) in TRANSPORTS.into_iter().zip(rounds) {
        let connections = fixture.connect(transport, tags, 2 * bytes as usize);
        fixture.ping_pong(&connections, bytes, rounds);
        fixture.finish();
    }
}

#[test]
fn data_that_changes_every_round_goes_back_and_forth() {
    threads(world(2), |comm| {
        back_and_forth(comm, 1, 4096, [rounds(10_000, 500), rounds(2_000, 200)]);
    });
}

/// As many as `WARPLINK_TEST_ROUNDS` says on each kind of channel; else a million on GPUs, and of proxied channels fewer.
#[test]
fn a_million_rounds() {
    fn wanted() -> Option<u32> {
        number_from_env("WARPLINK_TEST_ROUNDS").map(|rounds| rounds.try_into().unwrap())
    }
    fn takes_long() -> bool {
        is_long() || wanted().is_some()
    }
    let ranks = Ranks {
        config: Some(|config| {
            if takes_long() {
                config.timeout = HOUR;
            }
        }),
        limit: takes_long().then_some(HOUR),
        ..Ranks::of(world(2))
    };
    ranks.run(|comm| {
        const BYTES: u64 = 64;
        let fixture = Fixture::new(comm);
        let usual = [rounds(1_000_000, 5_000), rounds(20_000, 500)];
        for (transport, usual) in TRANSPORTS.into_iter().zip(usual) {
            let rounds = wanted().unwrap_or(usual);
            let connections = fixture.connect(transport, 1, 2 * BYTES as usize);
            comm.barrier().unwrap();
            let start = Instant::now();
            fixture.ping_pong(&connections, BYTES, rounds);
            // Every word of every round was compared.
            fixture.finish();
            if comm.rank() == 0 {
                let took = start.elapsed().as_secs_f64();
                tell(format_args!(
                    "{rounds} rounds of {BYTES} bytes, {transport}, in {took:.1} s"
                ));
            }
        }
    });
}

#[test]
fn nothing_depends_on_when_operations_happen() {
    let late = |config: &mut _| delays(config, Duration::from_micros(300));
    threads_with(world(2), late, |comm| {
        back_and_forth(comm, 3, 4096, [40, 40])
    });
}

#[test]
fn several_tags_between_one_pair() {
    processes(world(2), |comm| {
        back_and_forth(comm, 5, 1024, [rounds(1_000, 50), rounds(200, 30)]);
    });
}

/// Every rank with every other, on several connections at once.
#[test]
fn several_tags_between_all_pairs_at_once() {
    processes(world(8), |comm| {
        back_and_forth(comm, 3, 1024, [rounds(300, 6), rounds(60, 6)]);
    });
}

#[test]
fn all_pairs_at_once() {
    processes(world(8), |comm| {
        let fixture = Fixture::new(comm);
        let (world, bytes) = (comm.world(), 8192);
        for transport in TRANSPORTS {
            let connections = fixture.connect(transport, 1, 2 * world * bytes);
            let arguments = [
                connections.channels().unwrap(),
                Argument::U32(fixture.rank()),
                Argument::U32(world as u32),
                Argument::U64(bytes as u64),
                Argument::U32(rounds(500, 6)),
            ];
            fixture.run("all_pairs", world as u32 - 1, &arguments);
        }
    });
}

#[test]
fn pieces_of_odd_lengths_from_both_ends_at_once() {
    threads(world(2), |comm| {
        let fixture = Fixture::new(comm);
        let (half, pieces) = (97 * 64, 64_u32);
        for transport in TRANSPORTS {
            let connection = fixture.pair(transport, 2 * half);
            let region = connection.region(0).unwrap();
            let source = |rank: usize| contents(rank as u32, half);
            let mut start = source(comm.rank());
            start.resize(2 * half, 0);
            region.upload(&start).unwrap();
            comm.barrier().unwrap();
            let arguments = [
                connection.channel(),
                Argument::U64(half as u64),
                Argument::U32(pieces),
            ];
            fixture.run("odd_pieces", 4, &arguments);
            let (peers, mut expected) = (source(1 - comm.rank()), vec![0; half]);
            for i in 0..pieces as usize {
                let (from, bytes) = (97 * i + i % 5, 61 + i % 31);
                expected[97 * i..97 * i + bytes].copy_from_slice(&peers[from..from + bytes]);
            }
            assert!(
                region.download().unwrap()[half..] == expected,
                "{transport}"
            );
        }
    });
}

#[test]
fn a_source_may_change_after_a_flush() {
    let late = |config: &mut _| delays(config, Duration::from_micros(300));
    threads_with(world(2), late, |comm| {
        let fixture = Fixture::new(comm);
        for transport in TRANSPORTS {
            fixture.flushed_slots(transport);
        }
    });
}

/// Packets of every length and kind, each of which is checked.
fn packets(comm: &Communicator, lengths: &[usize]) {
    let fixture = Fixture::new(comm);
    let mut wrong = Vec::new();
    for &bytes in lengths {
        let part = bytes.next_multiple_of(128);
        // Of one kind each, and of all in turn.
        for kind in 0..4 {
            let connection = fixture.pair(Transport::Direct, 2 * part + 2 * (3 * part + 256));
            connection
                .region(0)
                .unwrap()
                .upload(&vec![0; 8 * part + 512])
                .unwrap();
            comm.barrier().unwrap();
            let arguments = [
                connection.channel(),
                Argument::U64(bytes as u64),
                Argument::U32(rounds(300, 12)),
                Argument::U32(kind),
            ];
            fixture.launch("packets", 1, &arguments).unwrap();
            comm.synchronize(&fixture.stream).unwrap();
            let outcome = fixture.outcome.read();
            if outcome != [0, 0] {
                wrong.push((bytes, kind, outcome));
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "bytes, kind, wrong words and status: {wrong:?}"
    );
}

#[test]
fn packets_carry_their_flags() {
    threads(world(2), |comm| {
        packets(comm, &[8, 120, 128, 1000, 4096, 40_000]);
    });
}

#[test]
fn packets_between_processes() {
    processes(world(2), |comm| packets(comm, &[8, 1000]));
}

/// Barriers of all ranks among `set`, to which this rank belongs, over each kind of channel.
fn barriers(comm: &Communicator, set: &[usize], rounds: u32) {
    let fixture = Fixture::new(comm);
    for transport in TRANSPORTS {
        let ranks = set.iter().copied();
        let connections = fixture.connect_to(ranks, transport, 1, 8 * (1 + comm.world()));
        assert_eq!(connections.all().len(), set.len() - 1);
        let arguments = [
            connections.channels().unwrap(),
            Argument::U32(connections.all().len() as u32),
            Argument::U32(fixture.rank()),
            Argument::U32(rounds),
        ];
        fixture.run("barriers", 1, &arguments);
    }
}

#[test]
fn barriers_over_all_peers() {
    let ranks = Ranks {
        delay: Some(Duration::from_micros(200)),
        ..Ranks::of(world(8))
    };
    ranks.run(|comm| {
        let all: Vec<_> = (0..comm.world()).collect();
        barriers(comm, &all, rounds(1_000, 8));
    });
}

/// The even and the odd ranks among themselves, at the same time.
#[test]
fn barriers_over_a_set_of_peers() {
    processes(world(8), |comm| {
        let step = if comm.world() >= 4 { 2 } else { 1 };
        let set: Vec<_> = (comm.rank() % step..comm.world()).step_by(step).collect();
        barriers(comm, &set, rounds(1_000, 8));
    });
}

#[test]
fn polling_uses_up_each_signal_once() {
    threads(world(2), |comm| {
        let fixture = Fixture::new(comm);
        for transport in TRANSPORTS {
            let connection = fixture.pair(transport, 8 * 400);
            let channel = connection.channel();
            if comm.rank() == 0 {
                let arguments = [channel, Argument::U32(100)];
                fixture.launch("many_puts", 4, &arguments).unwrap();
            } else {
                // Two blocks share the signals.
                let arguments = [channel, Argument::U32(200)];
                fixture.launch("poll_for", 2, &arguments).unwrap();
            }
            fixture.finish();
        }
    });
}

#[test]
fn regions_are_added_and_written_by_the_host() {
    threads(world(2), |comm| {
        let fixture = Fixture::new(comm);
        let (rank, peer) = (comm.rank(), 1 - comm.rank());
        let bytes = 4096;
        for transport in TRANSPORTS {
            let connection = fixture.pair(transport, bytes);
            // The two ranks' regions need not be equal.
            let added: Vec<_> = (0..2)
                .map(|number| comm.alloc(2 * bytes + 64 * (rank + number)).unwrap())
                .collect();
            for (number, region) in added.iter().enumerate() {
                let numbers = comm.add_regions(&[(&connection, region)]).unwrap();
                assert_eq!(numbers, [1 + number as u32]);
                let peers = 2 * bytes + 64 * (peer + number);
                assert_eq!(connection.peer_bytes(numbers[0]), Some(peers));
            }
            // The host writes what the peer's kernel gets here.
            let source = comm.alloc(bytes).unwrap();
            source.upload(&contents(rank as u32, bytes)).unwrap();
            connection
                .write(&fixture.stream, (2, bytes as u64), &source)
                .unwrap();
            fixture.finish();
            comm.barrier().unwrap();
            let arguments = [
                connection.channel(),
                Argument::U32(2),
                Argument::U64(bytes as u64),
            ];
            fixture.run("get_region", 1, &arguments);
            // What was put at the peer is known to be there by the peer, which waited for it.
            comm.barrier().unwrap();
            let read = comm.alloc(bytes).unwrap();
            connection.read(&fixture.stream, &read, (2, 0)).unwrap();
            fixture.finish();
            let own = added[1].download().unwrap();
            assert!(own[..bytes] == contents(peer as u32, bytes), "{transport}");
            assert!(own[..bytes] == own[bytes..2 * bytes], "{transport}");
            assert!(
                read.download().unwrap() == contents(rank as u32, bytes),
                "{transport}"
            );
            comm.barrier().unwrap();
        }
    });
}

#[test]
fn a_graph_with_a_kernel_is_replayed() {
    threads(world(2), |comm| {
        let fixture = Fixture::new(comm);
        for transport in TRANSPORTS {
            let connections = fixture.connect(transport, 1, 2 * 1024);
            // A graph does not keep what is recorded into it.
            let channels = connections.channels().unwrap();
            fixture.stream.begin_capture().unwrap();
            fixture.ping_pong_on(&channels, 1, 1024, 3);
            let graph = fixture.stream.end_capture().unwrap();
            assert_eq!(graph.operations(), 1);
            for _ in 0..20 {
                graph.launch(&fixture.stream).unwrap();
            }
            fixture.finish();
        }
    });
}

#[test]
fn signals_without_a_connection() {
    processes(world(3), |comm| {
        let fixture = Fixture::new(comm);
        let (rank, world) = (comm.rank(), comm.world());
        let (right, left) = ((rank + 1) % world, (rank + world - 1) % world);
        let own = comm.signals(3).unwrap();
        assert!(own.word(3).is_err() && comm.signals(0).is_err());
        // The rank to the left raises this rank's words.
        let handle = comm.export_handle(own.region(), left).unwrap();
        let handles = comm.all_gather_bytes(&handle).unwrap();
        let opened = comm.open_handle(right, &handles[right]).unwrap();
        let peers = RemoteSignals::new(opened).unwrap();
        assert_eq!((own.count(), peers.count()), (3, 3));
        let arguments = [
            Argument::from(&own),
            Argument::from(&peers),
            Argument::U32(fixture.rank()),
            Argument::U32(90),
        ];
        for launch in 1..=2 {
            fixture.launch("pass_on", 1, &arguments).unwrap();
            // A stream may wait for the same words.
            let word = own.word(2).unwrap();
            let value = 30 * launch;
            let wait = MemoryOp::wait(&word, value);
            fixture.stream.memory_ops(&[wait]).unwrap();
            fixture.finish();
        }
    });
}
