//! A fault of some signals ends what waits for them and what follows that, and nothing else.

use crate::common::{open_device, write_word};
use crate::{bytes_of, soon, streams};
use std::sync::Arc;
use std::time::Duration;
use warplink::device::{AllocationKind, DeviceSlice, Fault, MemoryOp, Priority, Stream};
use warplink::{Device, Error, ErrorKind};

fn lost() -> Error {
    Error::new(ErrorKind::PeerLost, "rank 1 was lost").with_peer(1)
}

fn wait(stream: &Stream, words: &DeviceSlice, value: u64) -> Result<(), Error> {
    let word = words.word(0)?;
    stream.memory_ops(&[MemoryOp::wait(&word, value)])
}

fn fails(stream: &Stream) {
    let error = stream.synchronize(soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
}

/// Signals, and the fault that ends waits for them.
type Page = (DeviceSlice, Arc<Fault>);

/// A device and two pages of signals.
fn two_pages() -> (Arc<dyn Device>, [Page; 2]) {
    let device = open_device();
    let pages = [(); 2].map(|()| {
        let fault = Arc::<Fault>::default();
        (
            device
                .allocate_signals_for(64, AllocationKind::Plain, &fault)
                .unwrap(),
            fault,
        )
    });
    (device, pages)
}

#[test]
fn only_streams_that_wait_for_the_signals_fail() {
    let (device, [(first, fault), (second, other)]) = two_pages();
    let streams: [_; 3] = streams(&device);
    let [failed, waiting, idle] = &streams;
    wait(failed, &first, 1).unwrap();
    wait(waiting, &second, 1).unwrap();
    fault.raise(lost());
    fails(failed);
    assert!(wait(failed, &second, 0).is_err(), "it stays failed");
    let memory = device.allocate(64, AllocationKind::Plain).unwrap();
    idle.fill(&memory, 7).unwrap();
    idle.synchronize(soon()).unwrap();
    assert!(!waiting.is_idle().unwrap());
    write_word(idle, &second.word(0).unwrap(), 1);
    waiting.synchronize(soon()).unwrap();
    // A wait that would have to be ended at once is refused.
    let error = wait(idle, &first, 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerLost);
    assert!(other.error().is_none() && device.fault().error().is_none());
}

#[test]
fn a_stream_that_follows_a_failed_one_fails_and_does_nothing_more() {
    let (device, [(first, fault), (second, _)]) = two_pages();
    let streams: [_; 3] = streams(&device);
    let [failed, follower, second_follower] = &streams;
    let events = [(); 2].map(|()| device.create_event(false).unwrap());
    let memory = device.allocate(4096, AllocationKind::Plain).unwrap();
    device.upload(&memory, &[1; 4096]).unwrap();
    wait(failed, &first, 1).unwrap();
    failed.record(&events[0]).unwrap();
    follower.wait_event(&events[0]).unwrap();
    follower.record(&events[1]).unwrap();
    second_follower.wait_event(&events[1]).unwrap();
    second_follower.fill(&memory, 9).unwrap();
    let word = second.word(0).unwrap();
    write_word(second_follower, &word, 1);
    fault.raise(lost());
    for stream in &streams {
        fails(stream);
    }
    // What is behind a failed stream can still be marked, so that memory in use is let go of.
    let event = device.create_event(false).unwrap();
    failed.record(&event).unwrap();
    let until = soon();
    while !event.is_reached().unwrap() {
        assert!(!until.passed());
        std::thread::sleep(Duration::from_millis(1));
    }
    if device.kind() == warplink::DeviceKind::Host {
        // A GPU cannot stop what is enqueued; its peers are told first that it is not to be believed.
        assert_eq!(bytes_of(&*device, &memory), [1; 4096]);
        let seen = bytes_of(&*device, word.as_slice());
        assert_eq!(seen, [0; 8], "garbage was announced as good");
    }
}

#[test]
fn a_graph_brings_the_faults_of_its_waits_along() {
    let (device, [(first, fault), _]) = two_pages();
    let streams: [_; 3] = streams(&device);
    let [recording, joined, launching] = &streams;
    let events = [(); 2].map(|()| device.create_event(false).unwrap());
    let memory = device.allocate(64, AllocationKind::Plain).unwrap();
    device.upload(&memory, &[1; 64]).unwrap();
    recording.begin_capture().unwrap();
    recording.record(&events[0]).unwrap();
    joined.wait_event(&events[0]).unwrap();
    wait(joined, &first, 1).unwrap();
    joined.record(&events[1]).unwrap();
    recording.wait_event(&events[1]).unwrap();
    recording.fill(&memory, 9).unwrap();
    let graph = recording.end_capture().unwrap();
    graph.launch(launching).unwrap();
    fault.raise(lost());
    fails(launching);
    if device.kind() == warplink::DeviceKind::Host {
        assert_eq!(bytes_of(&*device, &memory), [1; 64]);
    }
    let other = device.create_stream(Priority::Normal).unwrap();
    assert!(graph.launch(&other).is_err());
}
