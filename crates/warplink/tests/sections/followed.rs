//! Faults that show only in some launches, lanes, cases or elements: the verifier has to follow these, too.

use crate::common::{threads_with, time_on_processor, world};
use crate::play::{Launches, play};
use std::time::Duration;
use warplink::program::{Diagnostic, DiagnosticKind, Parameters, Program, unroll, verify};

pub(crate) fn verdict(text: &str, n: i64) -> Result<(), Vec<Diagnostic>> {
    let program = Program::parse(text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    verify(&program, 2, 2, &Parameters::new().with("n", n)).map(|_| ())
}

pub(crate) fn refused(text: &str, kind: DiagnosticKind, words: &str) {
    let found = verdict(text, 16).expect_err(text);
    assert_eq!(found[0].kind, kind, "{}\n{text}", found[0]);
    assert!(found[0].message.contains(words), "{}\n{text}", found[0]);
}

pub(crate) fn accepted(text: &str) {
    if let Err(found) = verdict(text, 16) {
        panic!("{}\n{text}", found[0]);
    }
}

/// A kernel with an input X, an output Y, scratch S and Z, and announcements of `announced`.
pub(crate) fn kernel(lanes: usize, announced: &str, body: &str) -> String {
    format!(
        "program p(n) {{
            input X: f32[n]
            output Y: f32[n]
            scratch C: packets16 i32[2, {lanes}, world, {}]
            scratch S: f32[n]
            scratch Z: f32[n]
            kernel lane in 0..{lanes} threads 64 {{
                let slot = epoch % 2
                announce n with {announced} in C[slot][lane]
                agree n with {announced} in C[slot][lane]
                if lane == 0 {{ Y = copy(X) }}
                {body}
            }}
        }}",
        2 + 2 * announced.split(',').count()
    )
}

/// A race with the next launch of the same program is found whatever the remainder is.
#[test]
fn launches_of_one_remainder_are_followed_beside_one_another() {
    for (first, remainder) in [(0, 0), (0, 1), (0, 2), (1, 2), (2, 2)] {
        let text = format!(
            "program p(n) {{
                input X: f32[n]
                output Y: f32[n]
                scratch S: f32[n]
                scratch Z: f32[n]
                kernel lane in 0..1 threads 64 {{
                    Y = copy(X)
                    if (epoch + {first}) % 3 == {remainder} {{
                        if rank == 1 {{
                            S = copy(X)
                            Z = copy(S)
                            signal 0
                        }} else {{
                            wait 1
                            put X to S on 1
                        }}
                    }}
                }}
            }}"
        );
        refused(&text, DiagnosticKind::Race, "'S' of rank 1");
    }
}

/// Scratch may not be read before the run writes it; persistent scratch may, in every order of launches.
#[test]
fn a_run_reads_what_it_wrote() {
    let text = |scratch: &str, first: &str, second: &str| {
        format!(
            "program p(n) {{
                input X: f32[n]
                output Y: f32[n]
                scratch {scratch}R: f32[2, n]
                kernel lane in 0..1 threads 64 {{
                    {first}
                    barrier
                }}
                kernel lane in 0..1 threads 64 {{
                    {second}
                    Y = copy(R[0])
                    barrier
                }}
            }}"
        )
    };
    let put = "put X to R[0] on 1 - rank";
    let alternate = "put X to R[epoch % 4 / 2] on 1 - rank";
    // In one run, a kernel may read what the one before has put.
    accepted(&text("", put, ""));
    accepted(&text("", "", &format!("{put}; barrier")));
    accepted(&text("persistent ", alternate, ""));
    for first in [alternate, "if epoch % 4 == 0 { R[0] = copy(X) }"] {
        let why = "which nothing wrote in this run of the program since";
        refused(&text("", first, ""), DiagnosticKind::UnwrittenRead, why);
    }
    // Nothing was written before the first run.
    for scratch in ["", "persistent "] {
        let late = text(scratch, "if epoch % 4 == 2 { R[0] = copy(X) }", "");
        refused(
            &late,
            DiagnosticKind::UnwrittenRead,
            "which nothing wrote before",
        );
    }
}

/// A launch that reads scratch may come behind one that went directly, and the other way around.
#[test]
fn what_a_direct_launch_left_is_not_read_through_scratch() {
    for (direct, through) in [
        ("S = copy(X)", "Z = copy(S)"),
        ("put X to S on 1 - rank; barrier", "Z = copy(S)"),
        ("Z = copy(S)", "S = copy(X)"),
        (
            "if epoch % 2 == 0 { S = copy(X) }; Z = copy(S)",
            "S = copy(X)",
        ),
    ] {
        let body = format!("if reachable(Y) {{ {direct} }} else {{ {through} }}");
        refused(
            &kernel(1, "Y", &body),
            DiagnosticKind::UnwrittenRead,
            "'S' of rank",
        );
        let all = format!(
            "S = copy(X); {}",
            body.replace("put X to S on 1 - rank; ", "")
        );
        accepted(&kernel(1, "Y", &all));
        // What persists depends on the launches before.
        let text = kernel(1, "Y", &all).replace("scratch S", "scratch persistent S");
        refused(&text, DiagnosticKind::Malformed, "which tensors it reached");
    }
}

