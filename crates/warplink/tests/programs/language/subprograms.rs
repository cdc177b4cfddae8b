//! Programs that call others of their text.

use crate::common::{time_on_processor, world};
use crate::run::Run;
use warplink::program::{Diagnostic, Parameters, Program, verify};

const MESH_SUM: &str = include_str!("../../../../../examples/programs/mesh_sum.wlp");

#[test]
fn a_ring_is_called_for_rows_and_for_columns() {
    let world = world(4);
    for columns in 1..=world {
        if !world.is_multiple_of(columns) {
            continue;
        }
        let parameters = [("n", 12), ("columns", columns as i64)];
        let input = |rank: usize, _: &str, index: usize| (rank * 12 + index) as f64;
        Run::of(MESH_SUM, parameters, &input).check(world, |_, outputs| {
            let sum = |index| (0..world).map(|rank| (rank * 12 + index) as f64).sum();
            let expected: Vec<f64> = (0..12).map(sum).collect();
            assert_eq!(outputs["S"], expected);
        });
    }
}

/// Parts of tensors, families, lists, element types, defaults, optional tensors and results that start
/// at 0 are given as arguments; streams and names stay as they were.
#[test]
fn a_call_is_given_whatever_a_program_is() {
    let text = "program layer(n, sizes[], T = f16 | f32, twice = 0 | 1) {
        input X: T[n, n]
        input W[i]: T[n, sizes[i]] for i in 0..count(sizes)
        optional input extra: T[n, n]
        output Y: T[n, n] = 0
        optional output K: T[n, n]

        set_stream pool(0)
        synchronize caller
        for i in 0..count(sizes) { Y += matmul(X, W[i]) }
        if twice == 1 { Y += matmul(X, W[0]) }
        if given(extra) { Y = sum(Y, extra) }
        if given(K) { K = copy(X) }
        set_stream caller
        synchronize pool(0)
    }

    program net(n, sizes[]) {
        input A: f32[2, n, n]
        input B[i]: f32[n, sizes[i]] for i in 0..count(sizes)
        output C: f32[3, n, n]
        output D: f32[n, n]
        let X = A[1]
        for i in 0..2 {
            layer(n = n, sizes = sizes, T = f32, X = A[i], W = B, Y = C[i])
        }
        layer(n = n, sizes = sizes, T = f32, twice = 2 - 1, X = X, W = B, extra = C[0], Y = C[2], K = D)
    }";
    let parameters = Parameters::new().with("n", 2).with("sizes", vec![2, 2]);
    Run {
        text,
        parameters,
        streams: 1,
        // A[0] = [1 2; 3 4], A[1] = [5 6; 7 8], B[0] the identity, B[1] twice that.
        input: &|_, name, index| match name {
            "A" => (index + 1) as f64,
            _ => {
                let scale = if name == "B[0]" { 1.0 } else { 2.0 };
                if index % 3 == 0 { scale } else { 0.0 }
            }
        },
    }
    .check(world(2), |_, outputs| {
        let three = |values: [f64; 4]| values.map(|value| 3.0 * value);
        let (first, second) = (three([1.0, 2.0, 3.0, 4.0]), three([5.0, 6.0, 7.0, 8.0]));
        let third = [0, 1, 2, 3].map(|at| second[at] / 3.0 * 4.0 + first[at]);
        assert_eq!(outputs["C"], [first, second, third].concat());
        assert_eq!(outputs["D"], [5.0, 6.0, 7.0, 8.0]);
    });
}

fn refused(text: &str, world: usize) -> Vec<Diagnostic> {
    let program = Program::parse(text).unwrap_or_else(|error| panic!("{error}"));
    let parameters = [("n", 4)].into_iter().collect();
    verify(&program, world, 2, &parameters).expect_err(text)
}

#[test]
fn messages_name_the_call_and_the_line_within() {
    let text = "program inner(n) {
    input X: f32[n]
    output Y: f32[n]
    set_stream pool(0)
    synchronize caller
    for j in 0..2 { Y[j] = copy(X[j]) }
}
program outer(n) {
    input X: f32[n]
    output Y: f32[n]
    inner(n = n, X = X, Y = Y)
}
program p(n) {
    input A: f32[n]
    output B: f32[2, n]
    for i in 0..2 {
        outer(n = n, X = A, Y = B[i])
    }
}";
    let found = refused(text, 1);
    let said = found[0].to_string();
    let place = "rank 0, line 6, column 21 (j = 1) of 'inner', called in line 11 of 'outer', called in \
                 line 17 (i = 1): `Y[j] = copy(X[j])`";
    assert!(said.starts_with(&format!("unjoined: {place}")), "{said}");
    let lines: Vec<u32> = found[0].places[0]
        .site
        .with_calls()
        .map(|site| site.line)
        .collect();
    assert_eq!(lines, [6, 11, 17]);
}

