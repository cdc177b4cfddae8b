//! Parts of tensors along any axis, and transposed operands, of copies and element-wise operations.

use crate::common::{time_on_processor, world};
use crate::run::Run;
use warplink::program::{OperationKind, Parameters, Program, unroll, verify};

fn input(rank: usize, _: &str, index: usize) -> f64 {
    (100 * rank + index) as f64
}

#[test]
fn columns_are_copied_and_combined() {
    let text = "program columns(m, n, T = f32 | bf16 | i32) {
        require n % 2 == 0
        input A: T[m, n]
        output C: T[m, n]
        output D: T[n, m]
        output E: T[2, m]
        output F: T[m, 2, 3] = 0
        let half = n / 2
        fork pool(0), pool(1) {
            set_stream pool(0)
            C[:, 0..half] = copy(A[:, half..n])
            set_stream pool(1)
            C[:, half..n] = sum(A[:, 0..half], A[:, half..n])
        }
        D = copy(transpose(A))
        E[0] = max(A[:, 0], A[:, n - 1])
        E[1, 0..m] = product(C[:, 1], E[0])
        for j in 0..2 {
            F[:, j, 1..3] += sum(A[:, j..j + 2])
        }
        F[1, :, 0] = copy(A[0, 0..2])
    }";
    let (m, n) = (5, 4);
    for dtype in ["f32", "i32"] {
        let parameters = Parameters::from([("m".to_owned(), 5), ("n".to_owned(), 4)]);
        let parameters = parameters.with("T", dtype.parse::<warplink::DType>().unwrap());
        let run = Run {
            text,
            parameters,
            streams: 2,
            input: &input,
        };
        run.check(world(2), |rank, outputs| {
            let a = |i: usize, j: usize| input(rank, "A", i * n + j);
            for i in 0..m {
                for j in 0..n {
                    let expected = if j < 2 {
                        a(i, j + 2)
                    } else {
                        a(i, j - 2) + a(i, j)
                    };
                    assert_eq!(outputs["C"][i * n + j], expected, "C[{i}, {j}]");
                    assert_eq!(outputs["D"][j * m + i], a(i, j), "D[{j}, {i}]");
                }
                let largest = a(i, n - 1);
                assert_eq!(outputs["E"][i], largest);
                assert_eq!(outputs["E"][m + i], largest * a(i, 3));
                for j in 0..2 {
                    let row = &outputs["F"][3 * (2 * i + j)..][..3];
                    let first = if i == 1 { a(0, j) } else { 0.0 };
                    assert_eq!(row, [first, a(i, j), a(i, j + 1)], "F[{i}, {j}]");
                }
            }
        });
    }
}

/// Two streams write to columns side by side, which lie between one another in memory.
#[test]
fn columns_side_by_side_are_apart() {
    let text = |second: &str| {
        format!(
            "program apart() {{
                input A: f32[64, 8]
                output C: f32[64, 8]
                fork pool(0), pool(1) {{
                    set_stream pool(0)
                    C[:, 0..4] = copy(A[:, 4..8])
                    set_stream pool(1)
                    {second} = copy(A[:, 0..4])
                }}
            }}"
        )
    };
    let verdict = |second: &str| {
        let program = Program::parse(&text(second)).unwrap();
        verify(&program, 2, 2, &Parameters::new())
    };
    verdict("C[:, 4..8]").unwrap();
    let error = verdict("C[:, 3..7]").unwrap_err();
    assert!(
        error.iter().any(|e| e.kind.to_string() == "race"),
        "{error:?}"
    );
    let error = verdict("C[:, 4..8] = copy(A[:, 0..4]); C[63, 1..5]").unwrap_err();
    assert!(
        error[0].message.contains("expected the same shape"),
        "{error:?}"
    );
}

/// A part of whole rows, or with one element along other axes, is one copy.
#[test]
fn parts_that_are_contiguous_are_copied_as_such() {
    let text = "program whole() {
        input A: f32[4, 1, 6]
        output C: f32[4, 6]
        output D: f32[6]
        output E: f32[2, 6]
        C = copy(A[:, 0, :])
        D = copy(A[3, :, 0..6])
        E = copy(A[1..3, :, :])
    }";
    let program = Program::parse(text).unwrap();
    let rank = unroll(&program, 0, 1, 1, &Parameters::new()).unwrap();
    for operation in &rank.operations {
        assert!(
            matches!(operation.kind, OperationKind::Copy { .. }),
            "{operation:?}"
        );
    }
}

