//! The verifier's verdicts on random programs, against the behaviour of the host device.

use super::common::{TimedBarrier, kind};
use super::program_support::device::Runner;
use super::program_support::evidence::check;
use super::program_support::sample::{Allowed, Sample, sample};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Mutex;
use std::time::Duration;
use warplink::bootstrap::{JoinConfig, Rendezvous, UniqueId};
use warplink::device::{AllocationKind, Priority};
use warplink::p2p::Path;
use warplink::program::ir::Program;
use warplink::program::ir::Role;
use warplink::program::{
    Bindings, DiagnosticKind, OperationKind, Parameters, PrepareOptions, Report,
};
use warplink::{Communicator, Config, DType, Deadline, DeviceKind, Error, ErrorKind, Result};

/// How a sample is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Eager,
    Captured,
}

/// A rank's outputs; none where the sample cannot be captured.
type Outputs = Result<Option<Vec<u8>>>;

/// Runs `sample` on every rank, and gives each rank's outputs.
fn outputs(sample: &Sample, how: How, limit: Duration) -> Vec<Outputs> {
    let id = UniqueId::create(IpAddr::V4(Ipv4Addr::LOCALHOST), 0).unwrap();
    let ends: Vec<Mutex<Option<Outputs>>> = (0..sample.world).map(|_| Mutex::default()).collect();
    // Nobody leaves before all have their result: a rank that leaves is lost to the others.
    let together = TimedBarrier::new(sample.world);
    std::thread::scope(|scope| {
        for (rank, end) in ends.iter().enumerate() {
            let (id, together) = (id.clone(), &together);
            scope.spawn(move || {
                let join = JoinConfig::new(Rendezvous::Id(id), rank, sample.world);
                let comm = Communicator::join(&Config::new(join, kind())).unwrap();
                let result = run(&comm, sample, how, limit);
                *end.lock().unwrap() = Some(result);
                together.wait();
                // What hangs is let go, so that the threads of its streams end.
                let over = Error::closed("the test is over");
                comm.device().fault().raise(over);
                together.wait();
            });
        }
    });
    ends.into_iter()
        .map(|end| end.into_inner().unwrap().unwrap())
        .collect()
}

fn run(comm: &Communicator, sample: &Sample, how: How, limit: Duration) -> Outputs {
    let options = PrepareOptions {
        streams: sample.streams,
        verify: false,
        ..PrepareOptions::default()
    };
    let prepared = comm
        .executor()
        .prepare(&sample.program, &sample.parameters, options)?;
    let mut bindings = Bindings::new();
    for (index, tensor) in prepared.rank_program().tensors.iter().enumerate() {
        if tensor.role == Role::Local {
            continue;
        }
        let slice = comm
            .device()
            .allocate(tensor.bytes, AllocationKind::Plain)?;
        let elements = tensor.bytes / tensor.dtype.size();
        let values = (0..elements).map(|at| ((7 * at + 5 * index + 3 * comm.rank()) % 11) as f32);
        let bytes: Vec<u8> = match (tensor.role, tensor.dtype) {
            (Role::Input, DType::F32) => values.flat_map(f32::to_le_bytes).collect(),
            (Role::Input, dtype) => panic!("a sample with inputs of {dtype}"),
            _ => vec![0xff; tensor.bytes],
        };
        comm.device().upload(&slice, &bytes)?;
        bindings.insert(tensor.name.to_string(), slice);
    }
    let plan = prepared.bind(&bindings)?;
    let stream = comm.create_stream(Priority::Normal)?;
    // Twice: a run may not disturb the next.
    let ended = match how {
        How::Eager => {
            plan.run(&stream)?;
            plan.run(&stream)?;
            kept(plan, stream.synchronize(Deadline::after(limit)))
        }
        How::Captured => {
            let captured = plan.capture();
            let all = comm.all_gather_bytes(&[u8::from(captured.is_ok())])?;
            if all.contains(&vec![0]) {
                return captured.map(|_| None);
            }
            let captured = captured?;
            captured.launch(&stream)?;
            captured.launch(&stream)?;
            kept(captured, stream.synchronize(Deadline::after(limit)))
        }
    };
    ended?;
    let mut all = Vec::new();
    for tensor in &prepared.rank_program().tensors {
        if tensor.role == Role::Output {
            let slice = &bindings[&*tensor.name];
            let mut bytes = vec![0; slice.bytes()];
            comm.device().download(slice, &mut bytes)?;
            all.extend(bytes);
        }
    }
    Ok(Some(all))
}

