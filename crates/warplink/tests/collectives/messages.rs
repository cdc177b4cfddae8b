//! Groups of sends and receives.

use crate::common::{
    Stopwatch, TimedBarrier, allocate, assert_error, assert_names_peer, assert_says, delayed,
    kill_self, kind, lose, processes, several, threads, threads_that_end, threads_with, unchanged,
    with_timeout, with_victim, world, worlds,
};
use crate::data::{by, calling, is_without_library, library};
use crate::expected::Random;
use crate::parts;
use crate::planned::{Held, Planned, enqueue, exchange, held, plan};
use std::time::{Duration, Instant};
use warplink::collective::{CollectiveOptions, CollectivePath, Message};
use warplink::device::{AllocationKind, DeviceKind, Priority, ReduceOp};
use warplink::{Communicator, DType, Error, ErrorKind};

/// How soon every rank that is concerned must have its error.
const SOON: Duration = Duration::from_secs(5);

/// How long it may take until memory is published.
const PUBLISHED: Duration = Duration::from_secs(20);

/// Groups of random messages, several in flight, on every number of ranks. The longest go through a chunk many times.
#[test]
fn random_groups_are_right_for_every_number_of_ranks() {
    for ranks in worlds(1..=8) {
        threads_with(ranks, delayed(30), |comm| {
            let collectives = by(comm, None, 512 << 10);
            let stream = comm.create_stream(Priority::Normal).unwrap();
            let mut random = Random::new(21 + ranks as u64);
            for round in 0..6 {
                let most = [50, 3000, 200_000][round % 3];
                let groups: Vec<Vec<Held>> = (0..3)
                    .map(|_| held(comm, &plan(&mut random, ranks, most), random.next()))
                    .collect();
                exchange(comm, &collectives, &groups, &stream);
            }
        });
    }
}

/// More messages of a rank to itself than a launch has room for beside the others, and longer ones than go along with them.
#[test]
fn messages_of_a_rank_to_itself_are_right_beside_others() {
    threads_with(world(2), delayed(30), |comm| {
        let collectives = by(comm, None, 512 << 10);
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let mut random = Random::new(5);
        for (others, own, least) in [
            (1, 3, 100),
            (58, 2, 100),
            (60, 40, 100),
            (64, 2, 100),
            (0, 3, 0),
            // Long enough for two of its own to go along.
            (2, 4, (3 << 20) + 5),
        ] {
            let mut message = |from, to, bytes| Planned {
                from,
                to,
                bytes,
                seed: random.next(),
            };
            let mut plan = Vec::new();
            for number in 0..others {
                let from = number % comm.world();
                plan.push(message(from, (from + 1) % comm.world(), least + number));
            }
            let lengths = [(1 << 20) + 1, 1 << 20, 0, 7000];
            for rank in 0..comm.world() {
                plan.extend((0..own).map(|number| message(rank, rank, lengths[number % 4])));
            }
            exchange(comm, &collectives, &[held(comm, &plan, 3)], &stream);
        }
    });
}

/// Groups of messages, as they are and in a graph, and parts of a size for each rank, of ranks that are processes.
/// scripts/device-sanitizer.sh runs this: it is short.
#[test]
fn processes_exchange_messages_and_parts() {
    processes(world(3), |comm| {
        let collectives = by(comm, None, 512 << 10);
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let mut random = Random::new(43);
        let mut group = |most| {
            let plan = plan(&mut random, comm.world(), most);
            held(comm, &plan, random.next())
        };
        let groups = [group(50), group(3_000), group(60_000)];
        exchange(comm, &collectives, &groups, &stream);
        stream.begin_capture().unwrap();
        for group in &groups {
            enqueue(&collectives, group, &stream).unwrap();
        }
        let graph = stream.end_capture().unwrap();
        for _ in 0..2 {
            groups.iter().flatten().for_each(|held| held.reset(comm));
            graph.launch(&stream).unwrap();
            comm.synchronize(&stream).unwrap();
            groups.iter().flatten().for_each(|held| held.check(comm));
        }
        parts::rounds(comm, &collectives, 5);
    });
}

