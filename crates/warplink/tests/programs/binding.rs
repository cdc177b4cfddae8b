//! Binding a program on all ranks or on none: different programs, and ranks that fail before and after
//! the exchange.

use crate::common::{
    Stopwatch, allocate, assert_error, assert_names_peer, assert_says, delayed, kind, processes,
    threads, threads_with, values, without_descriptors, world,
};
use crate::matmul::{Case, Memory};
use std::time::Duration;
use warplink::bootstrap::Wait;
use warplink::device::Priority;
use warplink::overlap::{AllGatherMatmulLowering, Options};
use warplink::program::{Executor, Parameters, Plan, PrepareOptions, Prepared, Program};
use warplink::{Communicator, DeviceKind, ErrorKind, Result};

/// Passes `n` values to the next rank.
const RING: &str = "program ring(n, k = 1 | 2) {
    input A: f32[n]
    output B: f32[n]
    share {
        give = send A to (rank + 1) % world via get
        take = receive B from (rank - 1) % world via get
    }
    post give, take
    wait give, take
}";

/// The longest that ranks take to learn of a failure.
const SOON: Duration = Duration::from_secs(5);

fn prepare(
    executor: &Executor,
    text: &str,
    parameters: &[(&str, i64)],
    streams: usize,
) -> Prepared {
    let program = Program::parse(text).unwrap();
    let parameters: Parameters = parameters.iter().copied().collect();
    let options = PrepareOptions {
        streams,
        ..PrepareOptions::default()
    };
    executor.prepare(&program, &parameters, options).unwrap()
}

fn bind(comm: &Communicator, prepared: &Prepared, bytes: usize) -> Result<Plan> {
    let (a, b) = (allocate(comm, bytes), allocate(comm, bytes));
    prepared.bind(&[("A".to_owned(), a), ("B".to_owned(), b)].into())
}

/// Binds the ring to fresh memory, runs it and checks what arrives.
fn run_ring(comm: &Communicator, prepared: &Prepared, bytes: usize, round: usize) {
    let (a, b) = (allocate(comm, bytes), allocate(comm, bytes));
    comm.device()
        .upload(&a, &values(comm.rank(), round, bytes))
        .unwrap();
    let plan = prepared
        .bind(&[("A".to_owned(), a), ("B".to_owned(), b.clone())].into())
        .unwrap();
    let stream = comm.create_stream(Priority::Normal).unwrap();
    plan.run(&stream).unwrap();
    comm.synchronize(&stream).unwrap();
    let mut arrived = vec![0; bytes];
    comm.device().download(&b, &mut arrived).unwrap();
    let before = (comm.rank() + comm.world() - 1) % comm.world();
    assert_eq!(arrived, values(before, round, bytes), "round {round}");
}

#[test]
fn different_programs_are_told_at_once_and_by_name() {
    threads(world(4), |comm| {
        let (rank, world) = (comm.rank(), comm.world());
        if world < 2 {
            return;
        }
        let executor = comm.executor();
        let own = prepare(&executor, RING, &[("n", 64)], 2);
        let renamed = RING.replace("program ring", "program other");
        let changed = RING.replace("via get", "via put");
        let other = world - 1;
        let (a, b) = (format!("rank {other}"), "rank 0");
        type Case<'a> = (Prepared, usize, Vec<&'a str>);
        let cases: [Case<'_>; 5] = [
            (
                prepare(&executor, &renamed, &[("n", 64)], 2),
                256,
                vec!["'other'", "'ring'"],
            ),
            (
                prepare(&executor, &changed, &[("n", 64)], 2),
                256,
                vec!["text of 'ring'", "line"],
            ),
            (
                prepare(&executor, RING, &[("n", 65)], 2),
                260,
                vec!["n = 65", "n = 64"],
            ),
            (
                prepare(&executor, RING, &[("n", 64), ("k", 2)], 2),
                256,
                vec!["k = 2", "k = 1"],
            ),
            (
                prepare(&executor, RING, &[("n", 64)], 3),
                256,
                vec!["3 streams", "2"],
            ),
        ];
        for (round, (prepared, bytes, says)) in cases.into_iter().enumerate() {
            let start = Stopwatch::start();
            let bound = if rank == other {
                bind(comm, &prepared, bytes)
            } else {
                bind(comm, &own, 256)
            };
            let error = bound.unwrap_err();
            assert!(start.elapsed() < SOON);
            assert_names_peer(
                &error,
                ErrorKind::Mismatch,
                if rank == other { 0 } else { other },
            );
            assert_says(&error, &[&a, b]);
            assert_says(&error, &says);
            run_ring(comm, &own, 256, round);
        }
    });
}

