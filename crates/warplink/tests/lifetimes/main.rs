//! Freed memory is reusable, nothing is freed too early, and objects dropped while in use are kept.

// A test fails by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod borrowed;
#[path = "../common/mod.rs"]
mod common;
mod forked;
mod held;
mod in_use;
mod pool;
mod rounds;

use common::{
    Ranks, allocate, await_word, kind, processes, ring_requests, threads, transfer_from_first,
    transfer_once, values, world,
};
use held::Held;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use warplink::device::Priority;
use warplink::memory::IdleMappings;
use warplink::p2p::Protocol;
use warplink::{Communicator, DeviceKind, ErrorKind};

const MIB: usize = 1 << 20;

/// System resources held by a process.
#[derive(Clone, Copy, Debug)]
struct Footprint {
    descriptors: usize,
    mappings: usize,
    threads: usize,
    resident_mib: usize,
}

impl Footprint {
    fn now() -> Self {
        let count = |path: &str| std::fs::read_dir(path).unwrap().count();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let resident = resident.unwrap().trim().trim_end_matches(" kB");
        Self {
            descriptors: count("/proc/self/fd"),
            mappings: maps.lines().count(),
            threads: count("/proc/self/task"),
            resident_mib: resident.parse::<usize>().unwrap() / 1024,
        }
    }

    /// Whether it is no more than `before`, but for what allocators and drivers keep.
    fn is_within(&self, before: &Self) -> bool {
        self.descriptors <= before.descriptors + 4
            && (cfg!(warplink_tsan) || self.mappings <= before.mappings + 24)
            && self.threads <= before.threads + 1
            && (cfg!(warplink_tsan) || self.resident_mib <= before.resident_mib + 48)
    }

    /// Waits until what was let go of is back: peers are told by threads.
    fn assert_back(before: &Self) {
        eventually(
            "resources come back",
            || Self::now().is_within(before),
            || format!("{before:?}, then {:?}: {:?}", Self::now(), open_files()),
        );
    }
}

/// Files opened by this process, and how often each.
fn open_files() -> BTreeMap<String, usize> {
    let mut files = BTreeMap::new();
    for file in std::fs::read_dir("/proc/self/fd").unwrap() {
        // The directory's own is gone by now.
        if let Ok(name) = std::fs::read_link(file.unwrap().path()) {
            let name = name.to_string_lossy();
            let kind = name.split(['[', '-']).next().unwrap_or_default();
            *files.entry(kind.to_owned()).or_default() += 1;
        }
    }
    files
}

