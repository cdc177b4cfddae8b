//! A peer receives every notice once and in order, whatever its service drops.

use super::message::Request;
use super::peers::PeerInfo;
use super::service::{self, Handler, Service};
use super::{IdleMappings, MemoryRegistry, Message};
use crate::device::{AllocationKind, Device};
use crate::device::{DeviceConfig, DeviceKind};
use crate::error::Rank;
use crate::sync::lock;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::time::Instant;

const SECRET: &[u8] = b"a secret of tests";

fn eventually(what: &str, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(10), "not yet: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn device() -> Arc<dyn Device> {
    crate::device::open(&DeviceConfig::new(DeviceKind::Host, 0)).unwrap()
}

/// Rank 0 of two; the peer answers with the service `peer`.
fn registry(device: &Arc<dyn Device>, peer: &[u8], idle: IdleMappings) -> MemoryRegistry {
    let peer = PeerInfo::of_this_rank(&**device, peer);
    let peer = postcard::to_stdvec(&peer).unwrap();
    let gather = |own: Vec<u8>| {
        // The second exchange is about access to each other's memory.
        let peer = if own.len() == 2 {
            own.clone()
        } else {
            peer.clone()
        };
        Ok(vec![own, peer])
    };
    MemoryRegistry::start(0, device, SECRET, idle, 0, gather).unwrap()
}

fn release(region: u64) -> Message {
    Message::Released {
        generation: 1,
        region,
        handles: 1,
    }
}

fn notice(from: Rank, number: u64, message: Message) -> Request {
    Request {
        from,
        number,
        message,
    }
}

#[test]
fn dropped_notices_are_retransmitted() {
    let device = device();
    let name = b"warplink-test-that-drops-notices".to_vec();
    let listener = service::listen(&name).unwrap();
    let registry = registry(&device, &name, IdleMappings::default());
    let region = registry.allocate(64, AllocationKind::Plain).unwrap();
    registry.export_handle(&region, 1).unwrap().sent();
    drop(region);
    let received = Arc::new(Mutex::new(Vec::new()));
    let (heard, token) = (received.clone(), registry.shared.token);
    let peer = std::thread::spawn(move || {
        let handler: Handler = Box::new(move |request| {
            lock(&heard).push(request);
            Ok(None)
        });
        // First not read; then read and handled but not answered; then answered.
        drop(rustix::net::accept(&listener).unwrap());
        let unanswered = rustix::net::accept(&listener).unwrap();
        let request = service::read_request(&unanswered, &token).unwrap();
        assert_eq!(handler(request).unwrap().map(|_| ()), None);
        drop(unanswered);
        // The third one requests unmapping of an unregistered allocation.
        for _ in 0..3 {
            let connection = rustix::net::accept(&listener).unwrap();
            service::answer(&connection, &token, &handler).unwrap();
        }
    });
    registry.notify(1, release(5));
    registry.notify(1, release(6));
    peer.join().unwrap();
    let received: Vec<Request> = lock(&received).clone();
    // The dropped region's notice comes first.
    assert!(
        matches!(received[0].message, Message::Unmap { .. }),
        "{received:?}"
    );
    assert_eq!(received[0], received[1]);
    assert_eq!(
        received[2..],
        [2, 3].map(|number| notice(0, number, release(number + 3)))
    );
    assert_eq!(
        registry.counts().0,
        1,
        "freed though its peer may still map it"
    );
    // Now nobody listens.
    registry.notify(1, release(7));
    eventually("the peer is gone", || registry.counts().0 == 0);
}

#[test]
fn a_notice_that_comes_again_is_not_handled_again() {
    let device = device();
    let service = Service::start([0; 16], Box::new(|_| Ok(None))).unwrap();
    let registry = registry(&device, service.name(), IdleMappings::default());
    let region = registry.allocate(64, AllocationKind::Plain).unwrap();
    for _ in 0..2 {
        registry.export_handle(&region, 1).unwrap().sent();
    }
    let (generation, number) = (region.generation(), region.registration.numbers.region);
    drop(region);
    let released = |region| Message::Released {
        generation,
        region,
        handles: 1,
    };
    let hear = |number, message| {
        registry
            .requests
            .answer(notice(1, number, message))
            .unwrap()
    };
    for again in 1..4 {
        assert!(hear(1, released(0)).is_none());
        assert!(hear(2, released(number)).is_none());
        assert_eq!(registry.counts().0, 1, "freed after attempt {again}");
    }
    hear(3, released(0));
    hear(4, released(number));
    assert_eq!(registry.counts().0, 0);
}
