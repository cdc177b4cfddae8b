//! Limits of devices and engines that the verifier knows: element types, forms in place, tags, lengths, and
//! what one post may hold.

use crate::common::{allocate, kind, threads};
use crate::run::Run;
use warplink::program::{
    Bindings, DiagnosticKind, Parameters, PrepareOptions, Program, Report, verify,
};
use warplink::{DeviceKind, ErrorKind};

const WORLD: usize = 3;
const STREAMS: usize = 2;

fn program(body: &str) -> Program {
    Program::parse(&format!("program p(n) {{\n{body}\n}}")).unwrap()
}

fn parameters() -> Parameters {
    Parameters::new().with("n", 2)
}

fn check(program: &Program) -> Result<Report, (DiagnosticKind, String)> {
    verify(program, WORLD, STREAMS, &parameters())
        .map_err(|diagnostics| (diagnostics[0].kind, diagnostics[0].message.clone()))
}

fn refused(body: &str, kind: DiagnosticKind, part: &str) {
    let (found, message) = check(&program(body)).unwrap_err();
    assert!(
        found == kind && message.contains(part),
        "{found}: {message}\n{body}"
    );
}

/// `body` is accepted, and C becomes what `expected` gives for a rank, where A counts up from 100 times the rank.
fn gives(body: &str, expected: impl Fn(usize) -> Vec<f64> + Sync) {
    let program = program(body);
    let report = check(&program);
    let report = report.unwrap_or_else(|(kind, message)| panic!("{kind}: {message}"));
    let refusal = report.eager_only.map(|diagnostic| diagnostic.message);
    if kind() == DeviceKind::Host {
        let run = Run {
            text: &program.to_string(),
            parameters: parameters(),
            streams: STREAMS,
            input: &|rank, _, index| (100 * rank + index) as f64,
        };
        run.check_unless_refused(WORLD, refusal.as_deref(), |rank, outputs| {
            assert_eq!(outputs["C"], expected(rank), "rank {rank}\n{body}");
        });
    }
}

#[test]
fn collectives_are_in_place_where_engines_say_so() {
    let gathered = |_| {
        (0..WORLD)
            .flat_map(|r| [100.0 * r as f64, 100.0 * r as f64 + 1.0])
            .collect()
    };
    gives(
        "input A: f32[n]
        output C: f32[world, n]
        C[rank] = copy(A)
        C = all_gather(C[rank])",
        gathered,
    );
    gives(
        "input A: f32[world, n]
        output C: f32[n]
        allocate W: f32[world, n]
        W = copy(A)
        W[rank] = reduce_scatter(W, sum)
        C = copy(W[rank])",
        |rank| vec![300.0 + 6.0 * rank as f64, 303.0 + 6.0 * rank as f64],
    );
    gives(
        "input A: f32[n]
        output C: f32[n]
        C = copy(A)
        C = all_reduce(C, max)",
        |_| vec![200.0, 201.0],
    );
    gives(
        "input A: f32[n]
        output C: f32[n]
        C = copy(A)
        C = broadcast(C from 1)",
        |_| vec![100.0, 101.0],
    );
    gives(
        "input A: f32[n]
        output C: f32[n]
        C = copy(A)
        C = reduce(C, sum to 2)",
        |rank| match rank {
            2 => vec![300.0, 303.0],
            _ => vec![100.0 * rank as f64, 100.0 * rank as f64 + 1.0],
        },
    );
    for shifted in ["all_reduce(C[0..2], sum)", "broadcast(C[0..2] from rank_1)"] {
        let body = format!(
            "input A: f32[world, n]
            output C: f32[world, n]
            let rank_1 = 1
            C = copy(A)
            C[1..3] = {shifted}"
        );
        refused(&body, DiagnosticKind::Race, "both reads and writes");
    }
    for (body, part) in [
        (
            "C = copy(A)\nC = all_to_all(C)",
            "both reads and writes 'C'",
        ),
        (
            "C = copy(A)\nC = all_gather(C[(rank + 1) % world])",
            "both reads and writes",
        ),
        (
            "C = copy(A)\nC[(rank + 1) % world] = reduce_scatter(C, sum)",
            "both reads and writes",
        ),
    ] {
        let whole = format!("input A: f32[world, n]\noutput C: f32[world, n]\n{body}");
        refused(&whole, DiagnosticKind::Race, part);
    }
}

