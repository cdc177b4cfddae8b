//! Ranks on two hosts, which are network namespaces: connections between them go over the network, and collectives by
//! the vendor's library. The tests need root, and those of connections UCX, and are left out with a notice otherwise.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::hosts::{Hosts, SOON, ended_well, leave, role, take};
use common::{Stopwatch, allocate, assert_names_peer, assert_says, downloaded, values};
use common::{leave_out, unchanged};
use std::net::Ipv4Addr;
use std::path::Path;
use std::time::{Duration, Instant};
use warplink::bootstrap::{JoinConfig, Rendezvous, UniqueId};
use warplink::channel::{Connection, ConnectionRequest, NetworkPath, Transport};
use warplink::collective::{CollectiveOptions, CollectivePath, Message};
use warplink::device::network::{self, DeviceAccess, NetworkOptions};
use warplink::device::{
    AllocationKind, Argument, Block, DeviceSlice, Kernel, Launch, ModuleSource, ReduceOp, Stream,
};
use warplink::topology::{Connection as LinkedBy, Obstacle};
use warplink::{Collectives, Communicator, Config, DType, DeviceKind, Error, ErrorKind, Result};

/// How soon both ranks must know that the link was cut.
const DEADLINE: Duration = Duration::from_secs(5);

/// Runs `body` on two hosts of one rank each, with what the first cuts when the second asks for it.
fn on_two_hosts(body: impl FnOnce(Communicator, &Path)) {
    on_two_hosts_with(unchanged, body);
}

/// As [`on_two_hosts`], with a change to each rank's configuration.
fn on_two_hosts_with(change: fn(&mut Config), body: impl FnOnce(Communicator, &Path)) {
    if role().is_none()
        && let Err(error) = network::open(&NetworkOptions::default())
    {
        assert_eq!(error.kind(), ErrorKind::LibraryMissing, "{error}");
        return leave_out(error);
    }
    on_two_hosts_without_network(change, body);
}

