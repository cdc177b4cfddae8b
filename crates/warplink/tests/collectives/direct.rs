//! Memory of the calls that kernels of the peers access where it lies: which memory, from when on, and what happens
//! when it is freed or a rank is lost.

use crate::common::{
    Ranks, TimedBarrier, allocate, assert_names_peer, exit_as_survivor, kill_self, kind, processes,
    threads, threads_that_end, unchanged, world, worlds,
};
use crate::data::by;
use crate::expected::{Case, Random, kinds, sum_of};
use crate::launches::{self, download, integers, upload};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, Instant};
use warplink::collective::{Algorithm, CollectiveKind};
use warplink::device::{AllocationKind, DeviceSlice, Priority, ReduceOp, Stream};
use warplink::{Collectives, Communicator, DType, DeviceKind, ErrorKind};

/// How long it may take until all ranks reach memory.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// How long it may take until memory that nobody holds is let go of.
const LET_GO: Duration = Duration::from_secs(20);

pub(crate) fn direct(comm: &Communicator) -> Collectives {
    by(comm, Some(Algorithm::Direct), 1 << 20)
}

/// Runs ranks as threads, with collectives that go directly and a stream.
fn directly(world: usize, body: impl Fn(&Communicator, &Collectives, &Stream) + Send + Sync) {
    threads(world, |comm| {
        let stream = comm.create_stream(Priority::Normal).unwrap();
        body(comm, &direct(comm), &stream);
    });
}

/// Sums fresh numbers of all ranks in place, compares, and gives how many lanes went directly.
fn sum(
    comm: &Communicator,
    collectives: &Collectives,
    memory: &DeviceSlice,
    round: usize,
    stream: &Stream,
) -> u64 {
    let count = memory.bytes() / 4;
    upload(comm, memory, &integers(comm.rank(), round, count));
    let before = collectives.direct_lanes().unwrap();
    // No rank sends before all have their numbers.
    collectives
        .all_reduce(memory, memory, DType::I32, ReduceOp::Sum, stream)
        .unwrap();
    comm.synchronize(stream).unwrap();
    let expected = launches::sum(comm.world(), round, count);
    assert_eq!(download(comm, memory), expected, "round {round}");
    collectives.direct_lanes().unwrap() - before
}

/// Fails on all ranks where memory has not been reached on some of them in time; `what` was waited for since `started`.
pub(crate) fn check_soon(comm: &Communicator, started: Instant, what: impl Debug) {
    let late = [u8::from(started.elapsed() > SOON)];
    let late = comm.all_gather_bytes(&late).unwrap();
    assert!(late.iter().all(|late| *late == [0]), "not direct: {what:?}");
}

/// Calls until a call goes directly in all lanes; every rank sees the same in each call.
fn until_direct(
    comm: &Communicator,
    collectives: &Collectives,
    memory: &DeviceSlice,
    stream: &Stream,
) {
    let choice = collectives.choice(&sum_of(memory.bytes() / 4)).unwrap();
    let started = Instant::now();
    for round in 0.. {
        let lanes = sum(comm, collectives, memory, round, stream);
        assert!(lanes <= choice.lanes as u64);
        if lanes == choice.lanes as u64 {
            return;
        }
        check_soon(comm, started, memory);
    }
}

