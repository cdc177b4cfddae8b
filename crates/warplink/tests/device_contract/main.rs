//! Contract of every device, checked on the one under test.

// A test fails by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../common/mod.rs"]
mod common;
mod compute;
mod elementwise;
mod faults;
mod memory;

use common::{assert_names_peer, await_word, decode, encode, open_device, write_word};
use std::any::Any;
use std::sync::Arc;
use std::time::Duration;
use warplink::device::{
    AllocationKind, Compute, Device, DeviceSlice, MemoryOp, Opening, Priority, Stream, Turns,
};
use warplink::{DType, Deadline, DeviceKind, ErrorKind};

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

/// Streams of a device.
fn streams<const COUNT: usize>(device: &Arc<dyn Device>) -> [Stream; COUNT] {
    [(); COUNT].map(|()| device.create_stream(Priority::Normal).unwrap())
}

/// The bytes of memory.
fn bytes_of(device: &dyn Device, slice: &DeviceSlice) -> Vec<u8> {
    let mut bytes = vec![0; slice.bytes()];
    device.download(slice, &mut bytes).unwrap();
    bytes
}

/// New memory with values.
fn upload(device: &dyn Device, dtype: DType, values: &[f64]) -> DeviceSlice {
    let bytes = encode(dtype, values);
    let slice = device.allocate(bytes.len(), AllocationKind::Plain).unwrap();
    device.upload(&slice, &bytes).unwrap();
    slice
}

/// The values in memory.
fn download(device: &dyn Device, dtype: DType, slice: &DeviceSlice) -> Vec<f64> {
    decode(dtype, &bytes_of(device, slice))
}

/// A device, a stream of it, and what computes there.
fn computing() -> (Arc<dyn Device>, Stream, Arc<dyn Compute>) {
    let device = open_device();
    let stream = device.create_stream(Priority::Normal).unwrap();
    let compute = device.compute().unwrap();
    (device, stream, compute)
}

#[test]
fn copies_happen_in_stream_order() {
    let device = open_device();
    let stream = device.create_stream(Priority::Normal).unwrap();
    let (a, b, c) = (
        device.allocate(4096, AllocationKind::Plain).unwrap(),
        device.allocate(4096, AllocationKind::Plain).unwrap(),
        device.allocate(4096, AllocationKind::Virtual).unwrap(),
    );
    device.upload(&a, &[3; 4096]).unwrap();
    for round in 0..100u8 {
        stream.fill(a.slice(0..2048).unwrap(), round).unwrap();
        stream.copy(&b, &a).unwrap();
        stream.copy(c.slice(0..4096).unwrap(), &b).unwrap();
    }
    stream.synchronize(soon()).unwrap();
    let seen = bytes_of(&*device, &c);
    assert!(
        seen[..2048].iter().all(|byte| *byte == 99) && seen[2048..].iter().all(|byte| *byte == 3)
    );
    assert!(stream.is_idle().unwrap());
}

#[test]
fn words_order_two_streams() {
    let device = open_device();
    let (first, second) = (
        device.create_stream(Priority::Normal).unwrap(),
        device.create_stream(Priority::High).unwrap(),
    );
    let words = device.allocate_signals(4096).unwrap();
    let (ping, pong) = (words.word(0).unwrap(), words.word(64).unwrap());
    let a = device.allocate(1 << 20, AllocationKind::Plain).unwrap();
    let b = device.allocate(1 << 20, AllocationKind::Plain).unwrap();
    for round in 1..=50u64 {
        first.fill(&a, round as u8).unwrap();
        first
            .memory_ops(&[MemoryOp::write(&ping, round), MemoryOp::wait(&pong, round)])
            .unwrap();
        await_word(&second, &ping, round);
        second.copy(&b, &a).unwrap();
        write_word(&second, &pong, round);
    }
    first.synchronize(soon()).unwrap();
    second.synchronize(soon()).unwrap();
    assert!(bytes_of(&*device, &b).iter().all(|byte| *byte == 50));
}

