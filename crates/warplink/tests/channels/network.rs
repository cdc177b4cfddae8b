//! Connections over the network, between ranks of one machine. They are left out, with a notice, where UCX is
//! missing.

use super::common::{
    Ranks, assert_error, assert_names_peer, assert_says, await_word, has_network, kind, processes,
    waiting_streams, world, write_word,
};
use super::kernels::{Fixture, contents};
use super::proxied::await_proxies;
use std::time::{Duration, Instant};
use warplink::bootstrap::Wait;
use warplink::channel::{ConnectionRequest, Transport};
use warplink::device::{Argument, Launch, MemoryOp, ModuleSource};
use warplink::{Communicator, Config, Deadline, DeviceKind, ErrorKind};

/// Runs `body` on two ranks where there is a network.
fn with_network(body: impl Fn(&Communicator)) {
    if has_network() {
        processes(world(2), body);
    }
}

/// All of the machine's; the network takes those that it can use.
fn network_devices() -> String {
    let entries = std::fs::read_dir("/sys/class/net").unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.collect::<Vec<_>>().join(",")
}

/// Runs two ranks with a change to their configuration, and with random delays, where this machine has the network.
pub(super) fn configured(
    config: fn(&mut Config),
    delay: Option<Duration>,
    body: fn(&Communicator),
) {
    if has_network() {
        let ranks = Ranks {
            config: Some(config),
            delay,
            ..Ranks::of(world(2))
        };
        ranks.run(body);
    }
}

#[test]
fn data_goes_back_and_forth() {
    with_network(back_and_forth);
}

pub(super) fn back_and_forth(comm: &Communicator) {
    let fixture = Fixture::new(comm);
    for (tags, bytes, rounds) in [(1, 64, 30), (3, 4096, 20), (1, 1 << 20, 5)] {
        let connections = fixture.connect(Transport::Network, tags, 2 * bytes as usize);
        fixture.ping_pong(&connections, bytes, rounds);
        fixture.finish();
    }
}

/// Ten rounds on each of two connections.
pub(super) fn ping_pong(comm: &Communicator) {
    let fixture = Fixture::new(comm);
    let connections = fixture.connect(Transport::Network, 2, 2 * 1024);
    fixture.ping_pong(&connections, 1024, 10);
    fixture.finish();
}

#[test]
fn a_source_may_change_after_a_flush() {
    with_network(flushed_slots);
}

pub(super) fn flushed_slots(comm: &Communicator) {
    Fixture::new(comm).flushed_slots(Transport::Network);
}

#[test]
fn signals_and_puts_of_many_blocks_arrive() {
    with_network(many_blocks);
}

pub(super) fn many_blocks(comm: &Communicator) {
    let fixture = Fixture::new(comm);
    let (blocks, each) = (8, 500);
    let words = (blocks * each) as usize;
    let connection = fixture.pair(Transport::Network, 8 * words);
    let (region, data) = (connection.region(0).unwrap(), contents(1, 8 * words));
    if comm.rank() == 0 {
        region.upload(&data).unwrap();
        let arguments = [connection.channel(), Argument::U32(each)];
        fixture.launch("many_puts", blocks, &arguments).unwrap();
        fixture.run("many_signals", blocks, &arguments);
    } else {
        // A stream may wait as a kernel does.
        let wait = MemoryOp::wait(connection.inbound(), 2 * words as u64);
        fixture.stream.memory_ops(&[wait]).unwrap();
        fixture.finish();
        assert!(
            region.download().unwrap() == data,
            "not all words are there"
        );
    }
}

#[test]
fn regions_are_added_and_got_from() {
    with_network(added_regions);
}

