//! The same inputs give the same bits: on all ranks, from call to call, and by every algorithm.

use crate::common::{share_gpus, threads_with, world, worlds};
use crate::data::by;
use crate::direct::check_soon;
use crate::expected::{Case, REDUCTIONS, Random, assert_alike};
use crate::scaled::unhurried;
use std::time::Instant;
use warplink::collective::{Algorithm, Call, CollectiveKind};
use warplink::device::{Priority, ReduceOp, Stream};
use warplink::{Collectives, Communicator, DType};

const FLOATS: [DType; 6] = [
    DType::F64,
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::F8E4M3,
    DType::F8E5M2,
];

/// Those whose result depends on the order of the inputs.
const OPERATORS: [ReduceOp; 3] = [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Average];

/// A reduction on memory that kernels of the peers reach.
fn case(random: &mut Random, (number, kind): (usize, CollectiveKind), dtype: DType) -> Case {
    let op = match number % 4 {
        3 => ReduceOp::scaled_sum(0.3),
        plain => OPERATORS[plain],
    };
    Case {
        call: Call {
            kind,
            op: Some(op),
            dtype,
            // Parts of all ranks start at multiples of 16 bytes.
            count: (1 + random.below(4000)).next_multiple_of(16),
            root: kind.has_root().then_some(0),
        },
        in_place: false,
        shift: 0,
        seed: random.next() & !3,
    }
}

/// Result of a case by a call on new memory.
fn once(comm: &Communicator, collectives: &Collectives, case: Case, stream: &Stream) -> Vec<u8> {
    let made = case.make(comm, collectives, stream).unwrap();
    comm.synchronize(stream).unwrap();
    made.check(comm);
    made.reduced(comm)
}

/// Results of repeated calls on the same memory, until one was direct in all lanes, and the number of calls
/// before that, which used chunks at least in part.
fn until_direct(
    comm: &Communicator,
    collectives: &Collectives,
    case: Case,
    stream: &Stream,
) -> (Vec<Vec<u8>>, usize) {
    let all_lanes = collectives.choice(&case.call).unwrap().lanes as u64;
    let made = case.make(comm, collectives, stream).unwrap();
    comm.synchronize(stream).unwrap();
    let mut results = vec![made.reduced(comm)];
    let started = Instant::now();
    loop {
        let before = collectives.direct_lanes().unwrap();
        made.again(comm, collectives, stream).unwrap();
        comm.synchronize(stream).unwrap();
        results.push(made.reduced(comm));
        if collectives.direct_lanes().unwrap() - before == all_lanes {
            let before = results.len() - 1;
            return (results, before);
        }
        check_soon(comm, started, case);
    }
}

/// By chunks while memory is not reached, directly when it is, by packets, and by what is chosen without being told, of all
/// types of floats.
#[test]
fn floats_are_reduced_to_the_same_bits_however_often_and_by_every_algorithm() {
    for ranks in worlds([2, 3, 8]) {
        threads_with(ranks, unhurried, |comm| {
            let stream = comm.create_stream(Priority::Normal).unwrap();
            let direct = by(comm, Some(Algorithm::Direct), 1 << 20);
            let others = [
                Some(Algorithm::Chunks),
                Some(Algorithm::OneShot),
                Some(Algorithm::TwoShot),
                None,
            ];
            let others = others.map(|algorithm| by(comm, algorithm, 1 << 20));
            let mut random = Random::new(41 + ranks as u64);
            let mut number = 0;
            for dtype in FLOATS {
                for kind in REDUCTIONS {
                    number += 1;
                    // Compiling takes long where ranks share a processor.
                    if share_gpus() && number % 5 != 0 {
                        continue;
                    }
                    let case = case(&mut random, (number, kind), dtype);
                    let (results, before) = until_direct(comm, &direct, case, &stream);
                    assert!(before > 0);
                    let first = &results[0];
                    let same = results.iter().all(|result| result == first);
                    assert!(same, "{case:?}: other bits from call to call");
                    for collectives in &others {
                        let Ok(choice) = collectives.choice(&case.call) else {
                            continue;
                        };
                        for _ in 0..2 {
                            let result = once(comm, collectives, case, &stream);
                            assert!(result == *first, "{case:?}: other bits by {choice:?}");
                        }
                    }
                    if kind == CollectiveKind::AllReduce {
                        assert_alike(comm, first, format_args!("{case:?}"));
                    }
                }
            }
        });
    }
}

/// Another communicator of the same ranks, with workspace, memory and streams of its own, gives the same bits: so does the
/// next run of a program.
#[test]
fn floats_are_reduced_to_the_same_bits_from_run_to_run() {
    let ranks = world(4);
    let results = std::sync::Mutex::new(Vec::new());
    for _ in 0..2 {
        threads_with(ranks, unhurried, |comm| {
            let stream = comm.create_stream(Priority::Normal).unwrap();
            let (chosen, direct) = (
                by(comm, None, 1 << 20),
                by(comm, Some(Algorithm::Direct), 1 << 20),
            );
            let mut random = Random::new(43);
            let mut own = Vec::new();
            for (number, dtype) in FLOATS.into_iter().enumerate() {
                let mut case = case(&mut random, (number, CollectiveKind::AllReduce), dtype);
                // Simulating the algorithms for each length and size of an element takes long.
                let collectives = if number % 3 == 1 { &chosen } else { &direct };
                for count in [case.call.count, 40_000] {
                    case.call.count = count;
                    for _ in 0..2 {
                        own.push(once(comm, collectives, case, &stream));
                    }
                }
            }
            assert_alike(comm, &own.concat(), "sums");
            results.lock().unwrap().push(own);
        });
    }
    let results = results.into_inner().unwrap();
    let same = results.iter().all(|one| *one == results[0]);
    assert!(same, "other bits from run to run");
}
