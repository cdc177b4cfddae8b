//! Parsing, printing and unrolling of programs.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;
use warplink::ErrorKind;
use warplink::program::expr::{Comparison, Operator};
use warplink::program::ir::{
    Branch, Collective, Declaration, Each, ElementType, Loop, Over, Parameter, ParameterKind,
    PostedMatmul, Role, Selection, Sharding, ShareItem, ShareItemKind, Statement, StatementKind,
    StreamRef, TensorRef, Transfer, TransferRef,
};
use warplink::program::{
    Backend, Condition, Direction, Expr, Parameters, Program, Protocol, Value, unroll,
};
use warplink::{DType, device::ReduceOp};

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
        ("", 1, 1, "expected 'program', found the end of the text"),
        (
            "program p() {\n  let x = 1 +\n}",
            3,
            1,
            "expected an integer expression, found '}'",
        ),
        (
            "program p() {\n  let x = (1 < 2) + 1\n}",
            2,
            11,
            "expected an integer, found a condition",
        ),
        (
            "program p() {\n  if 1 { }\n}",
            2,
            6,
            "expected a condition such as 'rank == 0', found an integer",
        ),
        (
            "program p() {\n  let rank = 1\n}",
            2,
            7,
            "expected the name to bind, found 'rank', which is a reserved word",
        ),
        (
            "program p() {\n  post s r\n}",
            2,
            10,
            "expected the end of the statement, found 'r'",
        ),
        (
            "program p() {\n  for j in 0..2 {\n}\n",
            4,
            1,
            "expected '}' for the '{' that line 1 opens, found the end of the text",
        ),
        (
            "program p() {\n  share { s = send A to 1 }\n}",
            2,
            27,
            "expected 'tag' or 'via', found '}'",
        ),
        (
            "program p() {\n  let x = 99999999999999999999\n}",
            2,
            11,
            "'99999999999999999999' is not a number below 2^64 in decimal digits",
        ),
        (
            "program p() {\n  let x = 9223372036854775808\n}",
            2,
            11,
            "'9223372036854775808' overflows 64 bits",
        ),
        (
            "program p() {\n  let x = ü\n}",
            2,
            11,
            "'\\u{fc}' has no meaning here",
        ),
        (
            "program p(n, n) {\n}",
            1,
            14,
            "parameter 'n' is named twice",
        ),
        (
            "program p() {\n  input A: f32[2, 3 over loop]\n}",
            2,
            21,
            "the loop's axis is the first one",
        ),
        (
            "program p() {\n  set_stream pool\n}",
            2,
            18,
            "expected '(', found the end of the line",
        ),
        (
            "program p() {\n  C += sum(A)\n}",
            2,
            8,
            "expected matmul or linear, found 'sum'",
        ),
    ];
    for (text, line, column, message) in cases {
        let error = Program::parse_text(text).unwrap_err();
        assert_eq!(
            (error.line, error.column, error.message.as_str()),
            (line, column, message),
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
        format!("if 1 == 1 {{ }}{}", " else if 1 == 1 { }".repeat(50_000)),
        " ".repeat(2 << 20),
    ];
    for body in &parsing {
        let kind = unrolled(body).unwrap_err().kind();
        assert_eq!(kind, ErrorKind::Parse, "{}", &body[..60]);
    }
    let running = [
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
        (&[("n", 3)][..], "expected n % world == 0, n = 3, world = 2"),
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
            "s[j + 1] stands for s[0][1], which is not shared before",
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

fn name() -> impl Strategy<Value = String> {
    "[a-z_][a-zA-Z0-9_]{0,6}".prop_filter("not reserved", |name| {
        warplink::program::text::is_name(name)
    })
}

fn expr() -> impl Strategy<Value = Expr> {
    let leaf = prop_oneof![
        any::<i64>().prop_map(Expr::Number),
        (0..20_i64).prop_map(Expr::Number),
        name().prop_map(Expr::Name),
        prop_oneof![Just("rank"), Just("world"), Just("streams")]
            .prop_map(|n| Expr::Name(n.into())),
    ];
    let operator = prop_oneof![
        Just(Operator::Add),
        Just(Operator::Subtract),
        Just(Operator::Multiply),
        Just(Operator::Divide),
        Just(Operator::Remainder),
        Just(Operator::ShiftLeft),
        Just(Operator::ShiftRight),
        Just(Operator::Xor),
        Just(Operator::Min),
        Just(Operator::Max),
    ];
    leaf.prop_recursive(4, 16, 2, move |inner| {
        prop_oneof![
            inner.clone().prop_map(|a| Expr::Negative(a.into())),
            inner.clone().prop_map(|a| Expr::Log2(a.into())),
            (name(), inner.clone()).prop_map(|(list, index)| Expr::Element(list, index.into())),
            name().prop_map(Expr::Count),
            (operator.clone(), inner.clone(), inner).prop_map(|(op, a, b)| Expr::Binary(
                op,
                a.into(),
                b.into()
            )),
        ]
    })
}

/// An integer that is not an element of a list alone, which reads like a tensor.
fn number() -> impl Strategy<Value = Expr> {
    expr().prop_filter("is no tensor", |value| !matches!(value, Expr::Element(..)))
}

fn parameter() -> impl Strategy<Value = Parameter> {
    let numbers = prop::collection::btree_set(0..9_i64, 1..4);
    let types = prop::collection::hash_set(prop::sample::select(&DType::ALL[..]), 1..4);
    let one_of = |values: Vec<Value>| ParameterKind::OneOf(values);
    let kind = prop_oneof![
        Just(ParameterKind::Integer),
        Just(ParameterKind::List),
        numbers.prop_map(move |set| one_of(set.into_iter().map(Value::from).collect())),
        types.prop_map(move |set| one_of(set.into_iter().map(Value::from).collect())),
    ];
    (name(), kind).prop_map(|(name, kind)| Parameter { name, kind })
}

fn condition() -> impl Strategy<Value = Condition> {
    let comparison = prop_oneof![
        Just(Comparison::Equal),
        Just(Comparison::NotEqual),
        Just(Comparison::Less),
        Just(Comparison::LessOrEqual),
        Just(Comparison::Greater),
        Just(Comparison::GreaterOrEqual),
    ];
    let leaf = prop_oneof![
        (comparison, expr(), expr()).prop_map(|(c, a, b)| Condition::Compare(c, a, b)),
        name().prop_map(Condition::Given),
    ];
    leaf.prop_recursive(3, 8, 2, |inner| {
        prop_oneof![
            inner.clone().prop_map(|a| Condition::Not(a.into())),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| Condition::And(a.into(), b.into())),
            (inner.clone(), inner).prop_map(|(a, b)| Condition::Or(a.into(), b.into())),
        ]
    })
}

fn tensor() -> impl Strategy<Value = TensorRef> {
    let selection = prop_oneof![
        expr().prop_map(Selection::Index),
        (expr(), expr()).prop_map(|(a, b)| Selection::Range(a, b)),
    ];
    (name(), prop::collection::vec(selection, 0..3))
        .prop_map(|(name, selections)| TensorRef { name, selections })
}

fn transfer() -> impl Strategy<Value = TransferRef> {
    (name(), prop::collection::vec(expr(), 0..3))
        .prop_map(|(name, indices)| TransferRef { name, indices })
}

fn each<T: Clone + std::fmt::Debug>(
    item: impl Strategy<Value = T>,
) -> impl Strategy<Value = Vec<Each<T>>> {
    let over = (name(), expr(), expr()).prop_map(|(index, from, to)| Over { index, from, to });
    let each = (item, prop::option::of(over)).prop_map(|(item, over)| Each { item, over });
    prop::collection::vec(each, 1..4)
}

fn stream() -> impl Strategy<Value = StreamRef> {
    prop_oneof![
        Just(StreamRef::Caller),
        expr().prop_map(StreamRef::Pool),
        expr().prop_map(StreamRef::High),
        name().prop_map(StreamRef::Named),
    ]
}

fn declaration() -> impl Strategy<Value = Declaration> {
    let role = prop_oneof![Just(Role::Input), Just(Role::Output), Just(Role::Local)];
    let dtype = prop_oneof![
        prop::sample::select(&DType::ALL[..]).prop_map(ElementType::Fixed),
        name().prop_map(ElementType::Parameter),
    ];
    let family = (name(), expr(), expr()).prop_map(|(index, from, to)| Over { index, from, to });
    (
        (role, any::<bool>()),
        (name(), prop::option::of(family)),
        dtype,
        prop::collection::vec(expr(), 1..4),
        0..5_usize,
    )
        .prop_map(
            |((role, optional), (name, family), dtype, shape, sharded)| {
                let sharding = match sharded {
                    0 | 1 => Sharding::Whole,
                    2 => Sharding::Loop,
                    axis => Sharding::Ranks(axis % shape.len()),
                };
                Declaration {
                    role,
                    optional: optional && role != Role::Local,
                    name,
                    family,
                    dtype,
                    shape,
                    sharding,
                }
            },
        )
}

fn collective() -> impl Strategy<Value = Collective<Expr>> {
    let op = || {
        prop_oneof![
            Just(ReduceOp::Sum),
            Just(ReduceOp::Max),
            Just(ReduceOp::Min)
        ]
    };
    prop_oneof![
        Just(Collective::AllGather),
        Just(Collective::AllToAll),
        op().prop_map(Collective::AllReduce),
        op().prop_map(Collective::ReduceScatter),
        expr().prop_map(Collective::Broadcast),
        (op(), expr()).prop_map(|(op, root)| Collective::Reduce(op, root)),
    ]
}

fn blocks<S: Clone + std::fmt::Debug + 'static>(
    leaf: impl Strategy<Value = S> + 'static,
    repeat: fn(Loop<S>) -> S,
    branch: fn(Branch<S>) -> S,
) -> impl Strategy<Value = Vec<S>> {
    let one = leaf.prop_recursive(3, 12, 3, move |inner| {
        let body = prop::collection::vec(inner, 0..3);
        prop_oneof![
            (name(), expr(), expr(), body.clone()).prop_map(move |(index, from, to, body)| repeat(
                Loop {
                    index,
                    from,
                    to,
                    body
                }
            )),
            (condition(), body.clone(), body).prop_map(move |(condition, then, otherwise)| {
                branch(Branch {
                    condition,
                    then,
                    otherwise,
                })
            }),
        ]
    });
    prop::collection::vec(one, 0..4)
}

