//! Transfers between ranks: the cases of the systems that Warplink unites, and what breaks naive
//! versions of them. Ranks are processes unless a test says otherwise.

// A test fails by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../common/mod.rs"]
mod common;
mod graphs;
mod paths;
// Its kernel polls the last word of the data itself: a race on purpose, which the sanitizer reports.
#[cfg(not(warplink_tsan))]
mod persistent;

use common::{
    Ranks, allocate, complete, delayed, processes, recorded, ring_requests, threads, threads_with,
    transfer_from_first, transfer_once, values, world,
};
use warplink::device::{AllocationKind, Priority};
use warplink::memory::Region;
use warplink::p2p::{Path, Protocol, Transfer, TransferRequest, post_all, post_stores, wait_all};
use warplink::{Communicator, ErrorKind};

const PROTOCOLS: [Protocol; 2] = [Protocol::Get, Protocol::Put];

fn neighbours(comm: &Communicator) -> (usize, usize) {
    let (rank, world) = (comm.rank(), comm.world());
    ((rank + 1) % world, (rank + world - 1) % world)
}

/// A send to the right and a receive from the left.
fn ring(
    comm: &Communicator,
    send: &Region,
    receive: &Region,
    tag: u64,
    protocol: Protocol,
) -> Vec<Transfer> {
    let requests = ring_requests(comm, send, receive, tag);
    let requests = requests.map(|end| end.with_protocol(protocol));
    comm.exchange(&requests).unwrap()
}

/// Buffers without bytes lead to signals alone: beside others, and in graphs.
#[test]
fn transfers_of_no_bytes_complete() {
    threads(world(2), |comm| {
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let (_, left) = neighbours(comm);
        for (protocol, path) in PROTOCOLS
            .into_iter()
            .flat_map(|protocol| [Path::CopyEngine, Path::Multiprocessors].map(|p| (protocol, p)))
        {
            let [send, receive] = [(); 2].map(|()| comm.alloc(4096).unwrap());
            send.upload(&values(comm.rank(), 0, 4096)).unwrap();
            let ends = [0..0, 4096..4096, 0..4096].into_iter().enumerate();
            let requests = ends.flat_map(|(tag, range)| {
                let [send, receive] =
                    [&send, &receive].map(|end| end.slice(range.clone()).unwrap());
                ring_requests(comm, &send, &receive, tag as u64)
            });
            let requests = requests.map(|end| end.with_protocol(protocol).with_path(path));
            let transfers = comm.exchange(&requests.collect::<Vec<_>>()).unwrap();
            let group: Vec<&Transfer> = transfers.iter().collect();
            let empty = &group[..4];
            for group in [empty, &group, empty] {
                post_all(group, &stream).unwrap();
                wait_all(group, &stream).unwrap();
            }
            comm.synchronize(&stream).unwrap();
            assert_eq!(receive.download().unwrap(), values(left, 0, 4096));
            for group in [empty, &group] {
                let graph = recorded(&stream, || {
                    post_all(group, &stream).unwrap();
                    wait_all(group, &stream).unwrap();
                });
                (0..3).for_each(|_| graph.launch(&stream).unwrap());
                comm.synchronize(&stream).unwrap();
            }
            assert_eq!(receive.download().unwrap(), values(left, 0, 4096));
            comm.barrier().unwrap();
        }
    });
}

/// 32 rounds of a ring over one exchange, with data that changes every round.
fn ring_of_rounds(comm: &Communicator) {
    let (_, left) = neighbours(comm);
    let stream = comm.create_stream(Priority::High).unwrap();
    for (tag, protocol) in PROTOCOLS.into_iter().enumerate() {
        let (send, receive) = (comm.alloc(10_000).unwrap(), comm.alloc(10_000).unwrap());
        let transfers = ring(comm, &send, &receive, tag as u64, protocol);
        for round in 0..32 {
            send.upload(&values(comm.rank(), round, 10_000)).unwrap();
            complete(comm, &transfers, &stream).unwrap();
            assert_eq!(
                receive.download().unwrap(),
                values(left, round, 10_000),
                "{protocol}, round {round}"
            );
        }
        // A buffer must not be changed or read by a peer that is a round ahead.
        comm.barrier().unwrap();
    }
}

