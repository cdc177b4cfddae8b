//! Limits of devices and engines that the verifier knows: element types, forms in place, tags, lengths, and
//! what one post may hold.

use crate::common::{allocate, kind, threads};
use warplink::device::{AllocationKind, Priority};
use warplink::program::{
    Bindings, DiagnosticKind, Parameters, PrepareOptions, Program, Report, verify,
};
use warplink::{Communicator, DeviceKind, ErrorKind};

const WORLD: usize = 3;

fn program(body: &str) -> Program {
    Program::parse(&format!("program p(n) {{\n{body}\n}}")).unwrap()
}

fn check(program: &Program) -> Result<Report, (DiagnosticKind, String)> {
    let parameters = Parameters::new().with("n", 2);
    verify(program, WORLD, 2, &parameters)
        .map_err(|diagnostics| (diagnostics[0].kind, diagnostics[0].message.clone()))
}

fn refused(body: &str, kind: DiagnosticKind, part: &str) {
    let (found, message) = check(&program(body)).unwrap_err();
    assert!(
        found == kind && message.contains(part),
        "{found}: {message}\n{body}"
    );
}

/// Runs `program` twice where A has `inputs` elements that count up from 100 times the rank, and gives C.
fn run(comm: &Communicator, program: &Program, inputs: usize, outputs: usize) -> Vec<f32> {
    let options = PrepareOptions {
        streams: 2,
        verify: true,
        ..PrepareOptions::default()
    };
    let parameters = Parameters::new().with("n", 2);
    let prepared = comm
        .executor()
        .prepare(program, &parameters, options)
        .unwrap();
    let device = comm.device();
    let a = device.allocate(4 * inputs, AllocationKind::Plain).unwrap();
    let c = device.allocate(4 * outputs, AllocationKind::Plain).unwrap();
    let values = (0..inputs).map(|i| (100 * comm.rank() + i) as f32);
    device
        .upload(&a, &values.flat_map(f32::to_le_bytes).collect::<Vec<u8>>())
        .unwrap();
    let bindings = Bindings::from([("A".to_owned(), a), ("C".to_owned(), c.clone())]);
    let plan = prepared.bind(&bindings).unwrap();
    let stream = comm.create_stream(Priority::Normal).unwrap();
    plan.run(&stream).unwrap();
    plan.run(&stream).unwrap();
    comm.synchronize(&stream).unwrap();
    let mut bytes = vec![0; 4 * outputs];
    device.download(&c, &mut bytes).unwrap();
    let floats = bytes
        .chunks_exact(4)
        .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
    floats.collect()
}

/// `body` is accepted, and C becomes what `expected` gives for a rank.
fn gives(body: &str, inputs: usize, outputs: usize, expected: impl Fn(usize) -> Vec<f32> + Sync) {
    let program = program(body);
    check(&program).unwrap_or_else(|(kind, message)| panic!("{kind}: {message}"));
    if kind() == DeviceKind::Host {
        threads(WORLD, |comm| {
            let result = run(comm, &program, inputs, outputs);
            assert_eq!(
                result,
                expected(comm.rank()),
                "rank {}\n{body}",
                comm.rank()
            );
        });
    }
}

#[test]
fn collectives_are_in_place_where_engines_say_so() {
    let gathered = |_| {
        (0..WORLD)
            .flat_map(|r| [100.0 * r as f32, 100.0 * r as f32 + 1.0])
            .collect()
    };
    gives(
        "input A: f32[n]
        output C: f32[world, n]
        C[rank] = copy(A)
        C = all_gather(C[rank])",
        2,
        2 * WORLD,
        gathered,
    );
    gives(
        "input A: f32[world, n]
        output C: f32[n]
        allocate W: f32[world, n]
        W = copy(A)
        W[rank] = reduce_scatter(W, sum)
        C = copy(W[rank])",
        2 * WORLD,
        2,
        |rank| vec![300.0 + 6.0 * rank as f32, 303.0 + 6.0 * rank as f32],
    );
    gives(
        "input A: f32[n]
        output C: f32[n]
        C = copy(A)
        C = all_reduce(C, max)",
        2,
        2,
        |_| vec![200.0, 201.0],
    );
    gives(
        "input A: f32[n]
        output C: f32[n]
        C = copy(A)
        C = broadcast(C from 1)",
        2,
        2,
        |_| vec![100.0, 101.0],
    );
    gives(
        "input A: f32[n]
        output C: f32[n]
        C = copy(A)
        C = reduce(C, sum to 2)",
        2,
        2,
        |rank| match rank {
            2 => vec![300.0, 303.0],
            _ => vec![100.0 * rank as f32, 100.0 * rank as f32 + 1.0],
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
        80,
        2,
        |rank| {
            let first = 100.0 * rank as f32;
            let all = |i: usize| (0..40).map(|j| first + (2 * j + i) as f32).sum::<f32>();
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
    gives(&body("s, r", "t, q"), 2, 4, |rank| {
        let first = 100.0 * ((rank + WORLD - 1) % WORLD) as f32;
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
        gives(&body, 4, 4, |rank| {
            let first = 100.0 * ((rank + WORLD - 1) % WORLD) as f32;
            (0..4).map(|i| first + i as f32).collect()
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
    gives(&body("post heard\nwait heard\npost take"), 4, 4, |rank| {
        let first = 100.0 * ((rank + 1) % WORLD) as f32;
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
    gives(body, 2, 2, |rank| {
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
