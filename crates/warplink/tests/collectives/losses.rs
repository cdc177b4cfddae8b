//! Ranks that are lost in the middle of collectives: each of the others gets an error that names it, takes nothing
//! for a result that is none, and goes on with those that are left.

use crate::common::{
    Ranks, Stopwatch, TimedBarrier, allocate, assert_names_peer, assert_says, at_least, kill_self,
    processes_of, resume, several, stop_self, threads_that_end, threads_with, unchanged,
    with_timeout, world,
};
use crate::data::{by_the_library, exact, is_without_library};
use crate::expected::{Case, Random};
use std::time::Duration;
use warplink::collective::{Call, CollectiveKind, CollectiveOptions, CollectivePath};
use warplink::device::{Priority, ReduceOp, Stream};
use warplink::{Collectives, Communicator, DType, Error, ErrorKind};

const RANKS: usize = 4;

/// How soon after its end the others must have their error.
const SOON: Duration = Duration::from_secs(5);

/// How long a rank may be silent, in seconds.
const HEARTBEAT_LIMIT: &str = "1.5";

/// How a rank ends.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Killed,
    /// Its process does not run any more, but is there.
    Stopped,
    /// It leaves as a failure.
    Aborted,
    /// It lets go of its communicator without closing it.
    Dropped,
}

/// The collectives of `path`, or of the path that is chosen; none where there is no library for it.
fn join(comm: &Communicator, path: Option<CollectivePath>) -> Option<Collectives> {
    let options = match path {
        Some(CollectivePath::Engine) => by_the_library(None),
        path => CollectiveOptions {
            path,
            ..CollectiveOptions::default()
        },
    };
    match comm.collectives_with(&options) {
        Ok(collectives) => Some(collectives),
        Err(error) if is_without_library(&error) => None,
        Err(error) => panic!("{error}"),
    }
}

/// Makes calls until one fails, in groups of several; every result of a group that is said to be done is checked.
fn call_until(
    comm: &Communicator,
    collectives: &Collectives,
    stream: &Stream,
    groups: usize,
) -> Result<(), Error> {
    let mut random = Random::new(21);
    for _ in 0..groups {
        let mut cases: Vec<Case> = (0..4)
            .map(|_| Case::random(&mut random, comm.world(), 500))
            .collect();
        if collectives.path() == CollectivePath::Engine {
            cases.iter_mut().for_each(|case| exact(case, &mut random));
        }
        let made: Result<Vec<_>, _> = cases
            .iter()
            .map(|case| case.make(comm, collectives, stream))
            .collect();
        let made = made?;
        comm.synchronize(stream)?;
        // A rank may be lost, or given up, in between.
        made.iter().try_for_each(|made| made.compare(comm))?;
    }
    Ok(())
}

/// Runs ranks of which `victim` ends in the middle of collectives.
fn lose(victim: usize, end: End, path: Option<CollectivePath>) {
    let ranks = Ranks::of(world(RANKS))
        .with_env("WARPLINK_HEARTBEAT_LIMIT", HEARTBEAT_LIMIT)
        .with_env("WARPLINK_TIMEOUT", "30");
    if ranks.world < 2 {
        return;
    }
    let victim = victim.min(ranks.world - 1);
    let killed: &[usize] = if end == End::Killed { &[victim] } else { &[] };
    ranks.run_losing(killed, |comm| {
        println!("{victim} {end:?} {path:?}");
        lose_in(comm, victim, end, path);
    });
}

fn lose_in(comm: Communicator, victim: usize, end: End, path: Option<CollectivePath>) {
    let processes = processes_of(&comm);
    let Some(collectives) = join(&comm, path) else {
        if comm.rank() == victim && end == End::Killed {
            kill_self();
        }
        return;
    };
    let stream = comm.create_stream(Priority::Normal).unwrap();
    call_until(&comm, &collectives, &stream, 3).unwrap();
    comm.barrier().unwrap();
    if comm.rank() == victim {
        match end {
            End::Killed | End::Stopped => {
                // While another thread calls.
                std::thread::spawn(move || match end {
                    End::Killed => kill_self(),
                    _ => {
                        std::thread::sleep(Duration::from_millis(100));
                        stop_self();
                    }
                });
                let error = call_until(&comm, &collectives, &stream, usize::MAX).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::GivenUp, "{error}");
                assert!(comm.survivors().is_err());
            }
            End::Aborted => {
                call_until(&comm, &collectives, &stream, 5).unwrap();
                comm.abort("it has had enough");
                let error = call_until(&comm, &collectives, &stream, 1).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
            }
            End::Dropped => call_until(&comm, &collectives, &stream, 5).unwrap(),
        }
        return;
    }
    let started = Stopwatch::start();
    let error = call_until(&comm, &collectives, &stream, usize::MAX).unwrap_err();
    let took = started.elapsed();
    println!("rank {}: {error} ({took:?})", comm.rank());
    assert_names_peer(&error, ErrorKind::PeerLost, victim);
    assert!(took < SOON, "{error} came after {took:?}");
    // No call passes for done from now on.
    let again = call_until(&comm, &collectives, &stream, 1).unwrap_err();
    assert_eq!(again.peer(), Some(victim), "{again}");
    let world = comm.world();
    let left = go_on(comm, collectives, path);
    assert_eq!(left.world() + 1, world);
    left.barrier().unwrap();
    if end == End::Stopped && left.rank() == 0 {
        resume(processes[victim]);
    }
    left.close().unwrap();
}

