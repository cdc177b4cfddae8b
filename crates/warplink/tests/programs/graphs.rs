//! Programs that run eagerly but not as a graph: the verifier says so, and they are refused by capture
//! in the program's words.

use crate::common::kind;
use crate::run::Run;
use warplink::DeviceKind;
use warplink::program::{DiagnosticKind, Parameters, Program, Report, verify};

const STREAMS: usize = 2;
const LENGTH: usize = 16;

fn parameters() -> Parameters {
    Parameters::new().with("n", LENGTH as i64)
}

fn check(program: &Program) -> Report {
    verify(program, 2, STREAMS, &parameters()).unwrap_or_else(|diagnostics| {
        panic!("refused: {}", diagnostics[0]);
    })
}

/// `body` is accepted, runs eagerly, and runs as a graph unless that is refused with `says`.
fn runs(body: &str, says: Option<&str>, expected: [f64; 2]) {
    let text = format!(
        "program p(n) {{
            input A: f32[n]
            output C: f32[n]
            allocate W: f32[2, n]
            let peer = 1 - rank
            {body}
        }}"
    );
    let program = Program::parse(&text).unwrap();
    let report = check(&program);
    match (&report.eager_only, says) {
        (None, None) => {}
        (Some(diagnostic), Some(part)) => {
            assert_eq!(diagnostic.kind, DiagnosticKind::EagerOnly);
            assert!(!diagnostic.places.is_empty());
            assert!(diagnostic.message.contains(part), "{diagnostic}");
            assert!(report.to_string().contains(part), "{report}");
        }
        (found, _) => panic!("expected {says:?}, found {found:?}\n{text}"),
    }
    if kind() == DeviceKind::Host {
        let run = Run {
            text: &text,
            parameters: parameters(),
            streams: STREAMS,
            input: &|rank, _, _| 1.0 + rank as f64,
        };
        run.check_unless_refused(2, says, |rank, outputs| {
            assert_eq!(outputs["C"], [expected[rank]; LENGTH], "{text}");
        });
    }
}

/// A send that is posted again counts eagerly; in a graph it waits until it is done the time before.
#[test]
fn a_repeated_post_may_hold_up_a_graph() {
    let body = |wait_on: &str| {
        format!(
            "share {{
                if rank == 0 {{
                    t = send A to 1 tag 1 via get
                    u = send A to 1 tag 2 via get
                }} else {{
                    t = receive W[0] from 0 tag 1 via get
                    u = receive W[1] from 0 tag 2 via get
                }}
            }}
            if rank == 0 {{
                set_stream pool(0)
                synchronize caller
                set_stream caller
                post t
                set_stream {wait_on}
                wait t
                set_stream caller
                post t
                post u
                wait t, u
                synchronize pool(0)
                C = copy(A)
            }} else {{
                PEER
                wait t, u
                C = sum(W[0], W[1])
            }}"
        )
    };
    let crossed = body("pool(0)").replace("PEER", "post u\npost t\npost t");
    runs(
        &crossed,
        Some("as a graph, the program would not end"),
        [1.0, 2.0],
    );
    let in_order = body("pool(0)").replace("PEER", "post t\npost t\npost u");
    runs(&in_order, None, [1.0, 2.0]);
    let on_caller = body("caller").replace("PEER", "post t\npost t\npost u");
    runs(&on_caller, None, [1.0, 2.0]);
}

/// Posts of one end wait for the same value in a graph, so streams have to order them. Here, a ping and its echo do.
#[test]
fn signals_do_not_order_the_posts_of_a_transfer_in_a_graph() {
    let body = |between: &str| {
        format!(
            "allocate P: f32[2, n]
            share {{
                give = send A to peer tag 1 via put
                take = receive W[0] from peer tag 1 via put
                ping = send A to peer tag 2 via put
                pinged = receive P[0] from peer tag 2 via put
                echo = send A to peer tag 3 via put
                echoed = receive P[1] from peer tag 3 via put
            }}
            set_stream pool(0)
            synchronize caller
            set_stream pool(1)
            synchronize caller
            set_stream caller
            post take, pinged, echoed
            set_stream pool(0)
            post give
            set_stream pool(1)
            wait give
            post ping
            set_stream caller
            wait take, pinged
            post echo
            wait echoed
            {between}
            post take
            post give
            wait take, give
            synchronize pool(0)
            synchronize pool(1)
            C = copy(W[0])"
        )
    };
    let says = "posts 'give' again on caller, which does not synchronize with the post before";
    runs(&body(""), Some(says), [2.0, 1.0]);
    runs(&body("synchronize pool(1)"), None, [2.0, 1.0]);
}

/// In a group, a receive that is posted again holds up what the group moves.
#[test]
fn a_repeated_post_holds_up_its_group() {
    let body = |second: &str| {
        format!(
            "share {{
                give = send A to peer tag 1 via put
                take = receive W[0] from peer tag 1 via put
            }}
            post take
            post give
            wait take
            {second}
            wait take, give
            C = copy(W[0])"
        )
    };
    runs(&body("post take, give"), None, [2.0, 1.0]);
    runs(&body("post take\npost give"), None, [2.0, 1.0]);
}