#[test]
fn what_does_not_fit_a_call_is_refused() {
    let inner = "program inner(m, T = f16 | f32) {
        require m > 2
        input X: T[m]
        output Y: T[m]
        Y = copy(X)
    }";
    let cases = [
        (
            "inner(m = 4, T = f32, X = B, Y = A)",
            "input-written",
            "the input 'A' is written",
        ),
        (
            "inner(m = 4, T = f32, X = A)",
            "malformed",
            "'Y' is not given by the call",
        ),
        (
            "inner(m = 4, T = f32, X = A, Y = B, Z = B)",
            "malformed",
            "no parameter, input or output 'Z'; expected one of m, T, X, Y",
        ),
        (
            "inner(T = f32, X = A, Y = B)",
            "requirement",
            "parameter 'm' has no value",
        ),
        (
            "inner(m = 4, T = bf16, X = A, Y = B)",
            "requirement",
            "parameter 'T' is bf16; expected",
        ),
        (
            "inner(m = 2, T = f32, X = A[0..2], Y = B[0..2])",
            "requirement",
            "line 2 of 'inner', called in line",
        ),
        (
            "inner(m = 4, X = A, Y = B)",
            "mismatch",
            "'X' is f32[4]; expected f16[4]",
        ),
        (
            "inner(m = 3, T = f32, X = A, Y = B)",
            "mismatch",
            "'X' is f32[4]; expected f32[3]",
        ),
        (
            "inner(m = A, T = f32, X = A, Y = B)",
            "mismatch",
            "the argument 'm' of 'inner' is a tensor; expected a value",
        ),
        (
            "inner(m = 4, T = f32, X = n, Y = B)",
            "mismatch",
            "the argument 'X' of 'inner' is a value; expected a tensor",
        ),
        (
            "inner(m = 4, T = f32, X = U, Y = B)",
            "malformed",
            "unknown tensor 'U'",
        ),
        (
            "other(m = 4)",
            "malformed",
            "'other' is not a program defined before this one",
        ),
        (
            "p(n = 4, A = A, B = B, C = B)",
            "malformed",
            "'p' is not a program defined before this one",
        ),
    ];
    for (call, kind, said) in cases {
        let text = format!(
            "{inner}
    program p(n) {{
        input A: f32[n]
        output B: f32[n]
        output C: f32[n]
        {call}
    }}"
        );
        let found = refused(&text, 1).remove(0).to_string();
        assert!(
            found.starts_with(kind) && found.contains(said),
            "{call}: {found}"
        );
    }
}

#[test]
fn an_input_of_a_call_is_read_only() {
    let text = "program inner(n) {
    input X: f32[n]
    output Y: f32[n]
    Y = copy(X)
    X = copy(Y)
}
program p(n) {
    input A: f32[n]
    output B: f32[n]
    allocate C: f32[n]
    C = copy(A)
    inner(n = n, X = C, Y = B)
}";
    let said = refused(text, 1)[0].to_string();
    assert!(
        said.starts_with("input-written: rank 0, line 5 of 'inner', called in line 12"),
        "{said}"
    );
    let text = text
        .replace("    X = copy(Y)\n", "    deallocate X\n")
        .replace('C', "X");
    let said = refused(&text, 1)[0].to_string();
    assert!(
        said.contains("'X' is not allocated by the program"),
        "{said}"
    );
}

#[test]
fn texts_with_several_programs_are_parsed_in_order() {
    let errors = [
        (
            "program a() { }\nprogram a() { }",
            "line 2, column 9: another program has the name 'a'",
        ),
        (
            "program a() { }\nallocate",
            "expected the end of the text or another 'program', found 'allocate'",
        ),
        (
            "program a() { b(n = 1, n = 2) }",
            "argument 'n' is given twice",
        ),
        ("program a() { b(n) }", "expected '=', found ')'"),
        ("program a() { b(n = 1 }", "expected ',' or ')', found '}'"),
    ];
    for (text, said) in errors {
        let error = Program::parse(text).unwrap_err().to_string();
        assert!(error.contains(said), "{text}: {error}");
    }
    // A program calls those before it, and not itself or those behind it.
    let text = "program a() { b() }\nprogram b() { }\nprogram c(n) { a() }";
    let said = refused(text, 1)[0].to_string();
    assert!(
        said.contains("rank 0, line 1 of 'a', called in line 3: 'b' is not a program"),
        "{said}"
    );
    let text = "program a() { a() }\nprogram c(n) { a() }";
    assert!(
        refused(text, 1)[0]
            .message
            .contains("(no program calls itself)")
    );
}

/// Programs that call others twice cannot take long.
#[test]
fn calls_of_calls_end_early() {
    use std::fmt::Write as _;
    let mut text = "program p0() { }\n".to_owned();
    for i in 1..40 {
        let before = i - 1;
        let _ = writeln!(text, "program p{i}() {{ p{before}(); p{before}() }}");
    }
    text += "program p(n) { p28() }\n";
    let (said, took) = time_on_processor(|| refused(&text, 4)[0].to_string());
    assert!(said.contains("the program is too large"), "{said}");
    assert!(said.len() < 4000, "{} bytes", said.len());
    let text = text.replace("{ p28() }", "{ p39() }");
    assert!(
        refused(&text, 4)[0]
            .message
            .contains("blocks are nested too deep")
    );
    assert!(took.as_secs() < 20, "{took:?}");
}
