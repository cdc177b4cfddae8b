//! Behaviour of an end for arbitrary data written by its peer.

use super::end::{EndParts, StagedEnd};
use super::message::{StagingMessage, WORDS};
use super::state::StagingOperation;
use super::*;
use crate::deadline::Deadline;
use crate::device::network::RemoteMemory;
use crate::device::{AllocationKind, At, DeviceConfig, DeviceKind, DeviceSlice, Fault, Word};
use crate::error::ErrorKind;
use crate::transport::no_peer::{CarrierCall, NoPeer};
use proptest::prelude::*;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const LATE: Duration = Duration::from_secs(10);
const REGION: usize = 256;

/// An end, and the memory that its peer writes to.
struct Fixture {
    device: Arc<dyn Device>,
    end: StagedEnd,
    incoming: Arc<Incoming>,
    fault: Arc<Fault>,
    peer: Arc<NoPeer>,
    region: DeviceSlice,
    inbound: Word,
    /// Number of messages sent by the peer.
    sent: u64,
}

impl Fixture {
    fn new() -> Self {
        let device = crate::device::open(&DeviceConfig::new(DeviceKind::Host, 0)).unwrap();
        let shape = RingShape {
            chunk_bytes: 64,
            chunks: 4,
        };
        let incoming = Arc::new(Incoming::allocate(&device, shape).unwrap());
        let fault = Arc::<Fault>::default();
        let words = device
            .allocate_signals_for(64, AllocationKind::Plain, &fault)
            .unwrap();
        let region = device.allocate_staging(REGION).unwrap().slice().clone();
        let peer = Arc::<NoPeer>::default();
        let parts = EndParts {
            peer: 1,
            fault: fault.clone(),
            connection: peer.clone(),
            control: Arc::new(RemoteMemory::of_nobody(shape.control_bytes())),
            peer_ring: Arc::new(RemoteMemory::of_nobody(shape.ring_bytes())),
            peer_shape: shape,
            incoming: incoming.clone(),
            inbound: words.word(0).unwrap(),
        };
        let end = StagedEnd::new(&device, parts).unwrap();
        end.set_region(0, &region, false);
        Self {
            inbound: words.word(0).unwrap(),
            device,
            end,
            incoming,
            fault,
            peer,
            region,
            sent: 0,
        }
    }

    /// Makes the region, and the peer's of `bytes`, directly accessible.
    fn reach_past_the_rings(&self, bytes: usize) {
        self.end.set_region(0, &self.region, true);
        let peers = RemoteMemory::of_nobody(bytes);
        self.end.set_peers_region(0, Arc::new(peers));
    }

    fn read(&self, word: &Word) -> u64 {
        let mut bytes = [0; 8];
        self.device.download(word.as_slice(), &mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    }

    /// Sends a message with a raw header, and a chunk filled with 7.
    fn send(&mut self, header: [u64; WORDS]) {
        let (_, start) = self.incoming.shape.chunk(self.sent);
        let chunk = self.incoming.ring.slice().slice(start..start + 64).unwrap();
        self.device.upload(&chunk, &[7; 64]).unwrap();
        let at = self.incoming.shape.header(self.sent);
        for (word, value) in header.into_iter().enumerate() {
            self.incoming.control.store(at + 8 * word, value);
        }
        self.sent += 1;
        self.incoming.control.store(ARRIVED, self.sent);
    }

    /// Advances the end until `done` or a failure.
    fn until(&self, done: impl Fn() -> bool) {
        let started = Instant::now();
        while !done() && self.fault.error().is_none() {
            self.end.advance();
            assert!(started.elapsed() < LATE, "{:?}", self.end);
            std::thread::yield_now();
        }
    }

    /// Receives all messages, so that the peer may send again.
    fn take(&self) {
        self.until(|| self.end.returned() == self.sent);
    }

    fn word(&self) -> u64 {
        self.read(&self.inbound)
    }

    fn assert_refused(&self, expected: &str) {
        self.end.advance();
        let error = self.fault.error().unwrap();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::Protocol, Some(1)));
        assert!(error.to_string().contains(expected), "{error}");
        // It receives nothing any more.
        assert!(!self.end.advance());
    }
}