#[test]
fn groups_by_the_vendors_library_are_the_same() {
    let ranks = world(3);
    threads(ranks, |comm| {
        let Some(collectives) = library(comm) else {
            return;
        };
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let mut random = Random::new(5);
        for _ in 0..30 {
            let group = held(comm, &plan(&mut random, ranks, 100_000), random.next());
            exchange(comm, &collectives, &[group], &stream);
        }
    });
}

/// Ranks group the same messages differently; one waits for what another does after its second message.
#[test]
fn ranks_may_group_messages_differently() {
    let Some(ranks) = several(3) else { return };
    calling(ranks, |comm, collectives, stream| {
        for round in 0..20 {
            let planned = |from, to, number: u64| Planned {
                from,
                to,
                bytes: 100_000 + 7 * number as usize,
                seed: 10 * round + number,
            };
            let [first, second] = [0, 1].map(|number| planned(0, 1, number));
            let (on, back) = (planned(1, 2, 2), planned(ranks - 1, 0, 3));
            let groups = match comm.rank() {
                0 => vec![vec![(first, true), (second, true), (back, false)]],
                1 => vec![
                    vec![(first, false)],
                    vec![(second, false)],
                    vec![(if ranks == 2 { back } else { on }, true)],
                ],
                _ => vec![vec![(on, false)], vec![(back, true)]],
            };
            let groups: Vec<Vec<Held>> = groups
                .into_iter()
                .map(|group| {
                    let ends = group.into_iter();
                    ends.map(|(planned, sends)| Held::new(comm, planned, sends))
                        .collect()
                })
                .collect();
            exchange(comm, collectives, &groups, stream);
        }
    });
}

/// Graphs of groups and collectives, with other groups between their launches.
#[test]
fn groups_in_graphs_are_replayed() {
    let ranks = world(3);
    calling(ranks, |comm, collectives, stream| {
        let mut random = Random::new(31);
        let groups: Vec<Vec<Held>> = (0..4)
            .map(|_| held(comm, &plan(&mut random, ranks, 50_000), random.next()))
            .collect();
        let one = allocate(comm, 4);
        stream.begin_capture().unwrap();
        for group in &groups {
            enqueue(collectives, group, stream).unwrap();
            collectives
                .all_reduce(&one, &one, DType::I32, ReduceOp::Max, stream)
                .unwrap();
        }
        let graph = stream.end_capture().unwrap();
        for round in 0..30 {
            groups.iter().flatten().for_each(|held| held.reset(comm));
            graph.launch(stream).unwrap();
            let between = held(comm, &plan(&mut random, ranks, 500), random.next());
            if round % 2 == 0 {
                enqueue(collectives, &between, stream).unwrap();
            }
            comm.synchronize(stream).unwrap();
            groups.iter().flatten().for_each(|held| held.check(comm));
            if round % 2 == 0 {
                between.iter().for_each(|held| held.check(comm));
            }
        }
    });
}

/// Messages in both directions, each time of memory that is not published yet: both lanes of a pair of ranks wait many
/// times, and leave the counts of one another's signals alone.
#[test]
fn long_messages_both_ways_go_through_chunks_again_and_again() {
    let ranks = world(2);
    threads(ranks, |comm| {
        let collectives = by(comm, None, 512 << 10);
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let (bytes, rounds) = match kind() {
            DeviceKind::Host => (300_001, 5),
            DeviceKind::Cuda => (64 << 20, 20),
        };
        for round in 0..rounds {
            let message = |from| Planned {
                from,
                to: (from + 1) % ranks,
                bytes,
                seed: 19 * (from as u64 + 1) + round,
            };
            let plan: Vec<Planned> = (0..ranks).map(message).collect();
            exchange(comm, &collectives, &[held(comm, &plan, round)], &stream);
        }
    });
}

