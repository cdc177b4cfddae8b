//! Programs whose kernels share a workspace.

use crate::examples::example;
use warplink::device::ReduceOp;
use warplink::program::verify::verify_sharing;
use warplink::program::{DiagnosticKind, Parameters, Program};

fn sized(n: i64, lanes: i64) -> Parameters {
    Parameters::new().with("n", n).with("lanes", lanes)
}

/// Slots that lie apart whatever the length: another length, number of lanes or operator may follow.
#[test]
fn slots_that_lie_apart_may_be_shared() {
    let program = Program::parse(
        "program one_shot(n, lanes, op = sum | max) {
            input X: f32[n]
            output Y: f32[n]
            scratch P: packets16 f32[2, world, 1008]
            kernel lane in 0..lanes threads 32 {
                let slot = epoch % 2
                for r in 1..world {
                    put X[lane of lanes] to P[slot][rank][0..n][lane of lanes] on (rank + r) % world
                }
                Y[lane of lanes] = reduce(X[lane of lanes] if r == rank else P[slot][r][0..n][lane of lanes] for r in 0..world, op)
            }
        }",
    )
    .unwrap();
    let (small, large) = (sized(40, 4), sized(1000, 16));
    let other = sized(333, 8).with("op", ReduceOp::Max);
    for world in [2, 3, 8] {
        let programs = [(&program, &small), (&program, &large), (&program, &other)];
        if let Err(diagnostics) = verify_sharing(&programs, world, 2) {
            panic!("{world} ranks: {}", diagnostics[0]);
        }
    }
}

/// Where the slots of one length lie over those of another, the slot of this launch may be that of the last.
#[test]
fn slots_that_move_with_the_length_may_not_be_shared() {
    let one_shot = example("all_reduce_one_shot");
    let (small, large) = (sized(40, 4), sized(1000, 16));
    verify_sharing(&[(&one_shot, &small), (&one_shot, &small)], 2, 2).unwrap();
    let found = verify_sharing(&[(&one_shot, &small), (&one_shot, &large)], 2, 2).unwrap_err();
    assert_eq!(found[0].kind, DiagnosticKind::Race, "{}", found[0]);
}

/// A kernel between two others that does not meet its peers makes the slot the same again.
#[test]
fn a_launch_that_meets_nobody_may_not_share() {
    let one_shot = example("all_reduce_one_shot");
    let alone = Program::parse(
        "program alone(n) {
            input X: f32[n]
            output Y: f32[n]
            kernel lane in 0..2 threads 32 { Y[lane of 2] = copy(X[lane of 2]) }
        }",
    )
    .unwrap();
    let n = Parameters::new().with("n", 100);
    let found = verify_sharing(&[(&one_shot, &n), (&alone, &n)], 2, 2).unwrap_err();
    assert_eq!(found[0].kind, DiagnosticKind::Race, "{}", found[0]);
    let said = found[0].to_string();
    assert!(said.contains("of 'all_reduce_one_shot'"), "{said}");
}

/// Scratch that persists would lie under that of others.
#[test]
fn scratch_that_persists_is_not_shared() {
    let text = |persistent: &str| {
        let text = format!(
            "program keeps(n) {{
                input X: f32[n]
                output Y: f32[n]
                scratch {persistent}S: f32[n]
                kernel lane in 0..1 threads 32 {{
                    S = copy(X)
                    Y = copy(S)
                }}
            }}"
        );
        Program::parse(&text).unwrap()
    };
    let given = Parameters::new().with("n", 16);
    let (plain, keeps) = (text(""), text("persistent "));
    verify_sharing(&[(&plain, &given), (&plain, &given)], 2, 1).unwrap();
    let found = verify_sharing(&[(&plain, &given), (&keeps, &given)], 2, 1).unwrap_err();
    assert_eq!(found[0].kind, DiagnosticKind::Malformed, "{}", found[0]);
}
