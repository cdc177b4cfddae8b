//! Ranks whose processes are stopped: their peers wait until the heartbeat limit and go on without them;
//! nobody else waits.

// A test fails by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{
    Ranks, Stopwatch, assert_error, assert_says, complete, from_first, processes_of, resume, ring,
    ring_requests, stop_self, values, wait_until_stopped,
};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use warplink::bootstrap::Wait;
use warplink::channel::ConnectionRequest;
use warplink::device::Priority;
use warplink::memory::Region;
use warplink::p2p::{Protocol, Transfer, TransferRequest};
use warplink::{Communicator, Deadline, Error, ErrorKind};

/// How much later than the limit a peer may have its error.
const LATER: Duration = Duration::from_secs(1);

/// Runs `count` ranks with a heartbeat limit of `limit` seconds, none of which may fail.
fn run(count: usize, limit: &str, body: impl FnOnce(Communicator)) {
    let Some(ranks) = Ranks::all(count) else {
        return;
    };
    ranks
        .with_env("WARPLINK_HEARTBEAT_LIMIT", limit)
        .with_env("WARPLINK_TIMEOUT", "30")
        .run_losing(&[], body);
}

/// Checks that `error` is of the loss of `victim`, and came after the limit of 1.5 s and not much later:
/// the victim ran at `ran`, and was stopped about when `stopped` was started.
fn check_loss(error: &Error, victim: usize, ran: Instant, stopped: Stopwatch) {
    let named = (error.kind(), error.job_peer());
    assert_eq!(named, (ErrorKind::PeerLost, Some(victim)), "{error}");
    assert_says(error, &["was lost: it did not answer for 1.5s"]);
    let (took, at_most) = (stopped.elapsed(), ran.elapsed());
    // The last sign of life came up to half a second before the stop.
    assert!(
        at_most > Duration::from_millis(800),
        "{error} after {at_most:?}"
    );
    assert!(
        took < Duration::from_millis(1500) + LATER,
        "{error} after {took:?}"
    );
}

/// Stops a rank while the others are in `wait`, whose arguments are what the wait needs: the rank that is stopped, and a
/// transfer from it that it never posts. They get an error that names it, and it learns that it was given up.
fn stop_while(wait: impl Fn(&Communicator, usize, &Transfer) -> Error) {
    for victim in [2, 0] {
        run(4, "1.5", |comm| {
            println!("rank {victim} is stopped");
            let processes = processes_of(&comm);
            let region = comm.alloc(64).unwrap();
            let stream = comm.create_stream(Priority::Normal).unwrap();
            let is_victim = comm.rank() == victim;
            // The victim announces nothing, so what its peers wait for never comes.
            let peers: Vec<usize> = if is_victim {
                (0..4).filter(|&rank| rank != victim).collect()
            } else {
                vec![victim]
            };
            let request = |&peer: &usize| {
                if is_victim {
                    TransferRequest::send(&region, peer, 1)
                } else {
                    TransferRequest::receive(&region, peer, 1)
                }
            };
            let requests: Vec<_> = peers.iter().map(request).collect();
            let transfers = comm.exchange(&requests).unwrap();
            let ran = Instant::now();
            comm.barrier().unwrap();
            let stopped = Stopwatch::start();
            if is_victim {
                // What it has answered is to arrive.
                std::thread::sleep(Duration::from_millis(50));
                stop_self();
                // The others may have come to this barrier before the stop, so that it is done; they come to
                // no other.
                let error = comm.barrier().err();
                let error = error.unwrap_or_else(|| comm.barrier().unwrap_err());
                let says = ["gave this rank up: it did not answer for 1.5s"];
                assert_error(&error, ErrorKind::GivenUp, &says);
                // The streams of a rank that was given up fail too.
                transfers[0].post(&stream).ok();
                let error = comm.synchronize(&stream).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::GivenUp, "{error}");
                assert!(comm.survivors().is_err());
                return;
            }
            let error = wait(&comm, victim, &transfers[0]);
            check_loss(&error, victim, ran, stopped);
            let left = comm.survivors().unwrap();
            assert!(!left.job_ranks().contains(&victim));
            ring(&left, Protocol::default(), 5, |_| {}).unwrap();
            left.barrier().unwrap();
            if left.rank() == 0 {
                resume(processes[victim]);
            }
            drop((transfers, comm));
            left.close().unwrap();
        });
    }
}

#[test]
fn a_rank_that_stops_is_named_in_a_barrier() {
    stop_while(|comm, _, _| comm.barrier().unwrap_err());
}

#[test]
fn a_rank_that_stops_is_named_in_a_wait_for_a_key() {
    stop_while(|comm, victim, _| {
        let wait = Wait::on([victim], comm.deadline());
        comm.bootstrap().store().get("never", &wait).unwrap_err()
    });
}

