//! Many calls: in a row, in graphs, on several streams, of several communicators.

use crate::common::{allocate, downloaded, kind, number_from_env, tell, threads, world, worlds};
use crate::data::calling;
use crate::endurance::{Endurance, Mix};
use crate::expected::{Random, sum_of};
use std::time::{Duration, Instant};
use warplink::device::{DeviceSlice, Priority, ReduceOp};
use warplink::{Collectives, Communicator, DType, DeviceKind};

/// How often a long run says how far it has come.
const REPORT_EVERY: Duration = Duration::from_secs(30);

/// `count` integers of a rank in a round.
pub(crate) fn integers(rank: usize, round: usize, count: usize) -> Vec<i32> {
    let mut random = Random::new((rank * 1000 + round) as u64 + 1);
    (0..count).map(|_| random.next() as i32).collect()
}

pub(crate) fn upload(comm: &Communicator, memory: &DeviceSlice, values: &[i32]) {
    let bytes: Vec<u8> = values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    comm.device().upload(memory, &bytes).unwrap();
}

pub(crate) fn download(comm: &Communicator, memory: &DeviceSlice) -> Vec<i32> {
    let bytes = downloaded(comm, memory);
    let words = bytes.chunks_exact(4);
    words
        .map(|word| i32::from_le_bytes(word.try_into().unwrap()))
        .collect()
}

/// The sum of all ranks' integers.
pub(crate) fn sum(world: usize, round: usize, count: usize) -> Vec<i32> {
    let all = (0..world).map(|rank| integers(rank, round, count));
    all.reduce(|sum, one| {
        sum.iter()
            .zip(&one)
            .map(|(a, b)| a.wrapping_add(*b))
            .collect()
    })
    .unwrap()
}

pub(crate) fn memory(comm: &Communicator, count: usize) -> DeviceSlice {
    allocate(comm, 4 * count)
}

/// Of all kinds, types, operators, roots and lengths, on one or two streams or as graphs, of one or two
/// communicators, beside matrix products or not; before them, a graph of a hundred. `WARPLINK_TEST_CALLS` says how many there
/// are, and `WARPLINK_TEST_REPLAYS` how often the graph is launched. On GPUs of a few types only, whose kernels are compiled
/// in a minute.
#[test]
fn thousands_of_mixed_calls_stay_right() {
    const GRAPH: usize = 100;
    let count = |name, usual| number_from_env(name).unwrap_or(usual) as usize;
    let (wanted, replays) = (
        count("WARPLINK_TEST_CALLS", 700),
        count("WARPLINK_TEST_REPLAYS", 3),
    );
    for ranks in worlds([2, 4]) {
        threads(ranks, |comm| {
            let mut mix = Mix::all(11);
            if kind() != DeviceKind::Host {
                mix.types = vec![DType::BF16, DType::I32];
                mix.operators = vec![ReduceOp::Sum];
            }
            let told = |start: Instant, calls: usize, what: &str| {
                if comm.rank() == 0 {
                    let took = start.elapsed().as_secs_f64();
                    tell(format_args!(
                        "{calls} calls of {ranks} ranks, {what}, in {took:.1} s"
                    ));
                }
            };
            let mut endurance = Endurance::new(comm, mix);
            let mut start = Instant::now();
            if replays > 0 {
                let replayed = endurance.graph(0, GRAPH, replays);
                let launches = replayed / GRAPH;
                told(
                    start,
                    replayed,
                    &format!("a graph of {GRAPH} launched {launches} times"),
                );
            }
            start = Instant::now();
            let (mut calls, mut reports) = (0, 1);
            for batch in 0.. {
                if calls >= wanted {
                    break;
                }
                calls += endurance.batch(batch);
                // So that a run that is ended by its limit says how far it came.
                if start.elapsed() > REPORT_EVERY * reports {
                    reports += 1;
                    told(start, calls, "mixed, so far");
                }
            }
            told(start, calls, "mixed");
            endurance.close();
        });
    }
}

