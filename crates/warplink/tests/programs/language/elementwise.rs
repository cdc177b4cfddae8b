//! Element-wise operations of programs.

use crate::common::world;
use crate::run::Run;
use warplink::program::{DiagnosticKind, Parameters, Program, verify};

fn refused(text: &str) -> (DiagnosticKind, String) {
    let program = Program::parse(text).unwrap();
    let diagnostics = verify(&program, 2, 2, &Parameters::new()).unwrap_err();
    (diagnostics[0].kind, diagnostics[0].message.clone())
}

#[test]
fn products_and_extremes_of_any_number_of_tensors() {
    let text = "program combine(n) {
        input A: f32[n, 3]
        input B: f32[3]
        output P: f32[3]
        output L: f32[3]
        output S: f32[3]
        output T: f32[3]
        P = product(B, A[i] for i in 0..n)
        L = max(A[i] for i in 0..n, B)
        S = min(A[0], B)
        S = min(S, A[i] for i in 1..n)
        T = copy(B)
        T += sum(A[i] for i in 0..n)
    }";
    // More than a device takes at once.
    const N: usize = 40;
    let input = |rank: usize, name: &str, index: usize| match name {
        "B" => [2.0, -1.0, 3.0][index] + rank as f64,
        _ => [1.0, -1.0, 2.0, -1.0][(index + rank) % 4] * if index > 60 { 1.0 } else { -1.0 },
    };
    let run = Run::of(text, [("n", N as i64)], &input);
    run.check(world(2), |rank, outputs| {
        let places = outputs["P"]
            .iter()
            .zip(&outputs["L"])
            .zip(&outputs["S"])
            .zip(&outputs["T"]);
        for (column, (((product, largest), least), sum)) in places.enumerate() {
            let b = input(rank, "B", column);
            let a = (0..N).map(|row| input(rank, "A", 3 * row + column));
            let all = || a.clone().chain([b]);
            assert_eq!(*product, all().product::<f64>());
            assert_eq!(*largest, all().reduce(f64::max).unwrap());
            assert_eq!(*least, all().reduce(f64::min).unwrap());
            assert_eq!(*sum, all().sum::<f64>());
        }
    });
}

#[test]
fn a_sum_of_halves_in_single_precision() {
    let text = "program mean(T = bf16 | f16) {
        input A: T[4, 8]
        output C: T[8]
        output N: i32[8]
        allocate W: f32[4, 8]
        allocate S: f32[8] = 0
        for i in 0..4 {
            W[i] = cast(A[i])
            S += sum(W[i])
        }
        C = cast(S)
        N = cast(S)
    }";
    let input = |rank: usize, _: &str, index: usize| (32 * rank + index) as f64 + 0.5;
    let run = Run::of(text, Parameters::new(), &input);
    run.check(world(2), |rank, outputs| {
        for (column, (mean, whole)) in outputs["C"].iter().zip(&outputs["N"]).enumerate() {
            let sum: f64 = (0..4)
                .map(|row| {
                    let value = input(rank, "A", 8 * row + column);
                    f64::from(half::bf16::from_f64(value))
                })
                .sum();
            assert_eq!(*mean, f64::from(half::bf16::from_f64(sum)));
            assert_eq!(*whole, sum.trunc());
        }
    });
}

#[test]
fn what_cannot_be_combined_is_refused() {
    let with = |line: &str| {
        refused(&format!(
            "program p() {{
                input A: f32[4]
                input H: bf16[4]
                input B: u8[4]
                output C: f32[4]
                output D: u8[4]
                {line}
            }}"
        ))
    };
    for (line, kind, says) in [
        (
            "C = product(A, H)",
            DiagnosticKind::Mismatch,
            "same shape and type",
        ),
        (
            "C = max(A[0..2], A[2..4])",
            DiagnosticKind::Mismatch,
            "a max of f32[2]",
        ),
        ("D = min(B, B)", DiagnosticKind::Mismatch, "of u8"),
        (
            "C = cast(H[1..4])",
            DiagnosticKind::Mismatch,
            "expected the same shape",
        ),
        (
            "C = sum(A for i in 0..0)",
            DiagnosticKind::Mismatch,
            "of nothing",
        ),
        ("A = product(A, A)", DiagnosticKind::InputWritten, "'A'"),
    ] {
        let (found, message) = with(line);
        assert_eq!(found, kind, "{line}: {message}");
        assert!(message.contains(says), "{line}: {message}");
    }
    for line in [
        "C = cast(A, A)",
        "C += max(A)",
        "C += cast(A)",
        "product = copy(A)",
    ] {
        let text = format!("program p() {{\n{line}\n}}");
        Program::parse(&text).unwrap_err();
    }
}