#[test]
fn a_ring_of_processes_over_32_rounds() {
    processes(world(4), ring_of_rounds);
}

#[test]
fn a_ring_of_threads_over_32_rounds() {
    threads(world(4), ring_of_rounds);
}

#[test]
fn a_ring_with_random_delays() {
    threads_with(world(3), delayed(300), ring_of_rounds);
}

#[test]
fn each_rank_may_see_only_its_own_gpu() {
    Ranks {
        own_gpu_only: true,
        ..Ranks::of(world(2))
    }
    .run(ring_of_rounds);
}

#[test]
fn a_neighbours_value_is_read_through_its_handle() {
    processes(world(2), |comm| {
        let peer = 1 - comm.rank();
        let (own, seen) = (comm.alloc(8).unwrap(), comm.alloc(8).unwrap());
        own.upload(&(comm.rank() as u64 + 41).to_le_bytes())
            .unwrap();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let requests = ring_requests(comm, &own, &seen, 0);
        let requests = requests.map(|end| end.with_protocol(Protocol::Get));
        transfer_once(comm, &requests, &stream);
        assert_eq!(seen.download().unwrap(), (peer as u64 + 41).to_le_bytes());
    });
}

#[test]
fn the_middle_of_an_allocation_on_either_side() {
    processes(world(2), |comm| {
        let peer = 1 - comm.rank();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        for kind in [AllocationKind::Plain, AllocationKind::Virtual] {
            for protocol in PROTOCOLS {
                let whole = comm.device().allocate(3 << 20, kind).unwrap();
                comm.device().upload(&whole, &vec![0; 3 << 20]).unwrap();
                let whole = comm.register(&whole).unwrap();
                let from = whole.slice(1_000_003..1_300_003).unwrap();
                let to = whole.slice(2_000_001..2_300_001).unwrap();
                from.upload(&values(comm.rank(), 5, 300_000)).unwrap();
                let requests = [
                    TransferRequest::receive(&to, peer, 1).with_protocol(protocol),
                    TransferRequest::send(&from, peer, 1).with_protocol(protocol),
                ];
                transfer_once(comm, &requests, &stream);
                let all = whole.download().unwrap();
                assert_eq!(all[2_000_001..2_300_001], values(peer, 5, 300_000));
                for (beside, what) in [(0..1_000_003, "before"), (2_300_001..all.len(), "after")] {
                    let untouched = all[beside].iter().all(|byte| *byte == 0);
                    assert!(untouched, "bytes {what} the range were written");
                }
                comm.barrier().unwrap();
            }
        }
    });
}

#[test]
fn memory_that_somebody_else_allocated() {
    threads(world(2), |comm| {
        let peer = 1 - comm.rank();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let owner = allocate(comm, 1 << 16);
        // SAFETY: the owner holds the memory, and is held by the borrowed slice.
        let borrowed = unsafe {
            comm.device().borrow(
                owner.address() + 256,
                4096,
                std::sync::Arc::new(owner.clone()),
            )
        };
        let own = comm.register(&borrowed.unwrap()).unwrap();
        let into = comm.alloc(4096).unwrap();
        own.upload(&values(comm.rank(), 1, 4096)).unwrap();
        transfer_once(comm, &ring_requests(comm, &own, &into, 0), &stream);
        assert_eq!(into.download().unwrap(), values(peer, 1, 4096));
    });
}

