//! The rank that serves the store is lost: another serves it, and the job goes on.

// A test fails by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{
    Ranks, Stopwatch, barrier_that_all_have_passed, kill, kill_self, processes_of, resume, ring,
    stop_self,
};
use std::time::{Duration, Instant};
use warplink::bootstrap::Wait;
use warplink::p2p::Protocol;
use warplink::{Communicator, Error, ErrorKind};

/// How soon the others must have their error, and how soon they must have gone on.
const SOON: Duration = Duration::from_secs(5);

/// How long a stopped rank is waited for.
const LIMIT: &str = "1.5";

/// How rank 0 ends.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ending {
    Kill,
    Stop,
    Drop,
    Abort,
}

impl Ending {
    fn reason(self) -> &'static str {
        match self {
            Self::Kill => "rank 0 was lost: the connection to its store",
            Self::Stop => "rank 0 was lost: it did not answer for 1.5s",
            Self::Drop => "rank 0 was lost: it dropped its communicator without closing it",
            Self::Abort => "rank 0 was lost: it aborted: the disk is full",
        }
    }
}

/// Runs `count` ranks, of which `killed` do not end by themselves.
fn run(count: usize, killed: &[usize], body: impl FnOnce(Communicator)) {
    let Some(ranks) = Ranks::all(count) else {
        return;
    };
    ranks
        .with_env("WARPLINK_TIMEOUT", "20")
        .with_env("WARPLINK_HEARTBEAT_LIMIT", LIMIT)
        .run_losing(killed, body);
}

/// Whether it is not yet `end`, for all ranks of `comm`.
fn both_before(comm: &Communicator, end: Instant) -> bool {
    let own = [u8::from(Instant::now() < end)];
    let all = comm.all_gather_bytes(&own).unwrap();
    all.iter().all(|bytes| bytes[..] == [1])
}

fn assert_lost(error: &Error, rank: usize) {
    let named = (error.kind(), error.job_peer());
    assert_eq!(named, (ErrorKind::PeerLost, Some(rank)), "{error}");
}

/// The job goes on when rank 0 ends so.
fn go_on_without_rank_0(ending: Ending) {
    let killed: &[usize] = if ending == Ending::Kill { &[0] } else { &[] };
    run(4, killed, |comm| {
        let processes = processes_of(&comm);
        let pair = comm.split(comm.rank() as u64 / 2, 0).unwrap();
        let end = Instant::now() + Duration::from_millis(300);
        let begun = Stopwatch::start();
        match comm.rank() {
            0 => {
                let until = |_| assert!(Instant::now() < end, "time to end");
                let rounds = std::panic::AssertUnwindSafe(|| {
                    ring(&pair, Protocol::default(), usize::MAX, until)
                });
                std::panic::catch_unwind(rounds).unwrap_err();
                return end_rank_0(ending, comm, pair);
            }
            1 => {
                let error = ring(&pair, Protocol::default(), usize::MAX, |_| {}).unwrap_err();
                assert_lost(&error, 0);
                common::assert_says(&error, &[ending.reason()]);
                let took = begun.elapsed();
                assert!(took < Duration::from_millis(300) + SOON, "{error}");
            }
            // Rings of their own, each of which asks the store, before and after.
            _ => {
                while both_before(&pair, end + Duration::from_secs(3)) {
                    ring(&pair, Protocol::default(), 3, |_| {}).unwrap();
                }
                pair.split(0, 0).unwrap().barrier().unwrap();
            }
        }
        let left = comm.survivors().unwrap();
        assert_eq!(left.job_ranks(), [1, 2, 3]);
        ring(&left, Protocol::Get, 20, |_| {}).unwrap();
        assert_lost(&comm.barrier().unwrap_err(), 0);
        let half = left.split(u64::from(left.rank() == 0), 0).unwrap();
        if half.world() > 1 {
            ring(&half, Protocol::Put, 5, |_| {}).unwrap();
        }
        left.barrier().unwrap();
        if ending == Ending::Stop && left.rank() == 0 {
            resume(processes[0]);
        }
        left.close().unwrap();
    });
}

#[test]
fn the_job_goes_on_when_rank_0_was_killed() {
    go_on_without_rank_0(Ending::Kill);
}

#[test]
fn the_job_goes_on_when_rank_0_is_stopped() {
    go_on_without_rank_0(Ending::Stop);
}

#[test]
fn the_job_goes_on_when_rank_0_drops_its_communicator() {
    go_on_without_rank_0(Ending::Drop);
}

#[test]
fn the_job_goes_on_when_rank_0_aborts() {
    go_on_without_rank_0(Ending::Abort);
}

fn end_rank_0(ending: Ending, comm: Communicator, pair: Communicator) {
    match ending {
        Ending::Kill => kill_self(),
        Ending::Drop => drop((comm, pair)),
        Ending::Abort => comm.abort("the disk is full"),
        Ending::Stop => {
            stop_self();
            // The others go on, and it learns so.
            let error = pair.barrier().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::GivenUp, "{error}");
            common::assert_says(&error, &["gave this rank up: it did not answer for 1.5s"]);
        }
    }
}

