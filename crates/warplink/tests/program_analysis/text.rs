//! Parsing, printing and unrolling of programs.

use super::syntax::{name, parameter, statements};
use proptest::prelude::*;
use warplink::ErrorKind;
use warplink::program::ir::Subprogram;
use warplink::program::{Parameters, Program, unroll};

fn unrolled(body: &str) -> Result<(), warplink::Error> {
    let program = Program::parse(&format!("program p(n) {{\n{body}\n}}"))?;
    let parameters = Parameters::from([("n".to_owned(), 8)]);
    unroll(&program, 0, 2, 2, &parameters).map(|_| ())
}

#[test]
fn errors_point_at_the_place() {
    let text = "program p(n) {\n    input A: f32[n]\n    A[0] = copy(A,)\n}\n";
    let error = Program::parse_text(text).unwrap_err();
    assert_eq!((error.line, error.column), (3, 18));
    assert_eq!(
        error.to_string(),
        "line 3, column 18: expected ')', found ','\n  |\n3 |     A[0] = copy(A,)\n  |                  ^"
    );
    let cases = [
        ("", (1, 1), "expected 'program', found the end of the text"),
        (
            "program p() {\n  let x = 1 +\n}",
            (3, 1),
            "expected an integer expression, found '}'",
        ),
        (
            "program p() {\n  let x = (1 < 2) + 1\n}",
            (2, 11),
            "expected an integer, found a condition",
        ),
        (
            "program p() {\n  if 1 { }\n}",
            (2, 6),
            "expected a condition such as 'rank == 0', found an integer",
        ),
        (
            "program p() {\n  let rank = 1\n}",
            (2, 7),
            "expected the name to bind, found 'rank', which is a reserved word",
        ),
        (
            "program p() {\n  post s r\n}",
            (2, 10),
            "expected the end of the statement, found 'r'",
        ),
        (
            "program p() {\n  for j in 0..2 {\n}\n",
            (4, 1),
            "expected '}' for the '{' that line 1 opens, found the end of the text",
        ),
        (
            "program p() {\n  share { s = send A to 1 }\n}",
            (2, 27),
            "expected 'tag' or 'via', found '}'",
        ),
        (
            "program p() {\n  let x = 99999999999999999999\n}",
            (2, 11),
            "'99999999999999999999' is not a number below 2^64 in decimal digits",
        ),
        (
            "program p() {\n  let x = 9223372036854775808\n}",
            (2, 11),
            "'9223372036854775808' overflows 64 bits",
        ),
        (
            "program p() {\n  let x = ü\n}",
            (2, 11),
            "unexpected character 'ü' (\\u{fc})",
        ),
        (
            "program p(n, n) {\n}",
            (1, 14),
            "parameter 'n' is named twice",
        ),
        (
            "program p() {\n  input A: f32[2, 3 over loop]\n}",
            (2, 21),
            "the loop's axis is the first one",
        ),
        (
            "program p() {\n  set_stream pool\n}",
            (2, 18),
            "expected '(', found the end of the line",
        ),
        (
            "program p() {\n  C += copy(A)\n}",
            (2, 8),
            "expected matmul, linear or sum, found 'copy'",
        ),
    ];
    for (text, place, message) in cases {
        let error = Program::parse_text(text).unwrap_err();
        assert_eq!(
            ((error.line, error.column), error.message.as_str()),
            (place, message),
            "{text}"
        );
        let error = Program::parse(text).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Parse);
    }
}