fn share() -> impl Strategy<Value = Vec<ShareItem>> {
    let backend = prop_oneof![
        Just(Backend::Direct(Protocol::Get)),
        Just(Backend::Direct(Protocol::Put)),
        Just(Backend::Nccl),
    ];
    let direction = prop_oneof![Just(Direction::Send), Just(Direction::Receive)];
    let leaf = prop_oneof![
        (name(), direction, tensor(), expr(), expr(), backend).prop_map(
            |(name, direction, tensor, peer, tag, backend)| {
                ShareItemKind::Transfer(Transfer {
                    name,
                    direction,
                    tensor,
                    peer,
                    tag,
                    backend,
                })
                .into()
            }
        ),
        (name(), expr()).prop_map(|(name, value)| ShareItemKind::LetInteger { name, value }.into()),
    ];
    blocks(
        leaf,
        |it| ShareItemKind::For(it).into(),
        |it| ShareItemKind::If(it).into(),
    )
}

fn statements() -> impl Strategy<Value = Vec<Statement>> {
    let selected = tensor().prop_filter("selects", |tensor| !tensor.selections.is_empty());
    let leaf = prop_oneof![
        condition().prop_map(StatementKind::Require),
        declaration().prop_map(StatementKind::Declare),
        name().prop_map(StatementKind::Deallocate),
        (name(), number()).prop_map(|(name, value)| StatementKind::LetInteger { name, value }),
        (name(), selected).prop_map(|(name, value)| StatementKind::LetTensor { name, value }),
        (tensor(), tensor()).prop_map(|(target, source)| StatementKind::Copy { target, source }),
        (
            tensor(),
            tensor(),
            tensor(),
            prop::option::of(tensor()),
            any::<bool>()
        )
            .prop_map(|(target, a, b, bias, accumulate)| StatementKind::Matmul {
                target,
                a,
                b,
                bias,
                accumulate
            }),
        (tensor(), each(tensor()))
            .prop_map(|(target, sources)| StatementKind::Sum { target, sources }),
        (tensor(), tensor(), collective()).prop_map(|(target, source, collective)| {
            StatementKind::Collective {
                target,
                source,
                collective,
            }
        }),
        share().prop_map(StatementKind::Share),
        each(transfer()).prop_map(StatementKind::Post),
        (
            transfer(),
            tensor(),
            tensor(),
            prop::option::of(tensor()),
            prop::option::of((name(), expr(), expr()))
        )
            .prop_map(|(send, a, b, bias, over)| StatementKind::PostMatmul(Each {
                item: PostedMatmul { send, a, b, bias },
                over: over.map(|(index, from, to)| Over { index, from, to }),
            })),
        each(transfer()).prop_map(StatementKind::Wait),
        name().prop_map(StatementKind::GetStream),
        stream().prop_map(StatementKind::SetStream),
        stream().prop_map(StatementKind::Synchronize),
    ]
    .prop_map(Statement::from);
    let forked = blocks(
        leaf,
        |it| StatementKind::For(it).into(),
        |it| StatementKind::If(it).into(),
    );
    (prop::option::of(each(stream())), forked).prop_map(|(streams, body)| match streams {
        Some(streams) => vec![StatementKind::Fork { streams, body }.into()],
        None => body,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_printed_parses_to_the_same(
        name in name(),
        parameters in prop::collection::vec(parameter(), 0..4),
        body in statements(),
    ) {
        let mut parameters = parameters;
        parameters.sort_by(|a, b| a.name.cmp(&b.name));
        parameters.dedup_by(|a, b| a.name == b.name);
        let program = Program { name, parameters, body };
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
