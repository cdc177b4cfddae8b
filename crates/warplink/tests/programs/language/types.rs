//! Element types and operators: a device executes all that `verify` accepts; others are refused
//! before anything runs.

use crate::common::world;
use crate::run::Run;
use Expected::{At, Of, OverRanks};
use std::collections::BTreeSet;
use warplink::DType;
use warplink::program::{DiagnosticKind, Parameters, Program, verify};

const N: usize = 16;

/// An element of an input: small, so that every type holds what is made of it.
fn value(rank: usize, name: &str, index: usize) -> f64 {
    let step = (index % N) % 3;
    match name {
        "B" => (3 - step) as f64,
        _ => (rank + step + 1) as f64,
    }
}

/// What an operation gives.
enum Expected {
    /// A function of world, rank and index.
    At(fn(usize, usize, usize) -> f64),
    /// A value of the rank's A and one of its B, combined.
    Of(fn(f64, f64) -> f64),
    /// The values of all ranks' A, combined.
    OverRanks(fn(f64, f64) -> f64),
}

impl Expected {
    fn value(&self, world: usize, rank: usize, index: usize) -> f64 {
        match self {
            At(function) => function(world, rank, index),
            Of(join) => join(value(rank, "A", index), value(rank, "B", index)),
            OverRanks(join) => {
                let values = (0..world).map(|rank| value(rank, "A", index));
                values.reduce(*join).unwrap()
            }
        }
    }
}

fn product_of_matrices(rank: usize, index: usize) -> f64 {
    let (row, column) = (index / 4, index % 4);
    let terms = (0..4).map(|k| value(rank, "A", 4 * row + k) * value(rank, "A", 4 * k + column));
    terms.sum()
}

fn of_last(world: usize, _: usize, index: usize) -> f64 {
    value(world - 1, "A", index)
}

fn of_each(_: usize, _: usize, index: usize) -> f64 {
    value(index / N, "A", index % N)
}

/// Every operation with one element type: its shape, its words, and what it gives.
const OPERATIONS: [(&str, &str, Expected); 18] = [
    ("[n]", "copy(A)", Of(|a, _| a)),
    ("[n]", "sum(A, B)", Of(|a, b| a + b)),
    ("[n]", "product(A, B)", Of(|a, b| a * b)),
    ("[n]", "max(A, B)", Of(f64::max)),
    ("[n]", "min(A, B)", Of(f64::min)),
    (
        "[4, 4]",
        "matmul(M, M)",
        At(|_, rank, index| product_of_matrices(rank, index)),
    ),
    ("[n]", "all_reduce(A, sum)", OverRanks(|a, b| a + b)),
    ("[n]", "all_reduce(A, max)", OverRanks(f64::max)),
    ("[n]", "all_reduce(A, min)", OverRanks(f64::min)),
    ("[n]", "reduce_scatter(W, sum)", OverRanks(|a, b| a + b)),
    ("[n]", "reduce_scatter(W, max)", OverRanks(f64::max)),
    ("[n]", "reduce_scatter(W, min)", OverRanks(f64::min)),
    ("[n]", "reduce(A, sum to rank_0)", OverRanks(|a, b| a + b)),
    ("[n]", "reduce(A, max to rank_0)", OverRanks(f64::max)),
    ("[n]", "reduce(A, min to rank_0)", OverRanks(f64::min)),
    ("[n]", "broadcast(A from world - 1)", At(of_last)),
    ("[world, n]", "all_gather(A)", At(of_each)),
    ("[world, n]", "all_to_all(W)", At(of_each)),
];

/// A program of some of the operations, each with an output of its own.
fn program(dtype: DType, operations: &[usize]) -> String {
    let mut text = format!(
        "program every(n) {{
    input A: {dtype}[n]
    input B: {dtype}[n]
    input M: {dtype}[4, 4]
    input W: {dtype}[world, n]
    let rank_0 = 0
"
    );
    for &number in operations {
        let (shape, words, _) = OPERATIONS[number];
        text += &format!("    output C{number}: {dtype}{shape}\n");
        if words.starts_with("reduce(") {
            text += &format!("    C{number} = copy(A)\n");
        }
        text += &format!("    C{number} = {words}\n");
    }
    text + "}\n"
}

#[test]
fn every_operation_is_done_in_every_type_that_is_accepted() {
    let world = world(2);
    let parameters: Parameters = [("n", N as i64)].into_iter().collect();
    let mut refused = BTreeSet::new();
    for &dtype in DType::ELEMENTWISE.iter() {
        let accepted: Vec<usize> = (0..OPERATIONS.len())
            .filter(|&number| {
                let text = program(dtype, &[number]);
                let verdict = verify(&Program::parse(&text).unwrap(), world, 1, &parameters);
                if let Err(diagnostics) = &verdict {
                    assert_eq!(
                        diagnostics[0].kind,
                        DiagnosticKind::Mismatch,
                        "{diagnostics:?}"
                    );
                    refused.insert(format!("{dtype} {}", OPERATIONS[number].1));
                }
                verdict.is_ok()
            })
            .collect();
        Run::of(
            &program(dtype, &accepted),
            parameters.clone(),
            &|rank, name, index| value(rank, name, index),
        )
        .check(world, |rank, outputs| {
            for &number in &accepted {
                let (_, words, expected) = &OPERATIONS[number];
                let found = &outputs[&format!("C{number}")];
                for (index, found) in found.iter().enumerate() {
                    let expected = if words.starts_with("reduce(") && rank != 0 {
                        value(rank, "A", index)
                    } else {
                        expected.value(world, rank, index)
                    };
                    assert_eq!(*found, expected, "{dtype} {words} of rank {rank}, {index}");
                }
            }
        });
    }
    let expected = [
        "f64 matmul(M, M)",
        "i32 matmul(M, M)",
        "u8 matmul(M, M)",
        "u8 max(A, B)",
        "u8 min(A, B)",
        "u8 product(A, B)",
        "u8 sum(A, B)",
    ];
    assert_eq!(refused, expected.map(str::to_owned).into());
}
