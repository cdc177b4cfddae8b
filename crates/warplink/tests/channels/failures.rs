//! Peers that are lost or leave while kernels wait: an error, and no hang.

use super::common::{
    LIMIT, Ranks, Stopwatch, assert_says, has_network, kind, processes_of, stop_self,
    wait_until_stopped, world,
};
use super::kernels::{Rig, TRANSPORTS};
use super::staged::tiny;
use std::cell::Cell;
use std::time::Duration;
use warplink::bootstrap::Wait;
use warplink::channel::{Connection, Transport};
use warplink::device::Argument;
use warplink::{Communicator, Config, Deadline, DeviceKind, ErrorKind};

/// How soon a rank must have its error after a peer was lost.
const SOON: Duration = Duration::from_secs(5);

/// The key that says that rank 1 may end.
const BUSY: &str = "rank 0 is busy";

/// What rank 0 does: it says when rank 1 may end, and learns the process of that.
type Busy = fn(&Rig<'_>, &Connection, &dyn Fn() -> i32);

/// Runs two ranks of which 1 ends as `end` says while kernels of rank 0 do what `busy` enqueues, which
/// never ends by itself. Rank 0 must learn soon that rank 1 was lost.
fn ends(transport: Transport, busy: Busy, end: fn(Communicator)) {
    ends_with(None, transport, busy, end);
}

/// As [`ends`], with a change to each rank's configuration.
fn ends_with(
    config: Option<fn(&mut Config)>,
    transport: Transport,
    busy: Busy,
    end: fn(Communicator),
) {
    let limit = ("WARPLINK_HEARTBEAT_LIMIT".to_owned(), "3".to_owned());
    let ranks = Ranks {
        world: world(2),
        env: [limit].into(),
        config,
        ..Ranks::default()
    };
    let ended = ranks.start(|comm| {
        let processes = processes_of(&comm);
        let rig = Rig::new(&comm);
        let connection = rig.pair(transport, 512);
        comm.barrier().unwrap();
        if comm.rank() == 1 {
            let wait = Wait::on([0], comm.deadline());
            comm.bootstrap().store().get(BUSY, &wait).unwrap();
            std::thread::sleep(Duration::from_millis(100));
            drop((rig, connection));
            return end(comm);
        }
        let started = Cell::new(Stopwatch::start());
        busy(&rig, &connection, &|| {
            started.set(Stopwatch::start());
            comm.bootstrap().store().set(BUSY, b"").unwrap();
            processes[1]
        });
        let error = comm.synchronize(&rig.stream).unwrap_err();
        assert_eq!(
            (error.kind(), error.peer()),
            (ErrorKind::PeerLost, Some(1)),
            "{error}"
        );
        assert!(started.get().elapsed() < SOON, "{error} came late");
        // The next call says so as well.
        let error = rig.launch("wait_once", 1, &[connection.channel()]);
        assert_eq!(error.unwrap_err().kind(), ErrorKind::PeerLost);
        println!("survived");
        // One that was only stopped ends now.
        end_process(processes[1]);
        std::process::exit(0);
    });
    if let Some(ended) = ended {
        assert_eq!(ended[0].code, Some(0), "rank 0:\n{}", ended[0].output);
        assert!(ended[0].output.contains("survived"), "{}", ended[0].output);
    }
}

/// Kills a process, if it is still there.
fn end_process(process: i32) {
    if let Some(process) = rustix::process::Pid::from_raw(process) {
        let _ = rustix::process::kill_process(process, rustix::process::Signal::KILL);
    }
}

fn wait(rig: &Rig<'_>, connection: &Connection, ready: &dyn Fn() -> i32) {
    let channel = connection.channel();
    rig.launch("wait_once", 1, &[channel]).unwrap();
    ready();
}

fn kill(_: Communicator) {
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)
        .unwrap();
}

#[test]
fn a_peer_that_is_killed_ends_kernels_that_wait() {
    ends(Transport::Direct, wait, kill);
}

#[test]
fn a_peer_that_is_killed_ends_kernels_that_wait_for_its_proxy() {
    ends(Transport::Proxied, wait, kill);
}

/// It keeps its connections, so the heartbeat limit ends the waits.
fn stop(_: Communicator) {
    stop_self();
    std::thread::sleep(SOON);
}

#[test]
fn a_peer_that_is_stopped_ends_kernels_that_wait() {
    ends(Transport::Direct, wait, stop);
}

#[test]
fn a_peer_that_is_stopped_ends_kernels_that_wait_for_its_proxy() {
    ends(Transport::Proxied, wait, stop);
}

/// Flushes are answered by this rank's own device, whatever the peer does.
#[test]
fn a_peer_that_is_stopped_holds_up_no_put_to_its_memory() {
    let busy = |rig: &Rig<'_>, connection: &Connection, ready: &dyn Fn() -> i32| {
        wait_until_stopped(ready());
        let started = Stopwatch::start();
        let arguments = [connection.channel(), Argument::U32(8)];
        rig.launch("many_signals", 1, &arguments).unwrap();
        rig.comm.synchronize(&rig.stream).unwrap();
        assert!(started.elapsed() < Duration::from_secs(2), "{started:?}");
        wait(rig, connection, &|| 0);
    };
    ends(Transport::Proxied, busy, stop);
}