/// Long messages go through the workspace until their receiver's memory is published, and from then on straight to where
/// they belong, in graphs that were recorded before too; short ones go as packets, which count as neither.
#[test]
fn long_messages_are_stored_where_they_belong_once_that_is_published() {
    let ranks = world(3);
    threads_with(ranks, delayed(30), |comm| {
        let collectives = by(comm, None, 512 << 10);
        let stream = comm.create_stream(Priority::Normal).unwrap();
        // Seeds for which what is received is aligned as kernels want it.
        let around = |bytes| {
            let message = |from| Planned {
                from,
                to: (from + 1) % ranks,
                bytes,
                seed: 19 * (from as u64 + 1),
            };
            let plan: Vec<Planned> = (0..ranks).map(message).collect();
            held(comm, &plan, 3)
        };
        // On GPUs, packets carry the first part of a message, and all of one below 4 MiB.
        let long = match kind() {
            DeviceKind::Host => 300_001,
            DeviceKind::Cuda => (8 << 20) + 1,
        };
        let (long, short) = (around(long), around(777));
        let record = |group: &[Held]| {
            stream.begin_capture().unwrap();
            enqueue(&collectives, group, &stream).unwrap();
            stream.end_capture().unwrap()
        };
        let graphs = [record(&long), record(&short)];
        // How many lanes of this rank stored directly in a launch of the graph.
        let launch = |number: usize, group: &[Held]| {
            group.iter().for_each(|held| held.reset(comm));
            let before = collectives.direct_lanes().unwrap();
            graphs[number].launch(&stream).unwrap();
            comm.synchronize(&stream).unwrap();
            group.iter().for_each(|held| held.check(comm));
            collectives.direct_lanes().unwrap() - before
        };
        let started = Instant::now();
        loop {
            let direct = launch(0, &long) > 0;
            let all = comm.all_gather_bytes(&[u8::from(direct)]).unwrap();
            if all.iter().all(|direct| *direct == [1]) {
                break;
            }
            let late = [u8::from(started.elapsed() > PUBLISHED)];
            let late = comm.all_gather_bytes(&late).unwrap();
            assert!(late.iter().all(|late| *late == [0]), "never published");
        }
        let lanes = launch(0, &long);
        assert!(lanes > 0);
        assert_eq!(launch(0, &long), lanes, "all lanes, and again");
        assert_eq!(launch(1, &short), 0);
    });
}

fn one(comm: &Communicator, message: (bool, usize), bytes: usize) -> Result<(), Error> {
    let collectives = comm.collectives()?;
    let stream = comm.create_stream(Priority::Normal)?;
    let memory = comm.device().allocate(bytes + 1, AllocationKind::Plain)?;
    let memory = memory.slice(0..bytes)?;
    let (sends, peer) = message;
    let message = if sends {
        Message::send(peer, &memory)
    } else {
        Message::receive(peer, &memory)
    };
    collectives.send_receive(&[message], &stream)?;
    comm.synchronize(&stream)
}

/// Also where the one is empty, and where the one has more lanes than the other.
#[test]
fn another_length_is_told_on_both_ranks_and_to_those_that_wait_for_them() {
    let Some(ranks) = several(3) else { return };
    let last = ranks - 1;
    for (sent, received) in [(64, 65), (0, 64), (64, 0), (1 << 20, 64), (64, 1 << 20)] {
        let all = TimedBarrier::new(ranks);
        threads_that_end(ranks, unchanged, |comm| {
            comm.collectives().unwrap();
            let started = Stopwatch::start();
            let (result, peer, says) = match comm.rank() {
                0 => (
                    one(&comm, (true, last), sent),
                    last,
                    format!(
                        "the peer receives {received} bytes; expected {sent}, as this rank sends"
                    ),
                ),
                rank if rank == last => (
                    one(&comm, (false, 0), received),
                    0,
                    format!(
                        "the peer sends {sent} bytes; expected {received}, as this rank receives"
                    ),
                ),
                // Its own message is right, but rank 0 will not come to it.
                _ => (
                    one(&comm, (false, 0), 64),
                    usize::MAX,
                    "cannot finish its work here: ".to_owned(),
                ),
            };
            let took = started.elapsed();
            all.wait();
            comm.abort("the test is over");
            let error = result.unwrap_err();
            if peer == usize::MAX {
                assert_error(&error, ErrorKind::PeerFailed, &["bytes; expected"]);
            } else {
                assert_names_peer(&error, ErrorKind::Mismatch, peer);
            }
            assert_says(&error, &[&says]);
            assert!(took < SOON, "{error}");
        });
    }
}

