//! Collectives over a part of the ranks: rows and columns of a mesh, and lists of any order.

use crate::common::world;
use crate::run::{Outputs, Run};
use warplink::program::{Parameters, Program, verify};

/// Input of rank `rank`.
fn value(rank: usize, index: usize) -> f64 {
    (8 * rank + index) as f64
}

/// Every collective in the rows and the columns of a mesh, on two streams.
const MESH: &str = "program mesh(n, columns) {
    require world % columns == 0

    input A: f32[n]
    output G: f32[columns, n]
    output S: f32[n]
    output B: f32[n]
    output T: f32[world / columns, n]
    output P: f32[n]
    output R: f32[n]

    let start = rank / columns * columns
    let row = [start + c for c in 0..columns]
    # From the last row to the first, so that places and ranks differ.
    let column = [(world / columns - 1 - r) * columns + rank % columns for r in 0..world / columns]

    G[rank % columns] = copy(A)
    allocate W: f32[world / columns, n]
    for r in 0..count(column) { W[r] = copy(A) }
    R = copy(A)

    fork pool(0) {
        set_stream pool(0)
        G = all_gather(G[rank % columns]) among row
        S = all_reduce(A, sum) among row
        B = broadcast(A from start + columns - 1) among row
    }
    T = all_to_all(W) among column
    P = reduce_scatter(W, max) among column
    R = reduce(A, sum to column[0]) among column
}";

fn check_mesh(world: usize, columns: usize, rank: usize, outputs: &Outputs) {
    let (n, rows) = (8, world / columns);
    let row: Vec<usize> = (0..columns).map(|c| rank / columns * columns + c).collect();
    let column: Vec<usize> = (0..rows)
        .rev()
        .map(|r| r * columns + rank % columns)
        .collect();
    let of = |rank: usize| (0..n).map(move |index| value(rank, index));
    let sum = |ranks: &[usize]| -> Vec<f64> {
        let at = |index| ranks.iter().map(|rank| value(*rank, index)).sum();
        (0..n).map(at).collect()
    };
    let gathered: Vec<f64> = row.iter().flat_map(|rank| of(*rank)).collect();
    assert_eq!(outputs["G"], gathered);
    assert_eq!(outputs["S"], sum(&row));
    assert_eq!(outputs["B"], of(row[columns - 1]).collect::<Vec<_>>());
    let exchanged: Vec<f64> = column.iter().flat_map(|rank| of(*rank)).collect();
    assert_eq!(outputs["T"], exchanged);
    let largest = *column.iter().max().unwrap();
    assert_eq!(outputs["P"], of(largest).collect::<Vec<_>>());
    let reduced = if rank == column[0] {
        sum(&column)
    } else {
        of(rank).collect()
    };
    assert_eq!(outputs["R"], reduced);
}

#[test]
fn rows_and_columns_of_a_mesh_have_collectives_of_their_own() {
    let world = world(4);
    // On two ranks, a row or a column is a rank alone.
    for columns in [1, 2, world] {
        if !world.is_multiple_of(columns) {
            continue;
        }
        let parameters = [("n", 8), ("columns", columns as i64)];
        Run {
            text: MESH,
            parameters: parameters.into_iter().collect(),
            streams: 2,
            input: &|rank, _, index| value(rank, index),
        }
        .check(world, |rank, outputs| {
            check_mesh(world, columns, rank, outputs);
        });
    }
}

/// Ranks outside of a list do something else meanwhile, and the list is the caller's.
#[test]
fn ranks_that_are_not_listed_are_not_concerned() {
    let text = "program some(ranks[]) {
        input A: i32[4]
        output C: i32[4]
        C = copy(A)
        for place in 0..count(ranks) {
            if ranks[place] == rank {
                C = all_reduce(A, sum) among ranks
            }
        }
    }";
    let world = world(3);
    let list: Vec<usize> = (0..world).rev().step_by(2).collect();
    let mut parameters = Parameters::new();
    let ranks: Vec<i64> = list.iter().map(|rank| *rank as i64).collect();
    parameters.insert("ranks", ranks);
    Run::of(text, parameters, &|rank, _, index| value(rank, index)).check(
        world,
        |rank, outputs| {
            let expected: Vec<f64> = (0..4)
                .map(|index| {
                    if list.contains(&rank) {
                        list.iter().map(|member| value(*member, index)).sum()
                    } else {
                        value(rank, index)
                    }
                })
                .collect();
            assert_eq!(outputs["C"], expected);
        },
    );
}

/// A list of all ranks in order needs no engine of its own; one in another order does.
#[test]
fn all_ranks_in_order_are_all_ranks() {
    let report = |list: &str| {
        let text = format!(
            "program p() {{
                input A: f32[4]
                output C: f32[4]
                let list = [{list}]
                C = all_reduce(A, sum) among list
            }}"
        );
        let program = Program::parse(&text).unwrap();
        verify(&program, 4, 1, &Parameters::new()).unwrap()
    };
    let (same, other) = (
        report("r for r in 0..world"),
        report("3 - r for r in 0..world"),
    );
    assert!(same.uses_engine && same.uses_engine_of_all);
    assert!(other.uses_engine && !other.uses_engine_of_all);
}

#[test]
fn a_rank_takes_part_in_a_limited_number_of_lists() {
    let text = "program p() {
        input A: f32[4]
        output C: f32[4]
        for i in 0..world - 1 {
            for j in i + 1..world {
                if rank == i or rank == j {
                    let pair = [i, j]
                    C = all_reduce(A, sum) among pair
                }
            }
        }
    }";
    let program = Program::parse(text).unwrap();
    let check = |world| verify(&program, world, 1, &Parameters::new());
    check(65).unwrap();
    let refused = check(66).unwrap_err();
    assert!(refused[0].message.contains("at most 64"), "{}", refused[0]);
}
