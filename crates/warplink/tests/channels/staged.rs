//! Connections over the network through staging memory, as those of GPUs go; here whatever the device is.

use super::common::{
    Ranks, Stopwatch, assert_error, assert_names_peer, assert_says, has_network, processes_of,
    resume, stop_self, threads_that_end, wait_until_stopped, waiting_streams, world,
};
use super::kernels::{Fixture, contents};
use super::network;
use std::time::Duration;
use warplink::channel::{ConnectionRequest, StagingConfig, Transport};
use warplink::device::Argument;
use warplink::{Config, ErrorKind};

/// Rings of so many chunks, used for everything.
fn rings(chunk_bytes: usize, chunks: usize) -> StagingConfig {
    StagingConfig {
        chunk_bytes,
        chunks,
        always: true,
        ..StagingConfig::default()
    }
}

/// Rings that are gone around often.
fn small(config: &mut Config) {
    config.staging = rings(16 << 10, 3);
}

/// The smallest rings.
pub(super) fn tiny(config: &mut Config) {
    config.staging = rings(64, 2);
}

/// Many small chunks.
fn fine(config: &mut Config) {
    config.staging = rings(64, 256);
}

/// Few large chunks.
fn large(config: &mut Config) {
    config.staging = rings(1 << 20, 3);
}

#[test]
fn data_goes_back_and_forth_in_chunks() {
    network::configured(small, None, network::back_and_forth);
}

#[test]
fn nothing_depends_on_when_chunks_are_copied() {
    network::configured(tiny, Some(Duration::from_micros(300)), network::ping_pong);
}

#[test]
fn a_source_may_change_after_a_flush_of_chunks() {
    network::configured(
        tiny,
        Some(Duration::from_micros(100)),
        network::flushed_slots,
    );
}

#[test]
fn signals_and_puts_of_many_blocks_arrive_in_chunks() {
    network::configured(fine, None, network::many_blocks);
}

#[test]
fn regions_are_added_and_got_from_in_chunks() {
    network::configured(small, None, network::added_regions);
}

#[test]
fn the_host_writes_and_reads_in_chunks() {
    network::configured(large, None, network::host_writes);
}

#[test]
fn writes_of_many_streams_go_in_chunks() {
    network::configured(small, None, network::many_streams);
}

#[test]
fn wrong_writes_in_chunks_are_errors() {
    network::configured(small, None, network::wrong_writes);
}

#[test]
fn a_stopped_proxy_ends_writes_in_chunks() {
    network::configured(small, None, network::stopped_proxy);
}

#[test]
fn setups_of_staged_connections_leave_nothing_behind() {
    network::configured(small, None, network::many_setups);
}

/// Both ranks get from one another with rings that are full in both directions.
#[test]
fn gets_of_both_ends_at_once_do_not_hold_each_other_up() {
    network::configured(tiny, None, |comm| {
        const BYTES: usize = 16 << 10;
        const GETS: usize = 80;
        let fixture = Fixture::new(comm);
        let (rank, peer) = (comm.rank(), 1 - comm.rank());
        let connection = fixture.pair(Transport::Network, BYTES);
        let region = connection.region(0).unwrap();
        region.upload(&[rank as u8 + 1; BYTES]).unwrap();
        comm.barrier().unwrap();
        let streams: Vec<_> = (0..waiting_streams(GETS))
            .map(|_| comm.create_stream(Default::default()).unwrap())
            .collect();
        let gets: Vec<_> = (0..GETS)
            .map(|number| {
                let stream = &streams[number % streams.len()];
                let target = comm.alloc(BYTES / 64).unwrap();
                connection.read(stream, &target, 0).unwrap();
                (stream, target)
            })
            .collect();
        for (stream, target) in &gets {
            comm.synchronize(stream).unwrap();
            assert!(target.download().unwrap() == [peer as u8 + 1; BYTES / 64]);
        }
        comm.barrier().unwrap();
    });
}

