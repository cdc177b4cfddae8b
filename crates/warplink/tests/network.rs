//! The network between processes: on this machine, and between two network namespaces, which are as two
//! hosts are. The latter needs to run as root, and is left out with a notice otherwise.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::hosts::{SOON, leave, role, run_roles, soon, take};
use common::leave_out;
use common::{Stopwatch, assert_names_peer, assert_says, processes, values};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use warplink::device::network::{self, Network, NetworkConnection, NetworkOptions};
use warplink::device::{AllocationKind, DeviceConfig, DeviceSlice};
use warplink::{Deadline, Device, DeviceKind, ErrorKind, device};

fn host() -> Arc<dyn Device> {
    device::open(&DeviceConfig::new(DeviceKind::Host, 0)).unwrap()
}

/// The network over a device; none, with a notice, where its library is missing.
///
/// Its patience is shorter than [`SOON`], so that a peer that is gone is what a wait ends with, also where the system
/// does not tell.
fn open(device: &str) -> Option<Arc<dyn Network>> {
    let options = NetworkOptions {
        devices: Some(device.to_owned()),
        patience: SOON / 2,
        ..NetworkOptions::default()
    };
    match network::open(&options) {
        Ok(network) => Some(network),
        Err(error) if error.kind() == ErrorKind::LibraryMissing => {
            assert_says(&error, &["UCX was not found", "help: install UCX"]);
            leave_out(error);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn allocate(device: &dyn Device, bytes: usize) -> DeviceSlice {
    device.allocate(bytes, AllocationKind::Plain).unwrap()
}

/// Waits until the word at the start of `slice` is at least `value`.
fn wait_for(device: &dyn Device, slice: &DeviceSlice, value: u64) {
    let (deadline, word) = (soon(), slice.slice(0..8).unwrap());
    loop {
        let mut bytes = [0; 8];
        device.download(&word, &mut bytes).unwrap();
        if u64::from_le_bytes(bytes) >= value {
            return;
        }
        assert!(
            !deadline.passed(),
            "the word is {bytes:?}; expected {value}"
        );
        std::thread::yield_now();
    }
}

#[test]
fn data_is_there_when_its_signal_is() {
    const BYTES: usize = 300_001;
    processes(2, |comm| {
        let (Some(network), device) = (open("lo"), host()) else {
            return;
        };
        let (rank, peer) = (comm.rank(), 1 - comm.rank());
        let (inbox, outbox) = (allocate(&*device, BYTES), allocate(&*device, BYTES));
        let words = allocate(&*device, 16);
        device.upload(&words, &[0; 16]).unwrap();
        let (data, word) = (
            network.register(&inbox).unwrap(),
            network.register(&words).unwrap(),
        );
        let gather = |bytes: &[u8]| comm.all_gather_bytes(bytes).unwrap().swap_remove(peer);
        let connection = network.connect(peer, &gather(network.address())).unwrap();
        let theirs = connection.open(&gather(data.key())).unwrap();
        let their_word = connection.open(&gather(word.key())).unwrap();
        for round in 0..50 {
            // The second word says that what came before was read.
            wait_for(&*device, &words.slice(8..16).unwrap(), round as u64);
            device.upload(&outbox, &values(rank, round, BYTES)).unwrap();
            // In parts, the last first, and by a signal in between, so that order matters.
            connection
                .put(&outbox.slice(1000..BYTES).unwrap(), &theirs, 1000)
                .unwrap();
            connection
                .signal(&their_word, 0, 2 * round as u64 + 1)
                .unwrap();
            connection
                .put(&outbox.slice(0..1000).unwrap(), &theirs, 0)
                .unwrap();
            connection
                .signal(&their_word, 0, 2 * round as u64 + 2)
                .unwrap();
            wait_for(&*device, &words, 2 * round as u64 + 2);
            let mut received = vec![0; BYTES];
            device.download(&inbox, &mut received).unwrap();
            assert!(received == values(peer, round, BYTES), "round {round}");
            connection.signal(&their_word, 8, round as u64 + 1).unwrap();
            connection.flush(soon()).unwrap();
        }
        comm.barrier().unwrap();
        connection.close(soon()).unwrap();
        comm.barrier().unwrap();
        network.close(soon()).unwrap();
    });
}

#[test]
fn wrong_arguments_are_refused_and_break_nothing() {
    let (Some(network), device) = (open("lo"), host()) else {
        return;
    };
    let memory = allocate(&*device, 4096);
    let region = network.register(&memory).unwrap();
    let connection = network.connect(3, network.address()).unwrap();
    let mut altered = region.key().to_vec();
    altered[20] ^= 1;
    let error = connection.open(&altered).unwrap_err();
    assert_names_peer(&error, ErrorKind::InvalidHandle, 3);
    assert!(network.connect(3, &altered).is_err());

    let remote = connection.open(region.key()).unwrap();
    let source = allocate(&*device, 64);
    device.upload(&source, &[7; 64]).unwrap();
    for offset in [4033, 4096, usize::MAX] {
        let error = connection.put(&source, &remote, offset).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{offset}");
    }
    assert!(connection.signal(&remote, 4, 1).is_err());
    let other = network.connect(4, network.address()).unwrap();
    assert!(other.put(&source, &remote, 0).is_err());

    connection.put(&source, &remote, 4032).unwrap();
    // The key is given up after its uses, and the source after the write.
    drop((remote, source));
    connection.flush(soon()).unwrap();
    let mut end = [0; 64];
    device
        .download(&memory.slice(4032..4096).unwrap(), &mut end)
        .unwrap();
    assert_eq!(end, [7; 64]);
    network.close(soon()).unwrap();
    assert_eq!(
        connection.flush(soon()).unwrap_err().kind(),
        ErrorKind::Closed
    );
    drop(region);
}

#[test]
fn a_peer_that_is_gone_fails_its_connection_with_an_error_that_names_it() {
    let (Some(network), device) = (open("lo"), host()) else {
        return;
    };
    let gone = open("lo").unwrap();
    let memory = allocate(&*device, 8);
    let region = gone.register(&memory).unwrap();
    let connection = network.connect(5, gone.address()).unwrap();
    let remote = connection.open(region.key()).unwrap();
    connection.signal(&remote, 0, 1).unwrap();
    connection.flush(soon()).unwrap();
    gone.close(soon()).unwrap();
    let started = Instant::now();
    let error = loop {
        // Either can be the first that fails: what was on its way when the peer left may still have been taken.
        let signaled = connection.signal(&remote, 0, 2);
        match signaled.and_then(|()| connection.flush(soon())) {
            Err(error) => break error,
            Ok(()) => assert!(started.elapsed() < SOON),
        }
    };
    assert_names_peer(&error, ErrorKind::PeerLost, 5);
    // It stays so, and the network goes on.
    let again = connection.flush(soon()).unwrap_err();
    assert_eq!(again.peer(), Some(5));
    assert!(connection.close(soon()).is_err());
    let own = network.connect(0, network.address()).unwrap();
    own.flush(soon()).unwrap();
    network.close(soon()).unwrap();
}

/// The sender's connection to the receiver, who left what is needed.
fn connect(network: &dyn Network, directory: &Path) -> Arc<dyn NetworkConnection> {
    network.connect(1, &take(directory, "address")).unwrap()
}

/// The part with this number of what is sent: `bytes` bytes, pages of noise, each with its number.
fn pattern(part: usize, bytes: usize) -> Vec<u8> {
    const PAGE: usize = 4096;
    let noise = values(1, 7, PAGE);
    let mut all = Vec::with_capacity(bytes);
    for page in 0..bytes / PAGE {
        let number = (part * bytes / PAGE + page) as u64;
        all.extend_from_slice(&number.to_le_bytes());
        all.extend_from_slice(&noise[size_of::<u64>()..]);
    }
    all
}

#[test]
fn two_hosts_exchange_a_gibibyte_by_put_and_signal() {
    const BYTES: usize = 1 << 30;
    const PART: usize = 64 << 20;
    let Some((directory, role)) = role() else {
        if open("lo").is_some() {
            run_roles(|_, _| {});
        }
        return;
    };
    let (network, device) = (open("link0").unwrap(), host());
    if role == 1 {
        let (inbox, words) = (allocate(&*device, BYTES), allocate(&*device, 8));
        device.upload(&words, &[0; 8]).unwrap();
        let data = network.register(&inbox).unwrap();
        let word = network.register(&words).unwrap();
        leave(&directory, "data", data.key());
        leave(&directory, "word", word.key());
        leave(&directory, "address", network.address());
        for part in 0..BYTES / PART {
            wait_for(&*device, &words, part as u64 + 1);
            let mut bytes = vec![0; PART];
            let range = part * PART..(part + 1) * PART;
            let received = inbox.slice(range).unwrap();
            device.download(&received, &mut bytes).unwrap();
            assert!(bytes == pattern(part, PART), "part {part}");
        }
        leave(&directory, "received", &[]);
        take(&directory, "closed");
        return;
    }
    let connection = connect(&*network, &directory);
    let data = connection.open(&take(&directory, "data")).unwrap();
    let word = connection.open(&take(&directory, "word")).unwrap();
    let outbox = allocate(&*device, BYTES);
    let started = Instant::now();
    for part in 0..BYTES / PART {
        let range = part * PART..(part + 1) * PART;
        let source = outbox.slice(range.clone()).unwrap();
        device.upload(&source, &pattern(part, PART)).unwrap();
        connection.put(&source, &data, range.start).unwrap();
        connection.signal(&word, 0, part as u64 + 1).unwrap();
    }
    connection.flush(soon()).unwrap();
    println!("1 GiB in {:?}", started.elapsed());
    take(&directory, "received");
    connection.close(soon()).unwrap();
    leave(&directory, "closed", &[]);
    network.close(soon()).unwrap();
}

#[test]
fn a_cut_link_is_an_error_that_names_the_peer_within_the_deadline() {
    const LIMIT: Duration = Duration::from_secs(4);
    let Some((directory, role)) = role() else {
        if open("lo").is_some() {
            run_roles(|hosts, directory| {
                take(directory, "connected");
                hosts.cut();
                leave(directory, "cut", &[]);
            });
        }
        return;
    };
    let (network, device) = (open("link0").unwrap(), host());
    if role == 1 {
        let words = allocate(&*device, 8);
        let word = network.register(&words).unwrap();
        leave(&directory, "word", word.key());
        leave(&directory, "address", network.address());
        take(&directory, "closed");
        return;
    }
    let connection = connect(&*network, &directory);
    let word = connection.open(&take(&directory, "word")).unwrap();
    connection.signal(&word, 0, 1).unwrap();
    connection.flush(soon()).unwrap();
    leave(&directory, "connected", &[]);
    take(&directory, "cut");
    connection.signal(&word, 0, 2).unwrap();
    let started = Stopwatch::start();
    let error = connection.flush(Deadline::after(LIMIT)).unwrap_err();
    assert!(started.elapsed() < LIMIT + Duration::from_secs(1));
    assert!(
        matches!(error.kind(), ErrorKind::Timeout | ErrorKind::PeerLost),
        "{error}"
    );
    assert_eq!(error.peer(), Some(1), "{error}");
    println!("after {:?}: {error}", started.elapsed());
    // Ending it waits for nobody.
    let started = Stopwatch::start();
    assert!(
        connection
            .close(Deadline::after(Duration::from_millis(100)))
            .is_err()
    );
    network.close(Deadline::after(LIMIT)).unwrap();
    assert!(started.elapsed() < LIMIT);
    leave(&directory, "closed", &[]);
}