#[test]
fn sums_are_of_numbers_and_as_long_as_one_likes() {
    let body = "input A: u8[n]\noutput C: u8[n]\nC = sum(A, A)";
    refused(body, DiagnosticKind::Mismatch, "a sum of u8");
    gives(
        "input A: f32[40, n]
        output C: f32[n]
        C = copy(A[0])
        C = sum(A[j] for j in 0..40, C)",
        |rank| {
            let first = 100.0 * rank as f64;
            let all = |i: usize| (0..40).map(|j| first + (2 * j + i) as f64).sum::<f64>();
            vec![all(0) + first, all(1) + first + 1.0]
        },
    );
}

#[test]
fn tags_stay_within_what_travels() {
    let body = |tag: &str| {
        format!(
            "input A: f32[n]
            output C: f32[n]
            share {{
                s = send A to (rank + 1) % world tag {tag} via put
                r = receive C from (rank - 1) % world tag {tag} via put
            }}
            post s, r
            wait s, r"
        )
    };
    for tag in ["0", "-1", "(1 << 61) * 2 - 1", "-(1 << 62)"] {
        check(&program(&body(tag))).unwrap_or_else(|(_, message)| panic!("{message}"));
    }
    for tag in ["1 << 62", "-(1 << 62) - 1", "-9223372036854775808"] {
        refused(
            &body(tag),
            DiagnosticKind::OutOfBounds,
            "expected -2^62 to 2^62 - 1",
        );
    }
}

#[test]
fn tensors_have_a_length_that_a_device_may_have() {
    let body = "input A: f32[n << 60]\noutput C: f32[n]\nC = copy(A[0..n])";
    refused(
        body,
        DiagnosticKind::OutOfBounds,
        "'A' is too large; expected at most",
    );
    let body = "input A: f32[n]\noutput C: f32[n]\nallocate W: f32[1 << 44, n]\nC = copy(A)";
    refused(
        body,
        DiagnosticKind::OutOfBounds,
        "'W' is too large; expected at most",
    );
}

#[test]
fn a_post_is_of_transfers_of_one_kind() {
    let body = |first: &str, second: &str| {
        format!(
            "input A: f32[n]
            output C: f32[2, n]
            share {{
                s = send A to (rank + 1) % world tag 1 via put
                r = receive C[0] from (rank - 1) % world tag 1 via put
                t = send A to (rank + 1) % world tag 2 via nccl
                q = receive C[1] from (rank - 1) % world tag 2 via nccl
            }}
            post {first}
            post {second}
            wait s, r, t, q"
        )
    };
    refused(
        &body("s, r, t", "q"),
        DiagnosticKind::Mismatch,
        "expected one post for each",
    );
    gives(&body("s, r", "t, q"), |rank| {
        let first = 100.0 * ((rank + WORLD - 1) % WORLD) as f64;
        vec![first, first + 1.0, first, first + 1.0]
    });
}

/// The signals of a group come after all that it moves, so a wait for any member is as good.
#[test]
fn a_wait_for_any_member_of_a_group_is_as_good() {
    for member in ["give[0]", "give[1]"] {
        let body = format!(
            "input A: f32[2, n]
            output C: f32[2, n]
            allocate W: f32[2, n]
            W = copy(A)
            share {{
                for h in 0..2 {{
                    give = send W[h] to (rank + 1) % world tag h via put
                    take = receive C[h] from (rank - 1) % world tag h via put
                }}
            }}
            post take[h] for h in 0..2
            set_stream pool(0)
            synchronize caller
            post give[h] for h in 0..2
            set_stream caller
            wait {member}
            W = copy(A)
            synchronize pool(0)
            wait give[h] for h in 0..2
            wait take[h] for h in 0..2"
        );
        gives(&body, |rank| {
            let first = 100.0 * ((rank + WORLD - 1) % WORLD) as f64;
            (0..4).map(|i| first + i as f64).collect()
        });
    }
}

