//! `expect` statements of programs.

use crate::common::{encode, kind, root, threads, values, world};
use crate::play::{Launches, play};
use std::collections::BTreeSet;
use warplink::DeviceKind;
use warplink::program::evaluate::Evaluator;
use warplink::program::ir::{NodeKind, Statement, StatementKind};
use warplink::program::parameters::ParameterKind;
use warplink::program::{DiagnosticKind, Parameters, Program, TensorInstance, unroll, verify};

/// Folders with shipped programs, from the crate.
const FOLDERS: [&str; 4] = [
    "../../examples/programs",
    "src/collective/programs",
    "src/program/lower/all_gather_matmul",
    "src/program/lower/matmul_reduce_scatter",
];

/// The names and programs of a folder.
fn programs(folder: &str) -> Vec<(String, Program)> {
    let files = std::fs::read_dir(root().join(folder))
        .unwrap()
        .filter_map(|file| {
            let path = file.unwrap().path();
            let name = path.to_string_lossy().strip_suffix(".wlp")?.to_owned();
            let text = std::fs::read_to_string(&path).unwrap();
            Some((name, Program::parse(&text).unwrap()))
        });
    let mut all: Vec<_> = files.collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

/// Values for the parameters of a shipped program.
fn parameters(program: &Program, world: i64) -> Parameters {
    let matmul = program.parameters.iter().any(|it| it.name == "k");
    let mut all = Parameters::new();
    for parameter in &program.parameters {
        let name = parameter.name.as_str();
        let value = match name {
            "m" => 16 * world,
            "k" => 8 * world,
            "n" if matmul => 6,
            "n" => 37,
            // A row of each rank for each lane.
            "room" => 1 << 14,
            "chunks" | "repetitions" => 3,
            "root" => world - 1,
            "direct" | "columns" => 1,
            // Each rank stands at its own position.
            "order" | "places" => 0o76543210,
            _ => 7,
        };
        match &parameter.kind {
            ParameterKind::List => all = all.with(name, vec![6, 4]),
            ParameterKind::Integer => all = all.with(name, value),
            _ => {}
        }
    }
    all
}

fn elements(rank: usize, number: usize, tensor: &TensorInstance) -> Vec<u8> {
    let bytes = values(rank, number, tensor.bytes / tensor.dtype.size());
    let numbers: Vec<f64> = bytes.iter().map(|byte| f64::from(byte % 5)).collect();
    encode(tensor.dtype, &numbers)
}

/// Every set of the tensors that a program announces.
fn unreachable(announced: &BTreeSet<&str>) -> Vec<Vec<String>> {
    let sets = 0..1_usize << announced.len();
    let chosen = sets.map(|set| {
        let names = announced.iter().enumerate();
        let names = names.filter(|(at, _)| set >> at & 1 == 1);
        names.map(|(_, name)| (*name).to_owned()).collect()
    });
    chosen.collect()
}

#[test]
fn shipped_programs_are_what_they_expect() {
    let (mut wrong, mut count) = (Vec::new(), 0);
    for (name, program) in FOLDERS.iter().flat_map(|folder| programs(folder)) {
        if name.ends_with("barrier") {
            continue;
        }
        assert!(program.expects(), "{name} expects nothing");
        let mut evaluated = 0;
        for world in [1, 2, 3, 4, 8] {
            let mut given = parameters(&program, world as i64);
            // With what is optional, too.
            for optional in [&[][..], &["bias", "G", "Y"]] {
                for name in optional {
                    let declares = |statement: &Statement| matches!(&statement.kind, NodeKind::Do(StatementKind::Declare(it)) if it.optional && it.name == **name);
                    if program.body.iter().any(declares) {
                        given = given.with_tensor(*name);
                    }
                }
                let Ok(rank) = unroll(&program, 0, world, 2, &given) else {
                    continue;
                };
                for unreachable in unreachable(&rank.announced()) {
                    let evaluated_now = Evaluator::new(&program, world, 2, &given)
                        .and_then(|evaluator| evaluator.without_reaching(&unreachable))
                        .and_then(|evaluator| evaluator.run(elements));
                    evaluated += 1;
                    if let Err(error) = evaluated_now {
                        wrong.push(format!(
                            "{name} × {world}, without {unreachable:?}: {error}"
                        ));
                    }
                }
            }
        }
        assert!(evaluated > 0, "{name} is never evaluated");
        count += 1;
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count > 40, "only {count} programs");
}

/// Whatever kernels reach, they leave the same.
#[test]
fn each_branch_of_what_is_reachable_is_run() {
    // Kernels of GPUs find out what they reach; the host device is given it.
    if kind() != DeviceKind::Host {
        return;
    }
    threads(world(2), |comm| {
        let mut count = 0;
        for (name, program) in programs("src/collective/programs") {
            let given = parameters(&program, comm.world() as i64);
            let Ok(rank) = unroll(&program, 0, comm.world(), 2, &given) else {
                continue;
            };
            let sets = unreachable(&rank.announced());
            for unreachable in sets.iter().filter(|_| sets.len() > 1) {
                let launches = Launches {
                    unreachable: unreachable.clone(),
                    verify: false,
                    ..Launches::default()
                };
                let played = play(comm, &program, &given, launches);
                played.unwrap_or_else(|what| panic!("{name} without {unreachable:?}: {what}"));
                count += 1;
            }
        }
        assert!(count > 16, "only {count} cases");
    });
}

/// A program with an input X and an output Y, and what it expects.
fn text(tensors: &str, body: &str, expect: &str) -> String {
    format!(
        "program p(n, root = 1 | 0, op = sum | max) {{
            {tensors}
            kernel lane in 0..2 threads 32 {{
                barrier
                {body}
                barrier
            }}
            {expect}
        }}"
    )
}

