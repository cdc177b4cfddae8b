//! Parameters of every kind, optional tensors, families of tensors, forks and functions of integers.

use warplink::DType;
use warplink::program::ir::Role;
use warplink::program::{OperationKind, Parameters, Program, RankProgram, unroll, verify};

fn unrolled(text: &str, parameters: &Parameters) -> Result<RankProgram, String> {
    let program = Program::parse(text).map_err(|error| error.to_string())?;
    assert_eq!(Program::parse(&program.to_string()).unwrap(), program);
    unroll(&program, 0, 2, 2, parameters).map_err(|error| error.to_string())
}

/// The value of `expression` with n = 12 and a list of 3, 5.
fn value(expression: &str) -> Result<usize, String> {
    let text = format!("program p(n, l[]) {{\n allocate X: u8[1 + ({expression})]\n}}");
    let parameters = Parameters::from([("n", 12)]).with("l", vec![3, 5]);
    unrolled(&text, &parameters).map(|rank| rank.tensors[0].bytes - 1)
}

#[test]
fn integers_have_functions_lists_and_bits() {
    for (expression, expected) in [
        ("min(n, 5) + max(n, 5)", 17),
        ("log2(n)", 3),
        ("log2(8)", 3),
        ("n >> 2", 3),
        ("n ^ 10", 6),
        ("2 ^ 1 << 1", 0),
        ("l[0] * l[1] + count(l)", 17),
        ("l[count(l) - 1]", 5),
        ("min(l[0], max(1, 2))", 2),
    ] {
        assert_eq!(value(expression), Ok(expected), "{expression}");
    }
    for (expression, expected) in [
        ("l[2]", "'l[2]' is not an integer"),
        ("l[-1]", "'l[-1]' is not an integer"),
        ("n[0]", "'n[0]' is not an integer"),
        ("count(n)", "'count(n)' is not an integer"),
        ("log2(0)", "the logarithm of a number below 1"),
        ("min(n)", "expected ','"),
        ("l", "'l' is not an integer"),
    ] {
        let error = value(expression).unwrap_err();
        assert!(error.contains(expected), "{expression}: {error}");
    }
}

#[test]
fn a_name_can_stand_for_an_element_of_a_list() {
    let text = "program p(l[]) {\n let x = l[1]\n let y = l[0] + 1\n allocate X: u8[x, y]\n}";
    let rank = unrolled(text, &Parameters::new().with("l", vec![3, 5])).unwrap();
    assert_eq!(rank.tensors[0].shape, [5, 4]);
}

