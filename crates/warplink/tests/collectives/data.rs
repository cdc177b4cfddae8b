//! Right results: every collective, type, operator, number of ranks and algorithm.

use crate::common::{delays, kind, threads_with, world};
use crate::expected::{Case, Random};
use std::time::Duration;
use warplink::collective::{Algorithm, Call, CollectiveKind, CollectiveOptions};
use warplink::device::{Priority, ReduceOp};
use warplink::{Config, DType, DeviceKind};

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

/// Every type with every operator, by every algorithm, with results that are the same on all ranks.
#[test]
fn every_type_and_operator_is_reduced_by_every_algorithm() {
    for ranks in [2, 5, 8].map(world) {
        threads_with(
            ranks,
            |_| {},
            |comm| {
                let stream = comm.create_stream(Priority::Normal).unwrap();
                for algorithm in Algorithm::ALL {
                    let options = CollectiveOptions {
                        workspace_bytes: 1 << 20,
                        algorithm: Some(algorithm),
                    };
                    let collectives = comm.collectives_with(&options).unwrap();
                    let mut random = Random::new(3);
                    for dtype in DType::ALL {
                        for op in ReduceOp::ALL {
                            let call = Call {
                                kind: CollectiveKind::AllReduce,
                                op: Some(op),
                                dtype,
                                count: 1 + random.below(900),
                                root: None,
                            };
                            let choice = collectives.choice(&call).unwrap();
                            assert_eq!(choice.algorithm, algorithm);
                            let case = Case {
                                call,
                                in_place: random.below(2) == 0,
                                shift: random.below(4) * dtype.size(),
                                seed: random.next(),
                            };
                            let made = case.make(comm, &collectives, &stream).unwrap();
                            comm.synchronize(&stream).unwrap();
                            made.check(comm);
                            let all = comm.all_gather_bytes(&made.output(comm)).unwrap();
                            assert!(
                                all.iter().all(|output| *output == all[0]),
                                "{case:?}: ranks have other results"
                            );
                        }
                    }
                }
            },
        );
    }
}