/// Programs that the verifier accepts and that compute something else.
#[test]
fn an_output_that_is_not_what_is_expected_is_found() {
    let (one, rows) = (
        "input X: f32[n]; output Y: f32[n]",
        "input X: f32[world, n]; output Y: f32[world, n]",
    );
    let sum = "expect Y = sum(X on r for r in 0..world)";
    let gather = "for r in 0..world { expect Y[r] = copy(X[0] on r) }";
    let transposed = "for r in 0..world { expect Y[r] = copy(X[rank] on r) }";
    // An expectation with bodies that meet it, and bodies that do not.
    let cases: [(&str, &str, &[&str], &[&str]); 7] = [
        (
            one,
            sum,
            &[
                "Y[lane of 2] = reduce(X[lane of 2] on r for r in 0..world, sum)",
                "Y[lane of 2] = reduce(X[lane of 2] on r for r in 0..world, op)",
            ],
            &[
                // Another operator.
                "Y[lane of 2] = reduce(X[lane of 2] on r for r in 0..world, max)",
                // One rank twice and another never.
                "Y[lane of 2] = reduce(X[lane of 2] on (rank + r / 2) % world for r in 0..world, sum)",
                // Only the first half is reduced.
                "Y[lane of 2] = reduce(X[lane of 2] on r for r in 0..world + lane * (1 - world), sum)",
            ],
        ),
        (
            one,
            "expect Y = reduce(X on r for r in 0..world, op)",
            &["Y[lane of 2] = reduce(X[lane of 2] on r for r in 0..world, op)"],
            &[],
        ),
        (
            one,
            "expect Y = copy(X)",
            &[
                "if epoch % 2 == 0 { Y[lane of 2] = copy(X[lane of 2]) } else { Y[lane of 2] = reduce(X[lane of 2], sum) }",
            ],
            &[
                // A part of another lane.
                "Y[lane of 2][0..n / 2] = copy(X[1 - lane of 2][0..n / 2])",
                // In the first of three launches alone.
                "if epoch % 3 == 0 { Y[lane of 2] = copy(X[lane of 2]) } else { Y[lane of 2] = reduce(X[lane of 2], X[lane of 2], sum) }",
            ],
        ),
        (
            one,
            "expect Y = copy(X on (rank - 1) % world)",
            &["Y[lane of 2] = copy(X[lane of 2] on (rank - 1) % world)"],
            // The next rank's for the previous one's.
            &["Y[lane of 2] = copy(X[lane of 2] on (rank + 1) % world)"],
        ),
        (
            one,
            "expect Y = copy(X on root)",
            &["Y[lane of 2] = copy(X[lane of 2] on root)"],
            &["Y[lane of 2] = copy(X[lane of 2] on 0)"],
        ),
        (
            rows,
            gather,
            &["for r in 0..world { Y[r][lane of 2] = copy(X[0][lane of 2] on r) }"],
            // Rows in an order of their own.
            &[
                "for r in 0..world { Y[r][lane of 2] = copy(X[0][lane of 2] on (rank + r) % world) }",
            ],
        ),
        (
            rows,
            transposed,
            &["for r in 0..world { Y[r][lane of 2] = copy(X[rank][lane of 2] on r) }"],
            &["for r in 0..world { Y[r][lane of 2] = copy(X[r][lane of 2] on r) }"],
        ),
    ];
    for (tensors, expect, right, wrong) in cases {
        let right = right.iter().map(|body| (body, false));
        let wrong = wrong.iter().map(|body| (body, true));
        for (body, wrong) in right.chain(wrong) {
            let text = text(tensors, body, expect);
            let program = Program::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
            assert_eq!(Program::parse(&program.to_string()).unwrap(), program);
            let given = Parameters::new().with("n", 32);
            verify(&program, 3, 1, &given).unwrap_or_else(|found| panic!("{}\n{text}", found[0]));
            let evaluator = Evaluator::new(&program, 3, 1, &given).unwrap();
            let found = evaluator.violations(elements).unwrap();
            let kinds: Vec<DiagnosticKind> = found.iter().map(|one| one.kind).collect();
            let expected = if wrong {
                &[DiagnosticKind::Expectation][..]
            } else {
                &[]
            };
            assert_eq!(kinds, expected, "{found:?}\n{text}");
        }
    }
}

