//! Right results: every collective, type, operator, number of ranks and algorithm.

use crate::bound::moved;
use crate::common::{
    assert_says, delayed, processes, recorded, share_gpus, threads, threads_with, unchanged, world,
    worlds,
};
use crate::expected::{Case, Random, kinds};
use crate::scaled::unhurried;
use warplink::collective::{Algorithm, Call, CollectiveKind, CollectiveOptions, CollectivePath};
use warplink::device::{Priority, ReduceOp, Stream, VendorCommunicator};
use warplink::{Collectives, Communicator, Config, DType, Error, ErrorKind};

/// Runs `body` on ranks with their collectives and a stream.
pub(crate) fn calling(
    ranks: usize,
    body: impl Fn(&Communicator, &Collectives, &Stream) + Send + Sync,
) {
    calling_with(ranks, unchanged, body);
}

/// As [`calling`], with a change to each rank's configuration.
pub(crate) fn calling_with(
    ranks: usize,
    change: impl Fn(&mut Config) + Send + Sync,
    body: impl Fn(&Communicator, &Collectives, &Stream) + Send + Sync,
) {
    threads_with(ranks, change, |comm| {
        let collectives = comm.collectives().unwrap();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        body(comm, &collectives, &stream);
    });
}

/// Calls that differ in everything, enqueued several at a time. Each rank compiles the kernels of its calls for itself,
/// so ranks that share a processor make fewer.
#[test]
fn random_calls_are_right_for_every_number_of_ranks() {
    for ranks in worlds(1..=8) {
        calling_with(ranks, delayed(40), |comm, collectives, stream| {
            let mut random = Random::new(7 + ranks as u64);
            let rounds = if share_gpus() { 4 } else { 12 };
            for round in 0..rounds {
                let most = [20, 300, 3000, 100_000][round % 4];
                let cases: Vec<Case> = (0..6)
                    .map(|_| Case::random(&mut random, ranks, most))
                    .collect();
                let made: Vec<_> = cases
                    .iter()
                    .map(|case| case.make(comm, collectives, stream).unwrap())
                    .collect();
                comm.synchronize(stream).unwrap();
                made.iter().for_each(|made| made.check(comm));
            }
        });
    }
}

/// Calls of some hundred thousand elements, and longer ones of two ranks, of other kinds for each number of ranks.
#[test]
fn long_calls_are_right_for_every_number_of_ranks() {
    for ranks in worlds(2..=8) {
        calling_with(ranks, unhurried, |comm, collectives, stream| {
            let mut random = Random::new(11 + ranks as u64);
            let longer = if ranks == 2 { 4 } else { 1 };
            for kind in [2 * ranks, 2 * ranks + 1].map(|number| CollectiveKind::ALL[number % 8]) {
                let mut case = Case::random_of(kind, &mut random, (ranks, 1), |_| true);
                // Of elements that are reduced it takes longer to tell what they have to give.
                let least = if kind.reduces() { 110_000 } else { 500_000 };
                case.call.count = longer * (least + random.below(1000));
                let made = case.run(comm, collectives, stream);
                // When its memory may be reached.
                made.run_again(comm, collectives, stream);
            }
        });
    }
}

/// Each collective by each algorithm that does it, of ranks that are processes. scripts/device-sanitizer.sh runs this: it
/// is short, and a few kernels are enough.
#[test]
fn processes_make_each_collective_by_each_algorithm() {
    processes(world(3), |comm| {
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let mut random = Random::new(29);
        let mut made = 0;
        for algorithm in Algorithm::ALL {
            let collectives = by(comm, Some(algorithm), 1 << 20);
            for kind in kinds() {
                let dtype = if kind.reduces() {
                    DType::BF16
                } else {
                    DType::U8
                };
                let call = Call::new(kind, ReduceOp::Sum, dtype, 1003, comm.world() - 1);
                if collectives.choice(&call).is_err() {
                    continue;
                }
                let case = Case {
                    call,
                    in_place: kind == CollectiveKind::AllReduce,
                    shift: 0,
                    seed: random.next(),
                };
                case.run(comm, &collectives, &stream);
                made += 1;
            }
        }
        // Those by the copy engine are bound, and three ranks are no cube.
        let here = Algorithm::CHOICES.into_iter();
        let here = here.filter(|algorithm| *algorithm != Algorithm::Cube);
        let expected =
            here.map(|algorithm| kinds().filter(|kind| algorithm.supports(*kind)).count());
        assert_eq!(made, expected.sum::<usize>());
    });
}

