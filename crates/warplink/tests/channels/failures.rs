//! Peers that are lost or leave while kernels wait: an error, and no hang.

use super::common::{
    LIMIT, Ranks, Stopwatch, assert_names_peer, assert_says, exit_as_survivor, has_network, kind,
    processes_of, stop_self, wait_until_stopped, world,
};
use super::kernels::{Fixture, Outcome, THREADS, TRANSPORTS};
use super::proxied::small;
use super::staged::tiny;
use std::cell::Cell;
use std::time::Duration;
use warplink::bootstrap::Wait;
use warplink::channel::{Connection, Transport};
use warplink::device::{Argument, ChannelHandle, Launch, Priority, Stream};
use warplink::{Communicator, Config, Deadline, DeviceKind, ErrorKind};

/// How soon a rank must have its error after a peer was lost.
const SOON: Duration = Duration::from_secs(5);

/// The key that says that rank 1 may end.
const BUSY: &str = "rank 0 is busy";

/// Body of rank 0: signals when rank 1 may exit, and obtains its process id. Returns the waiting kernels.
type Busy = fn(&Fixture<'_>, &Connection, &dyn Fn() -> i32) -> Vec<Waiting>;

/// A kernel that waits.
struct Waiting {
    stream: Stream,
    outcome: Outcome,
}

impl Waiting {
    /// The last kernel of a fixture.
    fn of(fixture: &Fixture<'_>) -> Vec<Self> {
        let (stream, outcome) = (fixture.stream.clone(), fixture.outcome.clone());
        vec![Self { stream, outcome }]
    }

    /// Its stream fails, as the peer was lost, and so does its wait: on GPUs the kernel says so itself, where the stream
    /// does not wait for it any more.
    fn check(&self, comm: &Communicator, started: &Stopwatch) {
        let error = comm.synchronize(&self.stream).unwrap_err();
        assert_names_peer(&error, ErrorKind::PeerLost, 1);
        while kind() == DeviceKind::Cuda && self.outcome.look() != ABORTED {
            let told = self.outcome.look();
            assert!(started.elapsed() < SOON, "{told:?} after {error}");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(started.elapsed() < SOON, "{error} came late");
    }
}

/// Nothing wrong, and the status of calls whose wait was ended.
const ABORTED: [u32; 2] = [0, 1];

/// Runs two ranks of which 1 ends as `end` says while kernels of rank 0 do what `busy` enqueues, which
/// never ends by itself. Rank 0 and its kernels must learn soon that rank 1 was lost.
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
    let mut ranks = Ranks::of(world(2)).with_env("WARPLINK_HEARTBEAT_LIMIT", "3");
    ranks.config = config;
    let ended = ranks.start(|comm| {
        let processes = processes_of(&comm);
        let fixture = Fixture::new(&comm);
        let connection = fixture.pair(transport, 512);
        comm.barrier().unwrap();
        if comm.rank() == 1 {
            let wait = Wait::on([0], comm.deadline());
            comm.bootstrap().store().get(BUSY, &wait).unwrap();
            std::thread::sleep(Duration::from_millis(100));
            drop((fixture, connection));
            return end(comm);
        }
        let started = Cell::new(Stopwatch::start());
        let waiting = busy(&fixture, &connection, &|| {
            started.set(Stopwatch::start());
            comm.bootstrap().store().set(BUSY, b"").unwrap();
            processes[1]
        });
        let error = comm.synchronize(&fixture.stream).unwrap_err();
        assert_names_peer(&error, ErrorKind::PeerLost, 1);
        let started = started.into_inner();
        assert!(started.elapsed() < SOON, "{error} came late");
        waiting.iter().for_each(|one| one.check(&comm, &started));
        // The next call says so as well.
        let error = fixture.launch("wait_once", 1, &[connection.channel()]);
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

fn wait(fixture: &Fixture<'_>, connection: &Connection, ready: &dyn Fn() -> i32) -> Vec<Waiting> {
    let channel = connection.channel();
    fixture.launch("wait_once", 1, &[channel]).unwrap();
    ready();
    Waiting::of(fixture)
}

/// Every way to wait, each in a kernel and on a connection of its own, and the last in that of the fixture.
fn wait_in_every_way(
    fixture: &Fixture<'_>,
    connection: &Connection,
    ready: &dyn Fn() -> i32,
) -> Vec<Waiting> {
    let signals = fixture.comm.signals(2).unwrap();
    let kernel = fixture.kernels.get("wait_by");
    let one = |how: u32| {
        let stream = fixture.comm.create_stream(Priority::Normal).unwrap();
        let outcome = Outcome::new(fixture.comm.device());
        let arguments = [
            connection.channel(),
            Argument::from(&signals),
            Argument::U32(how),
            outcome.argument(),
        ];
        let launch = Launch::new(1, THREADS);
        kernel.launch(&stream, &launch, &arguments).unwrap();
        Waiting { stream, outcome }
    };
    let mut all: Vec<_> = (0..WAYS).map(one).collect();
    all.extend(wait(fixture, connection, ready));
    all
}

/// The ways to wait of the kernel `wait_by`.
const WAYS: u32 = 10;

#[test]
fn a_peer_that_is_killed_ends_every_kind_of_wait() {
    ends(Transport::Direct, wait_in_every_way, kill);
}

#[test]
fn a_peer_that_is_stopped_ends_every_kind_of_wait() {
    ends(Transport::Direct, wait_in_every_way, stop);
}

/// Signals by a proxy until they fail, also while the ring is full.
fn signal_on(
    fixture: &Fixture<'_>,
    connection: &Connection,
    ready: &dyn Fn() -> i32,
) -> Vec<Waiting> {
    fixture
        .launch("signal_on", 4, &[connection.channel()])
        .unwrap();
    ready();
    Waiting::of(fixture)
}

#[test]
fn a_peer_that_is_killed_ends_kernels_that_signal_through_a_proxy() {
    ends_with(Some(small), Transport::Proxied, signal_on, kill);
}

#[test]
fn a_peer_that_is_stopped_ends_kernels_that_signal_through_a_proxy() {
    ends_with(Some(small), Transport::Proxied, signal_on, stop);
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
    let busy = |fixture: &Fixture<'_>, connection: &Connection, ready: &dyn Fn() -> i32| {
        wait_until_stopped(ready());
        let started = Stopwatch::start();
        let arguments = [connection.channel(), Argument::U32(8)];
        fixture.launch("many_signals", 1, &arguments).unwrap();
        fixture.comm.synchronize(&fixture.stream).unwrap();
        assert!(started.elapsed() < Duration::from_secs(2), "{started:?}");
        wait(fixture, connection, &|| 0)
    };
    ends(Transport::Proxied, busy, stop);
}

/// Reads and writes of the host until the peer is lost, and then a wait.
fn write(fixture: &Fixture<'_>, connection: &Connection, ready: &dyn Fn() -> i32) -> Vec<Waiting> {
    let source = fixture.comm.alloc(64).unwrap();
    for round in 0..50 {
        if round == 5 {
            ready();
        }
        let written = connection.write(&fixture.stream, 0, &source);
        let both = written.and_then(|()| connection.read(&fixture.stream, &source, 0));
        if let Err(error) = both {
            assert_names_peer(&error, ErrorKind::PeerLost, 1);
            return Vec::new();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    // One that is only stopped is lost later.
    let launched = fixture.launch("wait_once", 1, &[connection.channel()]);
    launched.map_or_else(|_| Vec::new(), |()| Waiting::of(fixture))
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
fn flush_chunks(
    fixture: &Fixture<'_>,
    connection: &Connection,
    ready: &dyn Fn() -> i32,
) -> Vec<Waiting> {
    let arguments = [connection.channel(), Argument::U32(8)];
    let until = Deadline::after(LIMIT / 2);
    for round in 0.. {
        if round == 200 {
            ready();
        }
        let launched = fixture.launch("many_puts", 4, &arguments);
        let both = launched.and_then(|()| fixture.launch("many_signals", 4, &arguments));
        if let Err(error) = both {
            assert_names_peer(&error, ErrorKind::PeerLost, 1);
            break;
        }
        assert!(!until.passed(), "the peer is not lost");
        // Not so fast that the stream's queue grows without bound.
        std::thread::sleep(Duration::from_millis(1));
    }
    Vec::new()
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
            config: Some(|config| config.timeout = patience()),
            ..Ranks::of(world(2))
        };
        ranks.run_losing(&[], |comm| {
            let fixture = Fixture::new(&comm);
            let connection = fixture.pair(transport, 64);
            if comm.rank() == 1 {
                drop((fixture, connection));
                comm.close().unwrap_err();
            } else {
                wait(&fixture, &connection, &|| 0);
                let started = Stopwatch::start();
                let error = comm.synchronize(&fixture.stream).unwrap_err();
                assert_says(&error, &["rank 0"]);
                assert!(started.elapsed() < patience() + SOON, "{error} came late");
                // The kernel is let go when the rank gives up.
                comm.abort("the peer does not answer");
                let deadline = Deadline::after(SOON);
                let error = fixture.stream.synchronize(deadline).unwrap_err();
                // Or the peer gave up first.
                if error.kind() != ErrorKind::PeerLost {
                    assert_says(&error, &["the peer does not answer"]);
                }
            }
            exit_as_survivor();
        });
    }
}

/// A channel that is used when its connection is gone has the proxy fail: kernels that wait are let go, the rank's next call
/// fails, and the peer learns why. On GPUs, where a kernel can be given the bytes of a channel.
#[test]
fn a_proxy_that_fails_ends_kernels_and_tells_the_peer() {
    if kind() == DeviceKind::Host {
        return;
    }
    Ranks::of(world(2)).run_losing(&[], |comm| {
        let fixture = Fixture::new(&comm);
        let connection = fixture.pair(Transport::Proxied, 64);
        let gone = fixture.pair(Transport::Proxied, 64);
        let words = Argument::Words(ChannelHandle::memory(&gone).descriptor().into());
        drop(gone);
        comm.barrier().unwrap();
        // The proxy has released it then.
        std::thread::sleep(Duration::from_millis(200));
        let of_peer = fixture.outcome.of_peer(&comm, 1 - comm.rank());
        wait(&fixture, &connection, &|| 0);
        let started = Stopwatch::start();
        if comm.rank() == 0 {
            let stream = comm.create_stream(Priority::Normal).unwrap();
            let outcome = Outcome::new(comm.device());
            let arguments = [words, outcome.argument()];
            let kernel = fixture.kernels.get("signal_and_wait");
            let launch = Launch::new(1, THREADS);
            kernel.launch(&stream, &launch, &arguments).unwrap();
        }
        let error = comm.synchronize(&fixture.stream).unwrap_err();
        assert_says(&error, &["unknown connection"]);
        if comm.rank() == 1 {
            assert_names_peer(&error, ErrorKind::PeerLost, 0);
            assert_says(&error, &["its proxy failed"]);
        }
        // The device whose proxy failed refuses to read memory, so that the peer looks for both ranks.
        if comm.rank() == 1 {
            for outcome in [&fixture.outcome, &of_peer] {
                while outcome.look() != ABORTED {
                    assert!(started.elapsed() < SOON, "a kernel waits on after {error}");
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
        }
        let again = fixture.launch("wait_once", 1, &[connection.channel()]);
        assert_says(&again.unwrap_err(), &["unknown connection"]);
        if comm.rank() == 0 {
            // Its memory is there until the peer has looked.
            std::thread::sleep(SOON);
        }
        exit_as_survivor();
    });
}
