//! Connections over the network, between ranks of one machine. They are left out, with a notice, where UCX is
//! missing.

use super::common::{assert_says, kind, processes, world};
use super::kernels::{Rig, contents};
use std::time::{Duration, Instant};
use warplink::channel::{ConnectionRequest, Transport};
use warplink::device::network::{self, NetworkOptions};
use warplink::device::{Argument, MemoryOp};
use warplink::{Communicator, DeviceKind, ErrorKind};

/// Runs `body` on two ranks where there is a network.
fn with_network(body: impl Fn(&Communicator)) {
    // The network does not reach the memory of GPUs.
    if kind() == DeviceKind::Cuda {
        return;
    }
    match network::open(&NetworkOptions::default()) {
        Ok(_) => processes(world(2), body),
        Err(error) if error.kind() == ErrorKind::LibraryMissing => println!("left out: {error}"),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn data_goes_back_and_forth() {
    with_network(|comm| {
        let rig = Rig::new(comm);
        for (tags, bytes, rounds) in [(1, 64, 30), (3, 4096, 20), (1, 1 << 20, 5)] {
            let connections = rig.connect(Transport::Network, tags, 2 * bytes as usize);
            rig.ping_pong(&connections, bytes, rounds);
            rig.finish();
        }
    });
}

#[test]
fn a_source_may_change_after_a_flush() {
    with_network(|comm| {
        let rig = Rig::new(comm);
        let (bytes, slots) = (4096, 16);
        let connection = rig.pair(Transport::Network, (1 + slots) * bytes);
        let arguments = [
            connection.channel(),
            Argument::U64(bytes as u64),
            Argument::U32(slots as u32),
        ];
        rig.launch("flushed_slots", 1, &arguments).unwrap();
        rig.finish();
    });
}

#[test]
fn signals_and_puts_of_many_blocks_arrive() {
    with_network(|comm| {
        let rig = Rig::new(comm);
        let (blocks, each) = (8, 500);
        let words = (blocks * each) as usize;
        let connection = rig.pair(Transport::Network, 8 * words);
        let (region, data) = (connection.region(0).unwrap(), contents(1, 8 * words));
        if comm.rank() == 0 {
            region.upload(&data).unwrap();
            let arguments = [connection.channel(), Argument::U32(each)];
            rig.launch("many_puts", blocks, &arguments).unwrap();
            rig.launch("many_signals", blocks, &arguments).unwrap();
            rig.finish();
        } else {
            // A stream may wait as a kernel does.
            let wait = MemoryOp::Wait {
                word: connection.inbound(),
                value: 2 * words as u64,
            };
            rig.stream.memory_ops(&[wait]).unwrap();
            rig.finish();
            assert!(
                region.download().unwrap() == data,
                "not all words are there"
            );
        }
    });
}

#[test]
fn regions_are_added_and_got_from() {
    with_network(|comm| {
        let rig = Rig::new(comm);
        let (rank, bytes) = (comm.rank(), 4096);
        let connection = rig.pair(Transport::Network, bytes);
        let peers = 2 * bytes + 64 * (1 - rank);
        let added = comm.alloc(2 * bytes + 64 * rank).unwrap();
        let mut own = contents(7 + rank as u32, bytes);
        own.resize(added.bytes(), 0);
        own.copy_within(0..bytes, bytes);
        added.upload(&own).unwrap();
        assert_eq!(comm.add_regions(&[(&connection, &added)]).unwrap(), [1]);
        assert_eq!(connection.peer_bytes(1), Some(peers));
        let arguments = [
            connection.channel(),
            Argument::U32(1),
            Argument::U64(bytes as u64),
        ];
        rig.launch("get_region", 1, &arguments).unwrap();
        rig.finish();
        comm.barrier().unwrap();
        // What was got lies in the first region, and what the peer got was put to the second.
        let got = connection.region(0).unwrap().download().unwrap();
        assert!(got == contents(8 - rank as u32, bytes));
        let put = added.download().unwrap();
        assert!(put[..bytes] == contents(7 + rank as u32, bytes));
        let error = connection.write(&rig.stream, 0, added.slice(0..64).unwrap());
        assert_says(&error.unwrap_err(), &["on another machine", "in a kernel"]);
        let arguments = [connection.channel(), Argument::U64(bytes as u64)];
        // Only the first region is as long as this.
        let other = rig.pair(Transport::Network, bytes);
        let arguments = [other.channel(), arguments[1].clone()];
        rig.launch("out_of_range", 1, &arguments).unwrap();
        rig.finish();
        comm.barrier().unwrap();
    });
}

#[test]
fn setups_leave_nothing_behind() {
    with_network(|comm| {
        let rig = Rig::new(comm);
        let mut counts = Vec::new();
        for round in 0..30 {
            let connections = rig.connect(Transport::Network, 2, 2 * 256);
            rig.ping_pong(&connections, 256, 1);
            rig.finish();
            if round % 10 == 9 {
                comm.stop_proxy(comm.deadline()).unwrap();
            }
        }
        let started = Instant::now();
        // What both ends have let go of is let go of.
        while comm.registrations_and_mappings().0 > 2 {
            counts.push(comm.registrations_and_mappings());
            comm.release_idle().unwrap();
            std::thread::sleep(Duration::from_millis(10));
            assert!(
                started.elapsed() < Duration::from_secs(10),
                "left behind: {counts:?}"
            );
        }
        comm.barrier().unwrap();
    });
}

#[test]
fn a_network_device_that_is_not_there_is_an_error() {
    with_network(|comm| {
        let region = comm.alloc(64).unwrap();
        let request = ConnectionRequest::new(1 - comm.rank(), 0, &region);
        let error = comm
            .connect(&[request.clone().with_network_devices("none7")])
            .unwrap_err();
        assert_eq!(error.peer(), Some(1 - comm.rank()), "{error}");
        comm.barrier().unwrap();
        let connections = comm.connect(&[request.with_network_devices("lo")]).unwrap();
        assert_eq!(connections.all()[0].transport(), Transport::Network);
        let rig = Rig::new(comm);
        rig.launch("signal_and_wait", 1, &[connections.all()[0].channel()])
            .unwrap();
        rig.finish();
    });
}
