//! `expect` with integers that inputs hold: which rows arrive, and which are not stated.

use crate::common::encode;
use warplink::program::evaluate::Evaluator;
use warplink::program::{DiagnosticKind, Parameters, Program, TensorInstance, verify};

const WORLD: usize = 3;

/// Rows, or tokens, of each rank.
const ROWS: usize = 6;

const ALL_TO_ALL_V: &str = include_str!("../../../../examples/programs/all_to_all_v.wlp");
const DISPATCH: &str = include_str!("../../../../examples/programs/dispatch.wlp");

/// An integer of two others.
type OfTwo = fn(usize, usize) -> usize;

/// Numbers of rows by sender and receiver, and indices by rank and position.
const CHOICES: [(OfTwo, OfTwo); 5] = [
    (|_, _| 0, |_, _| 0),
    (|_, _| ROWS, |_, at| at % ROWS),
    (|_, to| ROWS * (to / 2), |_, _| ROWS - 1),
    (
        |from, to| 1 + (from + to) % 2,
        |rank, at| (rank + 5 * at + at / ROWS) % ROWS,
    ),
    (
        |from, to| (5 * from + 2 * to + 1) % (ROWS + 1),
        |rank, at| (2 * rank + at * at + at / ROWS) % ROWS,
    ),
];

/// Inputs by one of the choices; other elements all differ.
fn inputs(choice: usize) -> impl FnMut(usize, usize, &TensorInstance) -> Vec<u8> {
    let (count, index) = CHOICES[choice];
    move |rank, _, tensor| {
        let value = |at: usize| match &*tensor.name {
            "C" => count(rank, at),
            "I" => index(rank, at),
            _ => 1000 * rank + at,
        };
        let elements = 0..tensor.bytes / tensor.dtype.size();
        let values: Vec<f64> = elements.map(|at| value(at) as f64).collect();
        encode(tensor.dtype, &values)
    }
}

/// How the program fails for each choice of integers, where it does.
fn failures(text: &str, parameters: &Parameters) -> Vec<String> {
    let program = Program::parse(text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    assert_eq!(Program::parse(&program.to_string()).unwrap(), program);
    verify(&program, WORLD, 1, parameters).unwrap_or_else(|found| panic!("{}\n{text}", found[0]));
    let evaluator = Evaluator::new(&program, WORLD, 1, parameters).unwrap();
    let failure = |choice| Some(evaluator.run(inputs(choice)).err()?.to_string());
    (0..CHOICES.len()).filter_map(failure).collect()
}

#[test]
fn rows_that_are_not_those_that_memory_names_are_found() {
    let row = "[lane + j * lanes]";
    let backwards = "[m - 1 - lane - j * lanes]";
    let put = format!("put X[q]{row} to");
    let put_named = "put X[J[lane + j * lanes]] to";
    let copy = format!("Y[p]{row} = copy(R[slot][p]{row})");
    let loops = "0..(m - lane + lanes - 1) / lanes";
    // All but the last row, unless every row is asked for: else that is never written.
    let fewer = |rows| format!("0..(m - (2 * {rows} - 1 - m) / {rows} - lane + lanes - 1) / lanes");
    let (fewer_rows, fewer_tokens) = (fewer("rows"), fewer("tokens"));
    let header = "put C[q] to H";
    // For each text, replacements that leave it right, and others.
    type Case<'a> = (&'a str, &'a [(&'a str, &'a str)]);
    let cases: [(&str, &[Case<'_>], &[Case<'_>]); 2] = [
        (
            ALL_TO_ALL_V,
            &[
                (
                    "both ends count down",
                    &[
                        (&put, &format!("put X[q]{backwards} to")),
                        (&copy, &format!("Y[p]{backwards} = copy(R[slot][p]{row})")),
                    ],
                ),
                (
                    "the last row not stated",
                    &[("for j in 0..m { expect", "for j in 0..m - 1 { expect")],
                ),
            ],
            &[
                (
                    "rows backwards",
                    &[(&put, &format!("put X[q]{backwards} to"))],
                ),
                (
                    "rows of another rank",
                    &[(&put, &format!("put X[rank]{row} to"))],
                ),
                (
                    "rows backwards at the receiver",
                    &[(&copy, &format!("Y[p]{backwards} = copy(R[slot][p]{row})"))],
                ),
                ("a row too few", &[(loops, &fewer_rows)]),
                (
                    "another count",
                    &[
                        (header, "put C[rank] to H"),
                        ("let m = C[q]", "let m = C[rank]"),
                    ],
                ),
                (
                    "counts at another place",
                    &[("K[p] =", "K[world - 1 - p] =")],
                ),
                (
                    "stated of another rank",
                    &[("let m = C[rank] on r", "let m = C[r] on rank")],
                ),
                (
                    "a row too many stated",
                    &[(
                        "for j in 0..m { expect",
                        "for j in 0..min(m + 1, rows) { expect",
                    )],
                ),
            ],
        ),
        (
            DISPATCH,
            &[(
                "both ends count down",
                &[
                    (put_named, "put X[J[m - 1 - lane - j * lanes]] to"),
                    (&copy, &format!("Y[p]{backwards} = copy(R[slot][p]{row})")),
                ],
            )],
            &[
                ("no index", &[(put_named, "put X[lane + j * lanes] to")]),
                (
                    "indices backwards",
                    &[(put_named, "put X[J[m - 1 - lane - j * lanes]] to")],
                ),
                (
                    "indices for another rank",
                    &[("let J = I[q]", "let J = I[rank]")],
                ),
                ("a row too few", &[(loops, &fewer_tokens)]),
                (
                    "another count",
                    &[
                        (header, "put C[rank] to H"),
                        ("let m = C[q]", "let m = C[rank]"),
                    ],
                ),
                (
                    "names of another rank",
                    &[("put I[q] to M", "put I[rank] to M")],
                ),
                (
                    "stated of this rank's indices",
                    &[("let t = I[rank][j] on r", "let t = I[rank][j]")],
                ),
                (
                    "stated of a smaller range",
                    &[("on r at most tokens - 1", "on r at most tokens - 2")],
                ),
            ],
        ),
    ];
    for (text, right, wrong) in cases {
        let rows = if text == DISPATCH { "tokens" } else { "rows" };
        let parameters = Parameters::new().with(rows, ROWS as i64).with("n", 20);
        let failures_with = |(what, changes): &Case<'_>| {
            let mut changed = text.to_owned();
            for (from, to) in *changes {
                assert!(text.contains(from), "{what}: {from}");
                changed = changed.replace(from, to);
            }
            failures(&changed, &parameters)
        };
        for case in right {
            assert_eq!(failures_with(case), [""; 0], "{}", case.0);
        }
        for case in wrong {
            let found = failures_with(case);
            let unmet = |how: &String| how.contains("expectation:");
            assert!(
                !found.is_empty() && found.iter().all(unmet),
                "{}: {found:?}",
                case.0
            );
        }
    }
}

