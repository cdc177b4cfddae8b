//! Objects dropped while a stream may still use them are kept until the stream is done with them.

use super::Footprint;
use super::common::{assert_error, kind, processes, threads, transfer_from_first, world};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;
use warplink::bootstrap::{JoinConfig, Rendezvous, UniqueId};
use warplink::device::{DeviceSlice, MemoryOp, Priority, Stream, Word};
use warplink::p2p::Protocol;
use warplink::program::{Bindings, PrepareOptions, Program};
use warplink::{Communicator, Config, DeviceKind, ErrorKind};

/// A stream that waits until it is let go.
struct Held<'a> {
    comm: &'a Communicator,
    stream: Stream,
    page: DeviceSlice,
}

impl<'a> Held<'a> {
    fn new(comm: &'a Communicator) -> Self {
        let page = comm.device().allocate_signals(64).unwrap();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let held = Self { comm, stream, page };
        let word = held.word();
        held.stream.memory_ops(&[MemoryOp::wait(&word, 1)]).unwrap();
        held
    }

    fn word(&self) -> Word {
        self.page.word(0).unwrap()
    }

    /// Lets the stream go, and waits until it is done.
    fn finish(self) {
        let go = self.comm.create_stream(Priority::Normal).unwrap();
        let word = self.word();
        go.memory_ops(&[MemoryOp::write(&word, 1)]).unwrap();
        self.comm.synchronize(&self.stream).unwrap();
    }
}

#[test]
fn signals_of_a_dropped_transfer_do_not_reach_another() {
    threads(world(2), |comm| {
        let region = comm.alloc(4096).unwrap();
        let first = transfer_from_first(comm, &region, 1, Protocol::Get);
        let held = Held::new(comm);
        if comm.rank() == 0 {
            // Its signal goes to the peer when the stream is let go, and not before.
            first.post(&held.stream).unwrap();
        }
        drop(first);
        comm.barrier().unwrap();
        // Peers tell one another what they dropped.
        std::thread::sleep(Duration::from_millis(50));
        comm.barrier().unwrap();
        let second = transfer_from_first(comm, &region, 2, Protocol::Get);
        let stream = comm.create_stream(Priority::Normal).unwrap();
        region.upload(&[comm.rank() as u8; 4096]).unwrap();
        comm.barrier().unwrap();
        if comm.rank() == 0 {
            held.finish();
            comm.barrier().unwrap();
            std::thread::sleep(Duration::from_millis(50));
            region.upload(&[7; 4096]).unwrap();
            second.post(&stream).unwrap();
        } else {
            held.finish();
            comm.barrier().unwrap();
            second.post(&stream).unwrap();
        }
        second.wait(&stream).unwrap();
        comm.synchronize(&stream).unwrap();
        assert_eq!(region.download().unwrap(), [7; 4096], "copied too early");
        comm.barrier().unwrap();
    });
}

#[test]
fn memory_of_a_dropped_plan_is_not_used_again_too_early() {
    threads(1, |comm| {
        let text = "program p() {\n input A: f32[1024]\n output C: f32[1024]\n C = copy(A)\n}";
        let program = Program::parse(text).unwrap();
        let executor = comm.executor();
        let prepared = executor
            .prepare(&program, &Default::default(), PrepareOptions::default())
            .unwrap();
        let input = comm.alloc(4096).unwrap();
        let bindings = Bindings::from([("A".into(), input.memory().clone())]);
        let address = |plan: &warplink::program::Plan| plan.tensor("C").unwrap().address();
        let held = Held::new(comm);
        let plan = prepared.bind(&bindings).unwrap();
        plan.run(&held.stream).unwrap();
        let used = address(&plan);
        drop(plan);
        let other = prepared.bind(&bindings).unwrap();
        assert_ne!(address(&other), used, "still to be written by a stream");
        held.finish();
        let again = prepared.bind(&bindings).unwrap();
        assert_eq!(address(&again), used, "not given back");
        // The same for a graph.
        let graph = again.capture().unwrap();
        let held = Held::new(comm);
        graph.launch(&held.stream).unwrap();
        drop(graph);
        let third = prepared.bind(&bindings).unwrap();
        assert_ne!(address(&third), used, "still to be written by a graph");
        held.finish();
    });
}

/// Joins a job of one rank, and drops a plan that runs on a stream that waits.
fn leave_work_behind(end: impl FnOnce(Communicator)) {
    let id = UniqueId::create(IpAddr::V4(Ipv4Addr::LOCALHOST), 0).unwrap();
    let join = JoinConfig::new(Rendezvous::Id(id), 0, 1);
    let config = Config::new(join, kind()).with_timeout(Duration::from_secs(1));
    let comm = Communicator::join(&config).unwrap();
    let text = "program p() {\n input A: f32[4]\n output C: f32[4]\n C = copy(A)\n}";
    let program = Program::parse(text).unwrap();
    let prepared = comm
        .executor()
        .prepare(&program, &Default::default(), PrepareOptions::default())
        .unwrap();
    let input = comm.alloc(16).unwrap();
    let bindings = Bindings::from([("A".into(), input.memory().clone())]);
    let plan = prepared.bind(&bindings).unwrap();
    let Held { stream, page, .. } = Held::new(&comm);
    plan.run(&stream).unwrap();
    drop((plan, prepared, input, bindings, stream));
    end(comm);
    // Only now: its end would end the wait too.
    drop(page);
}

#[test]
fn leaving_ends_streams_that_still_wait() {
    if kind() != DeviceKind::Host {
        return;
    }
    // A process, which has no threads of other tests.
    processes(1, |_| {
        let round = || {
            leave_work_behind(|comm| {
                let error = comm.close().unwrap_err();
                let says = ["rank 0", "close the communicator", "streams"];
                assert_error(&error, ErrorKind::Timeout, &says);
            });
            leave_work_behind(drop);
        };
        // The allocator keeps what the first rounds needed.
        (0..3).for_each(|_| round());
        std::thread::sleep(Duration::from_millis(200));
        let before = Footprint::now();
        (0..5).for_each(|_| round());
        Footprint::assert_back(&before);
    });
}