#[test]
fn work_before_the_first_synchronize_is_not_in_a_graph() {
    let exchange = "share {
            give = send A to peer via put
            take = receive W[0] from peer via put
        }
        post take, give";
    let says = "is on pool(0) before that stream synchronizes";
    // The wait orders the copy, but only eagerly.
    let body = format!(
        "{exchange}
        set_stream pool(0)
        wait take
        C = copy(W[0])
        set_stream caller
        wait give
        synchronize pool(0)"
    );
    runs(&body, Some(says), [2.0, 1.0]);
    let forked = body.replace("wait take", "synchronize caller\nwait take");
    runs(&forked, None, [2.0, 1.0]);
    // A post on a stream that nothing orders, as its first work.
    let body = "share {
            give = send A to peer via put
            take = receive W[0] from peer via put
        }
        set_stream pool(0)
        synchronize caller
        post take
        set_stream caller
        post give
        wait take, give
        synchronize pool(0)
        C = copy(W[0])";
    runs(body, None, [2.0, 1.0]);
}

#[test]
fn a_stream_without_work_cannot_be_joined_in_a_graph() {
    let says = "waits for pool(1) before that stream synchronizes";
    runs("synchronize pool(1)\nC = copy(A)", Some(says), [1.0, 2.0]);
    // Nor can two streams that are outside wait for one another.
    let says = "is on pool(1) before that stream synchronizes";
    let body = "set_stream pool(1)
        synchronize pool(0)
        synchronize caller
        C = copy(A)
        set_stream caller
        synchronize pool(1)";
    runs(body, Some(says), [1.0, 2.0]);
}

/// Signals order the streams of a run, but events alone those of a graph.
#[test]
fn a_stream_that_only_signals_join_is_not_joined_in_a_graph() {
    let body = "share {
            give = send A to peer tag 1 via get
            take = receive W[0] from peer tag 1 via get
            back = send A to peer tag 2 via put
            answer = receive W[1] from peer tag 2 via put
        }
        post answer
        set_stream pool(0)
        synchronize caller
        post give
        set_stream caller
        post take
        post back
        wait answer, back
        JOIN
        C = copy(W[1])";
    let says = "with which the caller's stream does not synchronize afterwards";
    runs(&body.replace("JOIN", ""), Some(says), [2.0, 1.0]);
    let says = "posts 'give' without a later wait for it";
    runs(
        &body.replace("JOIN", "synchronize pool(0)"),
        Some(says),
        [2.0, 1.0],
    );
    let joined = body.replace("JOIN", "synchronize pool(0)\nwait give");
    runs(&joined, None, [2.0, 1.0]);
    // A wait on another stream follows the post by an event.
    runs(&body.replace("JOIN", "wait give"), None, [2.0, 1.0]);
}

#[test]
fn a_signal_is_waited_for_before_it_is_repeated_in_a_graph() {
    let body = |between: &str| {
        format!(
            "share {{
                give = send A to peer via get
                take = receive W[0] from peer via get
            }}
            post give
            {between}
            post give
            post take
            post take
            wait give, take
            C = copy(W[0])"
        )
    };
    let says = "posts 'give' again without a wait for the post before";
    runs(&body(""), Some(says), [2.0, 1.0]);
    let text = body("").replace("post give\n            post take\n", "post take\n");
    let waited = text.replacen("post take\n", "post take\nwait give\npost give\n", 1);
    runs(&waited, None, [2.0, 1.0]);
}

#[test]
fn what_every_lowering_makes_is_a_graph() {
    use warplink::DType;
    use warplink::program::lower::{
        AllGatherMatmul, AllGatherMatmulLowering, MatmulReduceScatter, MatmulReduceScatterLowering,
        lower,
    };
    for world in [1, 2, 3, 4, 8] {
        for streams in [1, 2, 3] {
            let gather = AllGatherMatmul {
                transposed_b: false,
                m: 512 * world,
                k: 16,
                n: vec![24, 8],
                dtype: DType::BF16,
                bias: true,
                keep: true,
            };
            let scatter = MatmulReduceScatter {
                transposed_b: false,
                m: 512 * world,
                k: 8 * world,
                n: 16,
                dtype: DType::F16,
                bias: true,
            };
            let gathers = AllGatherMatmulLowering::ALL
                .iter()
                .map(|one| lower(&gather, &one.lowering().unwrap(), world, streams).unwrap());
            let scatters = MatmulReduceScatterLowering::ALL
                .iter()
                .map(|one| lower(&scatter, &one.lowering().unwrap(), world, streams).unwrap());
            for lowered in gathers.chain(scatters) {
                let verdict = verify(lowered.program(), world, streams, &lowered.parameters);
                let report = verdict.unwrap_or_else(|diagnostics| panic!("{}", diagnostics[0]));
                let name = lowered.lowering.name();
                assert_eq!(report.eager_only, None, "{name} × {world} × {streams}");
            }
        }
    }
}