/// As [`on_two_hosts_with`], also where there is no library for the network.
fn on_two_hosts_without_network(change: fn(&mut Config), body: impl FnOnce(Communicator, &Path)) {
    let Some((directory, rank)) = role() else {
        let Some(hosts) = Hosts::create() else { return };
        let directory = tempfile::tempdir().unwrap();
        let mut roles = [0, 1].map(|host| hosts.run(host, directory.path()));
        let started = Instant::now();
        while roles
            .iter_mut()
            .any(|role| role.try_wait().unwrap().is_none())
            && started.elapsed() < 2 * SOON
        {
            if directory.path().join("cut").exists() {
                hosts.cut();
                leave(directory.path(), "was cut", &[]);
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        for (host, role) in roles.into_iter().enumerate() {
            assert!(ended_well(role), "host {host} failed");
        }
        return;
    };
    let id = if rank == 0 {
        let id = UniqueId::create(Ipv4Addr::new(10, 117, 0, 1).into(), 0).unwrap();
        leave(&directory, "id", id.to_string().as_bytes());
        id
    } else {
        let text = String::from_utf8(take(&directory, "id")).unwrap();
        text.parse().unwrap()
    };
    let config = Config::new(
        JoinConfig::new(Rendezvous::Id(id), rank, 2),
        DeviceKind::Host,
    );
    let mut config = config.with_network_devices("link0");
    change(&mut config);
    body(Communicator::join(&config).unwrap(), &directory);
}

/// So many bytes of what `rank` sends in `round`.
fn pattern(rank: usize, round: usize, bytes: usize) -> Vec<u8> {
    const PAGE: usize = 4096;
    let noise = values(rank, round, PAGE);
    let mut all = Vec::with_capacity(bytes);
    for page in 0..bytes / PAGE {
        all.extend_from_slice(&page.to_le_bytes());
        all.extend_from_slice(&noise[size_of::<usize>()..]);
    }
    all
}

fn kernel(
    comm: &Communicator,
    name: &str,
    closure: impl Fn(&Block<'_>) -> Result<()> + Send + Sync + 'static,
) -> Kernel {
    let source = ModuleSource::new("hosts").with_host_kernel(name, closure);
    // SAFETY: there is no code for a GPU.
    let module = unsafe { comm.device().load_module(&source) }.unwrap();
    module.kernel(name).unwrap()
}

/// The connection to the other host, which chooses the network by itself.
fn connect(comm: &Communicator, bytes: usize) -> (Connection, Stream) {
    let peer = 1 - comm.rank();
    let region = comm.alloc(bytes).unwrap();
    let request = ConnectionRequest::new(peer, 0, &region);
    let direct = request.clone().with_transport(Transport::Direct);
    let error = comm.connect(&[direct]).unwrap_err();
    assert_names_peer(&error, ErrorKind::Unsupported, peer);
    assert_says(&error, &["on another machine", "choose the network"]);
    let connection = comm.connect(&[request]).unwrap().all()[0].clone();
    assert_eq!(connection.transport(), Transport::Network);
    (connection, comm.create_stream(Default::default()).unwrap())
}

/// Nobody asks for the vendor's library, and it does all collectives. Without it there is one error.
#[test]
fn collectives_of_two_hosts_go_by_the_vendors_library() {
    on_two_hosts_without_network(unchanged, |comm, _| {
        let direct = CollectiveOptions::on(CollectivePath::Direct);
        // The topology says beforehand what transfers find.
        let topology = comm.topology().unwrap();
        assert_eq!(topology.mesh().connection(0, 1), LinkedBy::Nothing);
        let apart = |it: &Obstacle| matches!(it, Obstacle::DifferentNamespaces { namespaces, .. } if *namespaces == [[0], [1]]);
        assert!(topology.obstacles().iter().any(apart), "{topology}");
        let error = comm.collectives_with(&direct).unwrap_err();
        let found = (error.kind(), error.peer());
        assert_eq!(
            found,
            (ErrorKind::Unsupported, Some(1 - comm.rank())),
            "{error}"
        );
        assert_says(
            &error,
            &[
                "join the collectives",
                "on another machine",
                "leave the path open",
            ],
        );

        let collectives = comm.collectives().unwrap();
        assert_eq!(collectives.path(), CollectivePath::Engine);
        assert_eq!(collectives.path_of_messages(), Some(CollectivePath::Engine));
        assert!(collectives.peer_buffer(1 - comm.rank()).is_none());
        for _ in 0..3 {
            exchange_by_collectives(&comm, &collectives);
        }
        // Each host alone has kernels of its own.
        let own = comm.split(comm.rank() as u64, 0).unwrap();
        assert_eq!(own.collectives().unwrap().path(), CollectivePath::Direct);
        own.close().unwrap();
        drop(collectives);
        comm.close().unwrap();
    });
}

/// Sums, gathers and exchanges numbers that say whose they are.
fn exchange_by_collectives(comm: &Communicator, collectives: &Collectives) {
    const COUNT: usize = 50_000;
    let (rank, peer) = (comm.rank(), 1 - comm.rank());
    let stream = comm.create_stream(Default::default()).unwrap();
    let memory = |numbers: &[i32]| {
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        let memory = comm.device().allocate(bytes.len(), AllocationKind::Plain);
        let memory = memory.unwrap();
        comm.device().upload(&memory, &bytes).unwrap();
        memory
    };
    let number = |rank: usize, at: usize| (1000 * rank + at) as i32;
    let of = |rank: usize| {
        (0..COUNT)
            .map(move |at| number(rank, at))
            .collect::<Vec<_>>()
    };
    let own = memory(&of(rank));
    let nothing = vec![-1; COUNT];
    let (sum, came) = (memory(&nothing), memory(&nothing));
    let (all, turned) = (
        memory(&[&nothing[..], &nothing].concat()),
        memory(&of(rank)),
    );
    let (dtype, op) = (DType::I32, ReduceOp::Sum);
    collectives
        .all_reduce(&sum, &own, dtype, op, &stream)
        .unwrap();
    collectives.all_gather(&all, &own, &stream).unwrap();
    collectives.all_to_all(&turned, &turned, &stream).unwrap();
    let messages = [Message::send(peer, &own), Message::receive(peer, &came)];
    collectives.send_receive(&messages, &stream).unwrap();
    collectives.barrier(&stream).unwrap();
    comm.synchronize(&stream).unwrap();
    let check = |memory: &DeviceSlice, expected: Vec<i32>| {
        let bytes = downloaded(comm, memory);
        let expected: Vec<u8> = expected.iter().flat_map(|n| n.to_le_bytes()).collect();
        assert!(bytes == expected);
    };
    check(&sum, of(0).iter().zip(of(1)).map(|(a, b)| a + b).collect());
    check(&all, [of(0), of(1)].concat());
    check(&came, of(peer));
    let half = |of: Vec<i32>| of[rank * COUNT / 2..(rank + 1) * COUNT / 2].to_vec();
    check(&turned, [half(of(0)), half(of(1))].concat());
}

/// Both ranks put a gibibyte at once, in parts to places of their own, and check what arrives.
#[test]
fn two_hosts_exchange_a_gibibyte_by_connections() {
    const ALL: usize = 1 << 30;
    const PART: usize = 64 << 20;
    on_two_hosts(|comm, _| {
        let (rank, peer) = (comm.rank(), 1 - comm.rank());
        // What is sent, two parts in turn, and then all that arrives.
        let (connection, stream) = connect(&comm, 2 * PART + ALL);
        let region = connection.region(0).unwrap();
        let send = kernel(&comm, "send", |block| {
            let (channel, part) = (block.channel(0)?, block.u64(1)?);
            let (source, bytes) = (part % 2 * PART as u64, PART as u64);
            let target = (2 + part) * bytes;
            channel.put_with_signal_and_flush(target, source, bytes)
        });
        let receive = kernel(&comm, "receive", |block| block.channel(0)?.wait());
        let started = Instant::now();
        for part in 0..ALL / PART {
            let own = part % 2 * PART;
            let source = region.slice(own..own + PART).unwrap();
            source.upload(&pattern(rank, part, PART)).unwrap();
            let arguments = [connection.channel(), Argument::U64(part as u64)];
            let launch = Launch::new(1, 1);
            send.launch(&stream, &launch, &arguments).unwrap();
            receive
                .launch(&stream, &launch, &[connection.channel()])
                .unwrap();
            comm.synchronize(&stream).unwrap();
            let arrived = (2 + part) * PART;
            let arrived = region.slice(arrived..arrived + PART).unwrap();
            let right = arrived.download().unwrap() == pattern(peer, part, PART);
            assert!(right, "part {part}");
        }
        println!("1 GiB each way in {:?}", started.elapsed());
        drop((connection, region));
        comm.close().unwrap();
    });
}

#[test]
fn two_hosts_write_and_read_registered_buffers() {
    on_two_hosts(|comm, _| registered_buffers(comm, NetworkPath::Direct));
}

#[test]
fn two_hosts_write_and_read_through_staging_memory() {
    on_two_hosts_with(staged, |comm, _| {
        registered_buffers(comm, NetworkPath::Staged);
    });
}

#[test]
fn two_hosts_write_and_read_past_staging_memory() {
    on_two_hosts_with(past_staging, |comm, _| {
        registered_buffers(comm, NetworkPath::Direct);
    });
}

/// As connections of GPUs go.
fn staged(config: &mut Config) {
    config.staging.always = true;
}

/// As they go where the network's library reaches memory of GPUs by itself.
fn past_staging(config: &mut Config) {
    staged(config);
    config.staging.access = DeviceAccess::Direct;
}

/// Registered buffers, written and read by the hosts alone.
fn registered_buffers(comm: Communicator, path: NetworkPath) {
    const BYTES: usize = 24 << 20;
    let (rank, peer) = (comm.rank(), 1 - comm.rank());
    // What is sent and what is read are of the connection's region, as all that goes past staging memory.
    let (connection, stream) = connect(&comm, 2 * BYTES);
    assert_eq!(connection.network_path(), Some(path));
    // The two need not be equal.
    let buffer = comm.alloc(2 * BYTES + 4096 * rank).unwrap();
    let numbers = comm.add_regions(&[(&connection, &buffer)]).unwrap();
    let region = connection.region(0).unwrap();
    let (source, read) = (
        region.slice(0..BYTES).unwrap(),
        region.slice(BYTES..2 * BYTES).unwrap(),
    );
    for round in 0..4 {
        let at = round % 2 * BYTES;
        source.upload(&pattern(rank, round, BYTES)).unwrap();
        let place = (numbers[0], at as u64);
        connection.write(&stream, place, &source).unwrap();
        connection.read(&stream, &read, place).unwrap();
        comm.synchronize(&stream).unwrap();
        comm.barrier().unwrap();
        let arrived = buffer.slice(at..at + BYTES).unwrap().download().unwrap();
        assert!(arrived == pattern(peer, round, BYTES), "round {round}");
        assert!(read.download().unwrap() == pattern(rank, round, BYTES));
    }
    let end = (numbers[0], connection.peer_bytes(1).unwrap() as u64);
    let error = connection.write(&stream, end, &source).unwrap_err();
    assert_names_peer(&error, ErrorKind::InvalidArgument, peer);
    drop((connection, region, source, read, buffer));
    comm.close().unwrap();
}

#[test]
fn a_cut_link_ends_writes_with_an_error_that_names_the_peer() {
    on_two_hosts(|comm, directory| {
        cut_off(comm, directory, NetworkPath::Direct);
    });
}

#[test]
fn a_cut_link_ends_staged_writes_with_an_error_that_names_the_peer() {
    on_two_hosts_with(staged, |comm, directory| {
        cut_off(comm, directory, NetworkPath::Staged);
    });
}

#[test]
fn a_cut_link_ends_writes_past_staging_memory_with_an_error_that_names_the_peer() {
    on_two_hosts_with(past_staging, |comm, directory| {
        cut_off(comm, directory, NetworkPath::Direct);
    });
}

fn cut_off(comm: Communicator, directory: &Path, path: NetworkPath) {
    let (connection, stream) = connect(&comm, 1 << 20);
    assert_eq!(connection.network_path(), Some(path));
    // What is no region of the connection is staged.
    let source = connection.region(0).unwrap();
    connection.write(&stream, 0, &source).unwrap();
    comm.synchronize(&stream).unwrap();
    cut_the_link(&comm, directory);
    // One writes, the other reads.
    let started = Stopwatch::start();
    let asked = match comm.rank() {
        0 => connection.write(&stream, 0, &source),
        _ => connection.read(&stream, &source, 0),
    };
    let ended = asked.and_then(|()| comm.synchronize(&stream));
    was_cut_off(&comm, &ended.unwrap_err(), started);
    drop((connection, comm));
    std::process::exit(0);
}

/// Has the link cut when both ranks are here.
fn cut_the_link(comm: &Communicator, directory: &Path) {
    comm.barrier().unwrap();
    // The answer to the barrier is to arrive before the link is cut.
    if comm.rank() == 0 {
        take(directory, "ready");
        leave(directory, "cut", &[]);
    } else {
        leave(directory, "ready", &[]);
    }
    take(directory, "was cut");
}

/// Checks the error of what was begun when the link was cut.
fn was_cut_off(comm: &Communicator, error: &Error, started: Stopwatch) {
    let took = started.elapsed();
    println!("after {took:?}: {error}");
    assert!(took < DEADLINE, "after {took:?}: {error}");
    // The first rank serves the store, from which the other is cut off; it knows whom it lost all the same.
    let named = (error.kind(), error.peer());
    assert_eq!(
        named,
        (ErrorKind::PeerLost, Some(1 - comm.rank())),
        "{error}"
    );
}

#[test]
fn a_cut_link_ends_collectives_with_an_error_that_names_the_peer() {
    on_two_hosts_without_network(unchanged, |comm, directory| {
        let collectives = comm.collectives().unwrap();
        exchange_by_collectives(&comm, &collectives);
        cut_the_link(&comm, directory);
        // Both wait for what is not sent, as after a cut between hosts; these two share memory all the same.
        let stream = comm.create_stream(Default::default()).unwrap();
        let memory = allocate(&comm, 64);
        let started = Stopwatch::start();
        let message = Message::receive(1 - comm.rank(), &memory);
        let ended = collectives.send_receive(&[message], &stream);
        let ended = ended.and_then(|()| comm.synchronize(&stream));
        was_cut_off(&comm, &ended.unwrap_err(), started);
        std::process::exit(0);
    });
}

#[test]
fn a_cut_link_ends_kernels_with_an_error_that_names_the_peer() {
    on_two_hosts(|comm, directory| {
        let rank = comm.rank();
        let (connection, stream) = connect(&comm, 1 << 20);
        let signal_and_wait = kernel(&comm, "signal_and_wait", |block| {
            block.channel(0)?.signal()?;
            block.channel(0)?.wait()
        });
        let launch = Launch::new(1, 1);
        signal_and_wait
            .launch(&stream, &launch, &[connection.channel()])
            .unwrap();
        comm.synchronize(&stream).unwrap();
        cut_the_link(&comm, directory);
        // One waits for an answer to what it sends, the other for what is not sent.
        let busy = kernel(&comm, "busy", move |block| {
            if rank == 0 {
                return block.channel(0)?.put_with_signal_and_flush(0, 0, 1 << 20);
            }
            block.channel(0)?.wait()
        });
        busy.launch(&stream, &launch, &[connection.channel()])
            .unwrap();
        let started = Stopwatch::start();
        let error = comm.synchronize(&stream).unwrap_err();
        was_cut_off(&comm, &error, started);
        // Ending it waits for nobody.
        let started = Stopwatch::start();
        drop((connection, comm));
        assert!(started.elapsed() < Duration::from_secs(10));
        std::process::exit(0);
    });
}
