//! Channels: kernels that put, signal and wait.

// A test fails by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "channels/kernels.rs"]
mod kernels;

mod common;

use common::{Ranks, assert_says, threads, world};
use kernels::{Outcome, Rig};
use std::time::{Duration, Instant};
use warplink::channel::{Connection, ConnectionRequest};
use warplink::device::{Argument, Launch, ModuleSource};
use warplink::{Communicator, Deadline, DeviceKind, ErrorKind};

/// How soon a rank must have its error after a peer was lost.
const SOON: Duration = Duration::from_secs(5);

/// A connection between ranks 0 and 1 with `bytes` on each side.
fn pair(comm: &Communicator, tag: u64, bytes: usize) -> Connection {
    let region = comm.alloc(bytes).unwrap();
    let peer = 1 - comm.rank();
    let request = ConnectionRequest::new(peer, tag, &region);
    let connections = comm.connect(&[request]).unwrap();
    connections.find(peer, tag).unwrap().clone()
}

#[test]
fn data_that_changes_every_round_goes_back_and_forth() {
    threads(world(2), |comm| {
        let rig = Rig::new(comm);
        let connection = pair(comm, 7, 2 * 4096);
        rig.ping_pong(&connection, 4096, 500).unwrap();
        rig.finish().unwrap();
    });
}

/// Rank 0's kernel waits for a signal that rank 1, which ends as `end` says, never sends.
fn ends_while_a_kernel_waits(end: fn(Communicator)) {
    let ranks = Ranks {
        world: world(2),
        ..Ranks::default()
    };
    let ended = ranks.start(|comm| {
        let rig = Rig::new(&comm);
        let connection = pair(&comm, 0, 64);
        comm.barrier().unwrap();
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(200));
            drop((rig, connection));
            return end(comm);
        }
        let arguments = [connection.channel(), rig.outcome.argument()];
        rig.launch("wait_once", 1, &arguments).unwrap();
        let started = Instant::now();
        let error = comm.synchronize(&rig.stream).unwrap_err();
        assert_eq!(
            (error.kind(), error.peer()),
            (ErrorKind::PeerLost, Some(1)),
            "{error}"
        );
        assert!(started.elapsed() < SOON, "{error} came late");
        // The kernel ends, and the next call says why.
        let error = rig.launch("wait_once", 1, &arguments).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
        println!("survived");
        std::process::exit(0);
    });
    if let Some(ended) = ended {
        assert_eq!(ended[0].code, Some(0), "rank 0:\n{}", ended[0].output);
        assert!(ended[0].output.contains("survived"), "{}", ended[0].output);
    }
}

#[test]
fn a_peer_that_is_killed_ends_kernels_that_wait() {
    ends_while_a_kernel_waits(|_comm| {
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)
            .unwrap();
    });
}

#[test]
fn a_peer_that_aborts_ends_kernels_that_wait() {
    ends_while_a_kernel_waits(|comm| comm.abort("it had enough"));
}

#[test]
fn a_peer_that_leaves_without_closing_ends_kernels_that_wait() {
    ends_while_a_kernel_waits(drop);
}

#[test]
fn wrong_requests_are_errors() {
    threads(world(2), |comm| {
        let region = comm.alloc(64).unwrap();
        let (rank, peer) = (comm.rank(), 1 - comm.rank());
        let request = |peer| ConnectionRequest::new(peer, 0, &region);
        for (requests, says) in [
            (vec![request(rank)], "this rank itself"),
            (vec![request(9)], "unknown peer 9"),
            (vec![request(peer), request(peer)], "two connections"),
        ] {
            let error = comm.connect(&requests).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert_says(&error, &[says]);
        }
        // Nobody else connects with tag 5.
        if rank == 0 {
            let deadline = Deadline::after(Duration::from_millis(100));
            let request = ConnectionRequest::new(peer, 5, &region);
            let error = comm.connect_until(&[request], deadline).unwrap_err();
            assert_eq!((error.kind(), error.peer()), (ErrorKind::Timeout, Some(1)));
            assert_says(&error, &["connect with tag 5"]);
        }
        // The withdrawn end is not met by the peer's next.
        comm.barrier().unwrap();
        let connection = pair(comm, 5, 64);
        assert_eq!((connection.peer(), connection.tag()), (peer, 5));
        let source = comm.alloc(65).unwrap();
        let stream = comm.create_stream(Default::default()).unwrap();
        let error = connection.write(&stream, 0, &source).unwrap_err();
        assert_says(&error, &["65 bytes from offset 0", "at most 64", "tag 5"]);
        let error = connection.write(&stream, (1, 0), &source).unwrap_err();
        assert_says(&error, &["unknown region 1 of the peer"]);
    });
}

#[test]
fn wrong_launches_are_errors() {
    let device = common::open_device();
    let kernels = kernels::Kernels::load(&device);
    let stream = device.create_stream(Default::default()).unwrap();
    let kernel = kernels.get("wait_once");
    let outcome = Outcome::new(&device);
    let launch = Launch::new(0, 32);
    let error = kernel.launch(&stream, &launch, &[]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);

    // The closures learn of a wrong argument when they ask for it, a GPU's launch checks all.
    let launch = Launch::new(1, 32);
    let wrong = [Argument::U32(1), outcome.argument()];
    for arguments in [&[][..], &wrong] {
        let error = kernel
            .launch(&stream, &launch, arguments)
            .and_then(|()| stream.synchronize(Deadline::after(SOON)))
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert_says(&error, &["wait_once", "argument"]);
        if common::kind() == DeviceKind::Host {
            break;
        }
    }

    // SAFETY: these sources have no code.
    let loaded = unsafe { device.load_module(&ModuleSource::new("empty")) };
    let error = loaded.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert_says(&error, &["empty", "ModuleSource::with"]);
}

#[test]
fn an_unknown_kernel_is_an_error() {
    let device = common::open_device();
    let source = ModuleSource::new("one.cu")
        .with_cuda("extern \"C\" __global__ void one() {}")
        .with_host_kernel("one", |_| Ok(()));
    // SAFETY: the kernel does nothing.
    let module = unsafe { device.load_module(&source) }.unwrap();
    module.kernel("one").unwrap();
    for name in ["two", "with\0zero"] {
        let error = module.kernel(name).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert_says(&error, &["unknown kernel", "one.cu"]);
    }
}
