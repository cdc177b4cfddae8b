//! The example programs with kernels, and two of the library's own.

use crate::common::{delayed, threads_with, time_on_processor, worlds};
use crate::play::{Launches, play};
use std::time::Duration;
use warplink::DType;
use warplink::device::ReduceOp;
use warplink::program::{Parameters, Program, Value, verify};

/// The examples for any number of ranks.
const EXAMPLES: [&str; 10] = [
    include_str!("../../../../examples/programs/all_reduce_one_shot.wlp"),
    include_str!("../../src/collective/programs/all_reduce_two_shot.wlp"),
    include_str!("../../../../examples/programs/all_reduce_read.wlp"),
    include_str!("../../../../examples/programs/all_reduce_ring.wlp"),
    include_str!("../../../../examples/programs/all_gather_put.wlp"),
    include_str!("../../../../examples/programs/all_to_all_get.wlp"),
    include_str!("../../src/collective/programs/all_gather_copy_engine.wlp"),
    include_str!("../../src/collective/programs/all_to_all_copy_engine.wlp"),
    include_str!("../../src/collective/programs/reduce_scatter_packets.wlp"),
    include_str!("../../../../examples/programs/broadcast_chain.wlp"),
];

/// Those for two ranks only.
const EXAMPLES_OF_TWO: [&str; 2] = [
    include_str!("../../../../examples/programs/all_reduce_pushed.wlp"),
    include_str!("../../../../examples/programs/all_reduce_lanes.wlp"),
];

/// The examples, with the number of ranks that each is for, if it is for one only.
pub(crate) fn all() -> Vec<(Program, Option<usize>)> {
    let any = EXAMPLES.map(|text| (text, None));
    let of_two = EXAMPLES_OF_TWO.map(|text| (text, Some(2)));
    let parsed = any.into_iter().chain(of_two).map(|(text, only)| {
        let program = Program::parse(text).unwrap_or_else(|error| panic!("{error}"));
        let printed = program.to_string();
        assert_eq!(Program::parse(&printed).unwrap(), program, "{printed}");
        (program, only)
    });
    parsed.collect()
}

/// The example of a name.
pub(crate) fn example(name: &str) -> Program {
    let found = all().into_iter().find(|(program, _)| program.name == name);
    found.unwrap().0
}

pub(crate) fn parameters(program: &Program, n: i64, dtype: DType, op: ReduceOp) -> Parameters {
    let has = |name: &str| program.parameters.iter().any(|p| p.name == name);
    let mut list = Parameters::new().with("n", n).with("T", dtype);
    if has("op") {
        list = list.with("op", op);
    }
    // Of the programs of collectives, which share a workspace.
    for (name, value) in [
        ("room", 32 * (n + 16)),
        ("what", 1),
        ("length", n),
        ("upper", 0),
        ("factor", 0),
        // Lanes put what the copy engine does not.
        ("early", 16),
    ] {
        if has(name) {
            list = list.with(name, value);
        }
    }
    if has("root") {
        list = list.with("root", 0);
    }
    list
}

/// The most lanes that a program may have, up to 65.
fn lanes(program: &Program) -> Value {
    let of = program
        .parameters
        .iter()
        .find(|p| p.name == "lanes")
        .unwrap();
    // As many as most have, so that one limit is for all.
    let alternatives = of.kind.alternatives().iter();
    let most = alternatives.filter(|value| **value <= Value::Integer(65));
    most.max().unwrap().clone()
}

#[test]
fn examples_are_verified_for_every_world_and_length() {
    for (program, only) in all() {
        for world in 1..=16 {
            if only.is_some_and(|only| only != world) {
                continue;
            }
            for n in [1, 17, 1000] {
                let parameters = parameters(&program, n, DType::BF16, ReduceOp::Sum);
                let verdict = verify(&program, world, 2, &parameters);
                let said = |d: &Vec<warplink::program::Diagnostic>| {
                    d.iter()
                        .map(ToString::to_string)
                        .collect::<Vec<_>>()
                        .join("\n")
                };
                assert!(
                    verdict.is_ok(),
                    "{} × {world}, n = {n}: {}",
                    program.name,
                    said(&verdict.unwrap_err())
                );
            }
        }
    }
}

#[test]
fn examples_give_what_they_mean() {
    for ranks in worlds([2, 3, 4]) {
        threads_with(ranks, delayed(60), |comm| {
            for (program, only) in all() {
                if only.is_some_and(|only| only != comm.world()) {
                    continue;
                }
                for n in [1, 37, 1000] {
                    let parameters = parameters(&program, n, DType::F32, ReduceOp::Sum);
                    let played = play(comm, &program, &parameters, Launches::default());
                    played.unwrap_or_else(|what| panic!("{}, n = {n}: {what}", program.name));
                }
            }
        });
    }
}

#[test]
fn verifying_takes_less_than_a_second() {
    for (program, only) in all() {
        let parameters = parameters(&program, 1 << 20, DType::BF16, ReduceOp::Sum)
            .with("lanes", lanes(&program));
        let verified = || verify(&program, only.unwrap_or(8), 2, &parameters);
        let (verified, took) = time_on_processor(verified);
        verified.unwrap();
        println!("{}: {took:?}", program.name);
        // Optimized, a tenth of this.
        assert!(took < Duration::from_secs(10), "{}: {took:?}", program.name);
    }
}
