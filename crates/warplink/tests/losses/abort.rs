//! Ranks that end without closing: by abort, by dropping the communicator, by a panic.

use crate::common::{
    Stopwatch, TimedBarrier, assert_error, assert_names_peer, assert_says, at_least,
    config_of_thread, kind, threads_that_end, world,
};
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::time::Duration;
use warplink::bootstrap::{JoinConfig, Rendezvous, UniqueId, Wait};
use warplink::device::Priority;
use warplink::p2p::TransferRequest;
use warplink::{Communicator, Config, Error, ErrorKind, Job, PendingJob, Result};

/// How soon the peers must have their error.
const SOON: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug)]
enum Ending {
    Abort,
    Drop,
    Panic,
}

impl Ending {
    const ALL: [Self; 3] = [Self::Abort, Self::Drop, Self::Panic];

    fn end(self, comm: Communicator) {
        match self {
            Self::Abort => comm.abort("the input is missing"),
            Self::Drop => drop(comm),
            Self::Panic => panic!("a rank panics on purpose"),
        }
    }

    fn reason(self) -> &'static str {
        match self {
            Self::Abort => "it aborted: the input is missing",
            Self::Drop => "it dropped its communicator without closing it",
            Self::Panic => "it panicked",
        }
    }
}

/// Runs ranks of which `victim` ends while the others are in `wait`.
fn end_while(
    victim: usize,
    ending: Ending,
    prepare: impl Fn(&Communicator) + Sync,
    wait: impl Fn(&Communicator) -> Result<()> + Sync,
) {
    let world = world(3);
    let id = UniqueId::create(IpAddr::V4(Ipv4Addr::LOCALHOST), 0).unwrap();
    let answered = TimedBarrier::new(world);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world)
            .map(|rank| {
                let config = config_of_thread(&id, rank, world);
                let (prepare, wait, answered) = (&prepare, &wait, &answered);
                scope.spawn(move || {
                    let comm = Communicator::join(&config).unwrap();
                    prepare(&comm);
                    comm.barrier().unwrap();
                    // The victim may be the rank whose store answers barriers.
                    answered.wait();
                    if rank == victim {
                        // The others are to be in what this rank ends.
                        std::thread::sleep(Duration::from_millis(100));
                        ending.end(comm);
                        return;
                    }
                    let started = Stopwatch::start();
                    let error = wait(&comm).expect_err("the wait depends on the victim");
                    check(&error, victim, ending, started.elapsed());
                    // What comes later fails with the same cause.
                    let error = comm.barrier().expect_err("the victim is gone");
                    check(&error, victim, ending, started.elapsed());
                    let _ = comm.close();
                })
            })
            .collect();
        for (rank, thread) in ranks.into_iter().enumerate() {
            let panicked = thread.join().is_err();
            let expected = rank == victim && matches!(ending, Ending::Panic);
            assert_eq!(panicked, expected, "rank {rank}, {ending:?}");
        }
    });
}

fn check(error: &Error, victim: usize, ending: Ending, took: Duration) {
    assert_names_peer(error, ErrorKind::PeerLost, victim);
    assert!(error.to_string().contains(ending.reason()), "{error}");
    assert!(took < SOON, "{error} came after {took:?}");
}

#[test]
fn peers_in_a_barrier_learn_of_it_at_once() {
    for ending in Ending::ALL {
        for victim in [1, 0] {
            end_while(victim, ending, |_| {}, Communicator::barrier);
        }
    }
}

#[test]
fn peers_that_wait_for_a_key_learn_of_it_at_once() {
    for victim in [1, 0] {
        end_while(
            victim,
            Ending::Drop,
            |_| {},
            |comm| {
                let wait = Wait::on([victim], comm.deadline());
                comm.bootstrap().store().get("never", &wait).map(drop)
            },
        );
    }
}

#[test]
fn peers_in_an_exchange_learn_of_it_at_once() {
    for victim in [1, 0] {
        end_while(
            victim,
            Ending::Abort,
            |_| {},
            |comm| {
                let region = comm.alloc(64)?;
                let request = TransferRequest::receive(&region, victim, 7);
                comm.exchange(&[request]).map(drop)
            },
        );
    }
}

#[test]
fn peers_that_wait_in_a_stream_learn_of_it_at_once() {
    for ending in Ending::ALL {
        for victim in [1, 0] {
            let world = world(3);
            end_while(
                victim,
                ending,
                |comm| {
                    // The victim announces nothing, so what its peers post never completes.
                    let region = comm.alloc(64).unwrap();
                    let peers: Vec<usize> = if comm.rank() == victim {
                        (0..world).filter(|&rank| rank != victim).collect()
                    } else {
                        vec![victim]
                    };
                    let requests: Vec<_> = peers
                        .iter()
                        .map(|&peer| {
                            if comm.rank() == victim {
                                TransferRequest::send(&region, peer, 3)
                            } else {
                                TransferRequest::receive(&region, peer, 3)
                            }
                        })
                        .collect();
                    let transfers = comm.exchange(&requests).unwrap();
                    KEPT.with_borrow_mut(|kept| *kept = transfers);
                },
                |comm| {
                    let transfers = KEPT.take();
                    let stream = comm.create_stream(Priority::Normal)?;
                    for transfer in &transfers {
                        transfer.post(&stream)?;
                        transfer.wait(&stream)?;
                    }
                    comm.synchronize(&stream)
                },
            );
        }
    }
}

