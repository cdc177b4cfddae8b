//! Memory that is lent, used, freed and allocated anew, beside a graph that is launched again and again.

use crate::common::{
    kind, number_from_env, processes, processes_of, recorded, resume, stop_self,
    wait_until_stopped, world,
};
use crate::direct::{check_soon, direct};
use crate::launches::{download, integers, sum, upload};
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use warplink::device::{AllocationKind, DeviceSlice, Graph, Priority, ReduceOp, Stream};
use warplink::{Collectives, Communicator, DType, DeviceKind};

/// Elements of each call, and of that of the graph.
const COUNT: usize = 64;

/// How many allocations live at a time: more than have numbers, so that some make room.
const ALIVE: usize = 1100;

/// Between two calls that are compared, and between two launches of the graph.
const COMPARED_EVERY: usize = 10;
const LAUNCHED_EVERY: usize = 100;

/// Maximum growth of this process in the second half of the rounds.
const GROWTH: usize = 16 << 20;

/// Calls on lent memory until a rank, which is stopped meanwhile, maps them: about as many as there are numbers,
/// so that some have to make room.
const UNMAPPED: usize = 1000;

/// Longer than between two checks for memory to withdraw.
const SEVERAL_CHECKS: Duration = Duration::from_millis(300);

/// A rank, and a graph that it has captured on lent memory.
struct Lender<'a> {
    comm: &'a Communicator,
    collectives: Collectives,
    stream: Stream,
    graph: Graph,
    of_graph: DeviceSlice,
}

impl<'a> Lender<'a> {
    /// Captures the graph and launches it until peers access its memory directly.
    fn start(comm: &'a Communicator) -> Self {
        let collectives = direct(comm);
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let of_graph = allocate(comm);
        let graph = recorded(&stream, || sum_lent(comm, &collectives, &of_graph, &stream));
        let lender = Self {
            comm,
            collectives,
            stream,
            graph,
            of_graph,
        };
        lender.until_direct(|| lender.launch(0));
        lender
    }

    /// Enqueues a sum in `library`, which is lent for the call.
    fn sum(&self, library: &DeviceSlice) {
        sum_lent(self.comm, &self.collectives, library, &self.stream);
    }

    /// As [`sum`](Self::sum), and compares the result. Returns whether peers accessed the memory directly.
    fn sum_compared(&self, library: &DeviceSlice, round: usize) -> bool {
        self.compare(library, round, || self.sum(library))
    }

    /// Launches the graph, and compares the result. Returns whether peers accessed its memory directly.
    fn launch(&self, round: usize) -> bool {
        self.compare(&self.of_graph, round, || {
            self.graph.launch(&self.stream).unwrap();
        })
    }

    fn compare(&self, memory: &DeviceSlice, round: usize, enqueue: impl FnOnce()) -> bool {
        let comm = self.comm;
        upload(comm, memory, &integers(comm.rank(), round, COUNT));
        let before = self.collectives.direct_lanes().unwrap();
        enqueue();
        comm.synchronize(&self.stream).unwrap();
        let expected = sum(comm.world(), round, COUNT);
        assert_eq!(download(comm, memory), expected, "{round}");
        self.collectives.direct_lanes().unwrap() > before
    }

    /// Repeats a call until it goes directly, which it does on all ranks at once.
    fn until_direct(&self, call: impl Fn() -> bool) {
        let started = Instant::now();
        while !call() {
            check_soon(self.comm, started, "the calls");
        }
    }
}

fn allocate(comm: &Communicator) -> DeviceSlice {
    let device = comm.device();
    device.allocate(4 * COUNT, AllocationKind::Plain).unwrap()
}

fn sum_lent(
    comm: &Communicator,
    collectives: &Collectives,
    library: &DeviceSlice,
    stream: &Stream,
) {
    let device = comm.device();
    // SAFETY: the library's memory outlives the calls on what is lent of it.
    let lent = unsafe { device.borrow_operand(library.address(), 4 * COUNT) }.unwrap();
    collectives
        .all_reduce(&lent, &lent, DType::I32, ReduceOp::Sum, stream)
        .unwrap();
}

/// `WARPLINK_TEST_LENT` says how often memory is lent: more often than so that numbers run out and addresses come back.
#[test]
fn memory_that_is_lent_again_and_again_is_right_beside_a_graph() {
    let rounds = number_from_env("WARPLINK_TEST_LENT").unwrap_or(2_500) as usize;
    let ranks = world(2);
    // In processes of their own, whose memory no other test uses.
    processes(ranks, |comm| {
        let lender = Lender::start(comm);
        let mut alive = VecDeque::new();
        let mut early = 0;
        for round in 0..rounds {
            if alive.len() == ALIVE {
                // Its address may be that of the next one.
                comm.synchronize(&lender.stream).unwrap();
                drop(alive.pop_front());
            }
            let library = allocate(comm);
            if round % COMPARED_EVERY == 0 {
                lender.sum_compared(&library, round);
            } else {
                lender.sum(&library);
            }
            alive.push_back(library);
            if round % LAUNCHED_EVERY == 0 {
                assert!(
                    lender.launch(round),
                    "the graph's memory gave way in round {round}"
                );
            }
            if round == rounds / 2 {
                early = resident();
            }
        }
        // GPUs keep what is freed in the driver's memory, which counts for other processes, too.
        if kind() == DeviceKind::Host {
            let late = resident();
            assert!(late <= early + GROWTH, "{early} bytes became {late}");
        }
    });
}

/// While a peer maps nothing, numbers run out, and the graph's memory is all that could be withdrawn.
#[test]
fn a_peer_that_maps_late_takes_no_memory_from_a_graph() {
    let ranks = world(2);
    // A GPU's stream does not take as many calls while it waits for the peer.
    if ranks < 2 || kind() != DeviceKind::Host {
        return;
    }
    processes(ranks, |comm| {
        let lender = Lender::start(comm);
        let library: Vec<DeviceSlice> = (0..UNMAPPED).map(|_| allocate(comm)).collect();
        let processes = processes_of(comm);
        comm.barrier().unwrap();
        if comm.rank() == 1 {
            stop_self();
        } else {
            wait_until_stopped(processes[1]);
        }
        for memory in &library {
            lender.sum(memory);
        }
        if comm.rank() == 0 {
            std::thread::sleep(SEVERAL_CHECKS);
            resume(processes[1]);
        }
        // Once it is mapped, so are those before it, as far as they still have numbers.
        let late = allocate(comm);
        lender.until_direct(|| lender.sum_compared(&late, 1));
        assert!(lender.launch(2), "the graph's memory was withdrawn");
    });
}

/// Bytes of memory of this process.
fn resident() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = pages.split(' ').nth(1).unwrap().parse().unwrap();
    pages * rustix::param::page_size()
}