/// Waits until `holds`, for 30 seconds at most.
fn eventually(what: &str, holds: impl Fn() -> bool, state: impl Fn() -> String) {
    let until = Instant::now() + Duration::from_secs(30);
    while !holds() {
        assert!(Instant::now() < until, "{what}: {}", state());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Both ranks send a fresh buffer to each other once.
fn exchange_fresh(comm: &Communicator, stream: &warplink::device::Stream, bytes: usize) {
    let (send, receive) = (comm.alloc(bytes).unwrap(), comm.alloc(bytes).unwrap());
    transfer_once(comm, &ring_requests(comm, &send, &receive, 3), stream);
}

#[test]
fn fresh_buffers_that_are_sent_and_dropped_come_back() {
    processes(world(2), |comm| {
        let stream = comm.create_stream(Priority::Normal).unwrap();
        (0..10).for_each(|_| exchange_fresh(comm, &stream, 8 * MIB));
        comm.barrier().unwrap();
        let before = Held::now(comm);
        (0..400).for_each(|_| exchange_fresh(comm, &stream, 8 * MIB));
        comm.barrier().unwrap();
        before.assert_flat(comm);
        comm.barrier().unwrap();
    });
}

#[test]
fn a_thousand_exchanges_leave_nothing_behind() {
    processes(world(2), |comm| {
        let peer = 1 - comm.rank();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let round = |tag: usize| {
            // Every fourth exchange is of fresh memory.
            let (send, receive) = (comm.alloc(4096).unwrap(), comm.alloc(4096).unwrap());
            for step in 0..4 {
                send.upload(&values(comm.rank(), tag + step, 4096)).unwrap();
                transfer_once(comm, &ring_requests(comm, &send, &receive, 3), &stream);
                assert_eq!(receive.download().unwrap(), values(peer, tag + step, 4096));
            }
        };
        let settle = || {
            for _ in 0..2 {
                comm.release_idle().unwrap();
                comm.barrier().unwrap();
            }
        };
        (0..10).for_each(round);
        settle();
        let (before, registered) = (Held::now(comm), comm.registrations_and_mappings());
        (0..250).for_each(|turn| round(4 * turn));
        settle();
        assert_eq!(comm.registrations_and_mappings(), registered);
        before.assert_flat(comm);
        comm.barrier().unwrap();
    });
}

/// Rank 0 sends from a region, by get, so that rank 1 maps it.
fn mapped_by_rank_1(comm: &Communicator, bytes: usize) -> warplink::p2p::Transfer {
    let region = comm.alloc(bytes).unwrap();
    transfer_from_first(comm, &region, 0, Protocol::Get)
}

#[test]
fn what_is_revoked_in_use_is_unmapped_after_its_use() {
    processes(world(2), |comm| {
        let transfer = mapped_by_rank_1(comm, MIB);
        if comm.rank() == 0 {
            drop(transfer);
            // The peer is asked to unmap while its transfer is there.
            std::thread::sleep(Duration::from_millis(50));
            comm.barrier().unwrap();
            // Nothing but the page of signals is left.
            eventually(
                "the region is freed",
                || comm.registrations_and_mappings().0 <= 1,
                || format!("{:?}", comm.registrations_and_mappings()),
            );
        } else {
            comm.barrier().unwrap();
            drop(transfer);
        }
        comm.barrier().unwrap();
    });
}

#[test]
fn mappings_that_nobody_uses_are_closed_in_time() {
    let ranks = Ranks {
        config: Some(|config| {
            config.idle_mappings = IdleMappings {
                max_age: Duration::from_millis(100),
                ..IdleMappings::default()
            };
        }),
        ..Ranks::of(world(2))
    };
    ranks.run(|comm| {
        let transfer = mapped_by_rank_1(comm, MIB);
        let region = transfer.region().unwrap().clone();
        drop(transfer);
        // Though both regions are still registered.
        eventually(
            "idle mappings are closed",
            || comm.registrations_and_mappings().1 == 0,
            || format!("{:?}", comm.registrations_and_mappings()),
        );
        comm.barrier().unwrap();
        drop(region);
    });
}

#[test]
fn an_allocation_waits_for_memory_that_a_peer_still_maps() {
    if kind() != DeviceKind::Host {
        return;
    }
    processes(2, |comm| {
        const BYTES: usize = 256 * MIB;
        let transfer = mapped_by_rank_1(comm, BYTES);
        comm.barrier().unwrap();
        if comm.rank() == 0 {
            // Room for all that there is and half of what is to come.
            let status = std::fs::read_to_string("/proc/self/statm").unwrap();
            let pages: u64 = status.split(' ').next().unwrap().parse().unwrap();
            let space = pages * rustix::param::page_size() as u64 + (BYTES / 2) as u64;
            let limit = rustix::process::Rlimit {
                current: Some(space),
                maximum: None,
            };
            rustix::process::setrlimit(rustix::process::Resource::As, limit).unwrap();
            let held = comm.alloc(BYTES).unwrap_err();
            assert_eq!(held.kind(), ErrorKind::OutOfMemory, "{held}");
            drop(transfer);
            comm.barrier().unwrap();
            // The peer lets go a while later; on a busy machine that may be too late for the first attempt.
            let until = Instant::now() + Duration::from_secs(60);
            loop {
                let begun = Instant::now();
                match comm.alloc(BYTES) {
                    Ok(_) => break,
                    Err(error) => assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}"),
                }
                assert!(begun.elapsed() > Duration::from_secs(1), "it did not wait");
                assert!(Instant::now() < until, "the memory does not come back");
            }
        } else {
            comm.barrier().unwrap();
            std::thread::sleep(Duration::from_millis(300));
            drop(transfer);
        }
        comm.barrier().unwrap();
    });
}

/// Lines of this process's map of memory that are shared memory of the host device.
fn shared_mappings() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines()
        .filter(|line| line.contains("memfd:warplink"))
        .count()
}

#[test]
fn the_owner_is_told_after_the_unmapping_and_not_before() {
    if kind() != DeviceKind::Host {
        return;
    }
    // With delays, unmapping takes its time too.
    let ranks = Ranks {
        delay: Some(Duration::from_millis(100)),
        ..Ranks::of(2)
    };
    ranks.run(|comm| {
        comm.barrier().unwrap();
        let before = shared_mappings();
        let region = comm.alloc(MIB).unwrap();
        let peer = 1 - comm.rank();
        let handle = comm.export_handle(&region, peer).unwrap();
        let handles = comm.all_gather_bytes(&handle).unwrap();
        let remote = comm.open_handle(peer, &handles[peer]).unwrap();
        assert_eq!(shared_mappings(), before + 2);
        comm.barrier().unwrap();
        if comm.rank() == 0 {
            drop(remote);
            comm.barrier().unwrap();
            // The peer has unmapped it when this returns.
            region.close(comm.deadline()).unwrap();
            comm.barrier().unwrap();
        } else {
            // In use until here, and revoked in use.
            std::thread::sleep(Duration::from_millis(20));
            drop(remote);
            comm.barrier().unwrap();
            comm.barrier().unwrap();
            // Its own region is left, which is not closed.
            assert_eq!(shared_mappings(), before + 1, "told before it was unmapped");
        }
        comm.barrier().unwrap();
    });
}