#[test]
fn what_is_left_open_is_the_first_alternative() {
    let text = "program p(T = f16 | f32, parts = 2 | 4) {\n allocate X: T[parts]\n}";
    let tensor = |parameters: Parameters| {
        unrolled(text, &parameters).map(|rank| (rank.tensors[0].dtype, rank.tensors[0].bytes))
    };
    assert_eq!(tensor(Parameters::new()), Ok((DType::F16, 4)));
    let given = Parameters::from([("parts", 4)]).with("T", DType::F32);
    assert_eq!(tensor(given), Ok((DType::F32, 16)));
    for (parameters, expected) in [
        (
            Parameters::from([("parts", 3)]),
            "parameter 'parts' is 3; expected 2 or 4",
        ),
        (
            Parameters::new().with("T", DType::I32),
            "parameter 'T' is i32; expected f16 or f32",
        ),
        (
            Parameters::from([("q", 3)]),
            "unknown parameter 'q' of 'p'; expected T, parts",
        ),
        (
            Parameters::new().with_tensor("X"),
            "unknown optional tensor 'X' of 'p'",
        ),
    ] {
        let error = tensor(parameters).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    for (header, expected) in [
        ("p = 1 | f16", "expected another number"),
        ("p = 1 | 1", "expected another number"),
        ("p = x", "expected another number"),
        ("p, p", "parameter 'p' is named twice"),
        ("streams", "which is a reserved word"),
    ] {
        let error = Program::parse(&format!("program x({header}) {{\n}}")).unwrap_err();
        assert!(error.to_string().contains(expected), "{header}: {error}");
    }
}

const OPTIONAL: &str = "
program p(n[]) {
    input A: f32[4, 2]
    input B[i]: f32[2, n[i]] for i in 0..count(n)
    optional input bias[i]: f32[n[i]] for i in 0..count(n)
    output C[i]: f32[4, n[i]] for i in 0..count(n)
    optional output K: f32[4, 2]
    K = copy(A)
    for i in 0..count(n) { C[i] = matmul(K, B[i]) + bias[i] }
}";

#[test]
fn optional_tensors_are_bound_or_not() {
    let names = |rank: &RankProgram| -> Vec<(String, Role)> {
        let tensors = rank.tensors.iter();
        tensors.map(|t| (t.name.to_string(), t.role)).collect()
    };
    let biased = |rank: &RankProgram| -> Vec<bool> {
        let operations = rank.operations.iter();
        operations
            .filter_map(|operation| match &operation.kind {
                OperationKind::Matmul(it) => Some(it.bias.is_some()),
                _ => None,
            })
            .collect()
    };
    let parameters = Parameters::new().with("n", vec![3, 5]);
    let without = unrolled(OPTIONAL, &parameters).unwrap();
    assert_eq!(biased(&without), [false, false]);
    let named = names(&without);
    assert!(named.contains(&("B[1]".to_owned(), Role::Input)));
    // An output that nobody binds is the program's own.
    assert!(named.contains(&("K".to_owned(), Role::Local)));
    let parameters = parameters.with_tensor("bias").with_tensor("K");
    let with = unrolled(OPTIONAL, &parameters).unwrap();
    assert_eq!(biased(&with), [true, true]);
    assert!(names(&with).contains(&("K".to_owned(), Role::Output)));
    assert!(names(&with).contains(&("bias[0]".to_owned(), Role::Input)));
    verify(&Program::parse(OPTIONAL).unwrap(), 2, 2, &parameters).unwrap();
}

#[test]
fn misused_optional_tensors_and_families_are_refused() {
    let refused = |lines: &str, expected: &str| {
        let text = OPTIONAL.replace("    K = copy(A)", lines);
        let parameters = Parameters::new().with("n", vec![3]);
        let error = unrolled(&text, &parameters).unwrap_err();
        assert!(error.contains(expected), "{lines}: {error}");
    };
    refused(
        "K = copy(bias[0])",
        "expected a condition 'given(bias)' around it",
    );
    refused("K = copy(B)", "'B' is a family of tensors; expected 'B[i]'");
    refused("K = copy(B[1])", "B[1]: the member is 1; expected 0 to 0");
    refused("if given(A) { }", "'given(A)' is not an integer");
    refused(
        "allocate X[i]: u8[1] for i in 1..2",
        "are counted from 1; expected 0",
    );
    refused("allocate X[i]: u8[1] for j in 0..2", "is not this one");
    refused("allocate X[i]: u8[1]", "'for i in' does not follow");
    refused(
        "allocate X: n[1]",
        "neither an element type nor a parameter",
    );
    refused("optional allocate X: u8[1]", "expected 'input' or 'output'");
}

#[test]
fn a_fork_orders_its_streams_after_and_before_the_current_one() {
    let text = "program p() {
    allocate X: u8[1]
    fork high(0), pool(i) for i in 0..2 {
        set_stream pool(1)
    }
    allocate Y: u8[1]
}";
    let rank = unrolled(text, &Parameters::new()).unwrap();
    let order: Vec<String> = rank
        .operations
        .iter()
        .map(|operation| match operation.kind {
            OperationKind::Synchronize(other) => {
                format!(
                    "{} after {}",
                    rank.streams[operation.stream], rank.streams[other]
                )
            }
            _ => rank.streams[operation.stream].to_string(),
        })
        .collect();
    let expected = [
        "caller",
        "high(0) after caller",
        "pool(0) after caller",
        "pool(1) after caller",
        "caller after high(0)",
        "caller after pool(0)",
        "caller after pool(1)",
        "caller",
    ];
    assert_eq!(order, expected);
    for streams in [
        "caller",
        "pool(0), pool(0)",
        "pool(0), high(i) for i in 0..20",
    ] {
        let text = format!("program p() {{\n fork {streams} {{ }}\n}}");
        assert!(unrolled(&text, &Parameters::new()).is_err(), "{streams}");
    }
}

/// A fork is needed for the order: without it, the verifier finds the race.
#[test]
fn a_fork_is_what_makes_two_streams_safe() {
    let text = |open: &str, close: &str| {
        format!(
            "program p() {{
    input A: u8[4]
    output B: u8[4]
    allocate X: u8[4]
    X = copy(A)
    {open}
        set_stream pool(0)
        B = copy(X)
    {close}
    set_stream caller
    X = copy(A)
}}"
        )
    };
    let verdict = |text: String| {
        let program = Program::parse(&text).unwrap();
        verify(&program, 1, 1, &Parameters::new())
    };
    assert!(verdict(text("fork pool(0) {", "}")).is_ok());
    assert!(verdict(text("", "")).is_err());
}