#[test]
fn another_collective_in_the_place_of_a_bind_is_told_at_once() {
    threads(world(2), |comm| {
        if comm.world() < 2 {
            return;
        }
        let prepared = prepare(&comm.executor(), RING, &[("n", 64)], 2);
        let start = Stopwatch::start();
        let error = match comm.rank() {
            0 => bind(comm, &prepared, 256).unwrap_err(),
            _ => comm.barrier().unwrap_err(),
        };
        assert!(start.elapsed() < SOON);
        assert_error(&error, ErrorKind::Mismatch, &["bind", "barrier"]);
        run_ring(comm, &prepared, 256, 0);
    });
}

/// A rank that cannot bind says so to all, neighbours or not, and all can bind again. So they can where
/// all fail.
#[test]
fn a_rank_that_cannot_bind_tells_all() {
    threads_with(world(4), delayed(150), |comm| {
        let (rank, world) = (comm.rank(), comm.world());
        if world < 2 {
            return;
        }
        let prepared = prepare(&comm.executor(), RING, &[("n", 64)], 2);
        for round in 0..6 {
            let everybody = round % 3 == 2;
            let failing = round % world;
            let fails = everybody || rank == failing;
            let start = Stopwatch::start();
            let bytes = if fails { 255 } else { 256 };
            let error = bind(comm, &prepared, bytes).unwrap_err();
            assert!(start.elapsed() < SOON);
            assert_says(&error, &["bind", "'A'", "255"]);
            if fails {
                assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            } else {
                assert_names_peer(&error, ErrorKind::PeerFailed, failing);
            }
            run_ring(comm, &prepared, 256, round);
        }
    });
}

/// A rank whose wait ended leaves nobody to bind with, until all try again.
#[test]
fn a_rank_that_gave_up_waiting_fails_those_that_come_later() {
    let short = |config: &mut warplink::Config| {
        if config.join.rank == 0 {
            config.timeout = Duration::from_secs(1);
        }
    };
    threads_with(world(2), short, |comm| {
        if comm.world() < 2 {
            return;
        }
        let prepared = prepare(&comm.executor(), RING, &[("n", 64)], 2);
        if comm.rank() == 0 {
            let error = bind(comm, &prepared, 256).unwrap_err();
            assert_error(&error, ErrorKind::Timeout, &["rank 1", "bind"]);
            comm.bootstrap().store().set("gave up", b"").unwrap();
        } else {
            let wait = Wait::on([0], comm.deadline());
            comm.bootstrap().store().get("gave up", &wait).unwrap();
            let start = Stopwatch::start();
            let error = bind(comm, &prepared, 256).unwrap_err();
            assert_names_peer(&error, ErrorKind::PeerFailed, 0);
            assert!(start.elapsed() < SOON);
        }
        // Rank 0 came to its next call first; both are at the same one.
        for attempt in 0.. {
            match bind(comm, &prepared, 256) {
                Ok(_) => break,
                Err(error) if attempt < 20 => {
                    let kinds = [ErrorKind::Timeout, ErrorKind::PeerFailed];
                    assert!(kinds.contains(&error.kind()), "{error}");
                }
                Err(error) => panic!("{error}"),
            }
        }
    });
}

/// Rank `r` reads from the next; the others have nothing to exchange.
const ONE: &str = "program one(n, r) {
    input A: f32[n]
    output B: f32[n]
    if rank == r {
        share { take = receive B from (rank + 1) % world via get }
        post take
        wait take
    } else {
        if rank == (r + 1) % world {
            share { give = send A to r via get }
            post give
            wait give
        }
        B = copy(A)
    }
}";