/// Branches for tensors that are out of reach compute the same.
#[test]
fn branches_that_mean_something_else_are_found() {
    let put = |from: &str| format!("P[slot][rank] on r for r in 0..world = reduce({from}, sum)");
    let sum_of = |ranks: &str| format!("Y = reduce(P[slot][r] for r in {ranks}, sum)");
    let sum = "expect Y = sum(X on r for r in 0..world)";
    let next = "expect Y = copy(X on (rank + 1) % world)";
    let directly = "barrier; Y = reduce(X on r for r in 0..world, sum); barrier";
    let from_next = "barrier; Y = copy(X on (rank + 1) % world); barrier";
    let cases = [
        (sum, directly, put("X") + "; " + &sum_of("0..world"), true),
        // Without the last rank; directly on one rank only.
        (
            sum,
            directly,
            put("X") + "; " + &sum_of("0..world - 1"),
            false,
        ),
        (
            sum,
            "barrier; if rank == 0 { Y = reduce(X on r for r in 0..world, sum) } else { Y = copy(X) }; barrier",
            put("X") + "; " + &sum_of("0..world"),
            false,
        ),
        (
            next,
            from_next,
            put("X") + "; Y = copy(P[slot][(rank + 1) % world])",
            true,
        ),
        (
            next,
            from_next,
            put("X") + "; Y = copy(P[slot][(rank + world - 1) % world])",
            false,
        ),
        // The halves the wrong way around.
        (
            next,
            from_next,
            put("X")
                + "; Y[0..n / 2] = copy(P[slot][(rank + 1) % world][n / 2..n]); \
                Y[n / 2..n] = copy(P[slot][(rank + 1) % world][0..n / 2])",
            false,
        ),
    ];
    for (expect, direct, through, right) in cases {
        let text = format!(
            "program p(n) {{
                input X: f32[n]; output Y: f32[n]
                scratch C: packets16 i32[2, world, 4]
                scratch P: packets16 f32[2, world, n]
                kernel lane in 0..1 threads 32 {{
                    let slot = epoch % 2
                    announce n with Y in C[slot]
                    agree n with Y in C[slot]
                    if reachable(Y) {{ {direct} }} else {{ {through} }}
                }}
                {expect}
            }}"
        );
        let program = Program::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        let given = Parameters::new().with("n", 32);
        verify(&program, 3, 1, &given).unwrap_or_else(|found| panic!("{}\n{text}", found[0]));
        let wrong = [vec![], vec!["Y".to_owned()]]
            .into_iter()
            .filter(|unreachable| {
                let evaluator = Evaluator::new(&program, 3, 1, &given).unwrap();
                let evaluator = evaluator.without_reaching(unreachable).unwrap();
                let found = evaluator.run(elements).map(|_| ());
                found.is_err_and(|error| error.to_string().contains("expectation:"))
            });
        assert_eq!(wrong.count(), usize::from(!right), "{text}");
    }
}