#[test]
fn nothing_in_a_text_can_exhaust_the_machine() {
    let deep = |open: &str, middle: &str, close: &str, times: usize| {
        format!("{}{middle}{}", open.repeat(times), close.repeat(times))
    };
    let parsing = [
        format!("let x = {}", deep("(", "1", ")", 100_000)),
        format!("let x = {}1", "-".repeat(100_000)),
        format!("let x = {}1", "1 + ".repeat(100_000)),
        format!("if {} 1 == 1 {{ }}", "not ".repeat(100_000)),
        format!("if {} 1 == 1 {{ }}", "1 == 1 and ".repeat(50_000)),
        deep("if 1 == 1 {\n", "", "}\n", 50_000),
        " ".repeat(2 << 20),
    ];
    for body in &parsing {
        let kind = unrolled(body).unwrap_err().kind();
        assert_eq!(kind, ErrorKind::Parse, "{}", &body[..60]);
    }
    // A branch has any number of arms; what is evaluated of them counts.
    let arms = |count: usize| format!("if 1 == 2 {{ }}{}", " else if 1 == 2 { }".repeat(count));
    unrolled(&arms(50_000)).unwrap();
    let running = [
        format!("for i in 0..100 {{ {} }}", arms(50_000)),
        "for j in 0..9223372036854775807 { }".to_owned(),
        "for j in -9223372036854775808..9223372036854775807 { let x = j }".to_owned(),
        "for i in 0..100000 { for j in 0..100000 { } }".to_owned(),
        "post s for j in 0..9223372036854775807".to_owned(),
        "let x = 9223372036854775807 + 1".to_owned(),
        "let x = -9223372036854775808 / -1".to_owned(),
        "let x = -(-9223372036854775808)".to_owned(),
        "let x = 1 / (n - 8)".to_owned(),
        "let x = 1 % 0".to_owned(),
        "allocate A: f32[9223372036854775807, 4]".to_owned(),
        "allocate A: f32[0]".to_owned(),
        "allocate A: f32[-1]".to_owned(),
        "allocate A: f32[1, 1, 1, 1, 1, 1, 1, 1, 1]".to_owned(),
        "input A: f32[4]\nlet X = A[4]".to_owned(),
        "input A: f32[4]\nlet X = A[3..2]".to_owned(),
        "input A: f32[4]\nlet X = A[0][0]".to_owned(),
        "set_stream pool(2)".to_owned(),
        "set_stream high(16)".to_owned(),
        "let x = y".to_owned(),
        "let x = 1\nlet x = 2".to_owned(),
        "for j in 0..2 { input A: f32[4] }".to_owned(),
        (0..5000).map(|i| format!("let x{i} = {i}\n")).collect(),
    ];
    for body in &running {
        let error = unrolled(body).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Verification, "{error}");
    }
}

#[test]
fn parameters_and_requirements_are_the_callers_fault() {
    let program = Program::parse("program p(n) {\n    require n % world == 0\n}").unwrap();
    let with = |list: &[(&str, i64)]| {
        let list = list
            .iter()
            .map(|(name, value)| ((*name).to_owned(), *value));
        unroll(&program, 0, 2, 1, &list.collect())
            .map(|_| ())
            .map_err(|e| (e.kind(), e.to_string()))
    };
    assert_eq!(with(&[("n", 4)]), Ok(()));
    for (list, part) in [
        (
            &[("n", 3)][..],
            "expected n % world == 0; here n = 3, world = 2",
        ),
        (&[], "the parameter 'n' of 'p' has no value"),
        (
            &[("n", 4), ("q", 1)],
            "unknown parameter 'q' of 'p'; expected n",
        ),
    ] {
        let (kind, text) = with(list).unwrap_err();
        assert_eq!(kind, ErrorKind::InvalidArgument);
        assert!(text.contains(part), "{text}");
    }
}

/// Only the names in the condition, each once, and every parameter that has no value at once.
#[test]
fn requirements_name_what_they_are_about() {
    let text = "program p(n, sizes[], lanes = 4 | 8) {
    require world == 3 or n + n > sizes[1] * world
}";
    let program = Program::parse(text).unwrap();
    let message = |parameters: &Parameters| {
        let error = unroll(&program, 0, 2, 1, parameters).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        error.to_string()
    };
    let given = Parameters::new().with("n", 4).with("sizes", vec![9, 5]);
    let said = message(&given);
    let expected = "sizes[1] * world; here world = 2, n = 4, sizes[1] = 5";
    assert!(said.ends_with(expected), "{said}");
    let said = message(&Parameters::new());
    let expected = "the parameters 'n' (an integer), 'sizes' (a list of integers) of 'p' have no values; \
                    expected one for each";
    assert!(said.contains(expected), "{said}");
}