#[test]
fn a_buffer_replaced_on_one_rank_only() {
    processes(world(2), |comm| {
        let peer = 1 - comm.rank();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        for protocol in PROTOCOLS {
            let receive = comm.alloc(1 << 16).unwrap();
            let mut send = comm.alloc(1 << 16).unwrap();
            for round in 0..12 {
                if comm.rank() == 0 && round % 3 == 2 {
                    // Freed and allocated anew: often at the same address.
                    drop(send);
                    send = comm.alloc(1 << 16).unwrap();
                }
                send.upload(&values(comm.rank(), round, 1 << 16)).unwrap();
                let transfers = ring(comm, &send, &receive, 9, protocol);
                complete(comm, &transfers, &stream).unwrap();
                assert_eq!(
                    receive.download().unwrap(),
                    values(peer, round, 1 << 16),
                    "{protocol}, round {round}"
                );
            }
        }
    });
}

#[test]
fn a_group_completes_in_any_order_on_each_rank() {
    processes(world(4), |comm| {
        let (rank, world) = (comm.rank(), comm.world());
        let stream = comm.create_stream(Priority::Normal).unwrap();
        for round in 0..6 {
            let mut requests = Vec::new();
            let mut checks = Vec::new();
            for peer in (0..world).filter(|peer| *peer != rank) {
                for tag in 0..3u64 {
                    let protocol = PROTOCOLS[(tag as usize + rank.min(peer)) % 2];
                    let bytes = 1000 + 77 * tag as usize;
                    let (send, receive) = (comm.alloc(bytes).unwrap(), comm.alloc(bytes).unwrap());
                    send.upload(&values(rank * 100 + peer, round * 10 + tag as usize, bytes))
                        .unwrap();
                    requests.push(TransferRequest::send(&send, peer, tag).with_protocol(protocol));
                    requests.push(
                        TransferRequest::receive(&receive, peer, tag).with_protocol(protocol),
                    );
                    checks.push((
                        receive,
                        values(peer * 100 + rank, round * 10 + tag as usize, bytes),
                    ));
                }
            }
            // Another order on every rank and in every round.
            let order = values(rank, round, requests.len());
            let mut shuffled: Vec<_> = requests.into_iter().zip(order).collect();
            shuffled.sort_by_key(|(_, key)| *key);
            let requests: Vec<_> = shuffled.into_iter().map(|(request, _)| request).collect();
            transfer_once(comm, &requests, &stream);
            for (receive, want) in checks {
                assert_eq!(receive.download().unwrap(), want);
            }
        }
    });
}

#[test]
fn batches_need_not_be_cut_alike() {
    processes(world(2), |comm| {
        let peer = 1 - comm.rank();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let regions: Vec<_> = (0..4).map(|_| comm.alloc(64).unwrap()).collect();
        if comm.rank() == 0 {
            for (tag, region) in regions.iter().enumerate() {
                region.upload(&[tag as u8 + 1; 64]).unwrap();
                comm.send(region, peer, tag as u64, &stream).unwrap();
            }
        } else {
            let requests: Vec<_> = regions
                .iter()
                .zip(0..)
                .map(|(region, tag)| TransferRequest::receive(region, peer, tag))
                .collect();
            comm.once(&requests, &stream).unwrap();
        }
        comm.synchronize(&stream).unwrap();
        for (tag, region) in regions.iter().enumerate() {
            assert_eq!(region.download().unwrap(), [tag as u8 + 1; 64]);
        }
    });
}

#[test]
fn a_sender_that_runs_ahead_loses_no_signal() {
    threads_with(world(2), delayed(50), |comm| {
        let stream = comm.create_stream(Priority::Normal).unwrap();
        for protocol in PROTOCOLS {
            let region = comm.alloc(256).unwrap();
            region.upload(&[7; 256]).unwrap();
            let transfer = transfer_from_first(comm, &region, 1, protocol);
            // One rank posts a hundred before the other posts any, then the other way round.
            for first in [0, 1] {
                if comm.rank() == first {
                    (0..100).for_each(|_| transfer.post(&stream).unwrap());
                    comm.barrier().unwrap();
                } else {
                    comm.barrier().unwrap();
                    (0..100).for_each(|_| transfer.post(&stream).unwrap());
                }
                transfer.wait(&stream).unwrap();
                comm.synchronize(&stream).unwrap();
            }
            assert_eq!(region.download().unwrap(), [7; 256]);
        }
    });
}