/// An expectation is of outputs, and of inputs that fit.
#[test]
fn expectations_that_mean_nothing_are_refused() {
    let tensors = "input X: f32[n]; input I: i32[n]; output Y: f32[n]; allocate Z: f32[n]";
    for (expect, kind) in [
        ("expect X = copy(X)", DiagnosticKind::Malformed),
        ("expect Y = copy(Y)", DiagnosticKind::Malformed),
        ("expect Y = copy(Z)", DiagnosticKind::Malformed),
        ("expect Y = copy(I)", DiagnosticKind::Mismatch),
        ("expect Y = copy(X[0..n - 1])", DiagnosticKind::Mismatch),
        ("expect Y = copy(X on world)", DiagnosticKind::OutOfBounds),
        ("expect Y = matmul(X, X)", DiagnosticKind::Mismatch),
        (
            "expect Y = sum(X on r for r in 0..0)",
            DiagnosticKind::Malformed,
        ),
        ("expect Y = reduce(X, n)", DiagnosticKind::Malformed),
    ] {
        let text = text(tensors, "Y[lane of 2] = copy(X[lane of 2])", expect);
        let program = Program::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        let given = Parameters::new().with("n", 32);
        let found = verify(&program, 2, 1, &given).unwrap_err();
        assert_eq!(found[0].kind, kind, "{}\n{text}", found[0]);
    }
    for expect in [
        "expect Y",
        "expect Y = X",
        "expect Y = sum()",
        "expect Y += copy(X)",
        "expect Y = copy(X, X)",
    ] {
        let text = text(tensors, "Y[lane of 2] = copy(X[lane of 2])", expect);
        assert!(Program::parse(&text).is_err(), "{text}");
    }
}

/// Sums of floats in an order that depends on the rank are told; others are not.
#[test]
fn an_order_that_differs_among_ranks_is_told() {
    let kernel = |source: &str, dtype: &str| {
        format!(
            "program p(n) {{
                input X: {dtype}[n]
                output Y: {dtype}[n]
                scratch P: packets16 {dtype}[2, world, n]
                kernel lane in 0..1 threads 32 {{
                    let slot = epoch % 2
                    for r in 1..world {{ put X to P[slot][rank] on (rank + r) % world }}
                    {source}
                }}
            }}"
        )
    };
    let in_order = "Y = reduce(X if r == rank else P[slot][r] for r in 0..world, sum)";
    let own_first = "Y = reduce(X, P[slot][(rank + r) % world] for r in 1..world, sum)";
    let behind = "Y = reduce(X if (rank + 1 + r) % world == rank else P[slot][(rank + 1 + r) % world] for r in 0..world, sum)";
    let largest = "Y = reduce(X, P[slot][(rank + r) % world] for r in 1..world, max)";
    for (source, dtype, told) in [
        (in_order, "f32", false),
        (own_first, "f32", true),
        (own_first, "bf16", true),
        (behind, "f16", true),
        (own_first, "i32", false),
        (largest, "f32", false),
    ] {
        let text = kernel(source, dtype);
        let program = Program::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        let given = Parameters::new().with("n", 16);
        let evaluator = Evaluator::new(&program, 3, 1, &given).unwrap();
        let values = evaluator.run(elements).unwrap();
        let found = evaluator.reordered(&values);
        assert_eq!(!found.is_empty(), told, "{found:?}\n{text}");
    }
}