/// A matmul that is stored at a peer reads its operands behind the peer's signal, as a copy does.
#[test]
fn a_stored_matmul_begins_after_its_signal() {
    let body = |receive: &str| {
        format!(
            "input A: f32[n, n]
            output C: f32[n, n]
            allocate P: f32[n, n]
            allocate W: f32[n, n]
            allocate R: f32[n, n]
            let next = (rank + 1) % world
            let previous = (rank - 1) % world
            share {{
                told = send A to previous tag 1 via get
                heard = receive R from next tag 1 via get
                give = send P to previous tag 2 via put
                take = receive C from next tag 2 via put
            }}
            set_stream pool(0)
            synchronize caller
            set_stream pool(1)
            synchronize caller
            set_stream pool(0)
            W = copy(A)
            post told
            set_stream pool(1)
            post give = matmul(W, A)
            set_stream caller
            {receive}
            wait heard, take
            synchronize pool(0)
            synchronize pool(1)
            wait told, give"
        )
    };
    // Only a rank that has heard that W is written announces its buffer.
    gives(&body("post heard\nwait heard\npost take"), |rank| {
        let first = 100.0 * ((rank + 1) % WORLD) as f64;
        let a = [first, first + 1.0, first + 2.0, first + 3.0];
        let product =
            |row: usize, column: usize| a[2 * row] * a[column] + a[2 * row + 1] * a[2 + column];
        vec![product(0, 0), product(0, 1), product(1, 0), product(1, 1)]
    });
    refused(
        &body("post take\npost heard\nwait heard"),
        DiagnosticKind::Race,
        "unordered with",
    );
}

/// The engine is joined by all ranks, also by those that it does nothing for.
#[test]
fn ranks_without_work_for_the_engine_join_it() {
    let body = "input A: f32[n]
        output C: f32[n]
        C = copy(A)
        if rank == 0 {
            share { s = send A to 1 via nccl }
            post s
            wait s
        } else {
            if rank == 1 {
                share { r = receive C from 0 via nccl }
                post r
                wait r
            }
        }";
    assert!(check(&program(body)).unwrap().uses_engine);
    gives(body, |rank| {
        let first = if rank == 2 { 200.0 } else { 0.0 };
        vec![first, first + 1.0]
    });
}

#[test]
fn outputs_have_memory_of_their_own() {
    if kind() != DeviceKind::Host {
        return;
    }
    let program = program("input A: f32[n]\ninput B: f32[n]\noutput C: f32[n]\nC = sum(A, B)");
    threads(1, |comm| {
        let options = PrepareOptions::default();
        let parameters = Parameters::new().with("n", 2);
        let prepared = comm
            .executor()
            .prepare(&program, &parameters, options)
            .unwrap();
        let all = allocate(comm, 24);
        let bind = |a: usize, b: usize, c: usize| {
            let part = |at: usize| all.slice(at..at + 8).unwrap();
            prepared
                .bind(&Bindings::from([
                    ("A".to_owned(), part(a)),
                    ("B".to_owned(), part(b)),
                    ("C".to_owned(), part(c)),
                ]))
                .map(|_| ())
        };
        bind(0, 8, 16).unwrap();
        // Inputs may overlap: nothing writes them.
        bind(0, 4, 16).unwrap();
        for (a, b, c) in [(0, 8, 8), (0, 8, 4), (16, 0, 12), (8, 8, 8)] {
            let error = bind(a, b, c).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.to_string().contains("overlaps"), "{error}");
        }
    });
}