#[test]
fn turns_order_streams_of_two_objects_of_a_device() {
    let devices = [(); 2].map(|()| open_device());
    let [[first], [second]] = [&devices[0], &devices[1]].map(streams::<1>);
    let words = devices[0].allocate_signals(64).unwrap();
    let word = words.word(0).unwrap();
    let turns = Turns::new(&devices[0]);
    let wait = || first.memory_ops(&[MemoryOp::wait(&word, 1)]);
    turns.take(&first, wait).unwrap();
    turns.precede(&second).unwrap();
    let brief = Deadline::after(Duration::from_millis(50));
    let error = second.synchronize(brief).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    let [third] = streams(&devices[0]);
    write_word(&third, &word, 1);
    second.synchronize(soon()).unwrap();
    first.synchronize(soon()).unwrap();
}

#[test]
fn a_wait_is_for_at_least_the_value() {
    let device = open_device();
    let stream = device.create_stream(Priority::Normal).unwrap();
    let words = device.allocate_signals(64).unwrap();
    let word = words.word(8).unwrap();
    stream
        .memory_ops(&[MemoryOp::write(&word, 10), MemoryOp::wait(&word, 3)])
        .unwrap();
    stream.synchronize(soon()).unwrap();
    // Nobody will write 11: the deadline ends the wait on the host, the fault the one in the stream.
    await_word(&stream, &word, 11);
    assert!(!stream.is_idle().unwrap());
    let error = stream
        .synchronize(Deadline::after(Duration::from_millis(50)))
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    device
        .fault()
        .raise(warplink::Error::new(ErrorKind::PeerLost, "rank 1 is lost").with_peer(1));
    let error = stream.synchronize(soon()).unwrap_err();
    assert_names_peer(&error, ErrorKind::PeerLost, 1);
}

#[test]
fn events_order_and_measure() {
    let device = open_device();
    let [first, second] = streams(&device);
    let [begin, end] = [(); 2].map(|()| device.create_event(true).unwrap());
    let a = device.allocate(8 << 20, AllocationKind::Plain).unwrap();
    let b = device.allocate(8 << 20, AllocationKind::Plain).unwrap();
    first.record(&begin).unwrap();
    for round in 0..10 {
        first.fill(&a, round).unwrap();
    }
    first.record(&end).unwrap();
    second.wait_event(&end).unwrap();
    second.copy(&b, &a).unwrap();
    second.synchronize(soon()).unwrap();
    assert!(end.is_reached().unwrap());
    assert!(end.elapsed_since(&begin).unwrap() > 0.0);
    assert!(bytes_of(&*device, &b).iter().all(|byte| *byte == 9));
    let untimed = device.create_event(false).unwrap();
    first.record(&untimed).unwrap();
    first.synchronize(soon()).unwrap();
    assert!(untimed.elapsed_since(&begin).is_err());
}

#[test]
fn an_event_that_was_never_recorded_holds_up_nobody() {
    let device = open_device();
    let stream = device.create_stream(Priority::Normal).unwrap();
    let event = device.create_event(false).unwrap();
    assert!(event.is_reached().unwrap());
    stream.wait_event(&event).unwrap();
    stream.synchronize(soon()).unwrap();
}

#[test]
fn an_event_is_reached_where_it_was_recorded_last_also_after_a_capture() {
    let device = open_device();
    let [first, second, third] = streams(&device);
    let words = device.allocate_signals(128).unwrap();
    let [a, b] = [0, 64].map(|at| words.word(at).unwrap());
    let memory = device.allocate(64, AllocationKind::Plain).unwrap();
    let event = device.create_event(false).unwrap();
    let set = |word| third.memory_ops(&[MemoryOp::write(word, 1)]);
    for (stream, word) in [(&first, &a), (&second, &b)] {
        await_word(stream, word, 1);
    }
    first.record(&event).unwrap();
    third.begin_capture().unwrap();
    third.fill(&memory, 1).unwrap();
    third.record(&event).unwrap();
    third.end_capture().unwrap();
    second.record(&event).unwrap();
    set(&a).unwrap();
    first.synchronize(soon()).unwrap();
    assert!(
        !event.is_reached().unwrap(),
        "the second stream still waits"
    );
    set(&b).unwrap();
    second.synchronize(soon()).unwrap();
    assert!(event.is_reached().unwrap());
}