/// A rank without descriptors cannot map what it was sent, after all have exchanged.
#[test]
fn what_fails_after_the_exchange_is_told_to_all() {
    if kind() != DeviceKind::Host {
        return;
    }
    processes(4, |comm| {
        let (rank, world) = (comm.rank(), comm.world());
        let executor = comm.executor();
        let ring = prepare(&executor, RING, &[("n", 1 << 20)], 2);
        let bytes = 4 << 20;
        // Makes the signal pages that a bind needs beside its memory.
        run_ring(comm, &ring, bytes, 0);
        for failing in 0..world {
            let parameters = [("n", 1 << 20), ("r", failing as i64)];
            let one = prepare(&executor, ONE, &parameters, 2);
            // Registered already, so that nothing before the exchange needs a descriptor.
            let regions = [comm.alloc(bytes).unwrap(), comm.alloc(bytes).unwrap()];
            let [a, b] = regions.each_ref().map(|region| region.memory().clone());
            comm.barrier().unwrap();
            let bindings = [("A".to_owned(), a), ("B".to_owned(), b)].into();
            let start = Stopwatch::start();
            let bound = if rank == failing {
                without_descriptors(|| one.bind(&bindings))
            } else {
                one.bind(&bindings)
            };
            let took = start.elapsed();
            let error = bound.unwrap_err();
            assert!(took < SOON, "{took:?}");
            if rank == failing {
                assert_ne!(error.kind(), ErrorKind::PeerFailed, "{error}");
                assert_says(&error, &["exchange transfers", "open files"]);
            } else {
                assert_names_peer(&error, ErrorKind::PeerFailed, failing);
                let cause = format!("rank {failing}: exchange transfers");
                assert_says(&error, &["bind", &cause, "open files"]);
            }
            run_ring(comm, &ring, bytes, failing);
        }
    });
}

/// An error before a rank binds is reported to all, which would bind without it.
#[test]
fn a_rank_that_cannot_plan_an_overlap_tells_all() {
    threads(world(3), |comm| {
        if comm.world() < 2 {
            return;
        }
        let executor = comm.executor();
        let case = Case::of::<f32>(comm, false);
        let memory = Memory::gather(comm, &case);
        let good = memory.gather_buffers(&case);
        let only = |lowering: AllGatherMatmulLowering| Options::only(lowering.lowering().unwrap());
        let (push, ring) = (
            only(AllGatherMatmulLowering::Push),
            only(AllGatherMatmulLowering::RingPut),
        );
        for round in 0..3 {
            let (mut buffers, mut options) = (good.clone(), &push);
            if comm.rank() == 1 {
                match round {
                    0 => buffers.b.clear(),
                    1 => buffers.c[0] = buffers.c[0].slice(0..8).unwrap(),
                    _ => options = &ring,
                }
            }
            let start = Stopwatch::start();
            let error = case.gather().plan(&executor, options, &buffers);
            let error = error.unwrap_err();
            assert!(start.elapsed() < SOON);
            let expected = match (round, comm.rank()) {
                (2, _) => ErrorKind::Mismatch,
                (_, 1) => ErrorKind::InvalidArgument,
                _ => ErrorKind::PeerFailed,
            };
            assert_eq!(error.kind(), expected, "{error}");
            let peer = if comm.rank() == 1 { 0 } else { 1 };
            if comm.rank() != 1 || round == 2 {
                assert_eq!(error.peer(), Some(peer), "{error}");
            }
            case.gather().plan(&executor, &push, &good).unwrap();
        }
    });
}

const TWO_KERNELS: &str = "program two(n) {
    input X: f32[n]
    output Y: f32[n]
    output Z: f32[n]
    kernel lane in 0..4 threads 32 { Y[lane of 4] = copy(X[lane of 4]) }
    set_stream pool(0)
    synchronize caller
    kernel lane in 0..2 threads 32 { Z[lane of 2] = copy(X[lane of 2]) }
    set_stream caller
    synchronize pool(0)
}";

#[test]
fn lanes_beyond_the_limit_of_multiprocessors_are_refused() {
    threads(2, |comm| {
        let program = Program::parse(TWO_KERNELS).unwrap();
        let prepare = |most| {
            let options = PrepareOptions {
                multiprocessors: Some(most),
                ..PrepareOptions::default()
            };
            comm.executor()
                .prepare(&program, &[("n", 64)].into(), options)
        };
        for most in [1, 4, 5] {
            let error = prepare(most).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            let most = format!("expected at most {most} multiprocessors");
            assert_says(
                &error,
                &["line 5 has 4 lanes", "other streams have 2", &most],
            );
        }
        // Ranks that differ would wait for each other with different numbers of blocks.
        let prepared = prepare(6 + comm.rank()).unwrap();
        let bindings = ["X", "Y", "Z"].map(|name| (name.to_owned(), allocate(comm, 256)));
        let bindings = bindings.into();
        let error = prepared.bind(&bindings).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        assert_says(&error, &["multiprocessors = 7", "multiprocessors = 6"]);
        prepare(6).unwrap().bind(&bindings).unwrap();
    });
}