pub(super) fn added_regions(comm: &Communicator) {
    let fixture = Fixture::new(comm);
    let (rank, bytes) = (comm.rank(), 4096);
    let connection = fixture.pair(Transport::Network, bytes);
    let peers = 2 * bytes + 64 * (1 - rank);
    let added = comm.alloc(2 * bytes + 64 * rank).unwrap();
    let mut own = contents(7 + rank as u32, bytes);
    own.resize(added.bytes(), 0);
    own.copy_within(0..bytes, bytes);
    added.upload(&own).unwrap();
    assert_eq!(comm.add_regions(&[(&connection, &added)]).unwrap(), [1]);
    assert_eq!(connection.peer_bytes(1), Some(peers));
    let arguments = [
        connection.channel(),
        Argument::U32(1),
        Argument::U64(bytes as u64),
    ];
    fixture.run("get_region", 1, &arguments);
    comm.barrier().unwrap();
    // What was got lies in the first region, and what the peer got was put to the second.
    let got = connection.region(0).unwrap().download().unwrap();
    assert!(got == contents(8 - rank as u32, bytes));
    let put = added.download().unwrap();
    assert!(put[..bytes] == contents(7 + rank as u32, bytes));
    let arguments = [connection.channel(), Argument::U64(bytes as u64)];
    // Only the first region is as long as this.
    let other = fixture.pair(Transport::Network, bytes);
    let arguments = [other.channel(), arguments[1].clone()];
    fixture.run("out_of_range", 1, &arguments);
    comm.barrier().unwrap();
}

/// Each rank writes to the peer's second region what it then reads there, more bytes than are sent at once.
#[test]
fn the_host_writes_and_reads_in_stream_order() {
    with_network(host_writes);
}

pub(super) fn host_writes(comm: &Communicator) {
    const BYTES: usize = 20 << 20;
    let fixture = Fixture::new(comm);
    let (rank, peer) = (comm.rank() as u32, 1 - comm.rank());
    let connection = fixture.pair(Transport::Network, 64);
    let added = comm.alloc(BYTES + 64).unwrap();
    comm.add_regions(&[(&connection, &added)]).unwrap();
    let source = comm.alloc(BYTES).unwrap();
    let read = comm.alloc(BYTES).unwrap();
    for round in 0..3 {
        let at = (1, 16 * u64::from(round));
        // What the stream does before it is written, and after it the source may change.
        fixture.stream.fill(source.memory(), 0).unwrap();
        let (first, second) = (
            source.slice(0..64).unwrap(),
            source.slice(64..BYTES).unwrap(),
        );
        let words = comm.alloc(64).unwrap();
        words.upload(&contents(10 * round + rank, 64)).unwrap();
        fixture.stream.copy(first.memory(), words.memory()).unwrap();
        fixture.stream.fill(second.memory(), 7).unwrap();
        connection.write(&fixture.stream, at, &source).unwrap();
        fixture.stream.fill(source.memory(), 9).unwrap();
        connection.read(&fixture.stream, &read, at).unwrap();
        fixture.stream.copy(source.memory(), read.memory()).unwrap();
        // A kernel that follows tells the peer.
        let tell = [connection.channel()];
        fixture.run("signal_and_wait", 1, &tell);
        let expected = |rank: u32| {
            let mut all = contents(10 * round + rank, 64);
            all.resize(BYTES, 7);
            all
        };
        let written = added.download().unwrap();
        let start = at.1 as usize;
        assert!(written[start..start + BYTES] == expected(peer as u32));
        assert!(source.download().unwrap() == expected(rank));
        comm.barrier().unwrap();
    }
}

#[test]
fn writes_of_many_streams_wait_for_their_own_alone() {
    with_network(many_streams);
}

pub(super) fn many_streams(comm: &Communicator) {
    const EACH: usize = 50;
    let fixture = Fixture::new(comm);
    let (rank, peer) = (comm.rank(), 1 - comm.rank());
    let connection = fixture.pair(Transport::Network, 8 * 4096);
    let streams: Vec<_> = (0..waiting_streams(8))
        .map(|_| comm.create_stream(Default::default()).unwrap())
        .collect();
    // The first stream's write is held up by a signal that comes after the others are done.
    let held = comm.alloc(4096).unwrap();
    held.upload(&contents(rank as u32, 4096)).unwrap();
    let signals = comm.signals(1).unwrap();
    let word = signals.word(0).unwrap();
    let wait = MemoryOp::wait(&word, 1);
    streams[0].memory_ops(&[wait]).unwrap();
    connection.write(&streams[0], 0, &held).unwrap();
    for (number, stream) in streams.iter().enumerate().skip(1) {
        let (source, at) = (comm.alloc(4096).unwrap(), 4096 * number as u64);
        for round in 0..EACH {
            stream
                .fill(source.memory(), (round + number) as u8)
                .unwrap();
            connection.write(stream, at, &source).unwrap();
        }
    }
    for stream in &streams[1..] {
        comm.synchronize(stream).unwrap();
    }
    comm.barrier().unwrap();
    let region = connection.region(0).unwrap();
    let arrived = region.download().unwrap();
    for number in 1..streams.len() {
        let expected = [(EACH - 1 + number) as u8; 4096];
        assert!(arrived[4096 * number..4096 * (number + 1)] == expected);
    }
    comm.barrier().unwrap();
    write_word(&fixture.stream, &word, 1);
    comm.synchronize(&streams[0]).unwrap();
    comm.barrier().unwrap();
    let arrived = region.slice(0..4096).unwrap().download().unwrap();
    assert!(arrived == contents(peer as u32, 4096));
    comm.barrier().unwrap();
}