/// A signal is for a wait of the same run, however long it is until launches do the same again.
#[test]
fn signals_end_with_their_run() {
    let text = |first: &str, second: &str| {
        format!(
            "program p(n) {{
                input X: f32[n]
                output Y: f32[n]
                kernel lane in 0..1 threads 64 {{
                    Y = copy(X)
                    {first}
                }}
                kernel lane in 0..1 threads 64 {{
                    {second}
                }}
            }}"
        )
    };
    let sent = |period: u32, at: u32| format!("if epoch % {period} == {at} {{ signal 1 - rank }}");
    let awaited = |period: u32, at: u32| format!("if epoch % {period} == {at} {{ wait 1 - rank }}");
    accepted(&text("signal 1 - rank", "wait 1 - rank"));
    accepted(&text(&sent(4, 0), &awaited(4, 1)));
    accepted(&text("signal 1 - rank; wait 1 - rank", "barrier"));
    // The second kernel of a run for the first of the next; the first for that of another run.
    for (first, second) in [
        (awaited(4, 2), sent(4, 1)),
        (sent(4, 0) + "; " + &awaited(4, 2), String::new()),
        (sent(6, 0) + "; " + &awaited(6, 2), String::new()),
        (sent(8, 0) + "; " + &awaited(8, 6), String::new()),
        (sent(6, 2), awaited(6, 5)),
        (
            "signal 1 - rank".to_owned(),
            awaited(4, 3) + "; " + &awaited(4, 3),
        ),
    ] {
        refused(&text(&first, &second), DiagnosticKind::LostSignal, "");
    }
}

/// A tensor that a peer still writes when a launch of another kernel ends, which uses no tensor, is reported by its name.
#[test]
fn a_tensor_is_reported_by_its_name_where_another_kernel_ends() {
    let text = "program p(n) {
            input X: f32[n]
            output Y: f32[world, n]
            kernel lane in 0..1 threads 32 {
                barrier
                Y[rank] = copy(X)
                put X to Y[rank] on 1 - rank
                barrier
            }
            kernel lane in 0..1 threads 32 {
                signal 1 - rank
                signal 1 - rank
                wait 1 - rank
                barrier
            }
        }";
    let found = verdict(text, 16).expect_err(text);
    let races = found.iter().filter(|one| one.kind == DiagnosticKind::Race);
    assert!(
        races
            .map(|race| &race.message)
            .any(|message| message.contains("'Y' of rank"))
    );
}

/// Sections that are too large to verify or to compile are refused at once, with the limit.
#[test]
fn too_many_lanes_and_too_large_scratch_are_refused_at_once() {
    let text = "program p(n, lanes, room) {
        input X: f32[n]
        output Y: f32[n]
        scratch S: f32[room]
        kernel lane in 0..lanes threads 64 {
            barrier
            Y[lane of lanes] = copy(X[lane of lanes])
            if lane == 0 { S[0..n] = copy(X) }
        }
    }";
    let program = Program::parse(text).unwrap();
    for (world, lanes, room, words) in [
        (17, 1024, 64, "17 ranks have 1024 lanes each"),
        (64, 257, 64, "64 ranks have 257 lanes each"),
        (1024, 17, 64, "1024 ranks have 17 lanes each"),
        (2, 4, 1_i64 << 33, "'S' is larger than 17179869184 bytes"),
    ] {
        let given = Parameters::new()
            .with("n", 64)
            .with("lanes", lanes)
            .with("room", room);
        let (found, took) = time_on_processor(|| verify(&program, world, 1, &given));
        let found = found.unwrap_err();
        assert!(found[0].message.contains(words), "{}", found[0]);
        assert!(took < Duration::from_secs(10), "{words}: {took:?}");
    }
    let given = Parameters::new()
        .with("n", 64)
        .with("lanes", 4)
        .with("room", 1_i64 << 32);
    verify(&program, 2, 1, &given).unwrap();
}