#[test]
fn a_wait_on_another_stream_waits() {
    threads_with(world(2), delayed(1_000), |comm| {
        let peer = 1 - comm.rank();
        let (posts, waits) = (
            comm.create_stream(Priority::High).unwrap(),
            comm.create_stream(Priority::Normal).unwrap(),
        );
        for protocol in PROTOCOLS {
            let [send, receive, seen] = [(); 3].map(|()| comm.alloc(1 << 16).unwrap());
            let transfers = ring(comm, &send, &receive, 1, protocol);
            let group: Vec<&Transfer> = transfers.iter().collect();
            for round in 0..20 {
                send.upload(&values(comm.rank(), round, 1 << 16)).unwrap();
                post_all(&group, &posts).unwrap();
                wait_all(&group, &waits).unwrap();
                waits.copy(&seen, &receive).unwrap();
                comm.synchronize(&waits).unwrap();
                assert_eq!(
                    seen.download().unwrap(),
                    values(peer, round, 1 << 16),
                    "{protocol}, round {round}"
                );
                comm.barrier().unwrap();
            }
            comm.synchronize(&posts).unwrap();
        }
    });
}

/// Each rank stores into its right neighbour's buffer by itself, eagerly and in a graph.
fn stores(comm: &Communicator) {
    let (right, left) = neighbours(comm);
    let stream = comm.create_stream(Priority::Normal).unwrap();
    let (source, receive) = (comm.alloc(3000).unwrap(), comm.alloc(3000).unwrap());
    let transfers = comm
        .exchange(&[
            TransferRequest::store(3000, right, 7),
            TransferRequest::receive(&receive, left, 7).with_protocol(Protocol::Put),
        ])
        .unwrap();
    let [store, take] = &transfers[..] else {
        panic!("two were asked for");
    };
    assert_eq!((store.bytes(), store.region().is_none()), (3000, true));
    assert_eq!(store.target().unwrap().bytes(), 3000);
    let enqueue = || {
        take.post(&stream).unwrap();
        post_stores(&[store], &stream, |targets| {
            // In two parts, which are both there when the receiver hears of it.
            for part in [0..1000, 1000..3000] {
                let from = source.slice(part.clone())?;
                stream.copy(&targets[0].slice(part)?, &from)?;
            }
            Ok(())
        })
        .unwrap();
        take.wait(&stream).unwrap();
    };
    let graph = recorded(&stream, enqueue);
    for round in 0..20 {
        source.upload(&values(comm.rank(), round, 3000)).unwrap();
        match round % 2 {
            0 => enqueue(),
            _ => graph.launch(&stream).unwrap(),
        }
        comm.synchronize(&stream).unwrap();
        assert_eq!(receive.download().unwrap(), values(left, round, 3000));
    }
    // There is nothing to copy, and nothing to store for who receives.
    let error = store.post(&stream).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    // That harmed nothing.
    enqueue();
    comm.synchronize(&stream).unwrap();
    assert_eq!(receive.download().unwrap(), values(left, 19, 3000));
    let error = post_stores(&[take], &stream, |_| Ok(())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    let by_get = TransferRequest::store(64, right, 8).with_protocol(Protocol::Get);
    let error = comm.exchange(&[by_get]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    comm.barrier().unwrap();
}

#[test]
fn what_is_stored_at_the_receiver_is_there_when_it_hears_of_it() {
    processes(world(3), stores);
}

#[test]
fn what_is_stored_with_random_delays_is_there() {
    threads_with(world(3), delayed(200), stores);
}