#[test]
fn a_peer_that_is_killed_ends_waits_for_packets() {
    let read = |rig: &Rig<'_>, connection: &Connection, ready: &dyn Fn() -> i32| {
        let arguments = [
            connection.channel(),
            Argument::U64(0),
            Argument::U32(1),
            Argument::U32(0),
        ];
        rig.launch("packets", 1, &arguments).unwrap();
        ready();
    };
    ends(Transport::Direct, read, kill);
}

/// Reads and writes of the host until the peer is lost, and then a wait.
fn write(rig: &Rig<'_>, connection: &Connection, ready: &dyn Fn() -> i32) {
    let source = rig.comm.alloc(64).unwrap();
    for round in 0..50 {
        if round == 5 {
            ready();
        }
        let written = connection.write(&rig.stream, 0, &source);
        let both = written.and_then(|()| connection.read(&rig.stream, &source, 0));
        if let Err(error) = both {
            assert_eq!((error.kind(), error.peer()), (ErrorKind::PeerLost, Some(1)));
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    // One that is only stopped is lost later.
    let channel = connection.channel();
    rig.launch("wait_once", 1, &[channel]).ok();
}

#[test]
fn a_peer_that_is_killed_ends_writes_over_the_network() {
    if has_network() {
        ends(Transport::Network, write, kill);
    }
}

#[test]
fn a_peer_that_is_stopped_ends_writes_over_the_network() {
    if has_network() {
        ends(Transport::Network, write, stop);
    }
}

#[test]
fn a_peer_that_is_killed_ends_kernels_that_wait_for_the_network() {
    if has_network() {
        ends(Transport::Network, wait, kill);
    }
}

#[test]
fn a_peer_that_is_stopped_ends_kernels_that_wait_for_the_network() {
    if has_network() {
        ends(Transport::Network, wait, stop);
    }
}

/// More than the rings hold, which the peer takes until it is lost.
fn flush_chunks(rig: &Rig<'_>, connection: &Connection, ready: &dyn Fn() -> i32) {
    let arguments = [connection.channel(), Argument::U32(8)];
    let until = Deadline::after(LIMIT / 2);
    for round in 0.. {
        if round == 200 {
            ready();
        }
        let launched = rig.launch("many_puts", 4, &arguments);
        let both = launched.and_then(|()| rig.launch("many_signals", 4, &arguments));
        if let Err(error) = both {
            assert_eq!((error.kind(), error.peer()), (ErrorKind::PeerLost, Some(1)));
            return;
        }
        assert!(!until.passed(), "the peer is not lost");
        // Not so fast that the stream's queue grows without bound.
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_peer_that_is_killed_ends_flushes_of_chunks() {
    if has_network() {
        ends_with(Some(tiny), Transport::Network, flush_chunks, kill);
    }
}

#[test]
fn a_peer_that_is_stopped_ends_writes_in_chunks() {
    if has_network() {
        ends_with(Some(tiny), Transport::Network, write, stop);
    }
}

#[test]
fn a_peer_that_aborts_ends_kernels_that_wait() {
    ends(Transport::Direct, wait, |comm| comm.abort("it had enough"));
}

#[test]
fn a_peer_that_leaves_without_closing_ends_kernels_that_wait() {
    ends(Transport::Direct, wait, drop);
}

/// How long a rank waits that knows that it waits in vain. Ranks that share GPUs take seconds to join.
fn patience() -> Duration {
    Duration::from_secs(if kind() == DeviceKind::Host { 2 } else { 10 })
}

/// Rank 1 closes though rank 0 waits for it: nobody is lost, and both learn that something is missing.
#[test]
fn a_peer_that_closes_while_a_kernel_waits_is_a_timeout() {
    for transport in TRANSPORTS {
        let ranks = Ranks {
            world: world(2),
            config: Some(|config| config.timeout = patience()),
            ..Ranks::default()
        };
        let ended = ranks.start(|comm| {
            let rig = Rig::new(&comm);
            let connection = rig.pair(transport, 64);
            if comm.rank() == 1 {
                drop((rig, connection));
                comm.close().unwrap_err();
            } else {
                wait(&rig, &connection, &|| 0);
                let started = Stopwatch::start();
                let error = comm.synchronize(&rig.stream).unwrap_err();
                assert_says(&error, &["rank 0"]);
                assert!(started.elapsed() < patience() + SOON, "{error} came late");
                // The kernel is let go when the rank gives up.
                comm.abort("the peer does not answer");
                let deadline = Deadline::after(SOON);
                let error = rig.stream.synchronize(deadline).unwrap_err();
                // Or the peer gave up first.
                if error.kind() != ErrorKind::PeerLost {
                    assert_says(&error, &["the peer does not answer"]);
                }
            }
            println!("survived");
            std::process::exit(0);
        });
        for end in ended.iter().flatten() {
            assert_eq!(end.code, Some(0), "{}", end.output);
            assert!(end.output.contains("survived"), "{}", end.output);
        }
    }
}
