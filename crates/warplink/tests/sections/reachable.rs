//! The verifier follows kernels whose lanes find tensors reachable or not.

use crate::followed::{accepted, kernel, refused, verdict};
use warplink::program::DiagnosticKind;

/// Three lanes may each find other tensors reachable; where they wait for one another, that is refused.
#[test]
fn three_lanes_do_not_wait_for_one_another_by_what_they_reach() {
    // Each waits before it signals in a case of its own.
    let circle = |lanes: usize| {
        let cases = [
            "reachable(X) and not reachable(Y)",
            "reachable(Y) and not reachable(X)",
            "reachable(X) and reachable(Y)",
        ];
        let lane = |lane: usize| {
            let next = (lane + 1) % lanes;
            format!(
                "if lane == {lane} {{
                    if {} {{ wait rank; signal rank at {next} }} else {{ signal rank at {next}; wait rank }}
                }}\n",
                cases[lane % 3]
            )
        };
        kernel(lanes, "X, Y", &(0..lanes).map(lane).collect::<String>())
    };
    refused(
        &circle(3),
        DiagnosticKind::Malformed,
        "lanes 0, 1 and 2 wait for one another",
    );
    refused(
        &circle(4),
        DiagnosticKind::Malformed,
        "lanes 0, 1 and 2 wait for one another",
    );
    let found = verdict(&circle(2), 16).unwrap_err();
    assert_eq!(found[0].kind, DiagnosticKind::Deadlock, "{}", found[0]);
    // By packets, and with a lane that two others wait for.
    let packets = |lanes: usize| {
        let text = kernel(
            lanes,
            "Y",
            "P[slot][lane] = copy(X)
            if reachable(Y) { barrier }
            if lane > 0 { Q[lane] = copy(P[slot][lane - 1]) }",
        );
        text.replace(
            "scratch S:",
            &format!(
                "scratch P: packets16 f32[2, {lanes}, n]; scratch Q: f32[{lanes}, n]; scratch S:"
            ),
        )
    };
    refused(&packets(3), DiagnosticKind::Malformed, "lanes 0, 1 and 2");
    accepted(&packets(2));
    let star = |lanes: usize| {
        let waits = "wait rank; ".repeat(lanes - 1);
        let body = format!(
            "if lane > 0 {{ if reachable(Y) {{ signal rank at 0 }} else {{ signal rank at 0 }} }} else {{ {waits} }}"
        );
        kernel(lanes, "Y", &body)
    };
    accepted(&star(2));
    assert!(verdict(&star(3), 16).is_err());
    // Where nothing is asked, any number may.
    accepted(
        &circle(3)
            .replace("reachable(X)", "n > 0")
            .replace("reachable(Y)", "n > 0"),
    );
}

/// Each two lanes may find a tensor reachable, or not, on their own.
#[test]
fn every_two_lanes_are_followed_in_every_two_cases() {
    for (lanes, one, other) in [
        (2, 0, 1),
        (2, 1, 0),
        (3, 0, 2),
        (3, 2, 0),
        (7, 1, 5),
        (7, 6, 2),
    ] {
        let body = format!(
            "if reachable(Y) {{
                if lane == {one} {{ S = copy(X) }}
            }} else {{
                if lane == {other} {{ S = copy(X) }}
            }}"
        );
        refused(
            &kernel(lanes, "Y", &body),
            DiagnosticKind::Race,
            "'S' of rank",
        );
        let own = body.replace(&format!("lane == {other}"), &format!("lane == {one}"));
        accepted(&kernel(lanes, "Y", &own));
    }
}

/// One tensor may be reachable, and another not.
#[test]
fn tensors_are_reachable_one_by_one() {
    let outside = "put X to S[5..n + 5] on 1 - rank";
    for condition in [
        "if reachable(X) { if not reachable(Y) { @ } }",
        "if not reachable(X) and reachable(Y) { @ }",
        "if not (reachable(X) or reachable(Y)) { @ }",
        "if reachable(Y) { if n == 16 and not reachable(X) { @ } }",
    ] {
        let body = condition.replace('@', outside);
        let text = kernel(1, "X, Y", &body);
        refused(&text, DiagnosticKind::OutOfBounds, "5..21");
    }
    let never = "if reachable(X) { if not reachable(X) { @ } }".replace('@', outside);
    accepted(&kernel(1, "X, Y", &never));
}

/// A tensor may be announced by one rank alone, and others agree on it.
#[test]
fn one_rank_may_announce_a_tensor() {
    let text = |body: &str| {
        format!(
            "program p(n) {{
                input X: f32[n]
                output Y: f32[n] = 0
                scratch A: packets16 i32[2, world, 4]
                scratch R: packets16 f32[2, n]
                kernel lane in 0..1 threads 64 {{
                    let slot = epoch % 2
                    {body}
                    barrier
                }}
            }}"
        )
    };
    let body = "if rank == 0 { announce n with Y in A[slot] } else { agree n with Y in A[slot] }
        if reachable(Y) {
            if rank == 1 { put X to Y on 0; signal 0 } else { wait 1 }
        } else {
            if rank == 1 { put X to R[slot] on 0 } else { Y = copy(R[slot]) }
        }";
    accepted(&text(body));
    refused(
        &text(&body.replace("wait 1", "Y = copy(X)")),
        DiagnosticKind::LostSignal,
        "signals rank 0",
    );
    // Another rank announces it, too: the first one would have to hear of that.
    let both = body.replace("agree n", "announce n with Y in A[slot]; agree n");
    refused(
        &text(&both),
        DiagnosticKind::Malformed,
        "does not agree on it",
    );
    let agreed = both.replace(
        "if reachable",
        "if rank == 0 { agree n with Y in A[slot] }\nif reachable",
    );
    accepted(&text(&agreed));
    let early = "announce n with Y in A[slot]
        if reachable(Y) { barrier }
        agree n with Y in A[slot]";
    refused(
        &text(early),
        DiagnosticKind::Malformed,
        "before it agrees on it",
    );
}

/// Where a rank reads integers, ranks that announce different ones fail; one whose announcement is overwritten has a fault.
#[test]
fn an_announcement_that_is_overwritten_is_no_other_call() {
    let text = "program p(n) {
        input X: f32[n]
        input C: i32[1]
        output Y: f32[n] = 0
        scratch A: packets16 i32[world, 1]
        scratch R: f32[n]
        kernel lane in 0..1 threads 64 {
            let m = C[0] at most n
            announce m in A
            if rank == 1 { put X[0..m] to R[0..m] on 0; signal 0 }
            agree m in A
            if rank == 0 { wait 1; Y[0..m] = copy(R[0..m]) }
        }
    }";
    refused(text, DiagnosticKind::Race, "'A' of rank");
}
