//! Right results: every collective, type, operator, number of ranks and algorithm.

use crate::common::{delays, kind, threads_with, world};
use crate::expected::{Case, Random};
use std::time::Duration;
use warplink::collective::{Algorithm, Call, CollectiveKind, CollectiveOptions, CollectivePath};
use warplink::device::{Priority, ReduceOp};
use warplink::{Config, DType, DeviceKind, ErrorKind};

fn delayed(config: &mut Config) {
    if kind() == DeviceKind::Host {
        delays(config, Duration::from_micros(40));
    }
}

/// Calls that differ in everything, enqueued several at a time.
#[test]
fn random_calls_are_right_for_every_number_of_ranks() {
    for ranks in (1..=8).map(world) {
        threads_with(ranks, delayed, |comm| {
            let collectives = comm.collectives().unwrap();
            let stream = comm.create_stream(Priority::Normal).unwrap();
            let mut random = Random::new(7 + ranks as u64);
            for round in 0..12 {
                let most = [20, 300, 3000, 40_000][round % 4];
                let cases: Vec<Case> = (0..6)
                    .map(|_| Case::random(&mut random, ranks, most))
                    .collect();
                let made: Vec<_> = cases
                    .iter()
                    .map(|case| case.make(comm, &collectives, &stream).unwrap())
                    .collect();
                comm.synchronize(&stream).unwrap();
                made.iter().for_each(|made| made.check(comm));
            }
        });
    }
}

/// Every type with every operator on 1 to 8 ranks, by algorithms in turn, with results that are the same on all.
#[test]
fn every_type_and_operator_is_reduced_on_every_number_of_ranks() {
    for ranks in (1..=8).map(world) {
        threads_with(
            ranks,
            |_| {},
            |comm| {
                let stream = comm.create_stream(Priority::Normal).unwrap();
                let by = Algorithm::ALL.map(|algorithm| {
                    let options = CollectiveOptions {
                        workspace_bytes: 1 << 20,
                        algorithm: Some(algorithm),
                        ..CollectiveOptions::default()
                    };
                    comm.collectives_with(&options).unwrap()
                });
                let mut random = Random::new(3 + ranks as u64);
                let mut made = Vec::new();
                for (type_number, dtype) in DType::ALL.into_iter().enumerate() {
                    for (op_number, op) in ReduceOp::ALL.into_iter().enumerate() {
                        let number = (type_number + op_number + ranks) % by.len();
                        let call = Call {
                            kind: CollectiveKind::AllReduce,
                            op: Some(op),
                            dtype,
                            count: 1 + random.below(900),
                            root: None,
                        };
                        let choice = by[number].choice(&call).unwrap();
                        assert_eq!(choice.algorithm, Algorithm::ALL[number]);
                        let case = Case {
                            call,
                            in_place: random.below(2) == 0,
                            shift: random.below(4) * dtype.size(),
                            seed: random.next(),
                        };
                        made.push(case.make(comm, &by[number], &stream).unwrap());
                    }
                }
                comm.synchronize(&stream).unwrap();
                for made in &made {
                    made.check(comm);
                }
                let own: Vec<u8> = made.iter().flat_map(|made| made.reduced(comm)).collect();
                let all = comm.all_gather_bytes(&own).unwrap();
                assert!(
                    all.iter().all(|outputs| *outputs == all[0]),
                    "ranks have other results"
                );
            },
        );
    }
}

/// What is too long for packets goes by chunks, of which each lane has several.
#[test]
fn long_data_goes_through_a_small_workspace() {
    let ranks = world(4);
    threads_with(ranks, delayed, |comm| {
        let options = CollectiveOptions {
            workspace_bytes: 256 << 10,
            ..CollectiveOptions::default()
        };
        let collectives = comm.collectives_with(&options).unwrap();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let mut random = Random::new(5);
        let mut kinds: Vec<CollectiveKind> = CollectiveKind::ALL.to_vec();
        kinds.retain(|kind| *kind != CollectiveKind::Barrier);
        for kind in kinds {
            let case = loop {
                let case = Case::random(&mut random, ranks, 300_000);
                if case.call.kind == kind && case.call.count > 100_000 {
                    break case;
                }
            };
            let choice = collectives.choice(&case.call).unwrap();
            assert_eq!(choice.algorithm, Algorithm::Chunks);
            assert!(choice.chunks > 1, "{kind}: {choice:?}");
            let made = case.make(comm, &collectives, &stream).unwrap();
            comm.synchronize(&stream).unwrap();
            made.check(comm);
        }
    });
}

/// The calls where ranks cannot map one another's memory.
#[test]
fn the_vendors_library_does_the_same() {
    let ranks = world(3);
    threads_with(
        ranks,
        |_| {},
        |comm| {
            let options = CollectiveOptions {
                path: Some(CollectivePath::Engine),
                ..CollectiveOptions::default()
            };
            let collectives = match comm.collectives_with(&options) {
                Ok(collectives) => collectives,
                Err(error) if error.kind() == ErrorKind::LibraryMissing => return,
                Err(error) => panic!("{error}"),
            };
            assert_eq!(collectives.path(), CollectivePath::Engine);
            let direct = comm.collectives().unwrap();
            assert_eq!(direct.path(), CollectivePath::Direct);
            let stream = comm.create_stream(Priority::Normal).unwrap();
            let mut random = Random::new(9);
            for _ in 0..60 {
                let mut case = Case::random(&mut random, ranks, 500);
                let in_place_all_to_all = case.in_place
                    && case.call.kind == CollectiveKind::AllToAll
                    && case.call.count > 0;
                if in_place_all_to_all {
                    let error = case.make(comm, &collectives, &stream).unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
                    case.in_place = false;
                }
                // Where the order of summation is not told, only exact types can be compared.
                if case.call.kind.reduces() {
                    case.call.dtype = [DType::I32, DType::U8, DType::F32][random.below(3)];
                    case.call.op = Some([ReduceOp::Sum, ReduceOp::Max][random.below(2)]);
                    case.shift = 0;
                }
                let made = case.make(comm, &collectives, &stream).unwrap();
                collectives.barrier(&stream).unwrap();
                comm.synchronize(&stream).unwrap();
                made.check(comm);
            }
        },
    );
}
