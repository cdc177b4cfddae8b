//! Contents of timeout errors: the operation, the peer, the tag or key, and the time waited.

// A test fails by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{assert_error, assert_names_peer, assert_says, threads, with_timeout, world};
use std::time::Duration;
use warplink::bootstrap::Wait;
use warplink::channel::ConnectionRequest;
use warplink::device::{AllocationKind, Priority};
use warplink::p2p::{Path, TransferRequest};
use warplink::program::{Bindings, Parameters, PrepareOptions, Program};
use warplink::{Communicator, Deadline, Error, ErrorKind, Rank, Result};

/// Suffix of timeouts that leave the communicator usable.
const USABLE: &str = "; the communicator can still be used";

fn late() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

fn brief() -> Deadline {
    Deadline::after(Duration::from_millis(50))
}

/// Rank 0 of two waits in vain for rank 1.
fn time_out(wait: impl Fn(&Communicator) -> Error + Send + Sync, parts: &[&str]) {
    threads(world(2), |comm| {
        if comm.rank() == 0 {
            let error = wait(comm);
            assert_names_peer(&error, ErrorKind::Timeout, 1 as Rank);
            assert_says(&error, &["timed out after 50ms waiting for"]);
            assert_says(&error, parts);
        }
        comm.barrier().unwrap();
    });
}

#[test]
fn a_barrier_names_who_did_not_come() {
    time_out(
        |comm| {
            let group = comm.bootstrap().group(&[0, 1]).unwrap();
            group.barrier(brief()).unwrap_err()
        },
        &["barrier: ", "rank 1 to call barrier"],
    );
}

#[test]
fn an_all_gather_names_who_did_not_come() {
    time_out(
        |comm| {
            let group = comm.bootstrap().group(&[1, 0]).unwrap();
            group.all_gather(b"x", brief()).unwrap_err()
        },
        &["all-gather: ", "rank 1 to call all-gather"],
    );
}

#[test]
fn a_wait_for_a_key_names_the_rank_and_the_key() {
    time_out(
        |comm| {
            comm.bootstrap().store().set("there", b"1").unwrap();
            let keys = ["there", "never", "nor this"].map(str::to_owned);
            let wait = Wait::on([1], brief());
            let error = comm.bootstrap().store().multi_get(&keys, &wait);
            error.unwrap_err()
        },
        &["rank 1 to set the key", "key never)"],
    );
}

#[test]
fn an_exchange_names_the_end_that_did_not_come() {
    time_out(
        |comm| {
            let region = comm.alloc(64).unwrap();
            let request = TransferRequest::send(&region, 1, 8);
            comm.exchange_until(&[request], brief()).unwrap_err()
        },
        &[
            "rank 0: exchange transfers: ",
            "rank 1 to exchange its receive with tag 8",
            USABLE,
        ],
    );
}

fn name_what_was_not_posted(path: Path) {
    // What comes in time has to come within it, on a busy machine too.
    const LIMIT: Duration = Duration::from_secs(2);
    common::threads_with(
        world(2),
        |config| {
            config.timeout = LIMIT;
            config.path = Some(path);
        },
        |comm| {
            let peer = 1 - comm.rank();
            let regions = [comm.alloc(64).unwrap(), comm.alloc(64).unwrap()];
            let requests = match comm.rank() {
                0 => [4, 5].map(|tag| TransferRequest::receive(&regions[0], peer, tag)),
                _ => [4, 5].map(|tag| TransferRequest::send(&regions[1], peer, tag)),
            };
            let transfers = comm.exchange_until(&requests, late()).unwrap();
            let stream = comm.create_stream(Priority::Normal).unwrap();
            let store = comm.bootstrap().store();
            // Says something to the other rank, or waits until that does.
            let say = |what: &str| store.set(what, b"").unwrap();
            let hear = |what: &str| {
                store
                    .wait(&[what.to_owned()], &Wait::on([peer], late()))
                    .unwrap()
            };
            if comm.rank() == 0 {
                hear("one is posted");
                for transfer in &transfers {
                    transfer.post(&stream).unwrap();
                    transfer.wait(&stream).unwrap();
                }
                let error = comm.synchronize(&stream).unwrap_err();
                assert_names_peer(&error, ErrorKind::Timeout, 1 as Rank);
                assert_says(
                    &error,
                    &[
                        "rank 0: synchronize: timed out after 2s",
                        "rank 1 has not posted its send with tag 5",
                        USABLE,
                    ],
                );
                say("timed out");
                hear("both are posted");
            } else {
                // One of the two comes in time.
                transfers[0].post(&stream).unwrap();
                transfers[0].wait(&stream).unwrap();
                say("one is posted");
                hear("timed out");
                transfers[1].post(&stream).unwrap();
                transfers[1].wait(&stream).unwrap();
                say("both are posted");
            }
            comm.synchronize(&stream).unwrap();
        },
    );
}

