//! Shorthands for what most tests do with errors, memory, words and transfers.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use warplink::device::{AllocationKind, DeviceSlice, Graph, MemoryOp, Stream, Word};
use warplink::memory::Region;
use warplink::p2p::{Protocol, Transfer, TransferRequest, post_all, wait_all};
use warplink::{Communicator, Error, ErrorKind, Rank};

/// Fails unless `error` has this kind and names this peer.
pub fn assert_names_peer(error: &Error, kind: ErrorKind, peer: Rank) {
    let found = (error.kind(), error.peer());
    assert_eq!(found, (kind, Some(peer)), "{error}");
}

/// Fails unless `error` has this kind and its text contains every part.
pub fn assert_error(error: &Error, kind: ErrorKind, parts: &[&str]) {
    assert_eq!(error.kind(), kind, "{error}");
    assert_says(error, parts);
}

/// Fails with both texts where `error` does not contain every part.
pub fn assert_says(error: &Error, parts: &[&str]) {
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "'{text}' does not say '{part}'");
    }
}

/// Memory of the rank's device that is its alone until it is published.
pub fn allocate(comm: &Communicator, bytes: usize) -> DeviceSlice {
    let allocated = comm.device().allocate(bytes, AllocationKind::Plain);
    allocated.unwrap()
}

/// The bytes of memory of the rank's device.
pub fn downloaded(comm: &Communicator, slice: &DeviceSlice) -> Vec<u8> {
    let mut bytes = vec![0; slice.bytes()];
    comm.device().download(slice, &mut bytes).unwrap();
    bytes
}

/// Enqueues a wait until a word is at least `value`.
pub fn await_word(stream: &Stream, word: &Word, value: u64) {
    stream.memory_ops(&[MemoryOp::wait(word, value)]).unwrap();
}

/// Enqueues a write of a word.
pub fn write_word(stream: &Stream, word: &Word, value: u64) {
    stream.memory_ops(&[MemoryOp::write(word, value)]).unwrap();
}

/// Records what `work` enqueues as a graph.
pub fn recorded(stream: &Stream, work: impl FnOnce()) -> Graph {
    stream.begin_capture().unwrap();
    work();
    stream.end_capture().unwrap()
}

/// This rank's ends of a ring of transfers: `send` goes to the next rank, which for one of two ranks is also the one that
/// `receive` is for.
pub fn ring_requests(
    comm: &Communicator,
    send: &Region,
    receive: &Region,
    tag: u64,
) -> [TransferRequest; 2] {
    let (rank, world) = (comm.rank(), comm.world());
    [
        TransferRequest::send(send, (rank + 1) % world, tag),
        TransferRequest::receive(receive, (rank + world - 1) % world, tag),
    ]
}

/// Posts transfers, waits for them on `stream`, and for that.
pub fn complete(comm: &Communicator, transfers: &[Transfer], stream: &Stream) -> Result<(), Error> {
    let group: Vec<&Transfer> = transfers.iter().collect();
    post_all(&group, stream)?;
    wait_all(&group, stream)?;
    comm.synchronize(stream)
}

/// Makes transfers that are used once, and waits for them.
pub fn transfer_once(comm: &Communicator, requests: &[TransferRequest], stream: &Stream) {
    comm.once(requests, stream).unwrap();
    comm.synchronize(stream).unwrap();
}

/// This rank's end of a transfer of `region` from rank 0 to rank 1.
pub fn from_first(comm: &Communicator, region: &Region, tag: u64) -> TransferRequest {
    match comm.rank() {
        0 => TransferRequest::send(region, 1, tag),
        _ => TransferRequest::receive(region, 0, tag),
    }
}

/// The transfer that [`from_first`] asks for, by a protocol.
pub fn transfer_from_first(
    comm: &Communicator,
    region: &Region,
    tag: u64,
    protocol: Protocol,
) -> Transfer {
    let request = from_first(comm, region, tag).with_protocol(protocol);
    comm.exchange(&[request]).unwrap().remove(0)
}

/// Runs `body` while this process may open no file; the limit is its own, so ranks must be processes.
pub fn without_descriptors<T>(body: impl FnOnce() -> T) -> T {
    let before = getrlimit(Resource::Nofile);
    let none = Rlimit {
        current: Some(0),
        ..before
    };
    setrlimit(Resource::Nofile, none).unwrap();
    let done = body();
    setrlimit(Resource::Nofile, before).unwrap();
    done
}