#[test]
fn wrong_writes_over_the_network_are_errors() {
    with_network(wrong_writes);
}

pub(super) fn wrong_writes(comm: &Communicator) {
    let fixture = Fixture::new(comm);
    let connection = fixture.pair(Transport::Network, 64);
    let peer = Some(1 - comm.rank());
    let source = comm.alloc(65).unwrap();
    let whole = source.slice(0..64).unwrap();
    let stream = &fixture.stream;
    let wrong = [
        (
            connection.write(stream, 0, &source),
            "65 bytes from offset 0",
        ),
        (
            connection.write(stream, 1, &whole),
            "64 bytes from offset 1",
        ),
        (connection.read(stream, &whole, u64::MAX), "pass the end"),
        (
            connection.read(stream, &whole, (1, 0)),
            "unknown region 1 of the peer",
        ),
    ];
    for (result, says) in wrong {
        let error = result.unwrap_err();
        assert_eq!(
            (error.kind(), error.peer()),
            (ErrorKind::InvalidArgument, peer)
        );
        assert_says(&error, &[says, "tag 0"]);
    }
    stream.begin_capture().unwrap();
    let error = connection.write(stream, 0, &whole).unwrap_err();
    assert_eq!((error.kind(), error.peer()), (ErrorKind::Unsupported, peer));
    assert_says(&error, &["a graph", "in a kernel"]);
    stream.end_capture().unwrap();
    // Nothing is left of them.
    connection.write(stream, 0, &whole).unwrap();
    fixture.finish();
    comm.barrier().unwrap();
    comm.stop_proxy(comm.deadline()).unwrap();
    let error = connection.write(stream, 0, &whole).unwrap_err();
    assert_eq!((error.kind(), error.peer()), (ErrorKind::Closed, peer));
    assert_says(&error, &["the proxy was stopped"]);
    fixture.finish();
}

#[test]
fn copies_and_each_network_have_a_proxy() {
    with_network(|comm| {
        let fixture = Fixture::new(comm);
        let peer = 1 - comm.rank();
        let region = || comm.alloc(2 * 64).unwrap();
        let requests = [
            ConnectionRequest::new(peer, 0, &region()).with_transport(Transport::Proxied),
            ConnectionRequest::new(peer, 0, &region()).with_transport(Transport::Network),
            ConnectionRequest::new(peer, 0, &region()).with_network_devices(network_devices()),
        ];
        let connections = requests.map(|request| comm.connect(&[request]).unwrap());
        await_proxies(3);
        for _ in 0..2 {
            for connections in &connections {
                fixture.ping_pong(connections, 64, 3);
                fixture.finish();
            }
            comm.barrier().unwrap();
            comm.stop_proxy(comm.deadline()).unwrap();
            await_proxies(0);
            comm.launch_proxy().unwrap();
            comm.barrier().unwrap();
        }
    });
}

