//! Connecting, and what is left when connections are dropped.

use super::common::{assert_error, assert_names_peer, assert_says, threads, world};
use super::kernels::{Fixture, TRANSPORTS};
use std::time::{Duration, Instant};
use warplink::channel::{Connection, ConnectionRequest};
use warplink::{Communicator, Deadline, DeviceKind, ErrorKind};

/// A connection between ranks 0 and 1 with `bytes` on each side.
fn pair(comm: &Communicator, tag: u64, bytes: usize) -> Connection {
    let region = comm.alloc(bytes).unwrap();
    let peer = 1 - comm.rank();
    let request = ConnectionRequest::new(peer, tag, &region);
    let connections = comm.connect(&[request]).unwrap();
    connections.find(peer, tag).unwrap().clone()
}

#[test]
fn wrong_requests_are_errors() {
    threads(world(2), |comm| {
        let region = comm.alloc(64).unwrap();
        let (rank, peer) = (comm.rank(), 1 - comm.rank());
        let request = |peer| ConnectionRequest::new(peer, 0, &region);
        for (requests, says) in [
            (vec![request(rank)], "this rank itself"),
            (vec![request(9)], "unknown peer 9"),
            (vec![request(peer), request(peer)], "two connections"),
        ] {
            let error = comm.connect(&requests).unwrap_err();
            assert_error(&error, ErrorKind::InvalidArgument, &[says]);
        }
        // Nobody else connects with tag 5.
        if rank == 0 {
            let deadline = Deadline::after(Duration::from_millis(100));
            let request = ConnectionRequest::new(peer, 5, &region);
            let error = comm.connect_until(&[request], deadline).unwrap_err();
            assert_names_peer(&error, ErrorKind::Timeout, 1);
            assert_says(&error, &["connect with tag 5"]);
        }
        // The withdrawn end is not met by the peer's next.
        comm.barrier().unwrap();
        let connection = pair(comm, 5, 64);
        assert_eq!((connection.peer(), connection.tag()), (peer, 5));
        let source = comm.alloc(65).unwrap();
        let stream = comm.create_stream(Default::default()).unwrap();
        let error = connection.write(&stream, 0, &source).unwrap_err();
        assert_says(&error, &["65 bytes from offset 0", "at most 64", "tag 5"]);
        let error = connection.write(&stream, (1, 0), &source).unwrap_err();
        assert_says(&error, &["unknown region 1 of the peer"]);
    });
}

#[test]
fn different_transports_are_an_error_on_both_ranks() {
    threads(world(2), |comm| {
        let region = comm.alloc(64).unwrap();
        let transport = TRANSPORTS[comm.rank()];
        let request = ConnectionRequest::new(1 - comm.rank(), 3, &region).with_transport(transport);
        let error = comm.connect(&[request]).unwrap_err();
        let says = ["tag 3", "direct", "proxied", "same transport"];
        assert_error(&error, ErrorKind::Mismatch, &says);
    });
}

#[test]
fn the_order_of_requests_does_not_matter() {
    threads(world(3), |comm| {
        let region = comm.alloc(64).unwrap();
        let mut requests: Vec<_> = (0..comm.world())
            .filter(|peer| *peer != comm.rank())
            .flat_map(|peer| [7, 8, 9].map(|tag| ConnectionRequest::new(peer, tag, &region)))
            .collect();
        requests.rotate_left(comm.rank() * 2);
        if comm.rank() == 1 {
            requests.reverse();
        }
        let connections = comm.connect(&requests).unwrap();
        for peer in (0..comm.world()).filter(|peer| *peer != comm.rank()) {
            for tag in [7, 8, 9] {
                let connection = connections.find(peer, tag).unwrap();
                assert_eq!((connection.peer(), connection.tag()), (peer, tag));
            }
            assert!(connections.find(peer, 10).is_err());
        }
    });
}

/// Descriptors and threads of this process, without those of allocations that are kept for reuse: on the host device each
/// has a descriptor, and one for peers. How many are kept depends on how late the peer releases its mappings.
fn resources(comm: &Communicator) -> [usize; 2] {
    let count = |path| std::fs::read_dir(path).unwrap().count();
    let kept = match comm.device().kind() {
        DeviceKind::Host => 2 * comm.pooled_allocations_and_bytes().0,
        DeviceKind::Cuda => 0,
    };
    let descriptors = count("/proc/self/fd").saturating_sub(kept);
    [descriptors, count("/proc/self/task")]
}

#[test]
fn a_hundred_setups_leave_nothing_behind() {
    super::common::processes(world(2), |comm| {
        let fixture = Fixture::new(comm);
        let mut counts = Vec::new();
        for round in 0..100 {
            for transport in TRANSPORTS {
                let connections = fixture.connect(transport, 2, 2 * 256);
                fixture.ping_pong(&connections, 256, 1);
                fixture.finish();
            }
            if round % 10 == 9 {
                comm.stop_proxy(comm.deadline()).unwrap();
            }
            if round % 20 == 19 {
                comm.release_idle().unwrap();
                comm.barrier().unwrap();
                counts.push((comm.registrations_and_mappings(), resources(comm)));
            }
        }
        // What the streams of dropped connections still hold goes soon, and so do their threads.
        let started = Instant::now();
        let (held, first) = counts[0];
        loop {
            comm.release_idle().unwrap();
            let (registered, mapped) = comm.registrations_and_mappings();
            let last = resources(comm);
            let more = |which: usize| last[which].saturating_sub(first[which]);
            if registered <= held.0 && mapped <= held.1 && more(0) <= 4 && more(1) <= 4 {
                break;
            }
            assert!(
                started.elapsed() < Duration::from_secs(30),
                "left behind: registrations, mappings, descriptors and threads {counts:?}, at last \
                 {registered}, {mapped}, {last:?}, kept {:?}",
                comm.pooled_allocations_and_bytes()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    });
}
