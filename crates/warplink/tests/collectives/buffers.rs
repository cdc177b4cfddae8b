//! Memory that users share with peers, and barriers of some ranks' streams around accesses of it.

use crate::common::{allocate, delayed, processes, threads_with, world};
use crate::data::calling;
use crate::launches::integers;
use warplink::Communicator;
use warplink::device::{AllocationKind, Priority, Stream};
use warplink::memory::RemoteRegion;

const COUNT: usize = 3000;

fn bytes(rank: usize, round: usize) -> Vec<u8> {
    let numbers = integers(rank, round, COUNT);
    numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
}

/// Every rank of `group` reads the memory of all others again and again, between barriers of their streams: `barrier`
/// enqueues number `n`.
fn read_between(group: &Communicator, rounds: usize, barrier: impl Fn(usize, &Stream)) {
    let stream: Stream = group.create_stream(Priority::Normal).unwrap();
    let own = group.alloc(4 * COUNT).unwrap();
    let peers = group.share(&own).unwrap();
    let device = group.device();
    let (source, read) = [(); 2]
        .map(|()| device.allocate(group.world() * 4 * COUNT, AllocationKind::Plain))
        .map(Result::unwrap)
        .into();
    // Numbers in the job.
    let ranks = group.job_ranks();
    for round in 0..rounds {
        let source = source.slice(0..4 * COUNT).unwrap();
        device
            .upload(&source, &bytes(ranks[group.rank()], round))
            .unwrap();
        // What others read of it in the round before is done.
        stream.copy(own.memory(), &source).unwrap();
        barrier(2 * round, &stream);
        for (peer, region) in peers.iter().enumerate() {
            let part = read
                .slice(4 * COUNT * peer..4 * COUNT * (peer + 1))
                .unwrap();
            let memory = region.as_ref().map_or(own.memory(), RemoteRegion::memory);
            stream.copy(&part, memory).unwrap();
        }
        barrier(2 * round + 1, &stream);
        group.synchronize(&stream).unwrap();
        let mut found = vec![0; read.bytes()];
        device.download(&read, &mut found).unwrap();
        let expected: Vec<u8> = ranks.iter().flat_map(|rank| bytes(*rank, round)).collect();
        assert!(found == expected, "round {round}: wrong bytes");
    }
}

/// Some of the ranks, in another order; the others make no call, and nobody waits for them.
#[test]
fn some_ranks_read_one_anothers_memory_between_barriers_of_their_streams() {
    let ranks = world(5);
    if ranks < 3 {
        return;
    }
    threads_with(ranks, delayed(100), |comm| {
        let set: Vec<usize> = (0..ranks).rev().filter(|rank| *rank != 1).collect();
        if !set.contains(&comm.rank()) {
            return;
        }
        let group = comm.subgroup(&set).unwrap();
        let barrier = group.stream_barrier().unwrap();
        read_between(&group, 20, |_, stream| barrier.enqueue(stream).unwrap());
        group.close().unwrap();
    });
}

/// The same of processes, with barriers of both kinds. scripts/device-sanitizer.sh runs this: it is short.
#[test]
fn processes_read_one_anothers_memory_between_barriers() {
    processes(world(3), |comm| {
        let (collectives, barrier) = (comm.collectives().unwrap(), comm.stream_barrier().unwrap());
        read_between(comm, 6, |number, stream| {
            match number % 3 {
                0 => collectives.barrier(stream),
                _ => barrier.enqueue(stream),
            }
            .unwrap();
        });
    });
}

/// Every rank's workspace can be read by the others, whole.
#[test]
fn workspaces_of_peers_are_read() {
    calling(world(3), |comm, collectives, stream| {
        collectives.barrier(stream).unwrap();
        for peer in 0..comm.world() {
            let buffer = collectives.peer_buffer(peer).unwrap();
            assert!(buffer.bytes() > 0);
            let copy = allocate(comm, buffer.bytes());
            stream.copy(&copy, buffer).unwrap();
        }
        assert!(collectives.peer_buffer(comm.world()).is_none());
        // No rank calls anything else before all have read.
        comm.synchronize(stream).unwrap();
        comm.barrier().unwrap();
    });
}