#[test]
fn a_graph_replays_what_was_captured_on_two_streams() {
    let device = open_device();
    let [first, second] = streams(&device);
    let [fork, join] = [(); 2].map(|()| device.create_event(false).unwrap());
    let words = device.allocate_signals(128).unwrap();
    let (go, done) = (words.word(0).unwrap(), words.word(64).unwrap());
    let [a, b, c] = [(); 3].map(|()| device.allocate(4096, AllocationKind::Plain).unwrap());
    device.upload(&a, &[1; 4096]).unwrap();
    device.upload(&b, &[2; 4096]).unwrap();
    first.begin_capture().unwrap();
    assert!(first.is_capturing().unwrap() && !second.is_capturing().unwrap());
    first.record(&fork).unwrap();
    second.wait_event(&fork).unwrap();
    assert!(second.is_capturing().unwrap());
    // The two lanes meet through words as well as through events: they must run beside one another.
    first
        .memory_ops(&[MemoryOp::wait(&go, 1), MemoryOp::write(&go, 0)])
        .unwrap();
    first.copy(&c, &a).unwrap();
    second.copy(&a, &b).unwrap();
    write_word(&second, &go, 1);
    write_word(&second, &done, 7);
    second.record(&join).unwrap();
    first.wait_event(&join).unwrap();
    let graph = first.end_capture().unwrap();
    assert!(graph.operations() >= 5);
    assert!(!first.is_capturing().unwrap() && !second.is_capturing().unwrap());
    for _ in 0..100 {
        graph.launch(&first).unwrap();
    }
    first.synchronize(soon()).unwrap();
    assert!(
        bytes_of(&*device, &c).iter().all(|byte| *byte == 2),
        "the first lane did not wait for the second"
    );
}

#[test]
fn unjoined_work_does_not_make_a_graph() {
    let device = open_device();
    let [first, second] = streams(&device);
    let fork = device.create_event(false).unwrap();
    let a = device.allocate(64, AllocationKind::Plain).unwrap();
    first.begin_capture().unwrap();
    first.record(&fork).unwrap();
    second.wait_event(&fork).unwrap();
    second.fill(&a, 1).unwrap();
    assert!(first.end_capture().is_err());
}

#[test]
fn queries_during_a_capture_leave_it_valid() {
    let device = open_device();
    let [captured, other] = streams(&device);
    let words = device.allocate_signals(64).unwrap();
    let word = words.word(0).unwrap();
    let memory = device.allocate(64, AllocationKind::Plain).unwrap();
    let event = device.create_event(false).unwrap();
    await_word(&other, &word, 1);
    other.record(&event).unwrap();
    captured.begin_capture().unwrap();
    assert!(!event.is_reached().unwrap() && !other.is_idle().unwrap());
    captured.fill(&memory, 1).unwrap();
    let graph = captured.end_capture().unwrap();
    captured
        .memory_ops(&[MemoryOp::write(&word, 1)])
        .and_then(|()| graph.launch(&captured))
        .unwrap();
    for stream in [&captured, &other] {
        stream.synchronize(soon()).unwrap();
    }
    assert!(event.is_reached().unwrap() && other.is_idle().unwrap());
}