/// A chain of sums and gathers in one graph, with calls outside of it between its launches.
#[test]
fn a_graph_of_a_hundred_collectives_is_replayed() {
    const CALLS: usize = 50;
    const COUNT: usize = 33;
    let ranks = world(3);
    calling(ranks, |comm, collectives, stream| {
        let (own, all) = (memory(comm, COUNT), memory(comm, COUNT * ranks));
        let part = all.slice(4 * COUNT..8 * COUNT).unwrap();
        stream.begin_capture().unwrap();
        for _ in 0..CALLS {
            // Each rank's numbers become those of rank 1 and then the sum of all.
            collectives.all_gather(&all, &own, stream).unwrap();
            let op = ReduceOp::Sum;
            collectives
                .all_reduce(&own, &part, DType::I32, op, stream)
                .unwrap();
        }
        let graph = stream.end_capture().unwrap();
        for round in 0..20 {
            upload(comm, &own, &integers(comm.rank(), round, COUNT));
            graph.launch(stream).unwrap();
            if round % 3 == 0 {
                collectives.barrier(stream).unwrap();
            }
            comm.synchronize(stream).unwrap();
            let factor = (0..CALLS).fold(1_i32, |all, _| all.wrapping_mul(ranks as i32));
            let expected: Vec<i32> = integers(1, round, COUNT)
                .iter()
                .map(|value| value.wrapping_mul(factor))
                .collect();
            assert_eq!(download(comm, &own), expected, "round {round}");
        }
    });
}

pub(crate) fn sums(
    comm: &Communicator,
    collectives: &Collectives,
    stream: &warplink::device::Stream,
    round: usize,
    count: usize,
) -> (DeviceSlice, usize, usize) {
    let buffer = memory(comm, count);
    upload(comm, &buffer, &integers(comm.rank(), round, count));
    collectives
        .all_reduce(&buffer, &buffer, DType::I32, ReduceOp::Sum, stream)
        .unwrap();
    (buffer, round, count)
}

/// Each on a stream of its own, which no rank orders with the other.
#[test]
fn two_communicators_run_side_by_side() {
    let ranks = world(2);
    threads(ranks, |comm| {
        let other = comm.split(0, 0).unwrap();
        let both = [comm.collectives().unwrap(), other.collectives().unwrap()];
        let streams = [(); 2].map(|()| comm.create_stream(Priority::Normal).unwrap());
        let count_of = |round: usize, which: usize| 1 + (7 * round + 300 * which) % 2000;
        // Loading code waits for kernels that run, and these wait for ranks that may be loading code.
        for (round, which) in (0..200).flat_map(|round| [(round, 0), (round, 1)]) {
            let call = sum_of(count_of(round, which));
            both[which].prepare(&call).unwrap();
        }
        comm.barrier().unwrap();
        for start in (0..200).step_by(20) {
            let allocates_between = start % 40 == 0;
            // The ranks enqueue in another order, which is right for two communicators.
            let calls = (start..start + 20)
                .flat_map(|round| (0..2).map(move |turn| (round, (turn + comm.rank()) % 2)));
            let make = |(round, which): (usize, usize)| {
                let count = count_of(round, which);
                let buffer = memory(comm, count);
                upload(comm, &buffer, &integers(comm.rank(), round, count));
                (buffer, round, count, which)
            };
            let enqueue = |(buffer, .., which): &(DeviceSlice, usize, usize, usize)| {
                both[*which]
                    .all_reduce(buffer, buffer, DType::I32, ReduceOp::Sum, &streams[*which])
                    .unwrap();
            };
            let made: Vec<_> = if allocates_between {
                calls.map(&make).inspect(enqueue).collect()
            } else {
                let made: Vec<_> = calls.map(make).collect();
                made.iter().for_each(enqueue);
                made
            };
            for stream in &streams {
                comm.synchronize(stream).unwrap();
            }
            for (buffer, round, count, _) in made {
                assert_eq!(download(comm, &buffer), sum(ranks, round, count));
            }
        }
        other.close().unwrap();
    });
}