/// The communicator of the ranks that are left, whose collectives are right.
fn go_on(
    comm: Communicator,
    collectives: Collectives,
    path: Option<CollectivePath>,
) -> Communicator {
    let left = comm.survivors().unwrap();
    let anew = join(&left, path).unwrap();
    let stream = left.create_stream(Priority::Normal).unwrap();
    call_until(&left, &anew, &stream, 5).unwrap();
    drop((collectives, comm));
    left
}

#[test]
fn the_ranks_that_are_left_go_on_when_one_is_killed() {
    for victim in [RANKS - 1, 0] {
        lose(victim, End::Killed, None);
    }
}

#[test]
fn the_ranks_that_are_left_go_on_when_one_is_stopped() {
    for victim in [RANKS - 1, 0] {
        lose(victim, End::Stopped, None);
    }
}

#[test]
fn the_ranks_that_are_left_go_on_when_one_leaves() {
    for victim in [RANKS - 1, 0] {
        for end in [End::Aborted, End::Dropped] {
            lose(victim, end, None);
        }
    }
}

#[test]
fn the_ranks_that_are_left_go_on_by_the_vendors_library() {
    for (victim, end) in [
        (RANKS - 1, End::Killed),
        (0, End::Killed),
        (RANKS - 1, End::Stopped),
        (0, End::Aborted),
        (RANKS - 1, End::Dropped),
    ] {
        lose(victim, end, Some(CollectivePath::Engine));
    }
}

/// A close waits for the other ranks, and they for it in a collective.
#[test]
fn a_rank_that_closes_is_named_by_those_that_still_call() {
    close_early(None);
}

#[test]
fn a_rank_that_closes_is_named_by_those_that_still_call_the_vendors_library() {
    close_early(Some(CollectivePath::Engine));
}

fn close_early(path: Option<CollectivePath>) {
    let Some(ranks) = several(3) else { return };
    let limit = Duration::from_secs(2);
    threads_that_end(
        ranks,
        |config| {
            config.timeout = if config.join.rank == 1 {
                limit
            } else {
                10 * limit
            }
        },
        |comm| {
            let Some(collectives) = join(&comm, path) else {
                return comm.close().unwrap();
            };
            let stream = comm.create_stream(Priority::Normal).unwrap();
            call_until(&comm, &collectives, &stream, 2).unwrap();
            if comm.rank() == 1 {
                drop(collectives);
                let error = comm.close().unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
                return;
            }
            let started = Stopwatch::start();
            let error = call_until(&comm, &collectives, &stream, 1).unwrap_err();
            let took = started.elapsed();
            assert_names_peer(&error, ErrorKind::PeerLost, 1);
            assert_says(
                &error,
                &["it closed its communicator, and not all ranks did"],
            );
            // Long before a timeout of this rank.
            assert!(took < limit + SOON, "{error} came after {took:?}");
            go_on(comm, collectives, path).close().unwrap();
        },
    );
}

/// A call as errors name it: in bytes, where nothing is reduced.
fn told(call: &Call) -> String {
    let (dtype, count) = if call.kind.reduces() {
        (call.dtype, call.count)
    } else {
        (DType::U8, call.bytes())
    };
    Call {
        dtype,
        count,
        ..*call
    }
    .to_string()
}