/// Data too long for packets uses chunks, several for each lane.
#[test]
fn long_data_goes_through_a_small_workspace() {
    let ranks = world(4);
    threads_with(ranks, delayed(40), |comm| {
        let [by_chunks, collectives] =
            [Some(Algorithm::Chunks), None].map(|algorithm| by(comm, algorithm, 256 << 10));
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let mut random = Random::new(5);
        for kind in kinds() {
            let is_long = |count| count > 100_000;
            let case = Case::random_of(kind, &mut random, (ranks, 300_000), is_long);
            let choice = collectives.choice(&case.call).unwrap();
            assert_eq!(choice.algorithm, Algorithm::Direct);
            let choice = by_chunks.choice(&case.call).unwrap();
            assert_eq!(choice.algorithm, Algorithm::Chunks);
            assert!(choice.chunks > 1, "{kind}: {choice:?}");
            for collectives in [&by_chunks, &collectives] {
                case.run(comm, collectives, &stream);
            }
            assert_eq!(by_chunks.direct_lanes().unwrap(), 0);
        }
    });
}

/// Calls by the vendor's library, which are right.
pub(crate) fn calls_of_the_library(comm: &Communicator, collectives: &Collectives, calls: usize) {
    let stream = comm.create_stream(Priority::Normal).unwrap();
    let mut random = Random::new(9);
    for _ in 0..calls {
        let mut case = Case::random(&mut random, comm.world(), 500);
        exact(&mut case, &mut random);
        let made = case.make(comm, collectives, &stream).unwrap();
        collectives.barrier(&stream).unwrap();
        comm.synchronize(&stream).unwrap();
        made.check(comm);
    }
}

/// Where the order of summation is not told, only exact types can be compared.
pub(crate) fn exact(case: &mut Case, random: &mut Random) {
    if case.call.kind.reduces() {
        case.call.dtype = [DType::I32, DType::U8, DType::F32][random.below(3)];
        case.call.op = Some([ReduceOp::Sum, ReduceOp::Max][random.below(2)]);
        case.shift = 0;
    }
}

/// In place, of lengths that rise and fall, eagerly and in a graph that is launched after longer ones.
#[test]
fn all_to_all_in_place_by_the_vendors_library_is_right() {
    threads(world(3), |comm| {
        let Some(collectives) = library(comm) else {
            return;
        };
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let case = |count, seed| Case {
            call: moved(CollectiveKind::AllToAll, count),
            in_place: true,
            shift: 1,
            seed,
        };
        let memory = |case: &Case| case.on_new_memory(comm).unwrap();
        let replayed = memory(&case(900, 1));
        let graph = recorded(&stream, || {
            replayed.enqueue(&collectives, &stream).unwrap();
        });
        for (round, count) in [10, 5000, 3, 70_000, 900, 0].into_iter().enumerate() {
            // Two at a time, of which the second uses the same copy.
            let all = [1, 2].map(|number| memory(&case(count, 10 * round as u64 + number)));
            for made in &all {
                made.fill(comm).unwrap();
                made.enqueue(&collectives, &stream).unwrap();
            }
            replayed.fill(comm).unwrap();
            graph.launch(&stream).unwrap();
            comm.synchronize(&stream).unwrap();
            all.iter().for_each(|made| made.check(comm));
            replayed.check(comm);
        }
    });
}

/// Collectives by an algorithm, with so much of a workspace.
pub(crate) fn by(
    comm: &Communicator,
    algorithm: Option<Algorithm>,
    workspace_bytes: usize,
) -> Collectives {
    let options = CollectiveOptions {
        workspace_bytes,
        algorithm,
        ..CollectiveOptions::default()
    };
    comm.collectives_with(&options).unwrap()
}

/// How the library is asked for.
pub(crate) fn by_the_library(communicator: Option<VendorCommunicator>) -> CollectiveOptions {
    CollectiveOptions {
        path: Some(CollectivePath::Engine),
        communicator,
        ..CollectiveOptions::default()
    }
}

/// Whether an error says that there is no library for these ranks: it is missing, or ranks share a GPU, which it refuses.
pub(crate) fn is_without_library(error: &Error) -> bool {
    match error.kind() {
        ErrorKind::LibraryMissing => true,
        ErrorKind::Unsupported if share_gpus() => {
            assert_says(error, &["ranks ", " share a GPU"]);
            true
        }
        _ => false,
    }
}

/// Collectives by the library; none where it is missing, or ranks share a GPU, which it refuses.
pub(crate) fn library(comm: &Communicator) -> Option<Collectives> {
    match comm.collectives_with(&by_the_library(None)) {
        Ok(collectives) => Some(collectives),
        Err(error) if is_without_library(&error) => None,
        Err(error) => panic!("{error}"),
    }
}

/// The calls where ranks cannot map one another's memory.
#[test]
fn the_vendors_library_does_the_same() {
    let ranks = world(3);
    threads(ranks, |comm| {
        let Some(collectives) = library(comm) else {
            return;
        };
        assert_eq!(collectives.path(), CollectivePath::Engine);
        let direct = comm.collectives().unwrap();
        assert_eq!(direct.path(), CollectivePath::Direct);
        assert_eq!(direct.communicator(), None);
        calls_of_the_library(comm, &collectives, 60);
    });
}
