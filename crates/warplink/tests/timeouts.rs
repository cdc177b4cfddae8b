//! What a timeout says: the operation, the peer, the tag or key, and how long was waited.

// A test fails by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{assert_says, threads, world};
use std::time::Duration;
use warplink::bootstrap::Wait;
use warplink::device::Priority;
use warplink::p2p::{Path, TransferRequest};
use warplink::{Communicator, Deadline, Error, ErrorKind, Rank};

fn brief() -> Deadline {
    Deadline::after(Duration::from_millis(50))
}

/// Rank 0 of two waits in vain for rank 1.
fn time_out(wait: impl Fn(&Communicator) -> Error + Send + Sync, parts: &[&str]) {
    threads(world(2), |comm| {
        if comm.rank() == 0 {
            let error = wait(comm);
            assert_eq!(
                (error.kind(), error.peer()),
                (ErrorKind::Timeout, Some(1 as Rank)),
                "{error}"
            );
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
        ],
    );
}

fn name_what_was_not_posted(path: Path) {
    common::threads_with(
        world(2),
        |config| {
            config.timeout = Duration::from_millis(500);
            config.path = Some(path);
        },
        |comm| {
            let peer = 1 - comm.rank();
            let regions = [comm.alloc(64).unwrap(), comm.alloc(64).unwrap()];
            let requests = match comm.rank() {
                0 => [4, 5].map(|tag| TransferRequest::receive(&regions[0], peer, tag)),
                _ => [4, 5].map(|tag| TransferRequest::send(&regions[1], peer, tag)),
            };
            let transfers = comm.exchange(&requests).unwrap();
            let stream = comm.create_stream(Priority::Normal).unwrap();
            if comm.rank() == 0 {
                for transfer in &transfers {
                    transfer.post(&stream).unwrap();
                    transfer.wait(&stream).unwrap();
                }
                let error = comm.synchronize(&stream).unwrap_err();
                assert_eq!(
                    (error.kind(), error.peer()),
                    (ErrorKind::Timeout, Some(1 as Rank)),
                    "{error}"
                );
                assert_says(
                    &error,
                    &[
                        "rank 0: synchronize: timed out after 500ms",
                        "rank 1 has not posted its send with tag 5",
                    ],
                );
            } else {
                // One of the two comes in time.
                transfers[0].post(&stream).unwrap();
                transfers[0].wait(&stream).unwrap();
                comm.synchronize(&stream).unwrap();
                std::thread::sleep(Duration::from_millis(700));
                transfers[1].post(&stream).unwrap();
                transfers[1].wait(&stream).unwrap();
            }
            comm.synchronize(&stream).unwrap();
            comm.barrier().unwrap();
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
