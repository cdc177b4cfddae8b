//! Element types and operators: a device executes all that `verify` accepts; others are refused
//! before anything runs.

use crate::common::world;
use crate::run::Run;
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

type Expected = fn(usize, usize, usize) -> f64;

fn over_ranks(world: usize, index: usize, join: fn(f64, f64) -> f64) -> f64 {
    let values = (0..world).map(|rank| value(rank, "A", index));
    values.reduce(join).unwrap()
}

fn sum(a: f64, b: f64) -> f64 {
    a + b
}

fn product_of_matrices(rank: usize, index: usize) -> f64 {
    let (row, column) = (index / 4, index % 4);
    let terms = (0..4).map(|k| value(rank, "A", 4 * row + k) * value(rank, "A", 4 * k + column));
    terms.sum()
}

/// Every operation with one element type: its shape, its words, and what it gives by world, rank and index.
const OPERATIONS: [(&str, &str, Expected); 18] = [
    ("[n]", "copy(A)", |_, r, i| value(r, "A", i)),
    ("[n]", "sum(A, B)", |_, r, i| {
        value(r, "A", i) + value(r, "B", i)
    }),
    ("[n]", "product(A, B)", |_, r, i| {
        value(r, "A", i) * value(r, "B", i)
    }),
    ("[n]", "max(A, B)", |_, r, i| {
        value(r, "A", i).max(value(r, "B", i))
    }),
    ("[n]", "min(A, B)", |_, r, i| {
        value(r, "A", i).min(value(r, "B", i))
    }),
    ("[4, 4]", "matmul(M, M)", |_, r, i| {
        product_of_matrices(r, i)
    }),
    ("[n]", "all_reduce(A, sum)", |w, _, i| over_ranks(w, i, sum)),
    ("[n]", "all_reduce(A, max)", |w, _, i| {
        over_ranks(w, i, f64::max)
    }),
    ("[n]", "all_reduce(A, min)", |w, _, i| {
        over_ranks(w, i, f64::min)
    }),
    ("[n]", "reduce_scatter(W, sum)", |w, _, i| {
        over_ranks(w, i, sum)
    }),
    ("[n]", "reduce_scatter(W, max)", |w, _, i| {
        over_ranks(w, i, f64::max)
    }),
    ("[n]", "reduce_scatter(W, min)", |w, _, i| {
        over_ranks(w, i, f64::min)
    }),
    ("[n]", "reduce(A, sum to rank_0)", |w, _, i| {
        over_ranks(w, i, sum)
    }),
    ("[n]", "reduce(A, max to rank_0)", |w, _, i| {
        over_ranks(w, i, f64::max)
    }),
    ("[n]", "reduce(A, min to rank_0)", |w, _, i| {
        over_ranks(w, i, f64::min)
    }),
    ("[n]", "broadcast(A from world - 1)", |w, _, i| {
        value(w - 1, "A", i)
    }),
    ("[world, n]", "all_gather(A)", |_, _, i| {
        value(i / N, "A", i % N)
    }),
    ("[world, n]", "all_to_all(W)", |_, _, i| {
        value(i / N, "A", i % N)
    }),
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
        Run {
            text: &program(dtype, &accepted),
            parameters: parameters.clone(),
            streams: 1,
            input: &|rank, name, index| value(rank, name, index),
        }
        .check(world, |rank, outputs| {
            for &number in &accepted {
                let (_, words, expected) = OPERATIONS[number];
                let found = &outputs[&format!("C{number}")];
                for (index, found) in found.iter().enumerate() {
                    let expected = if words.starts_with("reduce(") && rank != 0 {
                        value(rank, "A", index)
                    } else {
                        expected(world, rank, index)
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
