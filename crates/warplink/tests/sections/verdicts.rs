//! Verdicts on kernels that go wrong with some integers alone, or among the threads of a lane: the host device does not show
//! these, since its lanes take whole steps.

use std::time::{Duration, Instant};
use warplink::program::{DiagnosticKind, Parameters, Program, verify};

/// Elements.
const LENGTH: i64 = 1024;

/// What a kernel does, on how many ranks, with how many lanes, and how it is refused, if it is.
const KERNELS: &[(&str, usize, usize, Option<DiagnosticKind>)] = &[
    // A packet proves nothing of the other threads of the lane that sends it.
    (
        "if lane == 0 {
            Y = copy(S)
            put X[0..2] to P[epoch % 2][0..2] on rank
        } else {
            Z = copy(P[epoch % 2][0..2])
            S = copy(W)
        }",
        1,
        2,
        Some(DiagnosticKind::Race),
    ),
    // Some threads of the put still read what it puts.
    (
        "if lane == 0 {
            put S to P[epoch % 2] on rank
        } else {
            Z = copy(P[epoch % 2][0..2])
            S = copy(W)
        }",
        1,
        2,
        Some(DiagnosticKind::Race),
    ),
    // All packets of the put have come, but to threads that have not met since.
    (
        "if lane == 0 {
            put S to P[epoch % 2] on rank
        } else {
            Y = copy(P[epoch % 2])
            S = copy(W)
        }",
        1,
        2,
        Some(DiagnosticKind::Race),
    ),
    (
        "if lane == 0 {
            put S to P[epoch % 2] on rank
        } else {
            Y = copy(P[epoch % 2])
            barrier
            S = copy(W)
        }",
        2,
        2,
        None,
    ),
    // The packets come from one thread, and others still copy: what a lane reads later does not end what it read before.
    (
        "if lane == 0 {
            Y = copy(S)
            put S[512..514] to P[epoch % 2][0..2] on rank
        } else {
            Z = copy(P[epoch % 2][0..2])
            barrier
            S[512..514] = copy(W[0..2])
        }",
        2,
        2,
        Some(DiagnosticKind::Race),
    ),
    // Each read is proved over by packets of its own.
    (
        "if lane == 0 {
            put S to P[epoch % 2] on rank
            put S to Q[epoch % 2] on rank
        } else {
            Y = copy(P[epoch % 2])
            Y = copy(Q[epoch % 2])
            barrier
            S = copy(W)
        }",
        2,
        2,
        None,
    ),
    // Reads of more steps are not kept apart.
    (
        "if lane == 0 {
            Y = copy(S)
            for i in 0..8 { put S[0..64] to P[epoch % 2][64 * i..64 * i + 64] on rank }
        } else {
            for i in 0..8 { Y[0..64] = copy(P[epoch % 2][64 * i..64 * i + 64]) }
            barrier
            S[0..64] = copy(W[0..64])
        }",
        2,
        2,
        Some(DiagnosticKind::Race),
    ),
    // Kernels wait for no packets of which no result has need.
    (
        "if lane == 0 {
            put X to P[epoch % 2] on rank
        } else {
            S = first(P[epoch % 2], X)
        }",
        1,
        2,
        Some(DiagnosticKind::Mismatch),
    ),
    // The result that has need of them is stored nowhere.
    (
        "if lane == 0 {
            put S to P[epoch % 2] on rank
        } else {
            Y; S for r in 0..0 = late(P[epoch % 2], X)
        }",
        1,
        2,
        Some(DiagnosticKind::Mismatch),
    ),
    // Y's packets are sent before those in P have come.
    (
        "if lane == 0 {
            Y = copy(S)
            signal rank at 1
            put X to P[epoch % 2] on rank
        } else {
            S; R[0] = late(P[epoch % 2], X)
            wait rank
        }",
        1,
        2,
        Some(DiagnosticKind::Race),
    ),
    // Packets of a result that does not need S come before S is read.
    (
        "if lane == 0 {
            P[epoch % 2]; Y = late(S, X)
        } else {
            Y = copy(P[epoch % 2])
            barrier
            S = copy(W)
        }",
        2,
        2,
        Some(DiagnosticKind::Race),
    ),
    // Two threads read the announcement, as data.
    (
        "let slot = epoch % 2
        put X to R[slot] on 1 - rank
        announce 1, 2 with Z in A[slot]
        K = copy(A[slot][1 - rank])
        Y = copy(R[slot])
        agree 1, 2 with Z in A[slot]
        barrier",
        2,
        1,
        Some(DiagnosticKind::Race),
    ),
    (
        "let slot = epoch % 2
        put X to R[slot] on 1 - rank
        announce 1, 2 with Z in A[slot]
        agree 1, 2 with Z in A[slot]
        Y = copy(R[slot])
        barrier",
        2,
        1,
        None,
    ),
    // Only between two numbers do two ranks go on at once.
    (
        "let slot = epoch % 2
        put X to R[slot] on 1 - rank
        let m = C[0] at most 100
        if m < 60 or m > 90 { barrier }
        Y = copy(R[slot])
        barrier",
        2,
        1,
        Some(DiagnosticKind::LostSignal),
    ),
    (
        "let m = C[0] at most 100
        if 100 / (m - 7) > 3 { Y = copy(X) }",
        1,
        1,
        Some(DiagnosticKind::Malformed),
    ),
    // Each thread reads the single value for itself.
    ("Y; S[0] = step(X, S[0])", 1, 1, Some(DiagnosticKind::Race)),
    // Every second launch leaves Y as it was, whatever the integer is.
    (
        "let m = C[0] at most 3
        if epoch % 2 == 0 { Y = copy(X) }",
        1,
        1,
        Some(DiagnosticKind::Malformed),
    ),
    // The same where another kernel reads the integer.
    (
        "let m = C[0] at most 3
        Z = copy(X[0..2])
        }
        kernel lane in 0..1 threads 256 {
        if epoch % 4 == 1 { Y = copy(X) }",
        1,
        1,
        Some(DiagnosticKind::Malformed),
    ),
    // Here it is the integer that decides.
    (
        "let m = C[0] at most 3
        if m > 1 { Y = copy(X) }",
        1,
        1,
        None,
    ),
    (
        "if epoch % 4 == 0 { N[0] = integer(0) }
        let m = N[0] at most 1
        if m == 1 { Y = copy(X) }
        N[0] = integer(1 - m)",
        1,
        1,
        None,
    ),
    // Rank 1 has announced no Y to rank 0.
    (
        "let slot = epoch % 2
        if rank == 0 { announce 1, 2 with Y in A[slot] } else { agree 1, 2 with Y in A[slot] }
        barrier
        if reachable(Y) and rank == 0 { Y on 1 = reduce(X, sum) }
        barrier",
        2,
        1,
        Some(DiagnosticKind::Malformed),
    ),
    (
        "let slot = epoch % 2
        if rank == 0 { announce 1, 2 with Y in A[slot] } else { agree 1, 2 with Y in A[slot] }
        barrier
        if reachable(Y) and rank == 1 { Y on 0 = reduce(X, sum) }
        barrier",
        2,
        1,
        None,
    ),
    // Two words that come by way of memory that no lane reads.
    (
        "I[0..1] = copy(C)
        K[0..1] = copy(I[0..1])
        I[0..1] = copy(D)
        K[1..2] = copy(I[0..1])
        let k = K[0] at most 9
        let l = K[1] at most 9
        if k != l { barrier }",
        2,
        1,
        Some(DiagnosticKind::Deadlock),
    ),
    // Rank 1 forwards a word that it does not read.
    (
        "let slot = epoch % 2
        if rank == 0 {
            put C to G[slot] on 1
            let m = C[0] at most 4
            for j in 0..m { put X[2 * j..2 * j + 2] to P[slot][2 * j..2 * j + 2] on 2 }
        } else if rank == 1 {
            put G[slot] to H[slot] on 2
        } else {
            let m = H[slot][0] at most 4
            for j in 0..m { Y[2 * j..2 * j + 2] = copy(P[slot][2 * j..2 * j + 2]) }
        }
        barrier",
        3,
        1,
        None,
    ),
    // Ranks go on where they agree on some words, and read another.
    (
        "let slot = epoch % 2
        let a = E[0] at most 1
        let b = E[1] at most 1
        let c = E[2] at most 1
        let d = E[3] at most 1
        announce a, b, c, d in A[slot]
        agree a, b, c, d in A[slot]
        barrier
        let k = D[0] at most 1
        if k == 1 { barrier }",
        2,
        1,
        Some(DiagnosticKind::Deadlock),
    ),
    // They agree on that one, too.
    (
        "let slot = epoch % 2
        let a = E[0] at most 1
        let b = E[1] at most 1
        let c = E[2] at most 1
        let k = D[0] at most 1
        announce a, b, c, k in A[slot]
        agree a, b, c, k in A[slot]
        barrier
        if k == 1 { barrier }",
        2,
        1,
        None,
    ),
    // Words are looked for with numbers in the middle alone.
    (
        "let m = C[0] at most 2
        let e = E[0] at most 9
        if m == 1 {
            let c = count(E in 6..8)
            if c > 0 { barrier }
        }",
        2,
        1,
        Some(DiagnosticKind::Deadlock),
    ),
    // With two numbers that differ.
    (
        "let m = C[0] at most 2
        let k = D[0] at most 9
        if m > k {
            let c = count(E in 1000..1001)
            if c > 0 { Y = copy(X) }
        }",
        1,
        2,
        Some(DiagnosticKind::Race),
    ),
    // Numbers that follow from those of the text.
    (
        "let m = C[0] at most 20
        if m - 3 == 4 { barrier }",
        2,
        1,
        Some(DiagnosticKind::Deadlock),
    ),
    (
        "let m = C[0] at most 1000000
        let k = 3 * (m - 70000)
        if k / 4 == 1500 { barrier }",
        2,
        1,
        Some(DiagnosticKind::Deadlock),
    ),
    // Each lane has a number of its own.
    (
        "let m = C[0] at most 1000
        if lane == 0 { Y[0..8] = copy(X[0..8]) }
        if m == lane * 30 + 31 { Y[8 - lane..9] = copy(X[8 - lane..9]) }",
        1,
        8,
        Some(DiagnosticKind::Race),
    ),
    // No number of the text.
    (
        "let m = C[0] at most 100
        if m * m == 1369 { barrier }",
        2,
        1,
        Some(DiagnosticKind::LostSignal),
    ),
    // Nothing, for an hour.
    (
        "for i in 0..32000 { let a = i + epoch % 64 }",
        2,
        1024,
        Some(DiagnosticKind::Malformed),
    ),
];