thread_local! {
    /// The transfers of this thread's rank between preparing and waiting.
    static KEPT: std::cell::RefCell<Vec<warplink::p2p::Transfer>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// A rank that leaves because another was lost is waited for in a communicator that does not contain that.
#[test]
fn a_rank_that_closes_after_a_loss_is_not_waited_for_elsewhere() {
    let Some(ranks) = at_least(3) else { return };
    let done = TimedBarrier::new(2);
    let change = |config: &mut warplink::Config| config.timeout = Duration::from_secs(20);
    threads_that_end(ranks, change, |comm| {
        if comm.rank() == 2 {
            comm.barrier().unwrap();
            return comm.abort("the input is missing");
        }
        let pair = comm.subgroup(&[0, 1]).unwrap();
        comm.barrier().unwrap();
        let started = Stopwatch::start();
        if comm.rank() == 0 {
            // It comes when the loss is known.
            comm.barrier().unwrap_err();
            let error = comm.close().unwrap_err();
            assert_names_peer(&error, ErrorKind::PeerLost, 2);
        } else {
            let error = pair.barrier().unwrap_err();
            assert_names_peer(&error, ErrorKind::PeerLost, 0);
            crate::common::assert_says(&error, &["rank 2", "the input is missing"]);
        }
        assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
        done.wait();
    });
}

#[test]
fn the_first_abort_counts_and_later_calls_fail() {
    let id = UniqueId::create(IpAddr::V4(Ipv4Addr::LOCALHOST), 0).unwrap();
    let comm = Communicator::join(&config_of_thread(&id, 0, 1)).unwrap();
    let stream = comm.create_stream(Priority::Normal).unwrap();
    comm.abort("first");
    comm.abort("second");
    assert_eq!(comm.barrier().unwrap_err().kind(), ErrorKind::Closed);
    let error = comm.synchronize(&stream).unwrap_err();
    assert!(error.to_string().contains("it aborted: first"), "{error}");
}

/// A job of rank `rank` of `world` that is joined in the background.
fn pending(rendezvous: Rendezvous, rank: usize, world: usize) -> PendingJob {
    let config = Config::new(JoinConfig::new(rendezvous, rank, world), kind());
    Job::begin_join(&config).unwrap()
}

/// Aborts a join that goes on, which ends soon.
fn abort_join(pending: PendingJob) {
    std::thread::sleep(Duration::from_millis(300));
    assert!(!pending.is_finished());
    let started = Stopwatch::start();
    pending.abort("the input is missing");
    let error = pending.wait().unwrap_err();
    let took = started.elapsed();
    assert!(took < SOON, "{error} came after {took:?}");
    let says = ["join was aborted", "the input is missing"];
    assert_error(&error, ErrorKind::Closed, &says);
}

#[test]
fn a_join_ends_when_it_is_aborted_wherever_it_waits() {
    let new_id = || UniqueId::create(IpAddr::V4(Ipv4Addr::LOCALHOST), 0).unwrap();
    // Nobody listens.
    let held = new_id();
    let address = held.address();
    let _port = held.release();
    abort_join(pending(Rendezvous::Address(address), 1, 2));
    // Somebody listens, and does not answer.
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = silent.local_addr().unwrap();
    abort_join(pending(Rendezvous::Address(address), 1, 2));
    // The others do not come.
    abort_join(pending(Rendezvous::Id(new_id()), 0, 2));
    // Another one has come, and learns why this one does not go on.
    let id = new_id();
    let waiting = pending(Rendezvous::Id(id.clone()), 0, 3);
    abort_join(pending(Rendezvous::Id(id), 1, 3));
    let error = waiting.wait().unwrap_err();
    assert_names_peer(&error, ErrorKind::PeerLost, 1);
    assert_says(&error, &["it aborted: the input is missing"]);
}

/// It is then the job that is aborted.
#[test]
fn an_abort_that_comes_after_the_join_ends_the_job() {
    let id = UniqueId::create(IpAddr::V4(Ipv4Addr::LOCALHOST), 0).unwrap();
    let [zero, one] = [0, 1].map(|rank| pending(Rendezvous::Id(id.clone()), rank, 2));
    let zero = zero.wait().unwrap();
    while !one.is_finished() {
        std::thread::sleep(Duration::from_millis(1));
    }
    one.abort("the input is missing");
    let error = zero.world().barrier().unwrap_err();
    assert_names_peer(&error, ErrorKind::PeerLost, 1);
    assert_says(&error, &["it aborted: the input is missing"]);
    let one = one.wait().unwrap();
    assert_eq!(one.world().check().unwrap_err().kind(), ErrorKind::Closed);
}