#[test]
fn what_is_dropped_during_a_capture_leaves_it_valid() {
    let device = open_device();
    let record = |a: &DeviceSlice, byte: u8, dropped: Vec<Box<dyn Any>>| {
        let stream = device.create_stream(Priority::Normal).unwrap();
        stream.begin_capture().unwrap();
        stream.fill(a, byte).unwrap();
        drop(dropped);
        stream.fill(a.slice(0..32).unwrap(), byte + 1).unwrap();
        (stream.end_capture().unwrap(), stream)
    };
    let allocate = |kind| device.allocate(4096, kind).unwrap();
    let a = allocate(AllocationKind::Plain);
    // One that was launched, one that never was, and one that still runs.
    let (launched, stream) = record(&a, 1, Vec::new());
    launched.launch(&stream).unwrap();
    stream.synchronize(soon()).unwrap();
    let (unused, other) = record(&a, 3, Vec::new());
    let (running, third) = record(&a, 5, Vec::new());
    running.launch(&third).unwrap();
    let event = device.create_event(true).unwrap();
    other.record(&event).unwrap();
    let dropped: Vec<Box<dyn Any>> = vec![
        Box::new(launched),
        Box::new(unused),
        Box::new(running),
        Box::new((stream, other, third)),
        Box::new(event),
        Box::new(allocate(AllocationKind::Plain)),
        Box::new(allocate(AllocationKind::Virtual)),
        Box::new(device.allocate_signals(64).unwrap()),
    ];
    let b = allocate(AllocationKind::Plain);
    let (graph, stream) = record(&b, 7, dropped);
    graph.launch(&stream).unwrap();
    stream.synchronize(soon()).unwrap();
    let seen = bytes_of(&*device, &b);
    assert!(seen[..32].iter().all(|byte| *byte == 8));
    assert!(seen[32..].iter().all(|byte| *byte == 7));
}

#[test]
fn bad_lengths_and_ranges_are_errors() {
    let device = open_device();
    let stream = device.create_stream(Priority::Normal).unwrap();
    let a = device.allocate(100, AllocationKind::Plain).unwrap();
    assert!(device.allocate(0, AllocationKind::Plain).is_err());
    assert!(device.allocate(0, AllocationKind::Virtual).is_err());
    assert!(a.slice(50..101).is_err());
    #[allow(clippy::reversed_empty_ranges)]
    let reversed = a.slice(60..50);
    assert!(reversed.is_err());
    assert!(a.word(96).is_err());
    assert_eq!(a.word(4).unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert!(a.word(usize::MAX).is_err());
    assert!(device.upload(&a, &[0; 99]).is_err());
    assert!(device.download(&a, &mut [0; 101]).is_err());
    assert!(stream.copy(&a, a.slice(0..50).unwrap()).is_err());
}

#[test]
fn an_export_opens_as_the_same_memory() {
    let device = open_device();
    for kind in [
        AllocationKind::Plain,
        AllocationKind::Virtual,
        AllocationKind::Host,
    ] {
        let own = device.allocate(100_000, kind).unwrap();
        let export = device.export(&own.slice(500..600).unwrap()).unwrap();
        assert_eq!(
            export.allocation.backing().identity(),
            own.backing().identity()
        );
        // A driver opens no IPC handle in the process that made it; a descriptor it does.
        assert_eq!(export.host, kind == AllocationKind::Host);
        let opening = match export.pieces {
            mut pieces if export.host => Opening::Host(pieces.remove(0)),
            pieces if pieces.is_empty() => Opening::SameProcess(export.allocation.clone()),
            pieces => Opening::Pieces(pieces),
        };
        let bytes = export.allocation.bytes();
        let mapped = device.import(opening, bytes).unwrap();
        device.upload(&own, &vec![8; 100_000]).unwrap();
        let seen = mapped.slice(own.offset()..own.offset() + 100_000).unwrap();
        assert!(bytes_of(&*device, &seen).iter().all(|byte| *byte == 8));
    }
}

#[test]
fn identities_are_never_used_again() {
    let device = open_device();
    let mut seen = std::collections::HashSet::new();
    for _ in 0..50 {
        let slice = device.allocate(1 << 16, AllocationKind::Plain).unwrap();
        // SAFETY: the slice is the owner, and holds the memory.
        let borrowed =
            unsafe { device.borrow(slice.address(), 100, std::sync::Arc::new(slice.clone())) }
                .unwrap();
        assert_eq!(borrowed.address(), slice.address());
        let again = device.allocate(1 << 16, AllocationKind::Plain).unwrap();
        assert!(seen.insert(slice.backing().identity()));
        assert!(seen.insert(again.backing().identity()));
    }
}

#[test]
fn the_other_device_is_refused_with_what_to_do() {
    if common::kind() == DeviceKind::Host && warplink::device::count(DeviceKind::Cuda).is_err() {
        let error =
            warplink::device::open(&warplink::device::DeviceConfig::new(DeviceKind::Cuda, 0))
                .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::LibraryMissing);
    }
}