#[test]
fn each_kernel_gets_its_verdict_in_time() {
    for &(body, world, lanes, expected) in KERNELS {
        let text = format!(
            "program test(n) {{
                input X: f32[n]
                input W: f32[n]
                input C: i32[1]
                input D: i32[1]
                input E: i32[4]
                output Y: f32[n]
                output Z: f32[2]
                output S: f32[n]
                allocate K: i32[4] = 0
                allocate I: i32[1] = 0
                scratch P: packets16 f32[2, n]
                scratch Q: packets16 f32[2, n]
                scratch A: packets16 i32[2, world, 4]
                scratch R: f32[2, n]
                scratch persistent N: i32[1]
                scratch G: packets16 i32[2, 1]
                scratch H: packets16 i32[2, 1]
                function step(x, s) {{ return x * s, s * 2 }}
                function first(p, x) {{ return x * 2 }}
                function late(p, x) {{ return x * 2, p * x }}
                S = copy(X)
                Y = copy(X)
                Z = copy(X[0..2])
                kernel lane in 0..{lanes} threads 256 {{
                    {body}
                }}
            }}"
        );
        let start = Instant::now();
        let program = Program::parse(&text).unwrap_or_else(|error| panic!("{body}: {error}"));
        let found = verify(&program, world, 2, &Parameters::new().with("n", LENGTH));
        let kind = found.as_ref().err().map(|all| all[0].kind);
        assert_eq!(kind, expected, "{body}: {found:?}");
        // Not compiled for speed.
        assert!(start.elapsed() < Duration::from_secs(20), "{body}");
    }
}