#[test]
fn a_stream_that_is_dropped_while_it_waits_leaves_nothing_behind() {
    // A process, which has no threads of other tests.
    processes(1, |comm| {
        let device = comm.device();
        let wait = || {
            let signals = device.allocate_signals(64).unwrap();
            let stream = device.create_stream(Priority::Normal).unwrap();
            let word = signals.word(0).unwrap();
            await_word(&stream, &word, 1);
        };
        let threads = Footprint::now().threads;
        // So many that the allocator keeps no more for the fewer ones below, of which more may live at once on a busy
        // machine.
        (0..150).for_each(|_| wait());
        eventually(
            "the streams end",
            || Footprint::now().threads <= threads,
            || format!("{:?}", Footprint::now()),
        );
        let before = Footprint::now();
        (0..50).for_each(|_| wait());
        Footprint::assert_back(&before);
    });
}

/// An owner of memory, which counts how many are left.
struct Owner(Arc<AtomicBool>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Two regions of one allocation, borrowed from different owners, and when these were let go.
fn borrowed_halves(comm: &Communicator) -> [(warplink::memory::Region, Arc<AtomicBool>); 2] {
    let whole = allocate(comm, 2 * MIB);
    [0, MIB].map(|offset| {
        let gone = Arc::new(AtomicBool::new(false));
        let owner = Arc::new((Owner(gone.clone()), whole.clone()));
        // SAFETY: the owner holds the allocation, and is held by the borrowed slice.
        let slice = unsafe {
            comm.device()
                .borrow(whole.address() + offset as u64, MIB, owner)
        };
        (comm.register(&slice.unwrap()).unwrap(), gone)
    })
}

fn owners_of_one_allocation(comm: &Communicator) {
    let peer = 1 - comm.rank();
    let [(first, first_gone), (second, second_gone)] = borrowed_halves(comm);
    let handles = [&first, &second].map(|region| comm.export_handle(region, peer).unwrap());
    let handles = comm.all_gather_bytes(&handles.concat()).unwrap();
    let (a, b) = handles[peer].split_at(handles[peer].len() / 2);
    let [remote_first, remote_second] = [a, b].map(|wire| comm.open_handle(peer, wire).unwrap());
    comm.barrier().unwrap();
    let is_gone = |gone: &AtomicBool| gone.load(Ordering::Acquire);
    // Dropped by its owner, the second is still used by the peer.
    drop(second);
    std::thread::sleep(Duration::from_millis(50));
    assert!(!is_gone(&second_gone), "let go of while a peer uses it");
    comm.barrier().unwrap();
    drop(remote_second);
    // Though the allocation is still registered, and mapped.
    eventually("the owner is let go", || is_gone(&second_gone), String::new);
    assert!(!is_gone(&first_gone), "let go of while it is registered");
    comm.barrier().unwrap();
    drop(first);
    std::thread::sleep(Duration::from_millis(50));
    assert!(!is_gone(&first_gone), "let go of while a peer uses it");
    comm.barrier().unwrap();
    drop(remote_first);
    eventually("the owner is let go", || is_gone(&first_gone), String::new);
    comm.barrier().unwrap();
}

#[test]
fn each_region_of_an_allocation_holds_its_own_owner() {
    processes(world(2), owners_of_one_allocation);
}

#[test]
fn each_region_of_an_allocation_holds_its_own_owner_among_threads() {
    threads(world(2), owners_of_one_allocation);
}

/// An owner that needs a lock to go, as one of an interpreter does.
struct Locked(Arc<std::sync::Mutex<()>>);

impl Drop for Locked {
    fn drop(&mut self) {
        drop(self.0.lock().unwrap());
    }
}

#[test]
fn letting_go_of_an_owner_may_wait_for_a_lock() {
    processes(world(2), |comm| {
        let peer = 1 - comm.rank();
        let interpreter = Arc::new(std::sync::Mutex::new(()));
        let whole = allocate(comm, MIB);
        let owner = Arc::new((Locked(interpreter.clone()), whole.clone()));
        // SAFETY: the owner holds the allocation, and is held by the borrowed slice.
        let slice = unsafe { comm.device().borrow(whole.address(), MIB, owner) };
        let region = comm.register(&slice.unwrap()).unwrap();
        let handle = comm.export_handle(&region, peer).unwrap();
        let handles = comm.all_gather_bytes(&handle).unwrap();
        let remote = comm.open_handle(peer, &handles[peer]).unwrap();
        comm.barrier().unwrap();
        drop(region);
        comm.barrier().unwrap();
        let held = interpreter.lock().unwrap();
        // Now the peer's owner goes, which needs the lock that the peer's main thread holds.
        drop(remote);
        std::thread::sleep(Duration::from_millis(50));
        // Meanwhile this rank still answers its peer.
        let stream = comm.create_stream(Priority::Normal).unwrap();
        (0..3).for_each(|_| exchange_fresh(comm, &stream, MIB));
        let waiting = comm.alloc(4096).unwrap();
        waiting.close(comm.deadline()).unwrap();
        comm.barrier().unwrap();
        drop(held);
    });
}