#[test]
fn a_rank_that_stops_is_named_in_an_exchange() {
    stop_while(|comm, victim, _| {
        let region = comm.alloc(64).unwrap();
        let late = TransferRequest::receive(&region, victim, 2);
        comm.exchange(&[late]).unwrap_err()
    });
}

#[test]
fn a_rank_that_stops_is_named_in_a_stream() {
    stop_while(|comm, _, transfer| {
        let stream = comm.create_stream(Priority::Normal).unwrap();
        transfer.post(&stream).unwrap();
        transfer.wait(&stream).unwrap();
        let error = comm.synchronize(&stream).unwrap_err();
        let says = ["set WARPLINK_HEARTBEAT_LIMIT", "use another stream"];
        assert_says(&error, &says);
        error
    });
}

#[test]
fn a_short_stop_is_waited_for() {
    for victim in [1, 0] {
        run(3, "3", |comm| {
            let processes = processes_of(&comm);
            for round in 0..3 {
                if comm.rank() == victim {
                    stop_self();
                } else if comm.rank() == 2 {
                    wait_until_stopped(processes[victim]);
                    std::thread::sleep(Duration::from_millis(700));
                    resume(processes[victim]);
                }
                comm.barrier().unwrap();
                ring(&comm, Protocol::Get, 3 + round, |_| {}).unwrap();
            }
            comm.close().unwrap();
        });
    }
}

#[test]
fn a_busy_rank_is_not_taken_for_a_stopped_one() {
    run(2, "1", |comm| {
        if comm.rank() == 0 {
            let end = AtomicBool::new(false);
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        while !end.load(Ordering::Relaxed) {
                            std::hint::spin_loop();
                        }
                    });
                }
                // A call that takes long, such as one of a driver.
                std::thread::sleep(Duration::from_secs(3));
                end.store(true, Ordering::Relaxed);
            });
        }
        comm.barrier().unwrap();
        comm.close().unwrap();
    });
}

/// Runs two ranks with transfers between them, one of which stops; when it goes on, its barrier fails as `learns` says.
/// The other drops them in `drops`, which must not take long.
fn drop_of_a_stopped_peer(
    limit: &str,
    learns: ErrorKind,
    drops: impl FnOnce(Communicator, Vec<Transfer>, Vec<Region>),
) {
    run(2, limit, |comm| {
        let processes = processes_of(&comm);
        let regions: Vec<_> = (0..20).map(|_| comm.alloc(4096).unwrap()).collect();
        let requests: Vec<_> = regions
            .iter()
            .zip(0..)
            .map(|(region, tag)| from_first(&comm, region, tag))
            .collect();
        let transfers = comm.exchange(&requests).unwrap();
        comm.barrier().unwrap();
        if comm.rank() == 1 {
            stop_self();
            let error = comm.barrier().unwrap_err();
            assert_eq!(error.kind(), learns, "{error}");
            return;
        }
        wait_until_stopped(processes[1]);
        let begun = Stopwatch::start();
        drops(comm, transfers, regions);
        let took = begun.elapsed();
        assert!(took < Duration::from_secs(5), "{took:?}");
        resume(processes[1]);
    });
}

#[test]
fn dropping_transfers_of_a_stopped_peer_is_quick() {
    drop_of_a_stopped_peer("3", ErrorKind::GivenUp, |comm, transfers, regions| {
        let begun = Stopwatch::start();
        drop((transfers, regions));
        let took = begun.elapsed();
        assert!(took < Duration::from_millis(500), "{took:?}");
        let error = comm.barrier().unwrap_err();
        assert_eq!(error.peer(), Some(1), "{error}");
        let left = comm.survivors().unwrap();
        drop(comm);
        left.close().unwrap();
    });
}

#[test]
fn a_drop_before_the_limit_is_quick_too() {
    // As in a debugger: the peer stays stopped for longer than this rank lives.
    drop_of_a_stopped_peer("600", ErrorKind::PeerLost, |comm, transfers, regions| {
        drop((transfers, regions, comm));
    });
}

