//! A peer that publishes what is no end of a connection: an error that names it, and nothing else breaks.

use super::common::{has_network, threads, threads_with, values, world};
use super::kernels::Fixture;
use std::time::Duration;
use warplink::bootstrap::Wait;
use warplink::channel::{ConnectionRequest, Transport};
use warplink::device::network::DeviceAccess;
use warplink::{Communicator, Config, Deadline, ErrorKind};

/// Ends that rank 1 publishes for each transport.
const ENDS: u64 = 60;

const SOON: Duration = Duration::from_secs(20);

/// Where `from` publishes its end of a connection to `to`: in the store, where every rank may write.
fn key(from: usize, to: usize, tag: u64) -> String {
    format!("warplink/world/channel/{from}>{to}/tag {tag}/0")
}

/// Alters a valid end as rank 1: parts missing, replaced or added.
fn altered(end: &[u8], number: usize) -> Vec<u8> {
    let mut altered = end.to_vec();
    let noise = values(1, number, 16);
    let place = usize::from(noise[0]) * 7 % altered.len();
    match number % 5 {
        0 => altered.truncate(place),
        1 => altered[place] ^= 1 << (noise[1] % 8),
        2 => altered[..16.min(end.len())].copy_from_slice(&noise[..16.min(end.len())]),
        3 => altered.extend(&noise),
        _ => altered = noise,
    }
    altered
}

fn ends_of_rank_1(comm: &Communicator, transport: Transport) {
    let store = comm.bootstrap().store();
    // An end of the same kind as those that rank 0 has.
    let region = comm.alloc(64).unwrap();
    let request =
        |tag| ConnectionRequest::new(1 - comm.rank(), tag, &region).with_transport(transport);
    if comm.rank() == 1 {
        let wait = || Wait::on(vec![0], Deadline::after(SOON));
        for tag in 0..ENDS {
            let end = store.get(&key(0, 1, tag), &wait()).unwrap();
            store
                .set(key(1, 0, tag), altered(&end, tag as usize))
                .unwrap();
        }
    } else {
        let mut refused = 0;
        for tag in 0..ENDS {
            let connected = comm.connect_until(&[request(tag)], Deadline::after(SOON));
            let Err(error) = connected else { continue };
            assert_eq!(error.peer(), Some(1), "tag {tag}: {error}");
            assert!(error.to_string().contains(&format!("tag {tag}")), "{error}");
            let kinds = [
                ErrorKind::Protocol,
                ErrorKind::InvalidHandle,
                ErrorKind::Mismatch,
                ErrorKind::Unsupported,
            ];
            assert!(kinds.contains(&error.kind()), "tag {tag}: {error}");
            refused += 1;
        }
        // What was changed may be what nothing depends on.
        assert!(refused > ENDS / 2, "{refused} of {ENDS} were refused");
    }
    comm.barrier().unwrap();
}

/// The ways of data over the network: as it is reached, through staging memory, and past that.
const WAYS: [fn(&mut Config); 3] = [
    |_| {},
    |config| config.staging.always = true,
    |config| {
        config.staging.always = true;
        config.staging.access = DeviceAccess::Direct;
    },
];

fn refused(transport: Transport, way: fn(&mut Config)) {
    threads_with(world(2), way, |comm| {
        ends_of_rank_1(comm, transport);
        // A true end is taken as if nothing had been.
        let fixture = Fixture::new(comm);
        let region = comm.alloc(2 * 64).unwrap();
        let request = ConnectionRequest::new(1 - comm.rank(), ENDS, &region);
        let connections = comm.connect(&[request]).unwrap();
        fixture.ping_pong(&connections, 64, 3);
        fixture.finish();
    });
}

#[test]
fn a_malformed_end_is_an_error_that_names_the_peer() {
    refused(Transport::Direct, |_| {});
}

#[test]
fn a_malformed_end_over_the_network_is_an_error_that_names_the_peer() {
    if has_network() {
        WAYS.into_iter()
            .for_each(|way| refused(Transport::Network, way));
    }
}

/// Rank 1 adds a region to one connection, and publishes for another what is no region.
fn regions_of_rank_1(comm: &Communicator, transport: Transport) {
    let store = comm.bootstrap().store();
    let (rank, peer) = (comm.rank(), 1 - comm.rank());
    let region = comm.alloc(64).unwrap();
    let request = |tag| ConnectionRequest::new(peer, tag, &region).with_transport(transport);
    let requests = [request(0), request(1)];
    let connections = comm.connect(&requests).unwrap();
    let [broken, whole] = [0, 1].map(|more| connections.find(peer, more).unwrap());
    let added = comm.alloc(256).unwrap();
    let of = |from, number| format!("{}/region {number}", key(from, 1 - from, 0));
    for number in [1, 2] {
        if rank == 1 {
            let wait = Wait::on(vec![0], Deadline::after(SOON));
            let handle = store.get(&of(0, number), &wait).unwrap();
            store.set(of(1, number), &handle[..3]).unwrap();
            let numbers = comm.add_regions(&[(whole, &added)]).unwrap();
            assert_eq!(numbers, [number]);
        } else {
            let both = [(broken, &added), (whole, &added)];
            let error = comm.add_regions(&both).unwrap_err();
            assert_eq!(error.peer(), Some(1), "{error}");
            let kinds = [ErrorKind::Protocol, ErrorKind::InvalidHandle];
            assert!(kinds.contains(&error.kind()), "{error}");
            assert_eq!(broken.peer_bytes(number), Some(0));
        }
        assert_eq!(whole.peer_bytes(number), Some(256));
    }
    comm.barrier().unwrap();
}

#[test]
fn a_malformed_region_leaves_the_numbers_of_all_as_the_peers_have_them() {
    threads(world(2), |comm| regions_of_rank_1(comm, Transport::Direct));
    if has_network() {
        for way in WAYS {
            threads_with(world(2), way, |comm| {
                regions_of_rank_1(comm, Transport::Network);
            });
        }
    }
}