/// Every rank gets an error, and all are left: they make collectives anew.
#[test]
fn ranks_that_called_different_things_go_on_in_another_communicator() {
    let with = |kind, op, dtype, root| Call {
        kind,
        op,
        dtype,
        count: 6,
        root,
    };
    let (sum, max) = (Some(ReduceOp::Sum), Some(ReduceOp::Max));
    let reduce = CollectiveKind::Reduce;
    let usual = with(reduce, sum, DType::I32, Some(0));
    let others = [
        Call { count: 7, ..usual },
        Call { count: 0, ..usual },
        Call { op: max, ..usual },
        Call {
            dtype: DType::F32,
            ..usual
        },
        Call {
            root: Some(1),
            ..usual
        },
        with(CollectiveKind::AllReduce, sum, DType::I32, None),
        with(CollectiveKind::Broadcast, None, DType::I32, Some(0)),
    ];
    for other in others {
        threads_that_end(world(3), unchanged, |comm| {
            let collectives = comm.collectives().unwrap();
            let stream = comm.create_stream(Priority::Normal).unwrap();
            let call = if comm.rank() == 1 { other } else { usual };
            let memory = allocate(&comm, 64);
            let slice = memory.slice(0..call.bytes()).unwrap();
            collectives.enqueue(&call, &slice, &slice, &stream).unwrap();
            let error = comm.synchronize(&stream).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{other}: {error}");
            let told = told(&other);
            assert_says(&error, &["reduce of 6 i32, sum, root 0", &told, "(peer"]);
            let again = call_until(&comm, &collectives, &stream, 1).unwrap_err();
            assert_eq!(again.kind(), ErrorKind::Mismatch, "{other}: {again}");
            let left = go_on(comm, collectives, None);
            assert_eq!(left.world(), world(3));
            left.close().unwrap();
        });
    }
}

/// Waiting for a rank does not make it lost: if it calls later, the call completes.
#[test]
fn a_rank_that_calls_after_a_timeout_is_waited_for() {
    call_late(None);
}

#[test]
fn a_rank_that_calls_the_vendors_library_after_a_timeout_is_waited_for() {
    call_late(Some(CollectivePath::Engine));
}

fn call_late(path: Option<CollectivePath>) {
    let Some(ranks) = several(3) else { return };
    let all = TimedBarrier::new(ranks);
    threads_with(ranks, with_timeout(Duration::from_secs(5)), |comm| {
        let Some(collectives) = join(comm, path) else {
            return;
        };
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let mut random = Random::new(3);
        let mut case = Case::random(&mut random, ranks, 500);
        exact(&mut case, &mut random);
        let by_library = path == Some(CollectivePath::Engine);
        if by_library {
            // NCCL connects the ranks in their first call, on the host, where it waits for all of them.
            case.run(comm, &collectives, &stream);
        }
        let made = if comm.rank() == 1 {
            // The others' calls have timed out.
            all.wait();
            case.make(comm, &collectives, &stream).unwrap()
        } else {
            let made = case.make(comm, &collectives, &stream).unwrap();
            let synchronized = comm.synchronize(&stream);
            all.wait();
            let error = synchronized.unwrap_err();
            assert_names_peer(&error, ErrorKind::Timeout, 1);
            assert_says(&error, &["the communicator can still be used"]);
            if by_library {
                let says = "synchronize: a call of the vendor's library is not done: call 2, ";
                let call = told(&case.call);
                let other = format!(", is missing on rank 1 (whose last is {call})");
                let last = format!("; the last that this rank called is {call}");
                assert_says(&error, &[says, &other, &last]);
            }
            made
        };
        comm.synchronize(&stream).unwrap();
        made.check(comm);
        call_until(comm, &collectives, &stream, 3).unwrap();
    });
}

/// Joining has a deadline too. A rank that joins later finds the other gone, and both join again.
#[test]
fn a_rank_that_does_not_join_is_named() {
    let Some(ranks) = at_least(2) else { return };
    let all = TimedBarrier::new(ranks);
    threads_with(ranks, with_timeout(Duration::from_secs(5)), |comm| {
        let early = (comm.rank() == 0).then(|| comm.collectives());
        all.wait();
        let late = (comm.rank() == 1).then(|| comm.collectives());
        all.wait();
        if let Some(early) = early {
            let error = early.unwrap_err();
            assert_names_peer(&error, ErrorKind::Timeout, 1);
            assert_says(&error, &["the communicator can still be used"]);
        }
        if let Some(late) = late {
            let error = late.unwrap_err();
            assert_names_peer(&error, ErrorKind::PeerFailed, 0);
        }
        comm.barrier().unwrap();
        let collectives = comm.collectives().unwrap();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        call_until(comm, &collectives, &stream, 2).unwrap();
    });
}