#[test]
fn parts_along_many_axes_or_of_the_wrong_shape_are_refused() {
    for (line, expected) in [
        ("v = copy(A[:, 4])", "the index is 4; expected 0 to 3"),
        ("v = copy(A[:, 1..1])", "selects 1..1"),
        ("v = copy(A[0, :, 1])", "selects from 1 axes"),
        ("v = copy(A[:, :])", "expected the same shape"),
        (
            "share { s = send A[:, 0..2] to rank via put }",
            "'A' that is transferred is not in the order of memory",
        ),
        (
            "v = all_reduce(A[:, 1], sum)",
            "is not in the order of memory",
        ),
        (
            "C = matmul(A, A) + A[:, 1]",
            "'A' that is added is not in the order",
        ),
        (
            "U[0, 0..2, 0..2, 0..2, 0..2, 0..2] = copy(U[1, 1..3, 1..3, 1..3, 1..3, 1..3])",
            "along 5 axes; expected at most 4",
        ),
    ] {
        let text = format!(
            "program p() {{\n input A: f32[4, 4]\n output v: f32[4]\n output C: f32[4, 4]\n \
             allocate U: f32[2, 3, 3, 3, 3, 3]\n {line}\n}}"
        );
        let program = Program::parse(&text).unwrap_or_else(|error| panic!("{error}"));
        let error = unroll(&program, 0, 1, 1, &Parameters::new()).expect_err(line);
        assert!(error.to_string().contains(expected), "{line}: {error}");
    }
}

/// A matrix of many rows is as cheap to verify as one of few.
#[test]
fn columns_of_large_matrices_cost_no_more_than_those_of_small_ones() {
    let text = "program large(n) {
        input A: bf16[n, n]
        output C: bf16[n, n]
        for j in 0..64 {
            let w = n / 64
            C[:, j * w..(j + 1) * w] = copy(A[:, j * w..(j + 1) * w])
            C[0..n / 2, j * w..(j + 1) * w] = sum(A[n / 2..n, j * w..(j + 1) * w])
        }
    }";
    let program = Program::parse(text).unwrap();
    let parameters = Parameters::from([("n".to_owned(), 1 << 16)]);
    let (verified, took) = time_on_processor(|| verify(&program, 8, 2, &parameters));
    verified.unwrap();
    assert!(took.as_secs() < 5, "{took:?}");
    // Each element alone is too much.
    let text = text.replace("0..64", "0..n").replace("n / 64", "1");
    let program = Program::parse(&text).unwrap();
    let error = verify(&program, 8, 2, &parameters).unwrap_err();
    assert!(error[0].message.contains("too large"), "{}", error[0]);
}

/// Blocks of matrices are operands and results of products, also transposed, where their rows are at even
/// steps; what lies between is left alone.
#[test]
fn blocks_of_matrices_are_multiplied() {
    let text = "program blocks(T = f32 | bf16) {
        input A: T[6, 10]
        input B: T[8, 9]
        input v: T[3]
        output C: T[4, 7] = 0
        output D: T[2, 3, 5]
        C[:, 2..5] = matmul(A[1..5, 3..8], B[2..7, 4..7]) + v
        C[0..2, 5..7] += matmul(transpose(A[0..6, 4..6]), transpose(B[1..3, 0..6]))
        C[2..4, 5..7] = matmul(A[0..2, 0..6], transpose(B[1..3, 0..6])) + C[2..4, 5..7]
        D[:, :, 0..4] = matmul(A[0..6, 0..2], B[0..2, 0..4])
        D[:, 1, 4] = copy(C[0..2, 2])
        D[:, 0, 4] = copy(C[2..4, 5])
        D[:, 2, 4] = copy(C[0..2, 0])
    }";
    let input = |rank: usize, name: &str, index: usize| -> f64 {
        let shift = if name == "A" { 0 } else { 1 };
        [0.0, 1.0, -1.0, 2.0][(7 * index + 3 * (index / 4) + rank + shift) % 4]
    };
    for dtype in [warplink::DType::F32, warplink::DType::BF16] {
        let run = Run::of(text, Parameters::new().with("T", dtype), &input);
        run.check(world(2), |rank, outputs| {
            let a = |i: usize, j: usize| input(rank, "A", 10 * i + j);
            let b = |i: usize, j: usize| input(rank, "B", 9 * i + j);
            let c = |i: usize, j: usize| -> f64 {
                match j {
                    0 | 1 => 0.0,
                    2..5 => {
                        let terms = (0..5).map(|k| a(1 + i, 3 + k) * b(2 + k, 2 + j));
                        terms.sum::<f64>() + input(rank, "v", j - 2)
                    }
                    _ if i < 2 => (0..6).map(|k| a(k, 4 + i) * b(j - 4, k)).sum(),
                    _ => (0..6).map(|k| a(i - 2, k) * b(j - 4, k)).sum(),
                }
            };
            for i in 0..4 {
                for j in 0..7 {
                    assert_eq!(outputs["C"][7 * i + j], c(i, j), "C[{i}, {j}]");
                }
            }
            for row in 0..6 {
                for j in 0..4 {
                    let expected: f64 = (0..2).map(|k| a(row, k) * b(k, j)).sum();
                    assert_eq!(outputs["D"][5 * row + j], expected, "D[{row}, {j}]");
                }
            }
            assert_eq!(outputs["D"][5 + 4], c(0, 2));
        });
    }
}
