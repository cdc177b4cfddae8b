//! Ranks that do not do what the others do: an error on every rank that says so.

use crate::common::{
    Stopwatch, TimedBarrier, allocate, assert_error, assert_says, lose, threads_that_end,
    with_timeout, with_victim, world,
};
use crate::data::calling;
use std::time::Duration;
use warplink::device::{AllocationKind, Priority, ReduceOp};
use warplink::{Collectives, Communicator, DType, Error, ErrorKind};

/// How soon every other rank must have its error.
const SOON: Duration = Duration::from_secs(5);

/// Reduces `count` elements with `op`, and waits for that.
fn reduce(
    comm: &Communicator,
    collectives: &Collectives,
    count: usize,
    op: ReduceOp,
) -> Result<(), Error> {
    let (device, bytes) = (comm.device(), 4 * count);
    let stream = comm.create_stream(Priority::Normal)?;
    let memory = device.allocate(bytes, AllocationKind::Plain)?;
    device.upload(&memory, &vec![0; bytes])?;
    collectives.all_reduce(&memory, &memory, DType::I32, op, &stream)?;
    comm.synchronize(&stream)
}

/// Runs ranks whose communicator waits for `timeout` at most; each must get an error from `body`, if it gives
/// one, of `kind` that `says` this.
fn fail(
    timeout: Duration,
    body: impl Fn(&Communicator, &Collectives) -> Option<Error> + Send + Sync,
    kind: ErrorKind,
    says: &[&str],
) {
    let ranks = world(3);
    let all = TimedBarrier::new(ranks);
    threads_that_end(ranks, with_timeout(timeout), |comm| {
        let collectives = comm.collectives().unwrap();
        reduce(&comm, &collectives, 10, ReduceOp::Sum).unwrap();
        let started = Stopwatch::start();
        if let Some(error) = body(&comm, &collectives) {
            let took = started.elapsed();
            println!("rank {}: {error} ({took:?})", comm.rank());
            // A peer that found the mismatch first may have told this rank before it looked itself.
            let by_peer = kind == ErrorKind::Mismatch && error.kind() == ErrorKind::PeerFailed;
            assert!(error.kind() == kind || by_peer, "{error}");
            assert_says(&error, says);
            assert!(took < timeout + SOON, "{error} came after {took:?}");
        }
        // None leaves while another still waits.
        all.wait();
        comm.abort("the test is over");
    });
}

#[test]
fn another_count_is_told_on_all_ranks() {
    // The last two have as many packets.
    for (count, other) in [(10, 11), (10, 100_000), (3, 4)] {
        fail(
            Duration::from_secs(10),
            |comm, collectives| {
                let count = if comm.rank() == 1 { other } else { count };
                let failed = reduce(comm, collectives, count, ReduceOp::Sum);
                Some(failed.expect_err("ranks called different things"))
            },
            ErrorKind::Mismatch,
            &["the peer calls all_reduce of", "this rank calls", "(peer"],
        );
    }
}

#[test]
fn another_operator_or_collective_is_told_on_all_ranks() {
    fail(
        Duration::from_secs(10),
        |comm, collectives| {
            let op = if comm.rank() == 1 {
                ReduceOp::Max
            } else {
                ReduceOp::Sum
            };
            Some(reduce(comm, collectives, 10, op).unwrap_err())
        },
        ErrorKind::Mismatch,
        &["i32, max", "i32, sum"],
    );
    fail(
        Duration::from_secs(10),
        |comm, collectives| {
            if comm.rank() != 1 {
                return Some(reduce(comm, collectives, 10, ReduceOp::Sum).unwrap_err());
            }
            let stream = comm.create_stream(Priority::Normal).unwrap();
            collectives.barrier(&stream).unwrap();
            Some(comm.synchronize(&stream).unwrap_err())
        },
        ErrorKind::Mismatch,
        &["barrier", "all_reduce of 10 i32, sum"],
    );
}

#[test]
fn a_rank_that_never_calls_is_named() {
    fail(
        Duration::from_secs(6),
        |comm, collectives| {
            let calls = comm.rank() != 1;
            calls.then(|| reduce(comm, collectives, 10, ReduceOp::Sum).unwrap_err())
        },
        ErrorKind::Timeout,
        &[
            "a rank has not arrived at a collective",
            "the last that this rank called is all_reduce of 10 i32, sum",
            "peer 1",
        ],
    );
}

#[test]
fn a_rank_that_dies_ends_the_collectives_of_the_others() {
    let victim = 1;
    with_victim(victim, |comm| {
        let collectives = comm.collectives().unwrap();
        let sum = |count| reduce(comm, &collectives, count, ReduceOp::Sum);
        for _ in 0..20 {
            sum(1000).unwrap();
        }
        lose(comm, victim, || sum(1000));
        let again = sum(10).unwrap_err();
        assert_eq!(again.kind(), ErrorKind::PeerLost, "{again}");
    });
}

#[test]
fn slices_that_do_not_fit_are_refused_before_anything_is_enqueued() {
    calling(world(2), |comm, collectives, stream| {
        let memory = allocate(comm, 64);
        let slice = |from: usize, to: usize| memory.slice(from..to).unwrap();
        let refused = |result: Result<(), Error>, says: &[&str]| {
            let error = result.unwrap_err();
            assert_error(&error, ErrorKind::InvalidArgument, says);
        };
        let sum = ReduceOp::Sum;
        refused(
            collectives.all_reduce(&slice(0, 8), &slice(8, 24), DType::F32, sum, stream),
            &["all_reduce", "the output has 8 bytes; expected 1 times 16"],
        );
        refused(
            collectives.all_reduce(&slice(0, 8), &slice(4, 12), DType::F32, sum, stream),
            &["overlap in part"],
        );
        refused(
            collectives.all_reduce(&slice(0, 7), &slice(8, 15), DType::F32, sum, stream),
            &["expected a multiple of the 4 bytes of f32"],
        );
        refused(
            collectives.all_reduce(&slice(0, 8), &slice(9, 17), DType::F32, sum, stream),
            &[
                "the input begins at",
                "expected a multiple of the 4 bytes of f32",
            ],
        );
        refused(
            collectives.broadcast(&slice(0, 8), &slice(8, 16), 2, stream),
            &["rank 2 is out of range"],
        );
        refused(
            collectives.all_to_all(&slice(0, 9), &slice(9, 18), stream),
            &["expected 2 times 4"],
        );
        // Nothing was enqueued that the other rank would wait for.
        collectives.barrier(stream).unwrap();
        comm.synchronize(stream).unwrap();
    });
}
