//! The host programs that nvFuser prints, written in the language: docs/nvfuser.md.

use super::products::{element, product};
use crate::common::worlds;
use crate::run::Run;
use warplink::DType;
use warplink::program::{Parameters, Program, verify};

const ALL_GATHER: &str =
    include_str!("../../../../../examples/programs/nvfuser_all_gather_matmul.wlp");
const RING: &str = include_str!("../../../../../examples/programs/nvfuser_ring_get.wlp");
const HANDLES: &str =
    include_str!("../../../../../examples/programs/nvfuser_share_mem_handles.wlp");

/// `linear` of gathered rows, with weights as [out, in].
fn all_gather_linear(text: &str, [rows, weights, bias, result]: [&'static str; 4]) {
    for ranks in worlds([1, 2, 4]) {
        let ([m, n, k], streams) = ([3 * ranks, 5, 4], 1 + ranks % 3);
        for dtype in [DType::BF16, DType::F32] {
            let run = Run {
                text,
                parameters: Parameters::from([("m", m as i64), ("k", k as i64), ("n", n as i64)])
                    .with("T", dtype),
                streams,
                // Weights and bias are the same on every rank.
                input: &|rank, name, index| {
                    element(if name == rows { rank } else { 0 }, name, index)
                },
            };
            run.check(ranks, |_, outputs| {
                let a = |row: usize, depth: usize| element(row / 3, rows, row % 3 * k + depth);
                let w = |depth: usize, column: usize| element(0, weights, column * k + depth);
                let expected: Vec<f64> = product([m, n, k], a, w)
                    .into_iter()
                    .enumerate()
                    .map(|(index, value)| value + element(0, bias, index % n))
                    .collect();
                assert_eq!(outputs[result], expected, "{ranks} ranks, {dtype}");
            });
        }
    }
}

#[test]
fn the_pipeline_that_nvfuser_prints_runs() {
    all_gather_linear(ALL_GATHER, ["T0", "T1", "T2", "T3"]);
}

#[test]
fn the_ring_with_the_get_protocol_runs() {
    all_gather_linear(RING, ["A", "W", "bias", "C"]);
}

#[test]
fn handles_that_are_shared_once_serve_every_repetition() {
    let (n, repetitions) = (6, 4);
    for ranks in worlds([1, 2, 4]) {
        let run = Run::of(
            HANDLES,
            [("n", n as i64), ("repetitions", repetitions as i64)],
            &element,
        );
        run.check(ranks, |rank, outputs| {
            let from = (rank + ranks - 1) % ranks;
            let expected: Vec<f64> = (0..n * repetitions)
                .map(|index| element(from, "A", index))
                .collect();
            assert_eq!(outputs["B"], expected);
        });
    }
}

/// As graphs too, for as many ranks as one machine has.
#[test]
fn they_are_verified_for_1_to_16_ranks() {
    for world in 1..=16 {
        for streams in [1, 2, 3, 8] {
            for text in [ALL_GATHER, RING] {
                let sizes = [("m", 2 * world as i64), ("k", 4), ("n", 3)];
                let program = Program::parse(text).unwrap();
                let report = verify(&program, world, streams, &sizes.into()).unwrap();
                assert_eq!(report.eager_only, None);
            }
            let program = Program::parse(HANDLES).unwrap();
            let sizes = [("n", 4), ("repetitions", 3)];
            let report = verify(&program, world, streams, &sizes.into()).unwrap();
            assert_eq!(report.eager_only, None);
        }
    }
}