#[test]
fn a_transfer_is_named_by_the_indices_of_its_loops() {
    let declared = "input A: f32[n]
        output C: f32[4, n]
        let peer = 1 - rank
        for i in 0..2 {
            for j in 0..2 {
                share {
                    s = send A to peer tag 2 * i + j via get
                    r = receive C[2 * i + j] from peer tag 2 * i + j via get
                }
                post s, r
                PLACE
            }
            AFTER
        }
        END";
    let with = |place: &str, after: &str, end: &str| {
        let body = declared
            .replace("PLACE", place)
            .replace("AFTER", after)
            .replace("END", end);
        unrolled(&body).map_err(|error| error.to_string())
    };
    // This iteration; the inner loop's index alone; both.
    assert_eq!(with("wait s", "", ""), Ok(()));
    assert_eq!(with("wait s[j]; wait s[0]; wait s[i][j]", "", ""), Ok(()));
    assert_eq!(with("", "wait s[0], s[1]; wait s[0][1]", ""), Ok(()));
    assert_eq!(with("", "", "wait s[i][1] for i in 0..2"), Ok(()));
    for (place, after, end, part) in [
        (
            "wait s[j + 1]",
            "",
            "",
            "s[j + 1] refers to s[0][1], which is not shared before",
        ),
        (
            "",
            "wait s",
            "",
            "does not say which iteration: 's' is declared inside 2 loops",
        ),
        ("", "", "wait s[0]", "does not say which iteration"),
        (
            "wait s[0][0][0]",
            "",
            "",
            "has 3 indices, but 's' is declared inside 2 loops",
        ),
        ("wait q", "", "", "unknown transfer 'q'"),
    ] {
        let error = with(place, after, end).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn statements_may_share_a_line_and_lines_may_be_broken() {
    let one = "program p(n) { input A: f32[n]; output B: f32[n]; share { s = send A to 1 via get; \
               r = receive B from 1 via get }; if rank == 0 { post s } else { post r } }";
    let many = "program p(n) {
        input A: f32[
            n
        ]
        output B: f32[n]  # a comment; not a statement
        share {
            s = send A to 1 via get
            r = receive B from 1 tag 0 via get
        }
        if rank ==
            0 {
            post s
        }
        else {
            post r
        }
    }";
    assert_eq!(Program::parse(one).unwrap(), Program::parse(many).unwrap());
}

#[test]
fn as_many_signs_as_are_parsed_are_printed() {
    for value in [
        format!("{}n", "-".repeat(63)),
        format!("{}(5)", "-".repeat(62)),
        format!("{}5", "-".repeat(63)),
        "-min(n, 2) * -part(n, 2) - -log2(n)".to_owned(),
        "-(n + 1) % -(-n - -1)".to_owned(),
        "- -n * -(n * -7)".to_owned(),
    ] {
        let text = format!("program p(n) {{\nlet x = {value}\n}}\n");
        let program = Program::parse(&text).unwrap_or_else(|error| panic!("{value}: {error}"));
        let printed = program.to_string();
        let parsed = Program::parse(&printed).unwrap_or_else(|error| panic!("{value}: {error}"));
        assert_eq!(parsed, program, "{printed}");
    }
}

#[test]
fn tensors_may_be_named_as_operators_of_kernels_are() {
    let step = |sources: &str| {
        format!(
            "program p(n, op = sum | max) {{\ninput X: f32[n]\ninput average: f32[n]\n\
             input scaled_sum: f32[n]\noutput Y: f32[n]\nkernel lane in 0..1 threads 64 {{\n\
             Y = reduce({sources})\n}}\n}}\n"
        )
    };
    for sources in [
        "X, average, sum",
        "average, scaled_sum, op",
        "X, average, scaled_sum[0..n] if rank == 0 else X, average",
        "X, scaled_sum on 1 - rank, scaled_sum",
        "X, average for r in 0..2, max",
    ] {
        let program =
            Program::parse(&step(sources)).unwrap_or_else(|error| panic!("{sources}: {error}"));
        let printed = program.to_string();
        assert!(printed.contains(&format!("reduce({sources})")), "{printed}");
        assert_eq!(Program::parse(&printed).unwrap(), program);
        let parameters = Parameters::from([("n".to_owned(), 8)]);
        unroll(&program, 0, 2, 1, &parameters).unwrap_or_else(|error| panic!("{sources}: {error}"));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_printed_parses_to_the_same(
        name in name(),
        parameters in prop::collection::vec(parameter(), 0..4),
        body in statements(),
        called in prop::collection::btree_map(name(), statements(), 0..3),
    ) {
        let mut parameters = parameters;
        parameters.sort_by(|a, b| a.name.cmp(&b.name));
        parameters.dedup_by(|a, b| a.name == b.name);
        let called = called.into_iter().filter(|(other, _)| *other != name);
        let subprograms = called.map(|(name, body)| Subprogram {
            name,
            parameters: parameters.clone(),
            body,
        });
        let subprograms = subprograms.collect();
        let program = Program { name, parameters, subprograms, body };
        let printed = program.to_string();
        let parsed = Program::parse(&printed).map_err(|e| TestCaseError::fail(e.to_string()))?;
        prop_assert_eq!(&parsed, &program, "{}", printed);
        prop_assert_eq!(parsed.to_string(), printed);
    }

    #[test]
    fn no_text_panics(text in "(program p\\(n\\) \\{\n)?([a-z]{1,3}|[0-9]{1,3}|for|if|in|share|post|wait|let|==|\\.\\.|[-+*/%{}\\[\\](),=\n; #]){0,40}") {
        if let Ok(program) = Program::parse(&text) {
            let _ = unroll(&program, 0, 2, 2, &Parameters::from([("n".to_owned(), 8)]));
        }
    }

    #[test]
    fn no_bytes_panic(text in any::<String>()) {
        let _ = Program::parse(&text);
    }
}