#[test]
fn one_rank_after_another_may_serve() {
    let victims = [0, 1, 2, 4];
    run(8, &victims, |comm| {
        let mut left = comm.clone();
        for victim in victims {
            let die = |round| {
                if comm.rank() == victim && round == 4 {
                    kill_self();
                }
            };
            let error = ring(&left, Protocol::default(), usize::MAX, die).unwrap_err();
            let lost = Stopwatch::start();
            assert_lost(&error, victim);
            left = left.survivors().unwrap();
            assert!(!left.job_ranks().contains(&victim));
            ring(&left, Protocol::default(), 10, |_| {}).unwrap();
            assert!(lost.elapsed() < SOON, "{:?}", lost.elapsed());
        }
        assert_eq!(left.job_ranks(), [3, 5, 6, 7]);
        drop(comm);
        left.close().unwrap();
    });
}

#[test]
fn the_next_to_serve_may_be_lost_at_the_same_time() {
    for gap in [0, 1, 20] {
        run(6, &[0, 1], |comm| {
            let pair = comm.split(comm.rank() as u64 / 2, 0).unwrap();
            barrier_that_all_have_passed(&comm);
            if comm.rank() < 2 {
                std::thread::sleep(Duration::from_millis(comm.rank() as u64 * gap));
                kill_self();
            }
            let begun = Stopwatch::start();
            let end = Instant::now() + Duration::from_millis(1500);
            while both_before(&pair, end) {
                ring(&pair, Protocol::default(), 3, |_| {}).unwrap();
            }
            let error = comm.barrier().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
            let mut left = comm.survivors().unwrap();
            while left.world() > 4 {
                // One of them was lost only after that.
                left.barrier().unwrap_err();
                left = left.survivors().unwrap();
            }
            assert_eq!(left.job_ranks(), [2, 3, 4, 5]);
            assert!(begun.elapsed() < SOON + Duration::from_millis(1500));
            ring(&left, Protocol::default(), 20, |_| {}).unwrap();
            drop((comm, pair));
            left.close().unwrap();
        });
    }
}

#[test]
fn what_the_store_contained_is_there_after_the_loss() {
    run(4, &[0], |comm| {
        let (rank, store) = (comm.rank(), comm.bootstrap().store().clone());
        let soon = || Wait::on([], comm.deadline());
        // More than a journal keeps without being told to forget.
        for round in 0..400 {
            let (own, next) = (format!("{rank}/{round}"), (rank + 1) % 4);
            store.set(own.clone(), [round as u8; 9]).unwrap();
            let key = format!("{next}/{round}");
            let value = match round % 3 {
                0 => store.take(&key, &Wait::on([next], comm.deadline())),
                _ => store.get(&key, &Wait::on([next], comm.deadline())),
            };
            assert_eq!(value.unwrap(), [round as u8; 9]);
        }
        store.add("counter", rank as i64).unwrap();
        comm.barrier().unwrap();
        // The owner changes: the later value is to hold.
        if rank == 2 {
            store.set("3/1", b"another").unwrap();
            assert!(store.delete("3/2").unwrap());
        }
        if rank == 3 {
            store.add("counter", 0).unwrap();
        }
        barrier_that_all_have_passed(&comm);
        if rank == 0 {
            kill_self();
        }
        // In the middle of a wait.
        let until_lost = || {
            let deadline = comm.deadline();
            while comm.bootstrap().health().lost().is_empty() {
                assert!(!deadline.passed(), "rank {rank} knows of no loss");
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        if rank == 1 {
            until_lost();
            std::thread::sleep(Duration::from_millis(200));
            store.set("late", b"value").unwrap();
        }
        let late = store.get("late", &Wait::on([1], comm.deadline())).unwrap();
        assert_eq!(late, b"value");
        until_lost();
        assert_eq!(comm.bootstrap().health().lost(), [0]);
        for owner in 1..4 {
            for round in 0..400 {
                let key = format!("{owner}/{round}");
                let taken = round % 3 == 0;
                // What rank 0 took, its owner may not have been told.
                if !(taken && owner == 1) {
                    let there = store.check(&[&key]).unwrap();
                    assert_eq!(there, !taken && key != "3/2", "{key}");
                }
            }
        }
        assert_eq!(store.get("3/1", &soon()).unwrap(), b"another");
        assert_eq!(store.add("counter", 0).unwrap(), 6);
        let left = comm.survivors().unwrap();
        drop(comm);
        left.close().unwrap();
    });
}

/// As when a machine is gone: none of its ranks refuses a connection.
#[test]
fn ranks_that_do_not_answer_are_found_at_the_same_time() {
    let victims = [0, 1, 2, 3];
    run(6, &victims, |comm| {
        let late = Duration::from_millis(1500 + 1500);
        let processes = processes_of(&comm);
        barrier_that_all_have_passed(&comm);
        let stopped = Stopwatch::start();
        if comm.rank() < 4 {
            stop_self();
            unreachable!("nobody resumes it");
        }
        while comm.bootstrap().health().lost() != victims {
            let took = stopped.elapsed();
            assert!(
                took < late,
                "{:?} after {took:?}",
                comm.bootstrap().health().lost()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        let left = comm.survivors().unwrap();
        assert_eq!(left.job_ranks(), [4, 5]);
        assert!(stopped.elapsed() < late, "{:?}", stopped.elapsed());
        if left.rank() == 0 {
            processes[..4].iter().copied().for_each(kill);
        }
        drop(comm);
        left.close().unwrap();
    });
}