/// A diagnostic of an access that a launch does not wait for names the launch's end or beginning.
#[test]
fn a_missing_barrier_is_told_where_it_is_missing() {
    let text = |before: &str, body: &str, after: &str| {
        format!(
            "program p(n) {{
                input X: f32[n]
                output Y: f32[world, n]
                kernel lane in 0..1 threads 64 {{
                    {before}
                    {body}
                    {after}
                }}
            }}"
        )
    };
    let put = "Y[rank] on r for r in 0..world = reduce(X, sum)";
    let get = "for r in 0..world { Y[r] = copy(X on r) }";
    let reduce = "for r in 0..world { Y[r] = reduce(X on r, X, sum) }";
    for body in [put, get, reduce] {
        accepted(&text("barrier", body, "barrier"));
        let ends = text("barrier", body, "");
        refused(
            &ends,
            DiagnosticKind::Race,
            "which does not wait until that is done before its launch",
        );
        let begins = text("", body, "barrier");
        refused(
            &begins,
            DiagnosticKind::Race,
            "without waiting until that rank's launch",
        );
    }
    // What differs from launch to launch is told at its step.
    for (step, line) in [
        ("if epoch % 2 == 1 { S = copy(W) }", 7),
        ("if epoch % 3 == 0 { S = copy(W) }", 7),
        ("S = copy(X)\nif epoch % 2 == 0 { Y = copy(W) }", 8),
        ("for i in 0..1 + epoch % 2 {\nS = copy(V[i])\n}", 8),
    ] {
        let text = format!(
            "program p(n) {{
                input X: f32[n]
                input V: f32[2, n]; input W: f32[n]
                output Y: f32[n]; scratch S: f32[n]
                kernel lane in 0..1 threads 64 {{
                    Y = copy(X)
                    {step}
                }}
            }}"
        );
        let found = verdict(&text, 16).unwrap_err();
        assert_eq!(found[0].kind, DiagnosticKind::Malformed, "{}", found[0]);
        assert_eq!(found[0].lines(), [line], "{}", found[0]);
    }
}

/// Two kernels may each repeat after few launches, and both together only after too many to follow.
#[test]
fn kernels_repeat_together_after_few_launches() {
    let text = |one: u32, other: u32| {
        format!(
            "program p(n) {{
                input X: f32[n]
                output Y: f32[n]
                output V: f32[n]
                scratch S: f32[n]
                scratch Z: f32[n]
                kernel lane in 0..1 threads 64 {{
                    barrier
                    Y = copy(X)
                    if epoch % {one} == 0 {{ if rank == 0 {{ put X to S on 1 }} }}
                }}
                kernel lane in 0..1 threads 64 {{
                    V = copy(X)
                    if (epoch + {other} - 2) % {other} == 1 {{ if rank == 1 {{ Z = copy(S) }} }}
                }}
            }}"
        )
    };
    refused(&text(63, 64), DiagnosticKind::Malformed, "4032 launches");
    let found = verdict(&text(3, 4), 16).unwrap_err();
    assert!(
        found.iter().any(|it| it.kind == DiagnosticKind::Race),
        "{}",
        found[0]
    );
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

/// A called program must not write its inputs, whatever they are to its caller.
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

/// Devices agree that a step does nothing where its row is empty, though a sum of nothing would be 0.
#[test]
fn no_single_value_of_an_empty_row_is_stored() {
    let text = "program p() {
        input X: f32[8]
        output Y: f32[8]
        scratch R: f32[8]
        function total(x) { return row_sum(x) }
        kernel lane in 0..1 threads 64 {
            R = copy(X)
            Y = copy(X)
            Y[3] = total(R[1 of 2])
        }
        expect Y = copy(X)
    }";
    let program = Program::parse(text).unwrap();
    threads_with(
        world(2),
        |_| (),
        |comm| {
            let played = play(comm, &program, &Parameters::new(), Launches::default());
            played.unwrap_or_else(|what| panic!("{what}"));
        },
    );
}

/// Lanes, steps and operands are counted before they are made.
#[test]
fn what_is_too_large_is_refused_at_once() {
    let too_many = |what: &str| {
        format!(
            "program p(n) {{
                input X: f32[64]
                output Y: f32[64]
                kernel lane in 0..n * 64 threads 64 {{
                    {what}
                    if lane == 0 {{ Y = copy(X) }}
                }}
            }}"
        )
    };
    let sources = too_many("Y[0..0] = reduce(X[0..0] for i in 0..60000, sum)");
    refused(&sources, DiagnosticKind::Malformed, "60000 sources");
    let targets = too_many("Y[i..i + 1] for i in 0..33 = reduce(X[0..1], sum)");
    refused(&targets, DiagnosticKind::Malformed, "33 targets");
    let steps = too_many("for i in 0..10000 { barrier }");
    refused(&steps, DiagnosticKind::Malformed, "too large to verify");
}

/// The epoch counts for ever; what is made of it does not grow.
#[test]
fn a_slot_is_found_in_every_launch() {
    let text = "program p(n) {
        input X: f32[64]
        output Y: f32[64]
        kernel lane in 0..1 threads 64 {
            let slot = (epoch * n) % 2
            Y = copy(X)
            if slot == 0 { barrier }
        }
    }";
    let n = 100_000_000_000_000_001;
    verdict(text, n).unwrap();
    let parameters = Parameters::new().with("n", n);
    let rank = unroll(&Program::parse(text).unwrap(), 0, 2, 1, &parameters).unwrap();
    let section = rank.sections().next().unwrap();
    for (epoch, steps) in [(0, 3), (1, 1), (1000, 3), (u64::MAX, 1)] {
        assert_eq!(section.steps(0, epoch).unwrap().len(), steps, "{epoch}");
    }
}