#[test]
fn a_stream_names_the_transfer_that_its_peer_has_not_posted() {
    name_what_was_not_posted(Path::CopyEngine);
}

#[test]
fn a_stream_names_the_transfer_whose_packets_have_not_come() {
    name_what_was_not_posted(Path::Multiprocessors);
}

/// Rank 0 times out in `call`, with an error that says that the communicator can still be used. Rank 1 calls late, if
/// `late` says how that ends. Then both call again, in time.
fn usable_after_a_timeout(
    call: impl Fn(&Communicator) -> Result<()> + Send + Sync,
    late: Option<fn(Result<()>)>,
) {
    repeatable_after_a_timeout(call, &[USABLE], late);
}

/// The same; the error says `parts`.
fn repeatable_after_a_timeout(
    call: impl Fn(&Communicator) -> Result<()> + Send + Sync,
    parts: &[&str],
    late: Option<fn(Result<()>)>,
) {
    // A call that both make at the same time has to end within it, on a busy machine too.
    common::threads_with(world(2), with_timeout(Duration::from_secs(4)), |comm| {
        // Not a call that is counted.
        let meet = |name: &str| {
            let store = comm.bootstrap().store();
            let (rank, peer) = (comm.rank(), 1 - comm.rank());
            store.set(format!("{name} {rank}"), b"").unwrap();
            let wait = Wait::on([peer], self::late());
            store.get(&format!("{name} {peer}"), &wait).unwrap();
        };
        if comm.rank() == 0 {
            let error = call(comm).unwrap_err();
            assert_error(&error, ErrorKind::Timeout, parts);
        }
        meet("timed out");
        if let (1, Some(check)) = (comm.rank(), late) {
            check(call(comm));
        }
        meet("was late");
        call(comm).unwrap();
    });
}

/// A barrier counts as called, also where nobody waits any more.
#[test]
fn a_barrier_works_after_a_timeout() {
    usable_after_a_timeout(Communicator::barrier, Some(|late| late.unwrap()));
}

#[test]
fn an_all_gather_works_after_a_timeout() {
    let call = |comm: &Communicator| comm.all_gather_bytes(b"x").map(drop);
    usable_after_a_timeout(call, Some(|late| late.unwrap()));
}

#[test]
fn a_stream_barrier_works_after_a_timeout() {
    usable_after_a_timeout(|comm| comm.stream_barrier().map(drop), None);
}

#[test]
fn connecting_works_after_a_timeout() {
    let call = |comm: &Communicator| {
        let region = comm.alloc(64)?;
        let request = ConnectionRequest::new(1 - comm.rank(), 3, &region);
        comm.connect(&[request]).map(drop)
    };
    usable_after_a_timeout(call, None);
}

/// A rank that no longer waits is told by none that it is one of those that are left.
#[test]
fn finding_the_survivors_works_after_a_timeout() {
    let call = |comm: &Communicator| comm.survivors()?.barrier();
    let late = |late: Result<()>| assert_eq!(late.unwrap_err().kind(), ErrorKind::PeerFailed);
    let parts = ["find the ranks that are left", "rank 1 to call"];
    repeatable_after_a_timeout(call, &parts, Some(late));
}

/// Nor does memory stay that nobody can map.
#[test]
fn sharing_works_after_a_timeout() {
    let call = |comm: &Communicator| {
        let region = comm.alloc(64)?;
        let shared = comm.share(&region).map(drop);
        region.close(Deadline::after(Duration::from_secs(2)))?;
        shared
    };
    let late = |late: Result<()>| assert_eq!(late.unwrap_err().kind(), ErrorKind::PeerFailed);
    usable_after_a_timeout(call, Some(late));
}

/// A binding that the peer gave up is over for this rank too.
#[test]
fn binding_works_after_a_timeout() {
    let text = "program p() {\n input A: f32[4]\n output C: f32[4]\n C = copy(A)\n}";
    let program = Program::parse(text).unwrap();
    let call = |comm: &Communicator| {
        let options = PrepareOptions {
            streams: 1,
            ..PrepareOptions::default()
        };
        let memory = || comm.device().allocate(16, AllocationKind::Plain);
        let bindings = [("A".to_owned(), memory()?), ("C".to_owned(), memory()?)];
        let prepared = comm
            .executor()
            .prepare(&program, &Parameters::new(), options)?;
        prepared.bind(&Bindings::from(bindings)).map(drop)
    };
    let late = |late: Result<()>| assert_eq!(late.unwrap_err().kind(), ErrorKind::PeerFailed);
    usable_after_a_timeout(call, Some(late));
}