/// Waits until no more is registered and mapped than `baseline` says, which may have had something of joining in it:
/// nothing is held for memory that is gone.
fn until_let_go(comm: &Communicator, baseline: (usize, usize)) {
    let started = Instant::now();
    loop {
        let (registered, mapped) = comm.registrations_and_mappings();
        if registered <= baseline.0 && mapped <= baseline.1 {
            return;
        }
        assert!(
            started.elapsed() < LET_GO,
            "{registered} and {mapped} are left of {baseline:?}"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// All collectives with random inputs: the first calls by chunks, and later ones all directly.
#[test]
fn every_collective_goes_directly_once_its_memory_is_known() {
    for ranks in worlds([2, 3, 8]) {
        directly(ranks, |comm, collectives, stream| {
            let mut random = Random::new(31 + ranks as u64);
            for kind in kinds() {
                for in_place in [false, true] {
                    let mut case = Case::random_of(kind, &mut random, (ranks, 5000), |_| true);
                    case.in_place = in_place;
                    case.shift = 0;
                    // Parts of outputs are in place at multiples of 16 bytes, too.
                    case.call.count = case.call.count.max(1).next_multiple_of(16);
                    case.seed &= !3;
                    let choice = collectives.choice(&case.call).unwrap();
                    assert_eq!(choice.algorithm, Algorithm::Direct);
                    let made = case.make(comm, collectives, stream).unwrap();
                    let started = Instant::now();
                    loop {
                        comm.synchronize(stream).unwrap();
                        made.check(comm);
                        let before = collectives.direct_lanes().unwrap();
                        made.run_again(comm, collectives, stream);
                        let lanes = collectives.direct_lanes().unwrap() - before;
                        // What is stored would replace what is still to be sent.
                        let never = in_place && kind == CollectiveKind::AllToAll;
                        if never {
                            assert_eq!(lanes, 0);
                            break;
                        }
                        if lanes == choice.lanes as u64 {
                            break;
                        }
                        check_soon(comm, started, case);
                    }
                }
            }
        });
    }
}

/// Random calls, aligned or not, in place or not, on memory that is used again and on fresh memory, beside small ones.
#[test]
fn random_calls_are_right_while_memory_becomes_known() {
    for ranks in worlds([2, 5]) {
        threads(ranks, |comm| {
            let (collectives, small) = (direct(comm), comm.collectives().unwrap());
            let stream = comm.create_stream(Priority::Normal).unwrap();
            let mut random = Random::new(77 + ranks as u64);
            let mut kept = Vec::new();
            for round in 0..60 {
                let case = Case::random(&mut random, ranks, 3000);
                let made = case.make(comm, &collectives, &stream).unwrap();
                let beside = Case::random(&mut random, ranks, 30);
                let beside = beside.make(comm, &small, &stream).unwrap();
                comm.synchronize(&stream).unwrap();
                made.check(comm);
                beside.check(comm);
                if round % 3 == 0 {
                    kept.push(made);
                }
                if let Some(one) = kept.get(random.below(kept.len())) {
                    one.run_again(comm, &collectives, &stream);
                }
            }
            assert!(
                collectives.direct_lanes().unwrap() > 0,
                "nothing went directly"
            );
        });
    }
}

/// Its own, virtual, the middle of an allocation, a region, and somebody else's that stays lent.
#[test]
fn memory_of_every_kind_is_reached() {
    directly(world(3), |comm, collectives, stream| {
        let device = comm.device();
        let plain = device.allocate(4096, AllocationKind::Plain).unwrap();
        let region = comm.alloc(4096).unwrap();
        let owner = device.allocate(8192, AllocationKind::Plain).unwrap();
        // SAFETY: the owner is held as long as the view, and only collectives access it.
        let lent = unsafe { device.borrow(owner.address() + 256, 4096, Arc::new(owner.clone())) };
        let mut all = vec![
            plain.clone(),
            plain.slice(512..3072).unwrap(),
            region.memory().clone(),
            lent.unwrap(),
        ];
        if let Ok(memory) = device.allocate(4096, AllocationKind::Virtual) {
            all.push(memory);
        }
        for memory in &all {
            until_direct(comm, collectives, memory, stream);
        }
    });
}

/// A library lends the same memory for each call: it stays reached without being held, until it is freed.
#[test]
fn memory_that_is_lent_for_each_call_stays_reached() {
    directly(world(3), |comm, collectives, stream| {
        let device = comm.device();
        let baseline = comm.registrations_and_mappings();
        let library = device.allocate(64 << 10, AllocationKind::Plain).unwrap();
        let lanes = collectives.choice(&sum_of(1024)).unwrap().lanes as u64;
        let held = Arc::new(());
        let lend = |offset: usize| {
            let address = library.address() + offset as u64;
            // SAFETY: the library's memory is held until after the call, which alone accesses it.
            unsafe { device.borrow(address, 4096, held.clone()) }.unwrap()
        };
        until_direct(comm, collectives, &lend(0), stream);
        for round in 0..6 {
            // Longer than between two looks at what is to be withdrawn.
            std::thread::sleep(Duration::from_millis(150));
            let lent = lend(8192 * round + 256);
            assert_eq!(sum(comm, collectives, &lent, round, stream), lanes);
        }
        let started = Instant::now();
        while Arc::strong_count(&held) > 1 {
            assert!(started.elapsed() < LET_GO, "the owner is held");
            std::thread::sleep(Duration::from_millis(20));
        }
        drop(library);
        // The GPU's memory is kept by the device for its next allocation.
        if kind() == DeviceKind::Host {
            until_let_go(comm, baseline);
        }
    });
}

/// More memory than there are numbers, lent once each, gives way to what is lent later.
#[test]
fn lent_memory_that_is_not_used_makes_room() {
    directly(world(2), |comm, collectives, stream| {
        let device = comm.device();
        let library: Vec<DeviceSlice> = (0..1200)
            .map(|_| device.allocate(256, AllocationKind::Plain).unwrap())
            .collect();
        for (round, memory) in library.iter().enumerate() {
            // SAFETY: the library's memory is held until after the call, which alone accesses it.
            let lent = unsafe { device.borrow(memory.address(), 256, Arc::new(())) }.unwrap();
            sum(comm, collectives, &lent, round, stream);
        }
        let memory = device.allocate(4096, AllocationKind::Plain).unwrap();
        until_direct(comm, collectives, &memory, stream);
    });
}

/// Memory of one rank that no peer can map, or that starts elsewhere than at a multiple of 16 bytes, goes by chunks.
#[test]
fn what_one_rank_does_not_share_goes_by_chunks() {
    directly(world(3), |comm, collectives, stream| {
        let device = comm.device();
        let whole = device.allocate(4096 + 16, AllocationKind::Plain).unwrap();
        let memory = whole.slice(0..4096).unwrap();
        until_direct(comm, collectives, &memory, stream);
        let shifted = if comm.rank() == 1 { 4 } else { 0 };
        let shifted = whole.slice(shifted..shifted + 4096).unwrap();
        for round in 0..10 {
            assert_eq!(sum(comm, collectives, &shifted, round, stream), 0);
        }
        if kind() != DeviceKind::Host {
            return;
        }
        // Memory of no file.
        let bytes = Arc::new(vec![0_u64; 1024]);
        let address = bytes.as_ptr() as u64;
        let address = address.next_multiple_of(16);
        // SAFETY: the vector is held as long as the view, and only collectives access it.
        let lent = unsafe { device.borrow(address, 4096, bytes) }.unwrap();
        let unshared = if comm.rank() == 1 { &lent } else { &memory };
        let started = Instant::now();
        for round in 0..50 {
            assert_eq!(sum(comm, collectives, unshared, round, stream), 0);
            if round == 20 {
                std::thread::sleep(Duration::from_millis(200).saturating_sub(started.elapsed()));
            }
        }
        until_direct(comm, collectives, &memory, stream);
    });
}

/// Mappings are looked up at each launch of a graph.
#[test]
fn a_graph_recorded_before_memory_is_known_goes_directly_later() {
    const COUNT: usize = 1000;
    directly(world(3), |comm, collectives, stream| {
        let memory = allocate(comm, 4 * COUNT);
        let lanes = collectives.choice(&sum_of(COUNT)).unwrap().lanes as u64;
        stream.begin_capture().unwrap();
        collectives
            .all_reduce(&memory, &memory, DType::I32, ReduceOp::Sum, stream)
            .unwrap();
        let graph = stream.end_capture().unwrap();
        let launch = |round: usize| {
            upload(comm, &memory, &integers(comm.rank(), round, COUNT));
            let before = collectives.direct_lanes().unwrap();
            graph.launch(stream).unwrap();
            comm.synchronize(stream).unwrap();
            let expected = launches::sum(comm.world(), round, COUNT);
            assert_eq!(download(comm, &memory), expected, "round {round}");
            collectives.direct_lanes().unwrap() - before
        };
        let started = Instant::now();
        let mut round = 0;
        while launch(round) != lanes {
            check_soon(comm, started, "the graph");
            round += 1;
        }
        // It stays so.
        for round in 0..20 {
            assert_eq!(launch(round), lanes);
        }
    });
}

/// Memory that is freed and allocated anew, at the same address or not, is another allocation.
#[test]
fn memory_that_is_freed_and_allocated_anew_is_reached_anew() {
    directly(world(2), |comm, collectives, stream| {
        let baseline = comm.registrations_and_mappings();
        let mut seen = Vec::new();
        let mut again = 0;
        for round in 0..20 {
            let memory = allocate(comm, 64 << 10);
            again += usize::from(seen.contains(&memory.address()));
            seen.push(memory.address());
            if round % 4 == 3 {
                // Gone before it is known.
                sum(comm, collectives, &memory, round, stream);
            } else {
                until_direct(comm, collectives, &memory, stream);
            }
            drop(memory);
        }
        println!(
            "rank {}: {again} allocations at addresses of others before",
            comm.rank()
        );
        until_let_go(comm, baseline);
    });
}

/// More allocations than have numbers, one after another, find some again.
#[test]
fn numbers_of_freed_allocations_are_used_again() {
    directly(world(2), |comm, collectives, stream| {
        for round in 0..1500 {
            let memory = allocate(comm, 256);
            sum(comm, collectives, &memory, round, stream);
        }
        let memory = allocate(comm, 4096);
        until_direct(comm, collectives, &memory, stream);
    });
}

/// Ranks in processes of their own map one another's memory as such.
#[test]
fn processes_reach_one_another() {
    processes(world(3), |comm| {
        let collectives = direct(comm);
        let stream = comm.create_stream(Priority::Normal).unwrap();
        for bytes in [4096, 100_000, 1 << 20] {
            let memory = allocate(comm, bytes);
            until_direct(comm, &collectives, &memory, &stream);
        }
    });
}

/// A rank that dies while ranks publish and withdraw is an error for the others, and nothing waits for it.
#[test]
fn a_rank_that_dies_while_tables_change_is_an_error() {
    let ranks = Ranks::of(world(3));
    let victim = ranks.world - 1;
    ranks.run_losing(&[victim], |comm| {
        let collectives = direct(&comm);
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let device = comm.device().clone();
        let started = Instant::now();
        for round in 0.. {
            if comm.rank() == victim && round == 60 {
                kill_self();
            }
            let memory = device.allocate(32 << 10, AllocationKind::Plain).unwrap();
            upload(&comm, &memory, &integers(comm.rank(), round, 8 << 10));
            let called = (0..3).try_for_each(|_| {
                collectives.all_reduce(&memory, &memory, DType::I32, ReduceOp::Sum, &stream)
            });
            let failed = called.and_then(|()| comm.synchronize(&stream));
            if let Err(error) = failed {
                assert_names_peer(&error, ErrorKind::PeerLost, victim);
                exit_as_survivor();
            }
            assert!(started.elapsed() < Duration::from_secs(60), "no error came");
        }
    });
}

/// Ranks that call different things access nothing of one another: each finds it before it moves anything.
#[test]
fn ranks_that_disagree_touch_nothing() {
    const COUNT: usize = 4096;
    let ranks = world(3);
    let all = TimedBarrier::new(ranks);
    threads_that_end(ranks, unchanged, |comm| {
        let collectives = direct(&comm);
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let memory = allocate(&comm, 4 * COUNT);
        until_direct(&comm, &collectives, &memory, &stream);
        let values = integers(comm.rank(), 5, COUNT);
        upload(&comm, &memory, &values);
        comm.barrier().unwrap();
        let count = if comm.rank() == 1 { 64 } else { COUNT };
        let part = memory.slice(0..4 * count).unwrap();
        let before = collectives.direct_lanes().unwrap();
        let called = collectives.all_reduce(&part, &part, DType::I32, ReduceOp::Sum, &stream);
        let error = called
            .and_then(|()| comm.synchronize(&stream))
            .expect_err("ranks called different things");
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        all.wait();
        if kind() == DeviceKind::Host {
            let mut bytes = vec![0; 4 * COUNT];
            let _ = comm.device().download(&memory, &mut bytes);
            let expected: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            assert!(
                bytes == expected,
                "rank {}: memory was touched",
                comm.rank()
            );
            assert_eq!(collectives.direct_lanes().ok(), Some(before));
        }
        // None leaves while another still looks.
        all.wait();
        comm.abort("the test is over");
    });
}
