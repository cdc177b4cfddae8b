//! Freed regions are used again, when nobody uses them any more and not before.

use super::common::{Ranks, kind, processes, threads_with, world};
use super::{MIB, eventually, exchange_fresh, shared_mappings};
use std::cell::RefCell;
use std::time::Duration;
use warplink::device::Priority;
use warplink::memory::RemoteRegion;
use warplink::{Communicator, DeviceKind};

/// Bytes of no other allocation here.
const BYTES: usize = 3 * MIB;

/// A region of rank 0, which rank 1 has mapped; its number on rank 0.
fn mapped_by_the_peer(comm: &Communicator) -> (u64, Option<RemoteRegion>) {
    let peer = 1 - comm.rank();
    if comm.rank() == 1 {
        let handle = comm.all_gather_bytes(&[]).unwrap().remove(peer);
        return (0, Some(comm.open_handle(peer, &handle).unwrap()));
    }
    let region = comm.alloc(BYTES).unwrap();
    let handle = comm.export_handle(&region, peer).unwrap();
    comm.all_gather_bytes(&handle).unwrap();
    (region.memory().backing().identity(), None)
}

#[test]
fn memory_is_not_used_again_while_a_peer_uses_it() {
    processes(world(2), |comm| {
        let (first, remote) = mapped_by_the_peer(comm);
        comm.barrier().unwrap();
        if comm.rank() == 0 {
            std::thread::sleep(Duration::from_millis(50));
            let other = comm.alloc(BYTES).unwrap();
            assert_ne!(
                other.memory().backing().identity(),
                first,
                "the peer uses it"
            );
            comm.barrier().unwrap();
            // The peer still maps it, but does not use it. What is allocated before the peer has told so is
            // kept, since what was freed last is used first.
            let kept = RefCell::new(vec![other]);
            let is_used_again = || {
                std::thread::sleep(Duration::from_millis(50));
                let region = comm.alloc(BYTES).unwrap();
                let is_first = region.memory().backing().identity() == first;
                kept.borrow_mut().push(region);
                is_first
            };
            eventually("the memory is used again", is_used_again, String::new);
        } else {
            comm.barrier().unwrap();
            drop(remote);
        }
        comm.barrier().unwrap();
    });
}

#[test]
fn memory_is_not_used_again_while_a_slice_of_it_is_held() {
    processes(1, |comm| {
        let region = comm.alloc(BYTES).unwrap();
        let slice = region.memory().slice(16..32).unwrap();
        let first = region.memory().backing().identity();
        drop(region);
        assert_eq!(comm.pooled_allocations_and_bytes(), (1, BYTES as u64));
        let other = comm.alloc(BYTES).unwrap();
        assert_ne!(other.memory().backing().identity(), first);
        drop((other, slice));
        let regions = [(); 2].map(|()| comm.alloc(BYTES).unwrap());
        let again = regions.map(|region| region.memory().backing().identity());
        assert!(again.contains(&first), "{first} of {again:?}");
    });
}

#[test]
fn memory_that_is_used_again_contains_garbage_on_the_host_device() {
    if kind() != DeviceKind::Host {
        return;
    }
    let delayed = |config: &mut warplink::Config| {
        super::common::delays(config, Duration::from_micros(1));
    };
    threads_with(1, delayed, |comm| {
        let region = comm.alloc(BYTES).unwrap();
        let first = region.memory().backing().identity();
        region.upload(&[7; BYTES]).unwrap();
        drop(region);
        let again = comm.alloc(BYTES).unwrap();
        assert_eq!(again.memory().backing().identity(), first);
        assert_eq!(again.download().unwrap(), [0xa5; BYTES]);
    });
}

#[test]
fn a_peer_finds_memory_that_is_used_again_still_mapped() {
    processes(world(2), |comm| {
        let stream = comm.create_stream(Priority::Normal).unwrap();
        (0..20).for_each(|_| exchange_fresh(comm, &stream, BYTES));
        comm.barrier().unwrap();
        let (_, mapped) = comm.registrations_and_mappings();
        // Only a region that is allocated before its predecessor came back needs another.
        assert!(mapped < 10, "{mapped} mappings");
        comm.barrier().unwrap();
    });
}

#[test]
fn trimming_gives_back_what_is_kept_here_and_unmaps_it_at_peers() {
    processes(world(2), |comm| {
        comm.barrier().unwrap();
        let before = shared_mappings();
        let (first, remote) = mapped_by_the_peer(comm);
        drop(remote);
        comm.barrier().unwrap();
        if comm.rank() == 0 {
            assert_eq!(comm.pooled_allocations_and_bytes(), (1, BYTES as u64));
            comm.trim(comm.deadline()).unwrap();
            assert_eq!(comm.pooled_allocations_and_bytes(), (0, 0));
            // The thread that the peer's answer came to may be unmapping it still.
            eventually(
                "what was given back is still mapped",
                || shared_mappings() == before,
                || format!("{before}, now {}", shared_mappings()),
            );
            assert_ne!(first, 0);
        }
        comm.barrier().unwrap();
        assert_eq!(comm.registrations_and_mappings(), (0, 0));
        assert_eq!(shared_mappings(), before, "the peer has unmapped it");
        comm.barrier().unwrap();
    });
}

#[test]
fn trimming_names_the_peer_that_still_maps_memory() {
    processes(world(2), |comm| {
        let (_, remote) = mapped_by_the_peer(comm);
        comm.barrier().unwrap();
        if comm.rank() == 0 {
            let soon = warplink::Deadline::after(Duration::from_millis(100));
            let error = comm.trim(soon).unwrap_err();
            super::common::assert_says(&error, &["trim memory", "peer 1"]);
        }
        comm.barrier().unwrap();
        drop(remote);
        comm.barrier().unwrap();
    });
}

#[test]
fn what_a_lost_rank_has_mapped_is_not_used_again() {
    let Some(ranks) = Ranks::all(3) else { return };
    ranks.run_losing(&[], |comm| {
        let region = comm.alloc(BYTES).unwrap();
        let first = region.memory().backing().identity();
        let peer = (comm.rank() + 1) % 3;
        let handle = comm.export_handle(&region, peer).unwrap();
        let handles = comm.all_gather_bytes(&handle).unwrap();
        let owner = (comm.rank() + 2) % 3;
        let remote = comm.open_handle(owner, &handles[owner]).unwrap();
        comm.barrier().unwrap();
        if comm.rank() == 2 {
            comm.abort("this test wants it to");
            // A release may reach rank 1 before the loss, and then its memory is used again, as it should be.
            std::mem::forget(remote);
            return;
        }
        drop((region, remote));
        let survivors = comm.survivors().unwrap();
        for _ in 0..50 {
            let again = survivors.alloc(BYTES).unwrap();
            if comm.rank() == 1 {
                // Rank 2 may still write to the first.
                assert_ne!(again.memory().backing().identity(), first);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        survivors.close().unwrap();
    });
}

#[test]
fn memory_that_finds_no_use_leaves_the_pool() {
    processes(1, |comm| {
        let many = [(); 20].map(|()| comm.alloc(BYTES).unwrap());
        drop(many);
        assert_eq!(comm.pooled_allocations_and_bytes().0, 20);
        // From now on, one is enough.
        (0..1000).for_each(|_| drop(comm.alloc(BYTES).unwrap()));
        assert_eq!(comm.pooled_allocations_and_bytes(), (1, BYTES as u64));
    });
}
