//! Channels between devices without atomic operations on each other's memory, and without access to it.

use super::common::{LIMITS, Ranks, assert_error, assert_says, pretending, world};
use super::kernels::Fixture;
use warplink::ErrorKind;
use warplink::channel::{ConnectionRequest, Transport};
use warplink::signal::RemoteSignals;

#[test]
fn an_open_transport_goes_by_the_proxy() {
    pretending(world(2), |comm, _| {
        let fixture = Fixture::new(comm);
        let region = comm.alloc(2 * 4096).unwrap();
        let peer = 1 - comm.rank();
        let connections = comm
            .connect(&[ConnectionRequest::new(peer, 1, &region)])
            .unwrap();
        assert_eq!(connections.all()[0].transport(), Transport::Proxied);
        fixture.ping_pong(&connections, 4096, 50);
        fixture.finish();
    });
}

/// Operations that need them are refused, with the reason.
#[test]
fn what_needs_atomic_operations_is_refused() {
    pretending(world(2), |comm, reaches| {
        let peer = 1 - comm.rank();
        let region = comm.alloc(64).unwrap();
        let request = ConnectionRequest::new(peer, 1, &region).with_transport(Transport::Direct);
        let error = comm.connect(&[request]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        let why = if reaches {
            "no atomic operations"
        } else {
            "cannot map"
        };
        assert_says(&error, &[why, "leave the transport open"]);
        let signals = comm.signals(2).unwrap();
        let handle = comm.export_handle(signals.region(), peer).unwrap();
        let handles = comm.all_gather_bytes(&handle).unwrap();
        let mapped = comm.open_handle(peer, &handles[peer]).unwrap();
        assert!(!mapped.has_atomics());
        let error = RemoteSignals::new(mapped).unwrap_err();
        assert_says(&error, &["no atomic operations", "by the proxy"]);
    });
}

/// Two ranks find the same where only one of them lacks something.
#[test]
fn one_rank_that_lacks_something_is_enough() {
    for limit in LIMITS {
        Ranks {
            config: Some(|config| {
                if config.join.rank == 0 {
                    config.device.pretend = Default::default();
                }
            }),
            ..Ranks::of(world(2)).with_env("WARPLINK_PRETEND", limit)
        }
        .run(|comm| {
            let region = comm.alloc(64).unwrap();
            let request = ConnectionRequest::new(1 - comm.rank(), 1, &region);
            let connections = comm.connect(&[request]).unwrap();
            assert_eq!(connections.all()[0].transport(), Transport::Proxied);
        });
    }
}

/// Memory of the device's own is not mapped by a device that cannot; memory of the host is.
#[test]
fn memory_of_the_device_stays_unmapped() {
    pretending(world(2), |comm, reaches| {
        let peer = 1 - comm.rank();
        for (kind, maps) in [
            (warplink::device::AllocationKind::Plain, reaches),
            (warplink::device::AllocationKind::Host, true),
        ] {
            let own = comm.device().allocate(4096, kind).unwrap();
            let region = comm.register(&own).unwrap();
            let handle = comm.export_handle(&region, peer).unwrap();
            let handles = comm.all_gather_bytes(&handle).unwrap();
            let opened = comm.open_handle(peer, &handles[peer]);
            assert_eq!(opened.is_ok(), maps, "{kind:?}: {opened:?}");
            if let Err(error) = opened {
                let says = ["cannot map", "allocate the memory"];
                assert_error(&error, ErrorKind::Unsupported, &says);
            }
        }
        comm.barrier().unwrap();
    });
}
