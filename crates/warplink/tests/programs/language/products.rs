//! Products: transposed operands, biases, and what of memory they can read.

use crate::common::{world, worlds};
use crate::run::Run;
use warplink::program::{Parameters, Program, unroll};

/// Small whole numbers, which every type holds exactly.
pub(crate) fn element(rank: usize, name: &str, index: usize) -> f64 {
    let seed = name.bytes().map(usize::from).sum::<usize>();
    ((7 * index + 3 * rank + seed) % 5) as f64 - 2.0
}

/// `m × k` by `k × n`, of elements by row and column.
pub(crate) fn product(
    [m, n, k]: [usize; 3],
    a: impl Fn(usize, usize) -> f64,
    b: impl Fn(usize, usize) -> f64,
) -> Vec<f64> {
    let entry = |row, column| (0..k).map(|depth| a(row, depth) * b(depth, column)).sum();
    (0..m)
        .flat_map(|row| (0..n).map(move |column| (row, column)))
        .map(|(row, column)| entry(row, column))
        .collect()
}

const LAYERS: &str = "program layers(m, k, n, T = f32 | bf16 | f16, transposed_b = 0 | 1) {
    input X: T[m, k]
    input Y: T[k, m]
    input B: T[k, n] column_major if transposed_b == 1
    input W: T[n, k]
    optional input bias: T[n]
    output C: T[m, n]
    output D: T[m, n]
    output E: T[m, n]
    output F: T[m, n]
    output H: T[2, m, n]
    allocate P: T[2, n, k]

    C = matmul(X, B) + bias
    D = linear(X, W, bias)
    E = matmul(transpose(Y), transpose(W))
    F = linear(X, W)
    F += linear(transpose(Y), W)
    for i in 0..2 {
        P[i] = copy(W)
    }
    let V = transpose(P[1])
    H[0] = linear(X, P[0])
    H[1] = matmul(X, V)
}";

#[test]
fn operands_may_be_transposed() {
    let [m, n, k] = [6, 5, 4];
    for dtype in ["f32", "bf16", "f16"] {
        for transposed in [0, 1] {
            for biased in [false, true] {
                let mut parameters = Parameters::from([
                    ("m", m as i64),
                    ("k", k as i64),
                    ("n", n as i64),
                    ("transposed_b", transposed),
                ])
                .with("T", dtype.parse::<warplink::DType>().unwrap());
                if biased {
                    parameters = parameters.with_tensor("bias");
                }
                let run = Run::of(LAYERS, parameters, &element);
                run.check(world(1), |rank, outputs| {
                    let of = |name: &'static str, columns: usize| {
                        move |row: usize, column: usize| element(rank, name, row * columns + column)
                    };
                    let turned = |name: &'static str, columns: usize| {
                        move |row: usize, column: usize| of(name, columns)(column, row)
                    };
                    let size = [m, n, k];
                    let bias = |index: usize| {
                        if biased {
                            element(rank, "bias", index % n)
                        } else {
                            0.0
                        }
                    };
                    let with_bias = |values: Vec<f64>| -> Vec<f64> {
                        let values = values.into_iter().enumerate();
                        values.map(|(index, value)| value + bias(index)).collect()
                    };
                    let b = if transposed == 1 {
                        product(size, of("X", k), turned("B", k))
                    } else {
                        product(size, of("X", k), of("B", n))
                    };
                    assert_eq!(outputs["C"], with_bias(b));
                    let linear = product(size, of("X", k), turned("W", k));
                    assert_eq!(outputs["D"], with_bias(linear.clone()));
                    let both = product(size, turned("Y", m), turned("W", k));
                    assert_eq!(outputs["E"], both);
                    let sum: Vec<f64> = linear.iter().zip(&both).map(|(a, b)| a + b).collect();
                    assert_eq!(outputs["F"], sum);
                    assert_eq!(outputs["H"], [linear.clone(), linear].concat());
                });
            }
        }
    }
}

/// Products that are stored at the next rank, with weights as [out, in].
#[test]
fn stored_products_may_be_transposed() {
    let text = "program stored(n) {
        input X: f32[2, n, n]
        input W: f32[n, n]
        output C: f32[2, n, n]
        allocate P: f32[2, n, n]
        allocate R: f32[2, n, n]
        let next = (rank + 1) % world
        let previous = (rank - 1) % world
        share {
            for i in 0..2 {
                give = send P[i] to next tag i via put
                take = receive R[i] from previous tag i via put
            }
        }
        post take[i] for i in 0..2
        post give[i] = linear(X[i], W) for i in 0..2
        wait take[i] for i in 0..2
        C = copy(R)
    }";
    let n = 16;
    for ranks in worlds([1, 2]) {
        let run = Run::of(text, [("n", n as i64)], &element);
        run.check(ranks, |rank, outputs| {
            let from = (rank + ranks - 1) % ranks;
            let expected: Vec<f64> = (0..2)
                .flat_map(|i| {
                    product(
                        [n, n, n],
                        |row, column| element(from, "X", (i * n + row) * n + column),
                        |row, column| element(from, "W", column * n + row),
                    )
                })
                .collect();
            assert_eq!(outputs["C"], expected);
        });
    }
}

#[test]
fn what_is_not_in_the_order_of_memory_is_refused_where_it_cannot_be_read() {
    for (line, expected) in [
        (
            "C = all_reduce(transpose(A), sum)",
            "'A' that is read is not in the order",
        ),
        (
            "D[0] = matmul(A, A)",
            "'D' that is written is not in the order",
        ),
        (
            "share { s = send transpose(A) to rank via put }",
            "'A' that is transferred is not in",
        ),
        (
            "C = matmul(A, transpose(v))",
            "transpose(v) has fewer than two axes",
        ),
        (
            "C = linear(A, transpose(A[0..2]))",
            "multiplies f32[4, 4] by f32[2, 4]",
        ),
        (
            "C = matmul(U[:, 0..2, 0..4], A)",
            "the left operand is neither in the order of memory nor",
        ),
        (
            "allocate X: f32[4] column_major",
            "'X' is column-major and has 1 axes",
        ),
    ] {
        let text = format!(
            "program p() {{\n input A: f32[4, 4]\n input v: f32[4]\n output C: f32[4, 4]\n \
             output D: f32[1, 4, 4] column_major\n output E: f32[2, 4]\n allocate U: f32[2, 4, 8]\n {line}\n}}"
        );
        let program = Program::parse(&text).unwrap_or_else(|error| panic!("{error}"));
        let error = unroll(&program, 0, 1, 1, &Parameters::new()).expect_err(line);
        assert!(error.to_string().contains(expected), "{line}: {error}");
    }
}
