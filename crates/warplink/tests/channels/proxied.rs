//! The FIFO and the proxy: full, asleep, stopped.

use super::common::{assert_error, assert_says, processes, threads, threads_with, world};
use super::kernels::{Fixture, contents};
use std::time::{Duration, Instant};
use warplink::channel::{ProxyConfig, Transport};
use warplink::device::Argument;
use warplink::{Config, Deadline, ErrorKind};

/// Puts of one word by each of several blocks.
const BLOCKS: u32 = 8;
const EACH: u32 = 100;

/// A FIFO of four slots.
pub(crate) fn small(config: &mut Config) {
    config.proxy.slots = 4;
}

/// A proxy that sleeps for a second whenever there is nothing to do.
fn sleepy(config: &mut Config) {
    config.proxy = ProxyConfig {
        idle: Duration::ZERO,
        nap: Duration::from_secs(1),
        ..ProxyConfig::default()
    };
}

/// Rank 0 puts many words without waiting for anything, `after` that is enqueued; rank 1 waits for all and
/// checks them. How long rank 0's kernel took.
fn many_puts(fixture: &Fixture<'_>, after: impl Fn(&Fixture<'_>)) -> Duration {
    let words = (BLOCKS * EACH) as usize;
    let connection = fixture.pair(Transport::Proxied, 8 * words);
    let (region, data) = (connection.region(0).unwrap(), contents(1, 8 * words));
    let started = Instant::now();
    if fixture.comm.rank() == 0 {
        region.upload(&data).unwrap();
        let arguments = [connection.channel(), Argument::U32(EACH)];
        fixture.run("many_puts", BLOCKS, &arguments);
        after(fixture);
    } else {
        let arguments = [connection.channel(), Argument::U64(words as u64)];
        fixture.run("wait_for", 1, &arguments);
        assert!(
            region.download().unwrap() == data,
            "not all words are there"
        );
    }
    started.elapsed()
}

#[test]
fn a_full_fifo_makes_kernels_wait_and_loses_nothing() {
    threads_with(world(2), small, |comm| {
        many_puts(&Fixture::new(comm), |_| ());
    });
}

#[test]
fn a_proxy_that_sleeps_for_a_second_loses_nothing() {
    threads_with(world(2), sleepy, |comm| {
        let fixture = Fixture::new(comm);
        let connections = fixture.connect(Transport::Proxied, 1, 2 * 64);
        // Each message finds the peer's proxy asleep.
        fixture.ping_pong(&connections, 64, 2);
        fixture.finish();
        many_puts(&fixture, |_| ());
    });
}

/// More signals than any queue of a driver holds, from one block and from many.
#[test]
fn any_number_of_signals_is_under_way() {
    const ALL: u32 = 20_000;
    threads(world(2), |comm| {
        let fixture = Fixture::new(comm);
        for blocks in [1, 8, 132] {
            let connection = fixture.pair(Transport::Proxied, 64);
            let each = ALL / blocks;
            if comm.rank() == 0 {
                let arguments = [connection.channel(), Argument::U32(each)];
                fixture.run("many_signals", blocks, &arguments);
            }
            let expected = u64::from(each * blocks);
            if comm.rank() == 1 {
                let arguments = [connection.channel(), Argument::U64(expected)];
                fixture.run("wait_for", 1, &arguments);
            }
            // Flushed is counted, and each counts once.
            comm.barrier().unwrap();
            let mut count = [0; 8];
            let word = connection.inbound().as_slice();
            comm.device().download(word, &mut count).unwrap();
            let received = if comm.rank() == 1 { expected } else { 0 };
            assert_eq!(u64::from_ne_bytes(count), received, "{blocks} blocks");
        }
    });
}

#[test]
fn what_is_in_flight_is_sent_when_the_proxy_is_stopped() {
    threads_with(world(2), small, |comm| {
        let fixture = Fixture::new(comm);
        for _ in 0..3 {
            many_puts(&fixture, |fixture| {
                fixture.comm.stop_proxy(fixture.comm.deadline()).unwrap()
            });
        }
        // The other rank's kernels used theirs for nothing.
        comm.stop_proxy(comm.deadline()).unwrap();
        comm.stop_proxy(comm.deadline()).unwrap();
    });
}

#[test]
fn kernels_that_use_a_stopped_proxy_end() {
    threads_with(world(2), small, |comm| {
        let fixture = Fixture::new(comm);
        let connection = fixture.pair(Transport::Proxied, 64);
        fixture
            .launch("signal_on", 4, &[connection.channel()])
            .unwrap();
        std::thread::sleep(Duration::from_millis(100));
        // It finds the ring empty for a moment, or it says how much it did not send.
        let stopped = comm.stop_proxy(Deadline::after(Duration::from_millis(200)));
        if let Err(error) = stopped {
            let says = ["triggers were not sent", "stop the proxy"];
            assert_error(&error, ErrorKind::Timeout, &says);
            let error = comm.launch_proxy().unwrap_err();
            let says = ["before it had sent everything", "connect again"];
            assert_error(&error, ErrorKind::Closed, &says);
        }
        // On GPUs the kernel ends with a status, on the host device it fails.
        match comm.synchronize(&fixture.stream) {
            Ok(()) => assert_eq!(fixture.outcome.read(), [0, 1]),
            Err(error) => assert_says(&error, &["the proxy was stopped"]),
        }
        comm.barrier().unwrap();
    });
}

