//! Memory that is lent, used, freed and allocated anew, beside a graph that is launched again and again.

use crate::common::{kind, number_from_env, processes, world};
use crate::direct::{SOON, direct};
use crate::launches::{download, integers, sum, upload};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;
use warplink::device::{AllocationKind, DeviceSlice, Priority, ReduceOp};
use warplink::{DType, DeviceKind};

/// Elements of each call, and of that of the graph.
const COUNT: usize = 64;

/// How many allocations live at a time: more than have numbers, so that some make room.
const ALIVE: usize = 1100;

/// Between two calls that are compared, and between two launches of the graph.
const COMPARED_EVERY: usize = 10;
const LAUNCHED_EVERY: usize = 100;

/// Maximum growth of this process in the second half of the rounds.
const GROWTH: usize = 16 << 20;

/// `WARPLINK_TEST_LENT` says how often memory is lent: more often than so that numbers run out and addresses come back.
#[test]
fn memory_that_is_lent_again_and_again_is_right_beside_a_graph() {
    let rounds = number_from_env("WARPLINK_TEST_LENT").unwrap_or(2_500) as usize;
    let ranks = world(2);
    // In processes of their own, whose memory no other test uses.
    processes(ranks, |comm| {
        let collectives = direct(comm);
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let device = comm.device();
        let allocate = || device.allocate(4 * COUNT, AllocationKind::Plain).unwrap();
        let lend = |library: &DeviceSlice| {
            // SAFETY: the library's memory outlives the calls on what is lent of it.
            unsafe { device.borrow(library.address(), 4 * COUNT, Arc::new(())) }.unwrap()
        };
        let all_reduce = |memory: &DeviceSlice| {
            collectives
                .all_reduce(memory, memory, DType::I32, ReduceOp::Sum, &stream)
                .unwrap();
        };
        let of_graph = allocate();
        stream.begin_capture().unwrap();
        all_reduce(&lend(&of_graph));
        let graph = stream.end_capture().unwrap();
        // Whether a launch went directly; its result is compared.
        let launch = |round: usize| {
            upload(comm, &of_graph, &integers(comm.rank(), round, COUNT));
            let before = collectives.direct_lanes().unwrap();
            graph.launch(&stream).unwrap();
            comm.synchronize(&stream).unwrap();
            assert_eq!(
                download(comm, &of_graph),
                sum(ranks, round, COUNT),
                "{round}"
            );
            collectives.direct_lanes().unwrap() > before
        };
        let started = Instant::now();
        while !launch(0) {
            let late = comm.all_gather_bytes(&[u8::from(started.elapsed() > SOON)]);
            assert!(late.unwrap().iter().all(|late| *late == [0]));
        }
        let mut alive = VecDeque::new();
        let mut early = 0;
        for round in 0..rounds {
            if alive.len() == ALIVE {
                // Its address may be that of the next one.
                comm.synchronize(&stream).unwrap();
                drop(alive.pop_front());
            }
            let library = allocate();
            let compared = round % COMPARED_EVERY == 0;
            if compared {
                upload(comm, &library, &integers(comm.rank(), round, COUNT));
            }
            all_reduce(&lend(&library));
            if compared {
                comm.synchronize(&stream).unwrap();
                assert_eq!(
                    download(comm, &library),
                    sum(ranks, round, COUNT),
                    "{round}"
                );
            }
            alive.push_back(library);
            if round % LAUNCHED_EVERY == 0 {
                assert!(
                    launch(round),
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

/// Bytes of memory of this process.
fn resident() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = pages.split(' ').nth(1).unwrap().parse().unwrap();
    pages * rustix::param::page_size()
}