/// A program that gathers rows of X by I, and what it expects.
fn gathers(expect: &str) -> String {
    format!(
        "program p(n, op = sum | max) {{
            input X: f32[6, n]; input C: i32[3]; input I: i32[6]; input F: f32[6]
            output Y: f32[6, n]
            function twice(x) {{ return x + x }}
            kernel lane in 0..1 threads 32 {{ for j in 0..6 {{ Y[j] = copy(X[I[j]]) }} }}
            {expect}
        }}"
    )
}

#[test]
fn rows_are_named_by_words_in_what_is_expected() {
    let right = [
        "for j in 0..6 { expect Y[j] = copy(X[I[j]]) }",
        // An alias is a part of a tensor.
        "let J = I[3..6]; expect Y[5] = copy(X[J[2]])",
        "for j in 0..6 { let i = I[j] at most 5; if i < 3 { expect Y[j] = copy(X[i]) } }",
        "let m = C[0] at most 6; for j in 0..m { expect Y[j] = copy(X[I[j]]) }",
    ];
    let wrong = [
        "for j in 0..6 { let i = I[j] at most 5; if i < 3 { expect Y[j] = copy(X[0]) } }",
        "for j in 0..6 { expect Y[j] = copy(X[j]) }",
        "for j in 0..5 { expect Y[j] = copy(X[I[j + 1]]) }",
        "for j in 0..6 { expect Y[j] = copy(X[I[j]] on (rank + 1) % world) }",
        "for j in 0..6 { expect Y[j] = twice(X[I[j]]) }",
        "let m = C[0] at most 6; for j in 0..m { expect Y[j] = copy(X[0]) }",
    ];
    let found = |expect| failures(&gathers(expect), &Parameters::new().with("n", 20));
    for expect in right {
        assert_eq!(found(expect), [""; 0], "{expect}");
    }
    for expect in wrong {
        let found = found(expect);
        let unmet = |how: &String| how.contains("expectation:");
        assert!(
            !found.is_empty() && found.iter().all(unmet),
            "{expect}: {found:?}"
        );
    }
}

#[test]
fn a_word_out_of_its_range_is_no_expected_value() {
    let found = failures(
        &gathers("let m = C[0] on 1 at most 4; for j in 0..m { expect Y[j] = copy(X[I[j]]) }"),
        &Parameters::new().with("n", 20),
    );
    assert!(
        found
            .iter()
            .any(|how| how.contains("C[0] on 1 is 6; expected 0 to 4") && how.contains("line ")),
        "{found:?}"
    );
}

#[test]
fn words_that_mean_nothing_are_refused() {
    use DiagnosticKind as Kind;
    for (expect, kind, part) in [
        (
            "let m = C[0] at most 5; Y[0] = copy(X[0])",
            Kind::Malformed,
            "on devices alone",
        ),
        (
            "let m = C[0] at most 5; if m > 2 { require n > 0 }",
            Kind::Malformed,
            "on devices alone",
        ),
        ("let m = Y[0][0] at most 5", Kind::Malformed, "is no input"),
        (
            "let m = F[0] at most 5",
            Kind::Mismatch,
            "expected one integer",
        ),
        (
            "let m = C at most 5",
            Kind::Mismatch,
            "3 of i32; expected one integer",
        ),
        ("let m = C[3] at most 5", Kind::OutOfBounds, "3"),
        ("let m = C[0] on world at most 5", Kind::OutOfBounds, "rank"),
        (
            "let m = C[0] at most 0 - 1",
            Kind::OutOfBounds,
            "expected at least 0",
        ),
        (
            "let m = C[0] at most 9; for j in 0..m { expect Y[j] = copy(X[j]) }",
            Kind::OutOfBounds,
            "8",
        ),
        (
            "expect Y[0] = copy(X[F[0]])",
            Kind::Mismatch,
            "expected one integer",
        ),
        (
            "let n = C[0] at most 5",
            Kind::Malformed,
            "already has a meaning",
        ),
    ] {
        let text = gathers(expect);
        let program = Program::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        let found = verify(&program, 2, 1, &Parameters::new().with("n", 20)).unwrap_err();
        let said = found[0].to_string();
        assert!(
            found[0].kind == kind && said.contains(part),
            "{said}\n{text}"
        );
    }
    for expect in [
        "let m = C[0] at",
        "let m = C[0] at most",
        "let m = C[0] + 1 at most 5",
    ] {
        assert!(Program::parse(&gathers(expect)).is_err(), "{expect}");
    }
}