/// `ended`; what failed is kept for good, since its streams still use it.
fn kept<T>(plan: T, ended: Result<()>) -> Result<()> {
    if ended.is_err() {
        std::mem::forget(plan);
    }
    ended
}

fn report(sample: &Sample) -> std::result::Result<Report, DiagnosticKind> {
    let verdict = sample.verdict();
    verdict.map_err(|diagnostics| diagnostics[0].kind)
}

#[test]
fn accepted_programs_give_the_same_under_delays() {
    if kind() != DeviceKind::Host {
        return;
    }
    let mut runner = Runner::new(1, Duration::from_secs(30));
    let (mut accepted, mut captured) = (0, 0);
    for seed in 0..250 {
        let Ok(sample) = sample(seed, Allowed::default()) else {
            continue;
        };
        let ran = check(&sample).and_then(|shown| {
            let Some(program) = shown.accepted else {
                return Ok(());
            };
            accepted += 1;
            captured += usize::from(program.as_graph);
            runner.run(&sample, &program)
        });
        ran.unwrap_or_else(|how| panic!("seed {seed}: {how}\n{}", sample.text));
    }
    assert!(accepted >= 100, "only {accepted} samples were accepted");
    assert!(
        captured >= accepted * 3 / 4,
        "{captured} of {accepted} samples were captured"
    );
}

/// Kernels at both ends order less than the verifier assumes of transfers: these programs, which it accepts, would compute something
/// else by them.
#[test]
fn programs_that_rely_on_the_order_of_transfers_do_not_go_by_kernels() {
    let both =
        "give = send A to 1 - rank tag 0 via put; take = receive T from 1 - rank tag 0 via put
        give2 = send D to 1 - rank tag 1 via put; take2 = receive U from 1 - rank tag 1 via put";
    let sections = [
        (both, "post take, take2, give, give2; wait take, take2, give, give2; B = copy(U); C = copy(T)", true),
        // A wait for one of a group covers the others.
        (both, "post take, take2; post give, give2; wait take; B = copy(U); wait take2; C = copy(T); wait give, give2", false),
        (
            "give = send T to 1 - rank tag 0 via get; take = receive B from 1 - rank tag 0 via get
            give2 = send U to 1 - rank tag 1 via get; take2 = receive C from 1 - rank tag 1 via get",
            "T = copy(A); U = copy(D); post give, give2, take, take2; wait give; U = copy(A); wait take, take2, give2",
            false,
        ),
        // Data is stored when it is put, and not when it is waited for.
        (
            "give = send A to 1 - rank tag 0 via put; take = receive T from 1 - rank tag 0 via put
            give2 = send D to 1 - rank tag 1 via put; take2 = receive T from 1 - rank tag 1 via put",
            "post take; post take2; post give; post give2; wait take2; wait take, give, give2; B = copy(T); C = copy(T)",
            false,
        ),
    ];
    for (share, body, suits) in sections {
        let text = format!(
            "program orders(n) {{
                input A: f32[n]; input D: f32[n]
                output B: f32[n]; output C: f32[n]
                allocate T: f32[n]; allocate U: f32[n]
                share {{ {share} }}
                {body}
            }}"
        );
        let sample = Sample {
            program: Program::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}")),
            text,
            world: 2,
            streams: 1,
            parameters: Parameters::from([("n".to_owned(), 40)]),
            changes: 0,
        };
        let report = report(&sample).unwrap();
        assert_eq!(report.suits_transfer_kernels, suits, "{}", sample.text);
    }
}