#[test]
fn messages_are_served_in_order() {
    let mut fixture = Fixture::new();
    let at = At::from(192);
    fixture.send(StagingMessage::Put { at, bytes: 64 }.encode(0));
    fixture.send(StagingMessage::Signal { value: 3 }.encode(1));
    fixture.take();
    fixture.until(|| fixture.word() == 3);
    let mut bytes = [0; REGION];
    fixture
        .device
        .download(&fixture.region, &mut bytes)
        .unwrap();
    assert!(bytes[..192] == [0; 192] && bytes[192..] == [7; 64]);
    // The reply to this end's get arrives in parts.
    let target = fixture
        .device
        .allocate_staging(100)
        .unwrap()
        .slice()
        .clone();
    let at = At::default();
    fixture.end.push(StagingOperation::Get {
        target: target.clone(),
        at,
    });
    fixture.until(|| fixture.end.gets() == 1);
    for (number, offset, bytes) in [(2, 0, 64), (3, 64, 36)] {
        let id = 0;
        fixture.send(StagingMessage::Got { id, offset, bytes }.encode(number));
    }
    fixture.take();
    let mut bytes = [0; 100];
    fixture.device.download(&target, &mut bytes).unwrap();
    assert!(bytes == [7; 100] && fixture.end.gets() == 0);
}

#[test]
fn protocol_violation_names_the_peer() {
    let at = |region, offset| At { region, offset };
    let put = |at, bytes| StagingMessage::Put { at, bytes };
    let id = 5;
    for (message, expected) in [
        (
            put(at(0, REGION as u64 - 63), 64),
            "64 bytes from 193 of region 0",
        ),
        (put(at(0, u64::MAX), 64), "region 0, which are not there"),
        (put(at(1, 0), 8), "of region 1"),
        (put(at(u32::MAX, 0), 8), "which are not there"),
        (put(at(0, 0), 65), "65 bytes; expected at most 64"),
        (StagingMessage::Signal { value: 0 }, "signals 0 after 0"),
        (StagingMessage::Signal { value: 1 << 62 }, "signals"),
        (
            StagingMessage::Get {
                id,
                at: at(0, 0),
                bytes: 257,
            },
            "257 bytes from 0",
        ),
        (
            StagingMessage::Get {
                id,
                at: at(0, 0),
                bytes: 0,
            },
            "asks for 0 bytes",
        ),
        (
            StagingMessage::Got {
                id,
                offset: 0,
                bytes: 8,
            },
            "of get 5, which are not due",
        ),
    ] {
        let mut fixture = Fixture::new();
        fixture.send(message.encode(0));
        fixture.assert_refused(expected);
    }
    let mut fixture = Fixture::new();
    fixture.send(StagingMessage::End.encode(0));
    fixture.send(StagingMessage::Signal { value: 1 }.encode(1));
    fixture.assert_refused("after its end");
    let mut fixture = Fixture::new();
    fixture.send(StagingMessage::End.encode(9));
    fixture.assert_refused("that of message 9; expected 0");
    let fixture = Fixture::new();
    fixture.incoming.control.store(ARRIVED, 5);
    fixture.assert_refused("has sent 5 messages; expected 0 to 4");
    let fixture = Fixture::new();
    fixture.incoming.control.store(CONSUMED, 1);
    fixture.assert_refused("has consumed 1 messages; expected 0 to 0");
}

#[test]
fn failure_is_reported_before_waits_end() {
    let mut fixture = Fixture::new();
    let delivered = Arc::<AtomicBool>::default();
    let delivering = delivered.clone();
    fixture
        .fault
        .notify_with(move |_| delivering.store(true, Ordering::Release));
    fixture.send([9; WORDS]);
    fixture.end.advance();
    assert!(delivered.load(Ordering::Acquire));
    assert!(fixture.fault.error().is_some() && !fixture.fault.is_released());
}