#[test]
fn another_pair_is_not_delayed() {
    run(4, "4", |comm| {
        let processes = processes_of(&comm);
        let pair = comm.split(comm.rank() as u64 / 2, 0).unwrap();
        let region = comm.alloc(64).unwrap();
        comm.barrier().unwrap();
        match comm.rank() {
            3 => {
                stop_self();
                pair.barrier().unwrap_err();
                return;
            }
            2 => {
                // It exchanges with the stopped rank, and hangs on it until the limit.
                let request = TransferRequest::send(&region, 1, 0);
                let error = pair.exchange(&[request]).unwrap_err();
                assert_eq!(error.job_peer(), Some(3), "{error}");
            }
            _ => {
                // New exchanges, transfers, barriers and drops, all the while.
                let mut longest = Duration::ZERO;
                let begun = Instant::now();
                for _ in 0..40 {
                    let round = Stopwatch::start();
                    ring(&pair, Protocol::default(), 2, |_| {}).unwrap();
                    pair.barrier().unwrap();
                    longest = longest.max(round.elapsed());
                    std::thread::sleep(Duration::from_millis(50));
                }
                assert!(begun.elapsed() > Duration::from_secs(2));
                assert!(longest < Duration::from_secs(1), "a round took {longest:?}");
            }
        }
        let left = comm.survivors().unwrap();
        assert_eq!(left.job_ranks(), [0, 1, 2]);
        if left.rank() == 0 {
            resume(processes[3]);
        }
        left.close().unwrap();
    });
}

#[test]
fn transfers_of_others_go_on_while_rank_0_is_stopped() {
    run(3, "2", |comm| {
        let processes = processes_of(&comm);
        if comm.rank() == 0 {
            comm.split(0, 0).unwrap();
            comm.barrier().unwrap();
            stop_self();
            comm.barrier().unwrap_err();
            return;
        }
        let pair = comm.split(1, 0).unwrap();
        let peer = 1 - pair.rank();
        let (send, receive) = (comm.alloc(4096).unwrap(), comm.alloc(4096).unwrap());
        let requests = ring_requests(&pair, &send, &receive, 0);
        let transfers = pair.exchange(&requests).unwrap();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        comm.barrier().unwrap();
        let begun = Instant::now();
        let mut longest = Duration::ZERO;
        // The same number on both ranks, over more than the limit.
        for round in 0..60 {
            let started = Stopwatch::start();
            send.upload(&values(pair.rank(), round, 4096)).unwrap();
            complete(&pair, &transfers, &stream).unwrap();
            assert!(receive.download().unwrap() == values(peer, round, 4096));
            longest = longest.max(started.elapsed());
            std::thread::sleep(Duration::from_millis(50));
        }
        assert!(begun.elapsed() > Duration::from_secs(3));
        assert!(longest < Duration::from_secs(1), "a round took {longest:?}");
        pair.barrier().unwrap();
        let left = comm.survivors().unwrap();
        if left.rank() == 0 {
            resume(processes[0]);
        }
        drop((comm, pair));
        left.close().unwrap();
    });
}

/// An exchange of three tags with rank 0 whose store is stopped ends at its deadline.
fn exchange_with_a_stopped_store(
    exchange: impl Fn(&Communicator, &Region, [u64; 3], Deadline) -> Error,
) {
    run(2, "600", |comm| {
        let processes = processes_of(&comm);
        let region = comm.alloc(64).unwrap();
        comm.barrier().unwrap();
        if comm.rank() == 0 {
            stop_self();
            comm.barrier().ok();
            return;
        }
        wait_until_stopped(processes[0]);
        let begun = Stopwatch::start();
        // The publishing has the limit of the call, and taking it back one of its own.
        let soon = Deadline::after(Duration::from_secs(2));
        let error = exchange(&comm, &region, [0, 1, 2], soon);
        let says = ["; the communicator has ended"];
        assert_error(&error, ErrorKind::Timeout, &says);
        assert!(
            begun.elapsed() < Duration::from_secs(8),
            "{:?}",
            begun.elapsed()
        );
        // What may be published yet meets nothing later.
        let request = ConnectionRequest::new(0, 9, &region);
        let error = comm.connect(&[request]).unwrap_err();
        assert_says(&error, &["could not be withdrawn", "communicator"]);
        let later = Stopwatch::start();
        comm.abort("rank 0 does not answer");
        assert!(
            later.elapsed() < Duration::from_secs(4),
            "{:?}",
            later.elapsed()
        );
        resume(processes[0]);
    });
}

#[test]
fn an_exchange_of_transfers_with_a_stopped_store_ends_at_its_deadline() {
    exchange_with_a_stopped_store(|comm, region, tags, soon| {
        let requests = tags.map(|tag| TransferRequest::send(region, 0, tag));
        comm.exchange_until(&requests, soon).unwrap_err()
    });
}

#[test]
fn an_exchange_of_connections_with_a_stopped_store_ends_at_its_deadline() {
    exchange_with_a_stopped_store(|comm, region, tags, soon| {
        let requests = tags.map(|tag| ConnectionRequest::new(0, tag, region));
        comm.connect_until(&requests, soon).unwrap_err()
    });
}