/// Tensors that may be one memory are verified as such.
#[test]
fn kernels_are_verified_in_place() {
    let text = |barrier: &str, body: &str, tensors: &str| {
        format!(
            "program p(n) {{
                {tensors}
                kernel lane in 0..2 threads 32 {{
                    {barrier}
                    {body}
                    {barrier}
                }}
            }}"
        )
    };
    let same = "input X: f32[n]; output Y: f32[n]; inout X = Y";
    let rows = "input X: f32[n]; output Y: f32[world, n]; inout X = Y[rank]";
    let part = "input X: f32[world, n]; output Y: f32[n]; inout Y = X[rank]";
    // Bodies that are accepted, and bodies that are refused.
    let cases: [(&str, &str, &[&str], &[&str]); 4] = [
        (
            "",
            same,
            &["Y[lane of 2] = copy(X[lane of 2])"],
            &[
                // Another lane's part is read after it was written, or not.
                "Y[lane of 2][0..n / 4] = copy(X[1 - lane of 2][0..n / 4]); Y[lane of 2][n / 4..n / 2] = copy(X[lane of 2][n / 4..n / 2])",
                // Overlapping, in no order.
                "Y[lane of 2] = reduce(X[lane of 2], X[0 of 2], sum)",
            ],
        ),
        (
            "barrier",
            same,
            &[
                "Y[rank of world][lane of 2] on r for r in 0..world = reduce(X[rank of world][lane of 2] on r for r in 0..world, sum)",
            ],
            // Peers still read what is written.
            &["Y[lane of 2] = reduce(X[lane of 2] on r for r in 0..world, sum)"],
        ),
        (
            "barrier",
            rows,
            &["Y[rank][lane of 2] on r for r in 0..world = reduce(X[lane of 2], sum)"],
            &[
                "for r in 0..world { Y[(rank + 1) % world][lane of 2] = copy(X[lane of 2] on r) }; Y[rank][lane of 2] = copy(X[lane of 2])",
            ],
        ),
        (
            "barrier",
            part,
            &["Y[lane of 2] = reduce(X[rank][lane of 2] on r for r in 0..world, sum)"],
            &[
                "Y[lane of 2] = reduce(X[(rank + 1) % world][lane of 2] on r for r in 0..world, sum)",
            ],
        ),
    ];
    let verdict = |text: &str| {
        let program = Program::parse(text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        assert_eq!(Program::parse(&program.to_string()).unwrap(), program);
        verify(&program, 2, 1, &Parameters::new().with("n", 32))
    };
    for (barrier, tensors, right, wrong) in cases {
        for body in right {
            let text = text(barrier, body, tensors);
            verdict(&text).unwrap_or_else(|found| panic!("{}\n{text}", found[0]));
        }
        for body in wrong {
            let text = text(barrier, body, tensors);
            let found = verdict(&text).expect_err(&text);
            assert_eq!(found[0].kind, DiagnosticKind::Race, "{}\n{text}", found[0]);
            assert!(found[0].message.contains("'inout'"), "{}", found[0]);
        }
    }
    for tensors in [
        "input X: f32[n]; output Y: f32[n]; inout X = X",
        "input X: f32[n]; output Y: f32[2 * n]; inout X = Y",
        "input X: i32[n]; input Z: f32[n]; output Y: f32[n]; inout X = Y",
    ] {
        let program = Program::parse(&text("", "if lane == 5 { barrier }", tensors)).unwrap();
        assert!(verify(&program, 2, 1, &Parameters::new().with("n", 32)).is_err());
    }
}