/// Whatever failed, a closed end notifies its peer that it has stopped writing, and finishes.
#[test]
fn an_end_that_failed_parts_from_its_peer() {
    for breaks_the_protocol in [true, false] {
        let mut fixture = Fixture::new();
        fixture.send(StagingMessage::Signal { value: 1 }.encode(0));
        fixture.end.advance();
        if breaks_the_protocol {
            fixture.send([9; WORDS]);
            fixture.end.advance();
        } else {
            fixture.fault.raise(Error::invalid("for a test"));
        }
        assert!(fixture.fault.error().is_some());
        // Still in use.
        fixture.end.advance();
        assert!(!fixture.end.is_over());
        let delivered = Arc::<AtomicBool>::default();
        fixture.end.close(&delivered);
        let deadline = Deadline::after(LATE);
        while !fixture.end.is_over() {
            assert!(!deadline.passed());
            fixture.end.advance();
        }
        assert!(delivered.load(Ordering::Acquire));
    }
}

/// Direct data moves from memory to memory; the message with the signal is sent after it has arrived.
#[test]
fn signals_follow_puts_that_bypass_the_rings() {
    let fixture = Fixture::new();
    fixture.reach_past_the_rings(1000);
    let at = At::from(900);
    let source = fixture.region.slice(8..72).unwrap();
    let from = source.address();
    fixture.end.push(StagingOperation::Put { source, at });
    fixture.end.push(StagingOperation::Signal(1));
    fixture.until(|| fixture.end.sent() == 1);
    let control = fixture.incoming.shape.control_bytes();
    let calls = fixture.peer.calls();
    let [put, header, announced] = calls[..] else {
        panic!("{calls:?}");
    };
    assert_eq!(put, CarrierCall::Put(from, 64, (1000, 900)));
    assert!(matches!(header, CarrierCall::Put(_, HEADER_BYTES, (bytes, _)) if bytes == control));
    assert_eq!(announced, CarrierCall::Signal(control, 1));
}