#[test]
fn a_proxy_that_was_stopped_can_be_launched_again() {
    threads_with(world(2), small, |comm| {
        comm.launch_proxy().unwrap();
        let fixture = Fixture::new(comm);
        let connections = fixture.connect(Transport::Proxied, 1, 2 * 64);
        let connection = &connections.all()[0];
        let signalled = || {
            let mut count = [0; 8];
            let word = connection.inbound().as_slice();
            comm.device().download(word, &mut count).unwrap();
            u64::from_ne_bytes(count)
        };
        for _ in 0..3 {
            fixture.ping_pong(&connections, 64, 5);
            fixture.finish();
            comm.barrier().unwrap();
            comm.stop_proxy(comm.deadline()).unwrap();
            comm.barrier().unwrap();
            let before = signalled();
            // Signals that are refused meanwhile are not sent later.
            let refused = Fixture::new(comm);
            let arguments = [connection.channel(), Argument::U32(3)];
            refused.launch("many_signals", 1, &arguments).unwrap();
            match comm.synchronize(&refused.stream) {
                Ok(()) => assert_eq!(refused.outcome.read(), [0, 1]),
                Err(error) => assert_says(&error, &["the proxy was stopped"]),
            }
            comm.launch_proxy().unwrap();
            comm.barrier().unwrap();
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!(signalled(), before);
            comm.barrier().unwrap();
        }
        // A later connection launches it, too.
        comm.stop_proxy(comm.deadline()).unwrap();
        let later = fixture.connect(Transport::Proxied, 1, 2 * 64);
        for connections in [&later, &connections] {
            fixture.ping_pong(connections, 64, 5);
            fixture.finish();
        }
    });
}

/// Waits until this process has so many proxies: a thread takes its name after it was started, and may end after who
/// stopped it goes on.
pub(super) fn await_proxies(expected: usize) {
    let count = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let names =
            tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
        names
            .filter(|found| found.trim() == "warplink-proxy")
            .count()
    };
    let until = Instant::now() + Duration::from_secs(5);
    while count() != expected {
        assert!(
            Instant::now() < until,
            "{} proxies, not {expected}",
            count()
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn all_communicators_of_a_rank_share_one_proxy() {
    processes(world(2), |comm| {
        await_proxies(0);
        let groups = [comm.subgroup(&[0, 1]).unwrap(), comm.split(0, 0).unwrap()];
        let rigs = [
            Fixture::new(comm),
            Fixture::new(&groups[0]),
            Fixture::new(&groups[1]),
        ];
        let connections = rigs
            .each_ref()
            .map(|fixture| fixture.pair(Transport::Proxied, 64));
        for (fixture, connection) in rigs.iter().zip(&connections) {
            let channel = connection.channel();
            fixture.launch("signal_and_wait", 1, &[channel]).unwrap();
        }
        rigs.iter().for_each(Fixture::finish);
        await_proxies(1);
        comm.stop_proxy(comm.deadline()).unwrap();
        await_proxies(0);
        comm.barrier().unwrap();
    });
}

/// Also where the ring has room: nobody reads it any more.
#[test]
fn a_single_call_after_the_proxy_was_stopped_is_refused() {
    threads(world(2), |comm| {
        let fixture = Fixture::new(comm);
        let connection = fixture.pair(Transport::Proxied, 64);
        comm.stop_proxy(comm.deadline()).unwrap();
        let calls = [
            ("signal_and_wait", 0),
            ("many_puts", 1),
            ("many_signals", 1),
        ];
        for (name, count) in calls {
            let mut arguments = vec![connection.channel()];
            arguments.extend((count > 0).then_some(Argument::U32(count)));
            fixture.launch(name, 1, &arguments).unwrap();
            match comm.synchronize(&fixture.stream) {
                Ok(()) => assert_eq!(fixture.outcome.read(), [0, 1], "{name}"),
                Err(error) => {
                    assert_says(&error, &["the proxy was stopped"]);
                    // On the host device the stream has failed.
                    break;
                }
            }
        }
        comm.barrier().unwrap();
    });
}

#[test]
fn a_dropped_connection_still_sends_what_it_was_asked_for() {
    threads(world(2), |comm| {
        let fixture = Fixture::new(comm);
        for _ in 0..20 {
            let connection = fixture.pair(Transport::Proxied, 8 * 64);
            let channel = connection.channel();
            drop(connection);
            if comm.rank() == 0 {
                fixture
                    .launch("many_puts", 1, &[channel, Argument::U32(64)])
                    .unwrap();
            } else {
                fixture
                    .launch("wait_for", 1, &[channel, Argument::U64(64)])
                    .unwrap();
            }
            fixture.finish();
        }
    });
}
