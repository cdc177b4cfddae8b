//! Connections whose data the network's library moves from memory to memory by itself, past the staging memory: what it
//! does with memory of GPUs where it can. Signals are messages. On the host device, where it can with Debian's UCX too,
//! that is asked for; on GPUs it depends on UCX, and what it cannot do is staged.

use super::common::{kind, tell};
use super::kernels::{Fixture, contents};
use super::network;
use std::time::{Duration, Instant};
use warplink::channel::{Connection, NetworkPath, StagingConfig, Transport};
use warplink::device::network::DeviceAccess;
use warplink::{Communicator, Config, DeviceKind};

/// Set where UCX is known to reach memory of GPUs: nothing is staged then.
const REQUIRED: &str = "WARPLINK_REQUIRE_NETWORK_MEMORY";

fn config(config: &mut Config, access: DeviceAccess) {
    config.staging = StagingConfig {
        chunk_bytes: 16 << 10,
        chunks: 3,
        always: true,
        access,
    };
}

fn direct(to: &mut Config) {
    config(to, DeviceAccess::Direct);
}

/// Rings as they are by default, for figures.
fn direct_by_default(to: &mut Config) {
    direct(to);
    to.staging.chunk_bytes = StagingConfig::default().chunk_bytes;
    to.staging.chunks = StagingConfig::default().chunks;
}

fn staged(to: &mut Config) {
    direct_by_default(to);
    to.staging.access = DeviceAccess::Staged;
}

fn one_end_stages(to: &mut Config) {
    match to.join.rank {
        0 => config(to, DeviceAccess::Staged),
        _ => config(to, DeviceAccess::Direct),
    }
}

/// No network card is known to reach what is the host's.
fn automatic(to: &mut Config) {
    config(to, DeviceAccess::Automatic);
}

/// Checks that the library moves the data, where that is certain, and tells what does.
fn assert_direct(comm: &Communicator, connection: &Connection) {
    let path = connection.network_path().unwrap();
    let kind = comm.device().kind();
    if kind == DeviceKind::Host || std::env::var_os(REQUIRED).is_some() {
        assert_eq!(path, NetworkPath::Direct, "{connection:?}");
    }
    tell(format!("over the network, {kind}: {path:?}"));
}

#[test]
fn data_goes_back_and_forth_past_the_chunks() {
    network::configured(direct, None, |comm| {
        assert_direct(comm, &Fixture::new(comm).pair(Transport::Network, 64));
        network::back_and_forth(comm);
    });
}

#[test]
fn nothing_depends_on_when_signals_are_copied() {
    network::configured(direct, Some(Duration::from_micros(300)), network::ping_pong);
}

#[test]
fn a_source_may_change_after_a_flush_of_what_went_past_the_chunks() {
    network::configured(direct, None, network::flushed_slots);
}

#[test]
fn signals_and_puts_of_many_blocks_arrive_past_the_chunks() {
    network::configured(direct, None, network::many_blocks);
}

#[test]
fn regions_are_added_and_got_from_past_the_chunks() {
    network::configured(direct, None, network::added_regions);
}

/// Memory outside the connection's regions is staged, into and out of regions that are accessed directly.
#[test]
fn the_host_writes_and_reads_past_the_chunks_and_through_them() {
    network::configured(direct, None, network::host_writes);
}

#[test]
fn setups_past_the_chunks_leave_nothing_behind() {
    network::configured(direct, None, network::many_setups);
}

#[test]
fn where_one_end_stages_both_do() {
    network::configured(one_end_stages, None, |comm| {
        let connection = Fixture::new(comm).pair(Transport::Network, 64);
        assert_eq!(connection.network_path(), Some(NetworkPath::Staged));
        drop(connection);
        network::back_and_forth(comm);
        network::added_regions(comm);
    });
}

#[test]
fn without_a_network_card_for_the_memory_data_is_staged() {
    if kind() == DeviceKind::Cuda {
        return;
    }
    network::configured(automatic, None, |comm| {
        let connection = Fixture::new(comm).pair(Transport::Network, 64);
        assert_eq!(connection.network_path(), Some(NetworkPath::Staged));
    });
}

#[test]
fn large_puts_past_the_chunks_are_right_and_as_fast_as_is_printed() {
    network::configured(direct_by_default, None, |comm| large_puts(comm, true));
}

#[test]
fn large_puts_in_chunks_are_right_and_as_fast_as_is_printed() {
    network::configured(staged, None, |comm| large_puts(comm, false));
}

/// Both ranks put one after the other, and then at the same time: 64 MiB on a GPU, of which the best time is told; on the
/// host device more than is sent at once.
fn large_puts(comm: &Communicator, is_direct: bool) {
    const MIB: usize = 1 << 20;
    let (mib, rounds) = match comm.device().kind() {
        DeviceKind::Cuda => (64, 6),
        DeviceKind::Host => (20, 2),
    };
    let bytes = mib * MIB;
    let fixture = Fixture::new(comm);
    let (rank, peer) = (comm.rank(), 1 - comm.rank());
    let connection = fixture.pair(Transport::Network, 2 * bytes);
    if is_direct {
        assert_direct(comm, &connection);
    } else {
        assert_eq!(connection.network_path(), Some(NetworkPath::Staged));
    }
    let region = connection.region(0).unwrap();
    let source = region.slice(0..bytes).unwrap();
    let arrived = region.slice(bytes..2 * bytes).unwrap();
    let data = |rank: usize, round: u32| {
        let part = contents(2 * round + rank as u32, MIB);
        part.repeat(mib)
    };
    for turn in [Some(0), Some(1), None] {
        let puts = |who: usize| turn.is_none_or(|turn| turn == who);
        let mut took = Duration::MAX;
        for round in 0..rounds {
            source.upload(&data(rank, round)).unwrap();
            comm.barrier().unwrap();
            if puts(rank) {
                let begun = Instant::now();
                connection
                    .write(&fixture.stream, bytes as u64, &source)
                    .unwrap();
                comm.synchronize(&fixture.stream).unwrap();
                took = took.min(begun.elapsed());
            }
            comm.barrier().unwrap();
            if puts(peer) {
                let is_right = arrived.download().unwrap() == data(peer, round);
                assert!(is_right, "round {round} of {turn:?}");
            }
            comm.barrier().unwrap();
        }
        if puts(rank) {
            tell(format!(
                "over the network, {:?}, {mib} MiB {}: {:.2} GB/s",
                connection.network_path().unwrap(),
                turn.map_or("both at once", |_| "alone"),
                bytes as f64 / took.as_secs_f64() / 1e9
            ));
        }
    }
}
