//! Every type and operator of what reduces, by each algorithm.

use crate::common::{allocate, share_gpus, threads, world, worlds};
use crate::data::by;
use crate::direct::{SOON, direct};
use crate::expected::{Case, Made, REDUCTIONS, Random, assert_alike};
use std::time::Instant;
use warplink::collective::{Algorithm, Call, CollectiveKind};
use warplink::device::{Priority, ReduceOp};
use warplink::{Collectives, Communicator, DType};

/// All types with all operators, each with a number of its own that changes with the ranks.
fn types_and_operators(ranks: usize) -> Vec<(DType, ReduceOp, usize)> {
    let mut all = Vec::new();
    for (type_number, dtype) in DType::ALL.into_iter().enumerate() {
        for (op_number, op) in ReduceOp::ALL.into_iter().enumerate() {
            let number = type_number + op_number + ranks;
            // Compiling takes minutes where eight ranks share a processor.
            if share_gpus() && ranks < world(8) && !number.is_multiple_of(4) {
                continue;
            }
            all.push((dtype, op, number));
        }
    }
    all
}

fn call(
    kind: CollectiveKind,
    (dtype, op): (DType, ReduceOp),
    count: usize,
    ranks: usize,
    random: &mut Random,
) -> Call {
    Call {
        kind,
        op: Some(op),
        dtype,
        count,
        root: kind.has_root().then(|| random.below(ranks)),
    }
}

/// On 1 to 8 ranks through the workspace, by algorithms in turn, with results of all-reduce that are the same on all.
#[test]
fn every_type_and_operator_is_reduced_on_every_number_of_ranks() {
    for ranks in worlds(1..=8) {
        threads(ranks, |comm| {
            let stream = comm.create_stream(Priority::Normal).unwrap();
            let algorithms = [Algorithm::OneShot, Algorithm::Chunks, Algorithm::TwoShot];
            let by = algorithms.map(|algorithm| by(comm, Some(algorithm), 4 << 20));
            let mut random = Random::new(3 + ranks as u64);
            let mut made = Vec::new();
            for (dtype, op, number) in types_and_operators(ranks) {
                let others = [CollectiveKind::Reduce, CollectiveKind::ReduceScatter];
                let calls = [
                    (CollectiveKind::AllReduce, number % 3),
                    // No other kind goes in two shots.
                    (others[number / 2 % 2], number % 2),
                ];
                for (kind, number) in calls {
                    let count = 1 + random.below(900);
                    let call = call(kind, (dtype, op), count, ranks, &mut random);
                    let choice = by[number].choice(&call).unwrap();
                    assert_eq!(choice.algorithm, algorithms[number]);
                    let case = Case::placed(&mut random, call);
                    made.push(case.make(comm, &by[number], &stream).unwrap());
                }
            }
            comm.synchronize(&stream).unwrap();
            for made in &made {
                made.check(comm);
            }
            let all_reduces = made
                .iter()
                .filter(|made| made.call().kind == CollectiveKind::AllReduce);
            let own: Vec<u8> = all_reduces.flat_map(|made| made.reduced(comm)).collect();
            assert_alike(comm, &own, "all-reduces");
        });
    }
}

/// On 2 to 8 ranks straight between the memory of the calls, which is reached before; by all-reduce, reduce and
/// reduce-scatter in turn.
#[test]
fn every_type_and_operator_is_reduced_directly() {
    for ranks in worlds(2..=8) {
        if ranks < 2 {
            return;
        }
        threads(ranks, |comm| {
            let collectives = direct(comm);
            let mut random = Random::new(57 + ranks as u64);
            let cases: Vec<Case> = types_and_operators(ranks)
                .into_iter()
                .map(|(dtype, op, number)| {
                    // Parts of inputs and outputs begin at multiples of 16 bytes.
                    let count = 16 * (1 + random.below(50));
                    let kind = REDUCTIONS[number % 3];
                    Case {
                        call: call(kind, (dtype, op), count, ranks, &mut random),
                        in_place: random.below(2) == 0,
                        shift: 0,
                        seed: random.next() & !3,
                    }
                })
                .collect();
            let room = |case: &Case| case.memory_bytes(ranks).next_multiple_of(256);
            let whole = allocate(comm, cases.iter().map(room).sum());
            let mut at = 0;
            let made: Vec<Made> = cases
                .into_iter()
                .map(|case| {
                    let from = at;
                    at += room(&case);
                    let memory = whole.slice(from..at).unwrap();
                    case.place(comm, memory).unwrap()
                })
                .collect();
            until_all_go_directly(comm, &collectives, &made);
        });
    }
}

/// Makes all calls, and checks them, until all of their lanes go directly.
fn until_all_go_directly(comm: &Communicator, collectives: &Collectives, made: &[Made]) {
    let stream = comm.create_stream(Priority::Normal).unwrap();
    let lanes = |made: &Made| collectives.choice(made.call()).unwrap().lanes as u64;
    let all: u64 = made.iter().map(lanes).sum();
    // The first calls compile their kernels, which takes any time.
    let mut compiled = None;
    loop {
        let before = collectives.direct_lanes().unwrap();
        for made in made {
            made.again(comm, collectives, &stream).unwrap();
        }
        comm.synchronize(&stream).unwrap();
        made.iter().for_each(|made| made.check(comm));
        let direct = collectives.direct_lanes().unwrap() - before;
        let started = compiled.get_or_insert_with(Instant::now);
        // All ranks go on together.
        let told = [u8::from(direct == all), u8::from(started.elapsed() > SOON)];
        let told = comm.all_gather_bytes(&told).unwrap();
        if told.iter().all(|told| told[0] == 1) {
            return;
        }
        assert!(
            told.iter().all(|told| told[1] == 0),
            "{direct} of {all} lanes went directly"
        );
    }
}
