//! Sums of values that are multiplied by a factor beforehand.

use crate::common::{
    TimedBarrier, assert_error, assert_says, kind, threads_that_end, threads_with, world, worlds,
};
use crate::data::{by, library};
use crate::expected::{Case, REDUCTIONS, Random};
use std::time::Duration;
use warplink::collective::{Algorithm, Call, CollectiveKind, CollectiveOptions, CollectivePath};
use warplink::device::{AllocationKind, Priority, ReduceOp};
use warplink::{Config, DType, DeviceKind, ErrorKind};

/// Ranks with many calls keep a small machine busy.
pub(crate) fn unhurried(config: &mut Config) {
    config.join.heartbeat_limit = Duration::from_secs(30);
}

fn floats() -> impl Iterator<Item = DType> {
    DType::ALL.into_iter().filter(|dtype| dtype.is_float())
}

fn scaled(kind: CollectiveKind, dtype: DType, factor: f64, count: usize) -> Call {
    Call::new(kind, ReduceOp::scaled_sum(factor), dtype, count, 0)
}

/// Of all three collectives in every type of floats, with other factors in a row, by each algorithm that there is.
#[test]
fn scaled_sums_of_floats_are_right_by_every_algorithm() {
    for ranks in worlds([1, 2, 3, 8]) {
        threads_with(ranks, unhurried, |comm| {
            let stream = comm.create_stream(Priority::Normal).unwrap();
            let algorithms = [
                None,
                Some(Algorithm::OneShot),
                Some(Algorithm::TwoShot),
                Some(Algorithm::Chunks),
            ];
            let all = algorithms.map(|algorithm| (algorithm, by(comm, algorithm, 1 << 20)));
            let mut random = Random::new(31 + ranks as u64);
            let mut made = Vec::new();
            for dtype in floats() {
                for factor in [1.0 / ranks as f64, -1.7, 0.0, 3.0] {
                    for kind in REDUCTIONS {
                        let call = scaled(kind, dtype, factor, 1 + random.below(700));
                        let (algorithm, collectives) = &all[random.below(all.len())];
                        let two_shot = *algorithm == Some(Algorithm::TwoShot);
                        if two_shot && kind != CollectiveKind::AllReduce {
                            continue;
                        }
                        let case = Case::placed(&mut random, call);
                        made.push(case.make(comm, collectives, &stream).unwrap());
                    }
                }
            }
            comm.synchronize(&stream).unwrap();
            made.iter().for_each(|made| made.check(comm));
        });
    }
}

/// Large calls are direct, and a graph keeps its factor.
#[test]
fn large_scaled_sums_and_those_of_graphs_are_right() {
    let ranks = world(2);
    threads_with(ranks, unhurried, |comm| {
        let collectives = by(comm, None, 1 << 20);
        let stream = comm.create_stream(Priority::Normal).unwrap();
        for kind in REDUCTIONS {
            for factor in [0.25, -3.5] {
                let case = Case::new(scaled(kind, DType::F32, factor, 150_001), 7);
                case.run(comm, &collectives, &stream);
            }
        }
        let device = comm.device();
        let allocate = || device.allocate(4 * 100, AllocationKind::Plain).unwrap();
        let (output, input) = (allocate(), allocate());
        let bytes = |value: f32| [value.to_le_bytes(); 100].concat();
        stream.begin_capture().unwrap();
        let op = ReduceOp::scaled_sum(0.5);
        collectives
            .all_reduce(&output, &input, DType::F32, op, &stream)
            .unwrap();
        let graph = stream.end_capture().unwrap();
        for round in 0..5 {
            device.upload(&input, &bytes(round as f32)).unwrap();
            let eager = ReduceOp::scaled_sum(4.0);
            collectives
                .all_reduce(&output, &input, DType::F32, eager, &stream)
                .unwrap();
            graph.launch(&stream).unwrap();
            comm.synchronize(&stream).unwrap();
            let mut found = vec![0; output.bytes()];
            device.download(&output, &mut found).unwrap();
            assert_eq!(found, bytes(0.5 * (round * ranks) as f32), "round {round}");
        }
    });
}

#[test]
fn the_vendors_library_sums_scaled_values() {
    let ranks = world(3);
    threads_with(ranks, unhurried, |comm| {
        let Some(collectives) = library(comm) else {
            return;
        };
        let stream = comm.create_stream(Priority::Normal).unwrap();
        for kind in REDUCTIONS {
            // It may round small floats more often than is allowed for here.
            let dtypes = [DType::F32, DType::F64, DType::BF16, DType::F16];
            let exact = crate::common::kind() == DeviceKind::Host;
            for dtype in &dtypes[..if exact { 4 } else { 2 }] {
                let case = Case::new(scaled(kind, *dtype, 0.375, 333), 11);
                case.run(comm, &collectives, &stream);
            }
        }
    });
}

/// By the factor as values are multiplied by it: in double precision those of 64 bits, and in single precision others.
#[test]
fn factors_that_differ_are_told_on_all_ranks() {
    for (dtype, other) in [(DType::F32, 0.25), (DType::F64, 0.1 + 1e-15)] {
        let ranks = world(3);
        let all = TimedBarrier::new(ranks);
        threads_that_end(
            ranks,
            |config| {
                config.timeout = Duration::from_secs(20);
                unhurried(config);
            },
            |comm| {
                let collectives = comm.collectives().unwrap();
                let stream = comm.create_stream(Priority::Normal).unwrap();
                let bytes = 10 * dtype.size();
                let memory = comm
                    .device()
                    .allocate(bytes, AllocationKind::Plain)
                    .unwrap();
                comm.device().upload(&memory, &vec![0; bytes]).unwrap();
                let reduce = |factor| {
                    let op = ReduceOp::scaled_sum(factor);
                    collectives
                        .all_reduce(&memory, &memory, dtype, op, &stream)
                        .unwrap();
                    comm.synchronize(&stream)
                };
                reduce(0.1).unwrap();
                if dtype == DType::F32 {
                    // These are the same in single precision.
                    reduce(0.1 + 1e-12 * comm.rank() as f64).unwrap();
                }
                let factor = if comm.rank() == 1 { other } else { 0.1 };
                let error = reduce(factor).unwrap_err();
                // None leaves while another still waits.
                all.wait();
                comm.abort("the test is over");
                assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
                let shown = ReduceOp::scaled_sum(other).to_string();
                assert_says(&error, &["all_reduce of 10", "scaled_sum(0.1", &shown]);
            },
        );
    }
}

#[test]
fn scaled_sums_of_integers_are_refused() {
    threads_with(world(2), unhurried, |comm| {
        let paths = match kind() {
            DeviceKind::Host => &[CollectivePath::Direct, CollectivePath::Engine][..],
            DeviceKind::Cuda => &[CollectivePath::Direct],
        };
        for path in paths {
            let options = CollectiveOptions::on(*path);
            let collectives = comm.collectives_with(&options).unwrap();
            let stream = comm.create_stream(Priority::Normal).unwrap();
            let memory = comm.device().allocate(16, AllocationKind::Plain).unwrap();
            let op = ReduceOp::scaled_sum(0.5);
            let error = collectives
                .all_reduce(&memory, &memory, DType::I32, op, &stream)
                .unwrap_err();
            let says = ["scaled_sum of i32; expected floats", "use sum"];
            assert_error(&error, ErrorKind::Unsupported, &says);
        }
    });
}