#[test]
fn answers_wait_for_operations_that_bypass_the_rings() {
    for movement in ["put", "get"] {
        let fixture = Fixture::new();
        fixture.reach_past_the_rings(REGION);
        fixture.peer.hold();
        let (own, at) = (fixture.region.slice(0..64).unwrap(), At::default());
        fixture.end.push(match movement {
            "put" => StagingOperation::Put { source: own, at },
            _ => StagingOperation::Get { target: own, at },
        });
        let answered = fixture.device.allocate_signals(8).unwrap().word(0).unwrap();
        let word = answered.clone();
        fixture
            .end
            .push(StagingOperation::Answer { word, value: 7 });
        for _ in 0..20 {
            fixture.end.advance();
            // A stream would write an answer.
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(fixture.peer.calls().len(), 1, "{movement}");
        assert!(!fixture.end.is_idle().unwrap() && fixture.read(&answered) == 0);
        fixture.peer.resume();
        fixture.until(|| fixture.end.is_idle().unwrap());
        assert_eq!(fixture.read(&answered), 7, "{movement}");
        // No message was needed.
        assert_eq!(fixture.end.sent(), 0);
    }
}

/// Memory outside this rank's regions, or targets that are not directly accessible, are staged.
#[test]
fn unreachable_regions_are_staged() {
    let fixture = Fixture::new();
    fixture.reach_past_the_rings(REGION);
    let other = fixture.device.allocate_staging(64).unwrap().slice().clone();
    let own = fixture.region.slice(0..64).unwrap();
    let at = |region| At { region, offset: 0 };
    for (sent, source, at) in [(1, &other, at(0)), (2, &own, at(1)), (2, &own, at(0))] {
        let source = source.clone();
        let address = source.address();
        fixture.end.push(StagingOperation::Put { source, at });
        fixture.until(|| fixture.end.sent() == sent);
        fixture.incoming.control.store(CONSUMED, sent);
        fixture.until(|| fixture.end.is_idle().unwrap());
        let is_direct = fixture.peer.calls() == [CarrierCall::Put(address, 64, (REGION, 0))];
        assert_eq!(is_direct, address == own.address() && at.region == 0);
    }
    let target = other;
    fixture
        .end
        .push(StagingOperation::Get { target, at: at(0) });
    fixture.until(|| fixture.end.gets() == 1);
}

/// A put longer than the maximum is split into consecutive parts.
#[test]
fn large_puts_past_the_rings_go_in_parts() {
    const MIB: usize = 1 << 20;
    let fixture = Fixture::new();
    let region = fixture.device.allocate_staging(40 * MIB).unwrap();
    let region = region.slice();
    fixture.end.set_region(0, region, true);
    let peers = RemoteMemory::of_nobody(50 * MIB);
    fixture.end.set_peers_region(0, Arc::new(peers));
    let (source, at) = (region.clone(), At::from(MIB as u64));
    fixture.end.push(StagingOperation::Put { source, at });
    fixture.until(|| fixture.end.is_idle().unwrap());
    let parts = [(0, 16), (16, 16), (32, 8)].map(|(start, mib)| {
        let from = region.address() + (start * MIB) as u64;
        CarrierCall::Put(from, mib * MIB, (50 * MIB, (start + 1) * MIB))
    });
    assert_eq!(fixture.peer.calls(), parts);
}

#[test]
fn no_more_than_a_ring_is_under_way() {
    let fixture = Fixture::new();
    let source = fixture
        .device
        .allocate_staging(64 * 9)
        .unwrap()
        .slice()
        .clone();
    let at = At::default();
    fixture.end.push(StagingOperation::Put { source, at });
    let answered = fixture.device.allocate_signals(8).unwrap().word(0).unwrap();
    let word = answered.clone();
    fixture
        .end
        .push(StagingOperation::Answer { word, value: 1 });
    let delivered = Arc::new(AtomicBool::new(false));
    for consumed in 0..9 {
        fixture.until(|| fixture.end.sent() == (consumed + 4).min(9));
        for _ in 0..10 {
            fixture.end.advance();
        }
        assert_eq!(fixture.end.sent(), (consumed + 4).min(9));
        let mut bytes = [0; 8];
        fixture
            .device
            .download(answered.as_slice(), &mut bytes)
            .unwrap();
        assert_eq!(bytes, [0; 8], "answered after {consumed} of 9");
        fixture.incoming.control.store(CONSUMED, consumed + 1);
    }
    fixture.until(|| fixture.end.is_idle().unwrap());
    // It finishes when the peer's end does, and not before.
    fixture.end.close(&delivered);
    fixture.until(|| fixture.end.sent() == 10);
    fixture.incoming.control.store(CONSUMED, 10);
    for _ in 0..10 {
        fixture.end.advance();
    }
    assert!(!delivered.load(Ordering::Acquire));
    let mut fixture = fixture;
    fixture.send(StagingMessage::End.encode(0));
    fixture.until(|| delivered.load(Ordering::Acquire));
    assert!(fixture.fault.error().is_none());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn whatever_a_peer_sends_is_done_or_an_error_that_names_it(
        messages in prop::collection::vec(
            (0_u64..7, prop_oneof![Just(0), 0_u64..3, any::<u64>()],
             prop_oneof![0_u64..REGION as u64, any::<u64>()],
             prop_oneof![0_u64..70, any::<u64>()],
             prop_oneof![0_u64..8, any::<u64>()]),
            1..12,
        ),
        (arrived, consumed) in (0_u64..3, 0_u64..3),
    ) {
        let mut fixture = Fixture::new();
        fixture.end.push(StagingOperation::Get { target: fixture.region.slice(0..100).unwrap(), at: At::default() });
        fixture.until(|| fixture.end.gets() == 1);
        for (kind, region, offset, bytes, value) in messages {
            let number = fixture.sent;
            fixture.send([number, kind, region, offset, bytes, value, !number]);
            fixture.take();
        }
        fixture.incoming.control.store(ARRIVED, fixture.sent + arrived);
        fixture.incoming.control.store(CONSUMED, consumed);
        for _ in 0..5 {
            fixture.end.advance();
        }
        if let Some(error) = fixture.fault.error() {
            prop_assert_eq!((error.kind(), error.peer()), (ErrorKind::Protocol, Some(1)));
        }
    }
}