/// One end is gone long before the other, which still puts, signals, gets and flushes.
#[test]
fn an_end_that_is_gone_takes_what_the_peer_sends() {
    network::configured(small, None, |comm| {
        let fixture = Fixture::new(comm);
        for _ in 0..3 {
            let connection = fixture.pair(Transport::Network, 8 * 100);
            comm.barrier().unwrap();
            if comm.rank() == 1 {
                drop(connection);
            } else {
                std::thread::sleep(Duration::from_millis(20));
                let arguments = [connection.channel(), Argument::U32(50)];
                fixture.launch("many_puts", 2, &arguments).unwrap();
                fixture.launch("many_signals", 2, &arguments).unwrap();
                let target = comm.alloc(8 * 100).unwrap();
                connection.read(&fixture.stream, &target, 0).unwrap();
                fixture.finish();
            }
        }
        comm.barrier().unwrap();
        comm.stop_proxy(comm.deadline()).unwrap();
    });
}

/// A rank puts more to a stopped one than is taken on the way there, and does with another what it likes.
#[test]
fn a_stopped_peer_holds_up_no_other_connection() {
    const BLOCKS: u32 = 4;
    const EACH: u32 = 150;
    let Some(mut ranks) = Ranks::all(3).filter(|_| has_network()) else {
        return;
    };
    ranks.config = Some(tiny);
    let ranks = ranks.with_env("WARPLINK_HEARTBEAT_LIMIT", "40");
    ranks.run(|comm| {
        let processes = processes_of(comm);
        let fixture = Fixture::new(comm);
        let words = BLOCKS * EACH;
        let bytes = 8 * words as usize;
        let data = contents(1, bytes);
        let connections = fixture.connect(Transport::Network, 1, bytes);
        let connection = |peer| connections.find(peer, 0).unwrap();
        comm.barrier().unwrap();
        let wait_for = |count: u32| {
            let arguments = [connection(0).channel(), Argument::U64(count.into())];
            fixture.run("wait_for", 1, &arguments);
        };
        match comm.rank() {
            0 => {
                connection(2).region(0).unwrap().upload(&data).unwrap();
                wait_until_stopped(processes[2]);
                let arguments = [connection(2).channel(), Argument::U32(EACH)];
                fixture.run("many_puts", BLOCKS, &arguments);
                let begun = Stopwatch::start();
                let arguments = [connection(1).channel(), Argument::U32(10)];
                fixture.run("many_signals", 1, &arguments);
                let took = begun.elapsed();
                assert!(took < Duration::from_secs(5), "a flush took {took:?}");
                resume(processes[2]);
            }
            1 => wait_for(10),
            _ => {
                stop_self();
                wait_for(words);
                let arrived = connection(0).region(0).unwrap().download().unwrap();
                assert!(arrived == data, "not all words are there");
            }
        }
        comm.barrier().unwrap();
    });
}

#[test]
fn ranks_that_stage_differently_are_told_so() {
    if !has_network() {
        return;
    }
    let change = |config: &mut Config| config.staging.always = config.join.rank == 0;
    threads_that_end(world(2), change, |comm| {
        let region = comm.alloc(64).unwrap();
        let request = ConnectionRequest::new(1 - comm.rank(), 3, &region);
        let request = request.with_transport(Transport::Network);
        let connected = comm.connect(&[request]);
        if comm.device().kind() == warplink::DeviceKind::Host {
            let error = connected.unwrap_err();
            let says = ["tag 3", "stages", "same staging"];
            assert_error(&error, ErrorKind::Mismatch, &says);
        }
        comm.close().unwrap();
    });
}

#[test]
fn rings_that_cannot_be_are_refused() {
    if !has_network() {
        return;
    }
    let change = |config: &mut Config| {
        small(config);
        config.staging.chunk_bytes = 100;
    };
    threads_that_end(world(2), change, |comm| {
        let region = comm.alloc(64).unwrap();
        let peer = 1 - comm.rank();
        let request = ConnectionRequest::new(peer, 0, &region);
        let request = request.with_transport(Transport::Network);
        let error = comm.connect(&[request]).unwrap_err();
        assert_names_peer(&error, ErrorKind::InvalidArgument, peer);
        assert_says(&error, &["3 chunks of 100 bytes", "multiple of 64"]);
        comm.close().unwrap();
    });
}
