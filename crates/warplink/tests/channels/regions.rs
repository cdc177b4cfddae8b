//! Places in regions: added while kernels run, never added, misaligned, and further apart than a trigger reaches.

use super::common::{
    assert_error, assert_names_peer, assert_says, kind, processes, threads, threads_with,
    with_timeout, world,
};
use super::kernels::{Fixture, TRANSPORTS, contents};
use std::time::Duration;
use warplink::channel::{ConnectionRequest, Transport};
use warplink::device::Argument;
use warplink::{Config, Deadline, DeviceKind, ErrorKind};

#[test]
fn a_kernel_that_runs_already_finds_a_region_that_is_added() {
    threads(world(2), |comm| {
        let fixture = Fixture::new(comm);
        let bytes = 4096;
        for transport in TRANSPORTS {
            let connection = fixture.pair(transport, bytes);
            let (rank, peer) = (fixture.rank(), 1 - fixture.rank());
            let own = connection.region(0).unwrap();
            own.upload(&contents(rank, bytes)).unwrap();
            let arguments = [connection.channel(), Argument::U64(bytes as u64)];
            fixture.launch("put_when_added", 1, &arguments).unwrap();
            // Long enough for the kernel to find nothing at first.
            std::thread::sleep(Duration::from_millis(20));
            let added = comm.alloc(bytes).unwrap();
            comm.add_regions(&[(&connection, &added)]).unwrap();
            let arguments = [connection.channel(), Argument::U64(1)];
            fixture.run("wait_for", 1, &arguments);
            assert!(added.download().unwrap() == contents(peer, bytes));
        }
    });
}

/// Rank 1 adds its region when rank 0 has given up, and both add one then.
#[test]
fn a_peer_that_adds_no_region_is_a_timeout_that_names_it() {
    threads_with(world(2), with_timeout(Duration::from_secs(5)), |comm| {
        let fixture = Fixture::new(comm);
        let connection = fixture.pair(Transport::Direct, 64);
        let region = comm.alloc(64).unwrap();
        if comm.rank() == 0 {
            let error = comm.add_regions(&[(&connection, &region)]).unwrap_err();
            assert_names_peer(&error, ErrorKind::Timeout, 1);
            assert_says(&error, &["add regions", "rank 1 to add a region", "tag 0"]);
        }
        let until = Deadline::after(Duration::from_secs(20));
        comm.bootstrap().barrier(until).unwrap();
        assert_eq!(comm.add_regions(&[(&connection, &region)]).unwrap(), [1]);
    });
}

#[test]
fn a_connection_has_as_many_regions_as_channels_name() {
    threads(world(2), |comm| {
        let fixture = Fixture::new(comm);
        let connection = fixture.pair(Transport::Direct, 64);
        let region = comm.alloc(64).unwrap();
        let added = [(&connection, &region)];
        for number in 1..16 {
            assert_eq!(comm.add_regions(&added).unwrap(), [number]);
        }
        let error = comm.add_regions(&added).unwrap_err();
        let says = ["has 16 regions already; expected at most 16"];
        assert_error(&error, ErrorKind::InvalidArgument, &says);
        // Those that it has are there.
        let arguments = [connection.channel(), Argument::U32(15), Argument::U64(32)];
        fixture.run("get_region", 1, &arguments);
    });
}

#[test]
fn a_fifo_has_a_power_of_two_of_slots() {
    for slots in [0, 3, 1 << 21] {
        let config = move |config: &mut Config| config.proxy.slots = slots;
        threads_with(world(2), config, |comm| {
            let region = comm.alloc(64).unwrap();
            let request = ConnectionRequest::new(1 - comm.rank(), 0, &region)
                .with_transport(Transport::Proxied);
            let error = comm.connect(&[request]).unwrap_err();
            let says = [&format!("a FIFO of {slots} slots"), "a power of two"];
            assert_error(&error, ErrorKind::InvalidArgument, &says);
        });
    }
}

#[test]
fn packets_that_are_misplaced_are_refused() {
    threads(world(2), |comm| {
        let fixture = Fixture::new(comm);
        let connection = fixture.pair(Transport::Direct, 1024);
        let arguments = [connection.channel(), Argument::U64(1024)];
        fixture.run("misplaced_packets", 1, &arguments);
        comm.barrier().unwrap();
        let own = connection.region(0).unwrap().download().unwrap();
        assert!(own.iter().all(|byte| *byte == 0), "something was put");
    });
}

/// More than 2 GiB by one call, which is several triggers; on GPUs, which have so much memory to spare.
#[test]
fn a_put_of_more_than_a_trigger_moves_is_whole() {
    if kind() == DeviceKind::Host {
        return;
    }
    const BYTES: usize = (2 << 30) + (1 << 20);
    const PIECE: usize = 4096;
    processes(world(2), |comm| {
        let fixture = Fixture::new(comm);
        let connection = fixture.pair(Transport::Proxied, 2 * BYTES);
        let memory = connection.region(0).unwrap().memory().clone();
        // Both ends, and around the end of the first trigger.
        let places = [0, (2 << 30) - PIECE, 2 << 30, BYTES - PIECE];
        for (number, place) in places.into_iter().enumerate() {
            let piece = memory.slice(place..place + PIECE).unwrap();
            let data = contents(2 * number as u32 + fixture.rank(), PIECE);
            comm.device().upload(&piece, &data).unwrap();
        }
        comm.barrier().unwrap();
        let arguments = [connection.channel(), Argument::U64(BYTES as u64)];
        fixture.run("put_half", 1, &arguments);
        for (number, place) in places.into_iter().enumerate() {
            let from = BYTES + place;
            let mut found = vec![0; PIECE];
            let piece = memory.slice(from..from + PIECE).unwrap();
            comm.device().download(&piece, &mut found).unwrap();
            let expected = contents(2 * number as u32 + 1 - fixture.rank(), PIECE);
            assert!(found == expected, "at {place}");
        }
        comm.barrier().unwrap();
    });
}