/// A stream that failed before it came to a copy waits for nothing, and holds nothing up.
#[test]
fn writes_of_a_stream_that_failed_are_left_out() {
    if kind() == DeviceKind::Cuda {
        return;
    }
    with_network(|comm| {
        let fixture = Fixture::new(comm);
        let connection = fixture.pair(Transport::Network, 64);
        let source = comm.alloc(64).unwrap();
        let module =
            ModuleSource::new("fails").with_host_kernel("fails", |block| block.u32(9).map(drop));
        // SAFETY: it has no code for a GPU.
        let module = unsafe { comm.device().load_module(&module) }.unwrap();
        let signals = comm.signals(1).unwrap();
        let word = signals.word(0).unwrap();
        let (wait, write) = (MemoryOp::wait(&word, 1), MemoryOp::write(&word, 1));
        let stream = comm.create_stream(Default::default()).unwrap();
        stream.memory_ops(&[wait]).unwrap();
        let fails = module.kernel("fails").unwrap();
        fails.launch(&stream, &Launch::new(1, 1), &[]).unwrap();
        connection.write(&stream, 0, &source).unwrap();
        fixture.stream.memory_ops(&[write]).unwrap();
        let error = stream.synchronize(comm.deadline()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        // The same copy by another stream is done, and nothing is left for the proxy.
        connection.write(&fixture.stream, 0, &source).unwrap();
        fixture.finish();
        comm.barrier().unwrap();
        comm.stop_proxy(Deadline::after(Duration::from_secs(20)))
            .unwrap();
    });
}

/// A stream that would wait for a proxy that has ended fails, as kernels do.
#[test]
fn writes_that_a_stopped_proxy_did_not_do_are_errors() {
    with_network(stopped_proxy);
}

pub(super) fn stopped_proxy(comm: &Communicator) {
    let fixture = Fixture::new(comm);
    let connection = fixture.pair(Transport::Network, 64);
    if comm.rank() == 0 {
        let source = comm.alloc(64).unwrap();
        let signals = comm.signals(1).unwrap();
        let word = signals.word(0).unwrap();
        await_word(&fixture.stream, &word, 1);
        connection.write(&fixture.stream, 0, &source).unwrap();
        let deadline = Deadline::after(Duration::from_millis(50));
        let error = comm.stop_proxy(deadline).unwrap_err();
        let says = ["1 copies of streams were not done"];
        assert_error(&error, ErrorKind::Timeout, &says);
        let error = comm.synchronize(&fixture.stream).unwrap_err();
        assert_names_peer(&error, ErrorKind::Closed, 1);
        assert_says(&error, &["the proxy was stopped"]);
        // The other is told while this rank is there.
        let wait = Wait::on(vec![1], Deadline::after(Duration::from_secs(20)));
        comm.bootstrap().store().get("told", &wait).unwrap();
        println!("as it should be");
        std::process::exit(0);
    }
    // A stream waits for what is not sent any more.
    let wait = MemoryOp::wait(connection.inbound(), 1);
    fixture.stream.memory_ops(&[wait]).unwrap();
    let error = comm.synchronize(&fixture.stream).unwrap_err();
    assert_names_peer(&error, ErrorKind::PeerFailed, 0);
    assert_says(&error, &["the proxy was stopped"]);
    comm.bootstrap().store().set("told", b"").unwrap();
    // Rank 0 has failed for its peers.
    let error = comm.barrier().unwrap_err();
    assert_eq!(error.peer(), Some(0), "{error}");
    std::process::exit(0);
}

#[test]
fn setups_leave_nothing_behind() {
    with_network(many_setups);
}

pub(super) fn many_setups(comm: &Communicator) {
    let fixture = Fixture::new(comm);
    let mut counts = Vec::new();
    for round in 0..30 {
        let connections = fixture.connect(Transport::Network, 2, 2 * 256);
        fixture.ping_pong(&connections, 256, 1);
        fixture.finish();
        if round % 10 == 9 {
            comm.stop_proxy(comm.deadline()).unwrap();
        }
    }
    let started = Instant::now();
    // What both ends have let go of is let go of.
    while comm.registrations_and_mappings().0 > 2 {
        counts.push(comm.registrations_and_mappings());
        comm.release_idle().unwrap();
        std::thread::sleep(Duration::from_millis(10));
        assert!(
            started.elapsed() < Duration::from_secs(30),
            "left behind: {counts:?}"
        );
    }
    comm.barrier().unwrap();
}

#[test]
fn a_network_device_that_is_not_there_is_an_error() {
    with_network(|comm| {
        let region = comm.alloc(64).unwrap();
        let request = ConnectionRequest::new(1 - comm.rank(), 0, &region);
        let error = comm
            .connect(&[request.clone().with_network_devices("none7")])
            .unwrap_err();
        assert_eq!(error.peer(), Some(1 - comm.rank()), "{error}");
        comm.barrier().unwrap();
        let request = request.with_network_devices(network_devices());
        let connections = comm.connect(&[request]).unwrap();
        assert_eq!(connections.all()[0].transport(), Transport::Network);
        let fixture = Fixture::new(comm);
        fixture.run("signal_and_wait", 1, &[connections.all()[0].channel()]);
    });
}
