//! A peer that is the rank itself: the transfer is a copy, so that a ring needs no case for one rank.

use crate::common::{kind, world, worlds};
use crate::run::Run;
use warplink::program::{DiagnosticKind, Parameters, Program, verify};
use warplink::{Communicator, DeviceKind};

/// Every element tells its rank and place.
fn element(rank: usize, _: &str, index: usize) -> f64 {
    (100 * rank + index) as f64
}

fn run(text: &str, worlds: &[usize], expected: impl Fn(usize, usize, usize) -> f64 + Sync) {
    for &ranks in worlds {
        let ranks = world(ranks);
        let run = Run {
            text,
            parameters: Parameters::from([("n", 5)]),
            streams: 2,
            input: &element,
        };
        run.check(ranks, |rank, outputs| {
            let expected: Vec<f64> = (0..5).map(|index| expected(ranks, rank, index)).collect();
            assert_eq!(outputs["B"], expected, "rank {rank} of {ranks}");
        });
    }
}

fn from_previous(world: usize, rank: usize, index: usize) -> f64 {
    element((rank + world - 1) % world, "A", index)
}

/// Whether the collective engine can be used on this machine.
fn has_engine() -> bool {
    kind() == DeviceKind::Host || {
        let found = std::sync::Mutex::new(false);
        crate::common::threads(1, |comm: &Communicator| {
            *found.lock().unwrap() = comm.collective_engine().is_ok();
        });
        found.into_inner().unwrap()
    }
}

#[test]
fn a_ring_of_one_rank_is_a_copy() {
    let mut all = vec!["get", "put"];
    if has_engine() {
        all.push("nccl");
    }
    for via in all {
        let text = format!(
            "program ring(n) {{
                input A: f32[n]
                output B: f32[n]
                share {{
                    give = send A to (rank + 1) % world via {via}
                    take = receive B from (rank - 1) % world via {via}
                }}
                post give, take
                wait give, take
            }}"
        );
        run(&text, &[1, 2], from_previous);
    }
}

/// More than a chunk of what an engine moves at once.
#[test]
fn a_long_copy_through_the_engine() {
    if !has_engine() {
        return;
    }
    let text = "program long(n) {
        input A: f32[n]
        output B: f32[n]
        share {
            give = send A to rank via nccl
            take = receive B from rank via nccl
        }
        post give, take
        wait give, take
    }";
    let long = 50_000;
    let run = Run::of(text, [("n", long)], &element);
    run.check(1, |rank, outputs| {
        let expected: Vec<f64> = (0..long as usize).map(|i| element(rank, "A", i)).collect();
        assert_eq!(outputs["B"], expected);
    });
}

#[test]
fn the_two_ends_may_be_on_two_streams() {
    let text = "program two_streams(n) {
        input A: f32[n]
        output B: f32[n]
        allocate G: f32[2, n]
        share {
            give = send G[0] to (rank + 1) % world via put
            take = receive G[1] from (rank - 1) % world via put
        }
        G[0] = copy(A)
        fork high(0), pool(0) {
            set_stream high(0)
            post take
            set_stream pool(0)
            synchronize caller
            post give
        }
        wait take
        wait give
        B = copy(G[1])
    }";
    run(text, &[1, 2], from_previous);
}

/// Twice through one transfer, which is posted again when it is done.
#[test]
fn a_transfer_to_oneself_is_posted_again() {
    let text = "program again(n) {
        input A: f32[n]
        output B: f32[n]
        allocate X: f32[n]
        allocate Y: f32[n]
        share {
            give = send X to rank via get
            take = receive Y from rank via get
        }
        X = copy(A)
        for i in 0..3 {
            post give, take
            wait give, take
            X = sum(X, Y)
        }
        B = copy(X)
    }";
    run(text, &[1, 2], |_, rank, index| {
        8.0 * element(rank, "A", index)
    });
}

#[test]
fn a_product_is_stored_at_its_own_rank() {
    let text = "program stored(n) {
        input A: f32[n, n]
        output B: f32[n, n]
        allocate P: f32[n, n]
        allocate R: f32[n, n]
        share {
            give = send P to (rank + 1) % world via put
            take = receive R from (rank - 1) % world via put
        }
        post take
        post give = matmul(A, A)
        wait take
        B = copy(R)
    }";
    for ranks in worlds([1, 2]) {
        let input = |rank: usize, _: &str, index: usize| (rank + index) as f64;
        Run::of(text, [("n", 2)], &input).check(ranks, |rank, outputs| {
            let from = (rank + ranks - 1) % ranks;
            let a: Vec<f64> = (0..4).map(|index| (from + index) as f64).collect();
            let entry =
                |row: usize, column: usize| a[2 * row] * a[column] + a[2 * row + 1] * a[2 + column];
            let expected = [entry(0, 0), entry(0, 1), entry(1, 0), entry(1, 1)];
            assert_eq!(outputs["B"], expected);
        });
    }
}

/// A transfer to the same rank follows the rules that others follow.
#[test]
fn a_transfer_to_oneself_follows_the_rules() {
    let body = |statements: &str| {
        format!(
            "program faulty(n) {{
                input A: f32[n]
                output B: f32[n]
                share {{
                    give = send A to rank via put
                    take = receive B from rank via put
                }}
                {statements}
            }}"
        )
    };
    let overlapping = "program faulty(n) {
        input A: f32[n]
        output B: f32[n]
        allocate G: f32[2, n]
        share {
            give = send G[0..2] to rank via get
            take = receive G[0..2] from rank via get
        }
        G[0] = copy(A)
        G[1] = copy(A)
        post give, take
        wait give, take
        B = copy(G[0])
    }";
    for (text, kind) in [
        (
            body("post give; post take; wait take"),
            DiagnosticKind::Deadlock,
        ),
        (
            body("post take; wait take; post give"),
            DiagnosticKind::Deadlock,
        ),
        (body("post take; wait take"), DiagnosticKind::Deadlock),
        (overlapping.to_owned(), DiagnosticKind::Race),
    ] {
        let program = Program::parse(&text).unwrap();
        let refused = verify(&program, 1, 2, &Parameters::from([("n", 4)]));
        let found = refused.expect_err(&text);
        assert_eq!(found[0].kind, kind, "{text}\n{}", found[0]);
    }
}