#[test]
fn a_peer_that_never_comes_is_named() {
    let all = TimedBarrier::new(world(3));
    threads_that_end(world(3), with_timeout(Duration::from_secs(6)), |comm| {
        comm.collectives().unwrap();
        let expected = match comm.rank() {
            0 => Some(((true, 1), "not posted the receive for this rank's send")),
            2 => Some(((false, 1), "not posted the send for this rank's receive")),
            _ => None,
        };
        if let Some((message, says)) = expected {
            let error = one(&comm, message, 100).unwrap_err();
            assert_names_peer(&error, ErrorKind::Timeout, 1);
            assert_says(&error, &[says]);
        }
        all.wait();
        comm.abort("the test is over");
    });
}

#[test]
fn a_rank_that_dies_ends_the_messages_of_its_peers() {
    die(CollectivePath::Direct);
}

#[test]
fn a_rank_that_dies_ends_the_messages_of_its_peers_by_the_vendors_library() {
    die(CollectivePath::Engine);
}

fn die(path: CollectivePath) {
    let victim = 1;
    with_victim(victim, |comm| {
        let peer = |step: usize| (comm.rank() + step) % comm.world();
        let options = CollectiveOptions::on(path);
        let collectives = match comm.collectives_with(&options) {
            Ok(collectives) => collectives,
            Err(error) => {
                assert!(is_without_library(&error), "{error}");
                if comm.rank() == victim {
                    kill_self();
                }
                return;
            }
        };
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let memory = |bytes| allocate(comm, bytes);
        let (own, come) = (memory(1 << 20), memory(1 << 20));
        let exchange = || {
            let messages = [
                Message::send(peer(1), &own),
                Message::receive(peer(comm.world() - 1), &come),
            ];
            collectives.send_receive(&messages, &stream)?;
            comm.synchronize(&stream)
        };
        exchange().unwrap();
        lose(comm, victim, exchange);
    });
}

#[test]
fn groups_that_cannot_be_done_are_refused() {
    calling(world(2), |comm, collectives, stream| {
        let memory = allocate(comm, 64);
        let slice = |from: usize, to: usize| memory.slice(from..to).unwrap();
        let (rank, peer) = (comm.rank(), 1 - comm.rank());
        let refused = |messages: &[Message<'_>], says: &str| {
            let error = collectives.send_receive(messages, stream).unwrap_err();
            let says = ["send and receive", says];
            assert_error(&error, ErrorKind::InvalidArgument, &says);
        };
        let (a, b, c) = (slice(0, 16), slice(16, 32), slice(8, 24));
        refused(&[Message::send(2, &a)], "rank 2 is out of range");
        refused(
            &[Message::send(peer, &a), Message::receive(peer, &c)],
            "overlaps",
        );
        refused(
            &[Message::receive(peer, &b), Message::receive(peer, &c)],
            "overlaps",
        );
        refused(&[Message::send(rank, &a)], "1 sends of this rank to itself");
        refused(
            &[
                Message::send(rank, &a),
                Message::receive(rank, &slice(16, 40)),
            ],
            "sends itself 16 bytes; expected 24",
        );
        refused(&[Message::send(peer, &a); 65], "65 messages in one group");
        // Nothing was enqueued that the other rank would wait for.
        let both = [Message::send(peer, &a), Message::receive(peer, &b)];
        collectives.send_receive(&both, stream).unwrap();
        comm.synchronize(stream).unwrap();
    });
}