/// By kernels at both ends, where a wait unpacks what the peer sent.
#[test]
fn programs_by_kernels_give_the_same_under_delays() {
    if kind() != DeviceKind::Host {
        return;
    }
    let text = "program rounds(n) {
        input A: f32[n]
        output S: f32[n]
        allocate W: f32[4, n]
        let right = (rank + 1) % world
        let left = (rank - 1) % world
        share {
            first = send A to right tag 1 via put
            got = receive W[0] from left tag 1 via put
            passed = send W[0] to right tag 2 via get
            second = receive W[1] from left tag 2 via get
            back = send W[1] to left tag 3 via put
            third = receive W[2] from right tag 3 via put
        }
        post got, first
        wait got, first
        post passed, second
        wait second, passed
        W[3] = copy(W[0])
        for i in 0 .. 3 {
            post third, back
            wait back, third
            W[1] = copy(W[2])
            post first, got
            wait got, first
        }
        S = sum(W[0], W[1], W[2], W[3])
    }";
    let program = Program::parse(text).unwrap();
    let mut runner = Runner::new(2, Duration::from_secs(30)).by(Path::Multiprocessors);
    // Packets of one block and of several, and stores of several blocks.
    for (world, n) in [(2, 1), (2, 3001), (3, 700), (4, 90), (3, 20_001)] {
        let sample = Sample {
            text: text.to_owned(),
            program: program.clone(),
            world,
            streams: 2,
            parameters: Parameters::from([("n".to_owned(), n)]),
            changes: 0,
        };
        let report = report(&sample).unwrap();
        assert!(report.suits_transfer_kernels && report.eager_only.is_none());
        let accepted = check(&sample).unwrap().accepted.unwrap();
        for _ in 0..4 {
            runner
                .run(&sample, &accepted)
                .unwrap_or_else(|how| panic!("{world} ranks, {n} elements: {how}"));
        }
    }
}

/// Two streams wait for one transfer, one of them behind a wait for what the other brings about.
#[test]
fn a_wait_depends_on_no_other_streams_wait() {
    if kind() != DeviceKind::Host {
        return;
    }
    let text = "program two_waits(n) {
        input A: f32[n]
        output C: f32[n]
        allocate W: f32[3, n]
        let peer = 1 - rank
        share {
            if rank == 0 {
                a = receive W[0] from peer tag 1 via put
                b = receive W[1] from peer tag 2 via put
                c = receive W[2] from peer tag 3 via put
            } else {
                a = send A to peer tag 1 via put
                b = send A to peer tag 2 via put
                c = send A to peer tag 3 via put
            }
        }
        if rank == 0 {
            post a, b
            set_stream pool(0)
            synchronize caller
            wait b, a
            set_stream pool(1)
            synchronize caller
            wait a
            post c
            set_stream caller
            synchronize pool(0)
            synchronize pool(1)
            wait c
            C = sum(W[0], W[1], W[2])
        } else {
            post a
            post c
            post b
            C = copy(A)
        }
    }";
    let sample = Sample {
        text: text.to_owned(),
        program: Program::parse(text).unwrap(),
        world: 2,
        streams: 2,
        parameters: Parameters::from([("n".to_owned(), 4)]),
        changes: 0,
    };
    let shown = report(&sample).unwrap();
    assert_eq!(shown.eager_only, None);
    // One stream's wait for packets of `b` would hold up the other's for `a`.
    assert!(!shown.suits_transfer_kernels);
    let limit = Duration::from_secs(20);
    let eager = outputs(&sample, How::Eager, limit);
    let captured = outputs(&sample, How::Captured, limit);
    for (eager, captured) in eager.iter().zip(&captured) {
        assert_eq!(
            eager.as_ref().unwrap().as_ref().unwrap(),
            captured.as_ref().unwrap().as_ref().unwrap()
        );
    }
}

#[test]
fn deadlocked_programs_hang() {
    if kind() != DeviceKind::Host {
        return;
    }
    let short = Duration::from_millis(250);
    let (mut seen, mut seed) = (0, 0);
    while seen < 12 {
        seed += 1;
        assert!(seed < 4000, "only {seen} samples deadlock");
        let allowed = Allowed {
            engine: false,
            ..Allowed::default()
        };
        let Ok(sample) = sample(seed, allowed) else {
            continue;
        };
        if report(&sample) != Err(DiagnosticKind::Deadlock) {
            continue;
        }
        // The executor exchanges all handles before the run, so hosts that would wait for one
        // another in the program's shares do not.
        let hosts = sample.verdict().expect_err("it was refused before");
        let at_share = hosts
            .iter()
            .flat_map(|diagnostic| &diagnostic.places)
            .any(|place| {
                let rank = sample.of_rank(place.rank).unwrap();
                rank.operations.iter().any(|operation| {
                    operation.site == place.site
                        && matches!(operation.kind, OperationKind::Share(_))
                })
            });
        if at_share {
            continue;
        }
        seen += 1;
        let ends = outputs(&sample, How::Eager, short);
        assert!(
            ends.iter()
                .any(|end| matches!(end, Err(error) if error.kind() == ErrorKind::Timeout)),
            "seed {seed} deadlocks in the verifier and ends on the device: {ends:?}\n{}",
            sample.text
        );
    }
}
