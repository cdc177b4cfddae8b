//! Tensors that start at 0, and sums that need no first step.

use crate::common::worlds;
use crate::run::Run;
use warplink::program::{OperationKind, Parameters, Program, unroll, verify};

fn operations(text: &str) -> Vec<String> {
    let program = Program::parse(text).unwrap();
    let rank = unroll(&program, 0, 1, 2, &Parameters::new()).unwrap();
    let operations = rank.operations.iter().map(|operation| {
        let name = operation.kind.name();
        match &operation.kind {
            OperationKind::Zero(range) => {
                format!("{name} {}..{}", range.offset_bytes, range.end())
            }
            OperationKind::Matmul(it) if it.spec.accumulate => format!("{name} +="),
            OperationKind::Elementwise(it) => format!("{name} of {}", it.sources.len()),
            _ => name.to_owned(),
        }
    });
    operations.collect()
}

#[test]
fn what_is_accumulated_first_is_stored() {
    let text = "program p() {
        input A: f32[2, 2]
        output C: f32[2, 2] = 0
        for i in 0..3 { C += matmul(A, A) }
    }";
    assert_eq!(operations(text), ["matmul", "matmul +=", "matmul +="]);
    let written_out = text.replace("C += matmul(A, A)", "C = matmul(A, A) + C");
    assert_eq!(operations(&written_out), operations(text));
    let sums = "program p() {
        input A: f32[3, 2]
        output C: f32[2] = 0
        for i in 0..3 { C += sum(A[i]) }
    }";
    assert_eq!(operations(sums), ["sum of 1", "sum of 2", "sum of 2"]);
}

#[test]
fn bytes_are_set_only_where_they_are_read_first_or_never_written() {
    let text = "program p() {
        input A: f32[2]
        output C: f32[2, 2] = 0
        output D: f32[2] = 0
        allocate X: f32[4, 2] = 0
        D = sum(X[0], D, A)
        X[1] = copy(A)
        C[0] = copy(X[0])
        C[0] = sum(X[1], X[2])
        X[0] = sum(X[0], A)
    }";
    assert_eq!(
        operations(text),
        [
            // X, then D, of which the zeros are left out.
            "allocate",
            "sum of 1",
            "copy",
            "zero 0..8",
            "copy",
            "sum of 1",
            "sum of 2",
            // The rest of C.
            "zero 8..16"
        ]
    );
    let part = "program p() {
        input A: f32[2, 2]
        output C: f32[4, 2] = 0
        C[0..2] += matmul(A, A)
        C[1..3] += matmul(A, A)
        C[3..4] = copy(A[0..1])
    }";
    assert_eq!(
        operations(part),
        ["matmul", "zero 16..24", "matmul +=", "copy"]
    );
}

/// A tensor is 0 again in every run, eagerly and as a graph, and what other ranks put counts.
#[test]
fn sums_around_a_ring_start_at_zero() {
    let text = "program ring_sum(n) {
        input A: f32[world, n, n]
        input I: f32[n, n]
        output C: f32[n, n] = 0
        output D: f32[2, n] = 0
        allocate P: f32[world, n, n] = 0
        let next = (rank + 1) % world
        let previous = (rank - 1) % world
        share {
            for s in 0..world - 1 {
                let block = (rank - 1 - s) % world
                pass = send P[block] to next tag s via put
                if s < world - 2 {
                    take = receive P[(block - 1) % world] from previous tag s via put
                } else {
                    take = receive C from previous tag s via put
                }
            }
        }
        post take[s] for s in 0..world - 1
        for s in 0..world {
            let block = (rank - 1 - s) % world
            if s > 0 { wait take[s - 1] }
            if s < world - 1 {
                P[block] += matmul(A[block], I)
                post pass[s]
            } else {
                C += matmul(A[block], I)
            }
        }
        D[0] = sum(C[0], D[1])
    }";
    let n = 3;
    let element = |rank: usize, name: &str, index: usize| match name {
        // The unit matrix.
        "I" => f64::from(u8::from(index.is_multiple_of(n + 1))),
        _ => (10 * rank + index) as f64,
    };
    for ranks in worlds([1, 2, 4]) {
        let run = Run::of(text, [("n", n as i64)], &element);
        run.check(ranks, |rank, outputs| {
            let sum = |index: usize| {
                (0..ranks)
                    .map(|from| element(from, "A", rank * n * n + index))
                    .sum()
            };
            let expected: Vec<f64> = (0..n * n).map(sum).collect();
            assert_eq!(outputs["C"], expected);
            assert_eq!(outputs["D"], [&expected[..n], &vec![0.0; n]].concat());
        });
    }
}

/// Memory lent to a called program for an output that starts at 0 is 0 from the call on, whatever the caller wrote
/// to it before, and however the parts lie that are accessed.
#[test]
fn what_a_call_declares_to_be_zero_is_cleared_there() {
    let text = |lent: &str, rest: &str| {
        format!(
            "program add_columns(n) {{
                input A: f32[n, n]
                output C: f32[n, n] = 0
                C[:, 0..2] += sum(A[:, 0..2])
            }}
            program calls(n) {{
                input A: f32[n, n]
                output D: f32[n, n]
                {lent}
                C = copy(A)
                {rest}
                add_columns(n = n, A = A, C = C)
                D = copy(C)
            }}"
        )
    };
    let fixed = text("allocate C: f32[n, n] = 0", "").replace("(n)", "(n = 4 | 8)");
    assert_eq!(
        operations(&fixed),
        ["allocate", "copy", "zero 0..64", "sum of 2", "copy"]
    );
    let n = 4;
    let element = |_: usize, _: &str, index: usize| (index + 1) as f64;
    let rest = "add_columns(n = n, A = A, C = C)\n C[:, 1] = copy(A[:, 0])";
    for lent in [
        "allocate C: f32[n, n]",
        "allocate C: f32[n, n] = 0",
        "output C: f32[n, n]",
    ] {
        for rest in ["", rest] {
            let text = text(lent, rest);
            let run = Run::of(&text, [("n", n as i64)], &element);
            run.check(1, |_, outputs| {
                let expected = (0..n * n).map(|index| match index % n {
                    0 | 1 => element(0, "A", index),
                    _ => 0.0,
                });
                assert_eq!(outputs["D"], expected.collect::<Vec<f64>>(), "{text}");
            });
        }
    }
}

#[test]
fn inputs_and_other_numbers_are_refused() {
    for (line, expected) in [
        ("input A: f32[2] = 0", "an input has the caller's values"),
        (
            "output A: f32[2] = 1",
            "expected 0, which a tensor may start at, found '1'",
        ),
    ] {
        let error = Program::parse(&format!("program p() {{\n {line}\n}}")).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
    // Zeros that one stream sets and another reads have an order like everything else.
    let text = "program p() {
        output C: f32[2]
        output D: f32[2]
        allocate X: f32[2] = 0
        set_stream pool(0)
        C = copy(X)
        set_stream caller
        D = copy(X)
        synchronize pool(0)
    }";
    let program = Program::parse(text).unwrap();
    assert!(verify(&program, 1, 1, &Parameters::new()).is_err());
}
