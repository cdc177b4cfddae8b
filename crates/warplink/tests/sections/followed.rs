//! What only shows in some launches, lanes, cases or elements: the verifier has to follow these, too.

use crate::common::{threads_with, world};
use crate::play::{Launches, play};
use warplink::program::{Diagnostic, DiagnosticKind, Parameters, Program, verify};

fn verdict(text: &str, n: i64) -> Result<(), Vec<Diagnostic>> {
    let program = Program::parse(text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    verify(&program, 2, 2, &Parameters::new().with("n", n)).map(|_| ())
}

fn refused(text: &str, kind: DiagnosticKind, words: &str) {
    let found = verdict(text, 16).expect_err(text);
    assert_eq!(found[0].kind, kind, "{}\n{text}", found[0]);
    assert!(found[0].message.contains(words), "{}\n{text}", found[0]);
}

fn accepted(text: &str) {
    if let Err(found) = verdict(text, 16) {
        panic!("{}\n{text}", found[0]);
    }
}

/// Packets are put whole, but what nobody put of the last of them is nothing to read.
#[test]
fn what_was_not_put_of_a_packet_is_not_read() {
    let text = |packing: &str, put: usize, read: usize| {
        format!(
            "program p(n) {{
                input X: f32[{put}]
                output Y: f32[{read}]
                scratch P: {packing} f32[2, world, n]
                kernel lane in 0..1 threads 64 {{
                    put X to P[epoch % 2][rank][0..{put}] on 1 - rank
                    Y = copy(P[epoch % 2][1 - rank][0..{read}])
                }}
            }}"
        )
    };
    for (packing, put, read) in [
        ("packets16", 3, 4),
        ("packets128", 9, 10),
        ("packets128", 3, 16),
    ] {
        let text = text(packing, put, read);
        refused(&text, DiagnosticKind::UnwrittenRead, "'P' of rank");
    }
    for packing in ["packets8", "packets16", "packets128"] {
        for (put, read) in [(3, 3), (4, 4), (4, 3), (9, 2)] {
            accepted(&text(packing, put, read));
        }
    }
}

/// What a program that is called takes as an input is not for it to write, whatever it is to its caller.
#[test]
fn an_input_of_a_called_program_is_not_written() {
    let text = |step: &str| {
        format!(
            "program sub(n) {{
                input A: f32[n]
                output B: f32[n]
                let C = A[0..n]
                kernel lane in 0..1 threads 64 {{
                    barrier
                    B = copy(A)
                    {step}
                    barrier
                }}
            }}
            program p(n) {{
                input X: f32[n]
                output Y: f32[n]
                allocate T: f32[n]
                T = copy(X)
                sub(n = n, A = T, B = Y)
            }}"
        )
    };
    accepted(&text(""));
    for step in [
        "A = reduce(A, A, sum)",
        "C = reduce(C, C, sum)",
        "put B to A on 1 - rank",
    ] {
        refused(&text(step), DiagnosticKind::InputWritten, "is written");
    }
}

/// A name may stand for one tensor on this rank, and for another, which is an input, where it is written.
#[test]
fn the_input_of_another_rank_is_not_written_by_another_name() {
    let part = |tensor: &str| {
        format!(
            "let M = {tensor}[0..n]
            kernel lane in 0..1 threads 64 {{
                barrier
                if rank == 1 {{ for q in 0..1 {{ M on 0 = reduce(M, M, sum) }} }}
                barrier
            }}"
        )
    };
    let text = format!(
        "program p(n) {{
            input X: f32[n]
            output Y: f32[n]
            Y = copy(X)
            if rank == 0 {{ {} }} else {{ {} }}
        }}",
        part("X"),
        part("Y")
    );
    refused(&text, DiagnosticKind::InputWritten, "is written");
}

const OF_RANKS: &str = "program p(n) {
    input B[i]: f32[n] for i in 0..2
    output Y: f32[n]
    output Z: f32[n]
    let M = B[@]
    let N = B[1 - rank]
    kernel lane in 0..1 threads 64 {
        barrier
        get M on 1 - rank to Y
        get N on 1 - rank to Z
        barrier
    }
}";

/// Tensors that peers access may be others on each rank, as long as names stand for as many.
#[test]
fn names_stand_for_the_tensors_of_the_rank_that_is_accessed() {
    let text = OF_RANKS.replace('@', "rank");
    accepted(&text);
    let program = Program::parse(&text).unwrap();
    let parameters = Parameters::new().with("n", 37);
    threads_with(
        world(2),
        |_| (),
        |comm| {
            let played = play(comm, &program, &parameters, Launches::default());
            played.unwrap_or_else(|what| panic!("{what}"));
        },
    );
    refused(
        &OF_RANKS.replace('@', "0"),
        DiagnosticKind::Mismatch,
        "'N' at other ranks",
    );
}
