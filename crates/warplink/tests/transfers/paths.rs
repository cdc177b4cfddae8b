//! Paths: what moves the bytes, one of which both ranks choose.

use super::common::{
    assert_error, assert_says, complete, delayed, from_first, kind, pretending, processes,
    recorded, ring_requests, threads, threads_with, transfer_once, values, world,
};
use super::graphs::{replay, steps_that_other_streams_wait_for};
use super::{PROTOCOLS, ring_of_rounds};
use std::time::Duration;
use warplink::device::{MatmulSpec, Priority, Stream};
use warplink::p2p::{Batch, Path, Protocol, Transfer, TransferRequest, post_all, wait_all};
use warplink::{Communicator, Config, DType, DeviceKind, ErrorKind};

const PATHS: [Path; 4] = [
    Path::CopyEngine,
    Path::Multiprocessors,
    Path::Fastest,
    Path::OneBlock,
];

fn kernels(config: &mut Config) {
    config.path = Some(Path::Multiprocessors);
}

/// Ranks as threads, whose communicator says that multiprocessors are free; with delays and without.
fn by_kernels(world: usize, body: impl Fn(&Communicator) + Send + Sync) {
    threads_with(world, kernels, &body);
    let late = delayed(300);
    threads_with(
        world,
        |config| {
            kernels(config);
            late(config);
        },
        &body,
    );
}

#[test]
fn every_path_is_right_without_atomics_or_access() {
    pretending(world(2), |comm, _| {
        move_ranges(comm, &[1, 100, 4096, 70_000, 3 << 20]);
    });
    pretending(world(3), |comm, _| ring_of_rounds(comm));
}

#[test]
fn a_ring_by_kernels_over_32_rounds() {
    by_kernels(world(3), ring_of_rounds);
}

#[test]
fn a_graph_by_kernels_replayed_stays_right() {
    threads_with(world(3), kernels, |comm| replay(comm, 3_000));
    by_kernels(world(3), |comm| replay(comm, 100));
}

#[test]
fn any_number_of_streams_of_a_graph_may_wait_for_kernels() {
    by_kernels(world(3), steps_that_other_streams_wait_for);
}

/// One end of a transfer between two ranks, of which rank 0 sends.
fn one_way(comm: &Communicator, region: &warplink::memory::Region, path: Path) -> Transfer {
    let request = from_first(comm, region, 3);
    let request = request.with_path(path).with_protocol(Protocol::Put);
    comm.exchange(&[request]).unwrap().remove(0)
}

/// Posts transfers and waits for them in one batch.
fn post_and_wait<'a>(stream: &Stream, transfers: impl IntoIterator<Item = &'a Transfer> + Copy) {
    let batch = Batch::new().post(transfers).wait(transfers);
    batch.enqueue(stream).unwrap();
}

/// Bytes of these lengths from many alignments to others, by each path and protocol: they arrive whole, and nothing beside
/// them is touched.
fn move_ranges(comm: &Communicator, lengths: &[usize]) {
    const MARGIN: usize = 64;
    let peer = 1 - comm.rank();
    let stream = comm.create_stream(Priority::Normal).unwrap();
    let starts = [(0, 0), (1, 0), (8, 16), (4, 3)];
    let longest = lengths.iter().max().unwrap();
    let whole = comm.alloc(longest + 4 * MARGIN).unwrap();
    for (path, protocol) in PATHS.iter().flat_map(|path| PROTOCOLS.map(|p| (*path, p))) {
        for (number, bytes) in lengths.iter().copied().enumerate() {
            let (from, to) = starts[number % starts.len()];
            let (from, to) = (MARGIN + from, MARGIN + to);
            let own = comm.alloc(bytes + 2 * MARGIN).unwrap();
            whole.upload(&vec![0xa5; whole.bytes()]).unwrap();
            let send = own.slice(from..from + bytes).unwrap();
            let receive = whole.slice(to..to + bytes).unwrap();
            send.upload(&values(comm.rank(), number, bytes)).unwrap();
            let requests = ring_requests(comm, &send, &receive, 0);
            let requests = requests.map(|request| request.with_path(path).with_protocol(protocol));
            transfer_once(comm, &requests, &stream);
            let all = whole.download().unwrap();
            let what = format!("{path}, {protocol}, {bytes} bytes from {from} to {to}");
            assert!(all[to..to + bytes] == values(peer, number, bytes), "{what}");
            for beside in [&all[..to], &all[to + bytes..]] {
                assert!(beside == vec![0xa5; beside.len()], "{what}");
            }
            comm.barrier().unwrap();
        }
    }
}

#[test]
fn every_path_moves_any_range() {
    let lengths = [1, 7, 8, 9, 63, 4096, 4101, 16_385, 70_001, (1 << 20) + 3];
    threads(world(2), |comm| move_ranges(comm, &lengths));
}

/// The same of a few lengths, of ranks that are processes, and transfers by kernels in a graph. scripts/device-sanitizer.sh
/// runs this: it is short.
#[test]
fn processes_move_some_ranges_by_each_path() {
    processes(world(2), |comm| {
        move_ranges(comm, &[1, 4101, 70_001]);
        eager_and_captured(comm, 6);
    });
}

/// Transfers by kernels, eager and in a graph by turns.
fn eager_and_captured(comm: &Communicator, rounds: usize) {
    for bytes in [5_000, 100_000] {
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let region = comm.alloc(bytes).unwrap();
        let transfer = one_way(comm, &region, Path::Multiprocessors);
        let step = || post_and_wait(&stream, [&transfer]);
        let graph = recorded(&stream, || (0..2).for_each(|_| step()));
        for round in 0..rounds {
            if comm.rank() == 0 {
                region.upload(&values(0, round, bytes)).unwrap();
            } else {
                region.upload(&vec![0; bytes]).unwrap();
            }
            comm.barrier().unwrap();
            match round % 3 {
                0 => graph.launch(&stream).unwrap(),
                _ => step(),
            }
            comm.synchronize(&stream).unwrap();
            assert_eq!(region.download().unwrap(), values(0, round, bytes));
            comm.barrier().unwrap();
        }
    }
}

/// The epochs go on from one kind of submission to the other.
#[test]
fn eager_and_captured_transfers_by_kernels_follow_one_another() {
    by_kernels(world(2), |comm| eager_and_captured(comm, 30));
}

/// A sender that is not waited for gets no further ahead than its scratch memory allows: every transfer has
/// the bytes that it was posted with.
#[test]
fn a_sender_by_packets_overwrites_nothing() {
    const BYTES: usize = 6_000;
    const ROUNDS: usize = 60;
    by_kernels(world(2), |comm| {
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let region = comm.alloc(BYTES).unwrap();
        let rounds: Vec<_> = (0..ROUNDS).map(|_| comm.alloc(BYTES).unwrap()).collect();
        let transfer = one_way(comm, &region, Path::Multiprocessors);
        for (round, bytes) in rounds.iter().enumerate() {
            if comm.rank() == 0 {
                bytes.upload(&values(0, round, BYTES)).unwrap();
            }
        }
        for bytes in &rounds {
            if comm.rank() == 0 {
                stream.copy(&region, bytes).unwrap();
                transfer.post(&stream).unwrap();
            } else {
                post_and_wait(&stream, [&transfer]);
                stream.copy(bytes, &region).unwrap();
            }
        }
        comm.synchronize(&stream).unwrap();
        if comm.rank() == 1 {
            for (round, bytes) in rounds.iter().enumerate() {
                let got = bytes.download().unwrap();
                assert!(got == values(0, round, BYTES), "round {round}");
            }
        }
    });
}

/// Posted on one stream, waited for on two others, each of which sees the bytes.
#[test]
fn any_stream_may_wait_for_packets() {
    const BYTES: usize = 9_001;
    by_kernels(world(2), |comm| {
        let stream = |_| comm.create_stream(Priority::Normal).unwrap();
        let [posts, first, second] = [0, 1, 2].map(stream);
        let region = comm.alloc(BYTES).unwrap();
        let seen = [comm.alloc(BYTES).unwrap(), comm.alloc(BYTES).unwrap()];
        let transfer = one_way(comm, &region, Path::Multiprocessors);
        for round in 0..20 {
            if comm.rank() == 0 {
                region.upload(&values(0, round, BYTES)).unwrap();
                transfer.post(&posts).unwrap();
                // What follows may change the buffer.
                transfer.wait(&first).unwrap();
                first.fill(&region, 0).unwrap();
            } else {
                // The buffer is in use until here, on the stream of the post.
                posts.fill(&region, 0xee).unwrap();
                transfer.post(&posts).unwrap();
                for (wait, seen) in [&first, &second].into_iter().zip(&seen) {
                    transfer.wait(wait).unwrap();
                    wait.copy(seen, &region).unwrap();
                }
            }
            for stream in [&posts, &first, &second] {
                comm.synchronize(stream).unwrap();
            }
            if comm.rank() == 1 {
                for seen in &seen {
                    assert!(
                        seen.download().unwrap() == values(0, round, BYTES),
                        "{round}"
                    );
                }
            }
        }
    });
}

/// A group of every path and protocol in both directions, in another order on each rank.
#[test]
fn a_group_mixes_paths() {
    const BYTES: usize = 12_345;
    threads_with(world(2), delayed(200), |comm| {
        let peer = 1 - comm.rank();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let (mut requests, mut sent, mut received) = (Vec::new(), Vec::new(), Vec::new());
        for (tag, path) in PATHS.into_iter().enumerate() {
            for protocol in PROTOCOLS {
                let (from, to) = (comm.alloc(BYTES).unwrap(), comm.alloc(BYTES).unwrap());
                let both = ring_requests(comm, &from, &to, tag as u64);
                let chosen =
                    |request: TransferRequest| request.with_path(path).with_protocol(protocol);
                requests.extend(both.map(chosen));
                sent.push(from);
                received.push(to);
            }
        }
        let transfers = comm.exchange(&requests).unwrap();
        let mut group: Vec<&Transfer> = transfers.iter().collect();
        for round in 0..12 {
            for (number, region) in sent.iter().enumerate() {
                let bytes = values(comm.rank(), 100 * round + number, BYTES);
                region.upload(&bytes).unwrap();
            }
            group.rotate_left(3 + 2 * comm.rank());
            post_all(&group, &stream).unwrap();
            wait_all(&group, &stream).unwrap();
            comm.synchronize(&stream).unwrap();
            for (number, region) in received.iter().enumerate() {
                let expected = values(peer, 100 * round + number, BYTES);
                assert!(region.download().unwrap() == expected, "{round}, {number}");
            }
            comm.barrier().unwrap();
        }
    });
}

/// The same memory is sent and received into: in one group the send reads it first.
#[test]
fn a_buffer_is_sent_before_it_is_received_into() {
    by_kernels(world(2), |comm| {
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let (region, other) = (comm.alloc(3_000).unwrap(), comm.alloc(3_000).unwrap());
        let forth = comm.exchange(&ring_requests(comm, &region, &region, 0));
        let forth = forth.unwrap();
        region.upload(&values(comm.rank(), 0, 3_000)).unwrap();
        for round in 1..=20 {
            post_and_wait(&stream, &forth);
            stream.copy(&other, &region).unwrap();
            comm.synchronize(&stream).unwrap();
            let from = (comm.rank() + round) % 2;
            assert!(
                other.download().unwrap() == values(from, 0, 3_000),
                "{round}"
            );
        }
        comm.barrier().unwrap();
    });
}

#[test]
fn paths_that_differ_are_told_to_both_and_nothing_is_lost() {
    threads(world(2), |comm| {
        let region = comm.alloc(4096).unwrap();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let own = [Path::CopyEngine, Path::Multiprocessors][comm.rank()];
        for _ in 0..3 {
            let request = from_first(comm, &region, 9);
            let error = comm.exchange(&[request.with_path(own)]).unwrap_err();
            let says = ["this rank uses the path", "copy-engine", "multiprocessors"];
            assert_error(&error, ErrorKind::Mismatch, &says);
        }
        region.upload(&values(comm.rank(), 1, 4096)).unwrap();
        let transfer = one_way(comm, &region, Path::Multiprocessors);
        assert_eq!(transfer.path(), Path::Multiprocessors);
        post_and_wait(&stream, [&transfer]);
        comm.synchronize(&stream).unwrap();
        assert_eq!(region.download().unwrap(), values(0, 1, 4096));
        comm.barrier().unwrap();
    });
}

#[test]
fn a_receive_by_packets_is_posted_twice_before_a_wait_at_most() {
    threads(world(2), |comm| {
        let region = comm.alloc(512).unwrap();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let transfer = one_way(comm, &region, Path::Multiprocessors);
        for round in 0..3 {
            if comm.rank() == 0 {
                region.upload(&values(0, round, 512)).unwrap();
            }
            for _ in 0..2 {
                transfer.post(&stream).unwrap();
            }
            if comm.rank() == 1 {
                let error = transfer.post(&stream).unwrap_err();
                let says = ["3 times without a wait", "peer 0"];
                assert_error(&error, ErrorKind::InvalidArgument, &says);
                // In one batch, too, of which nothing is posted then.
                let batch = Batch::new().wait([&transfer]).post([&transfer; 3]);
                let error = batch.enqueue(&stream).unwrap_err();
                assert_says(&error, &says);
            }
            transfer.wait(&stream).unwrap();
            comm.synchronize(&stream).unwrap();
            assert_eq!(region.download().unwrap(), values(0, round, 512));
            comm.barrier().unwrap();
        }
    });
}

/// Stores by others into the receiver's memory need no path of their own.
#[test]
fn bytes_that_are_stored_go_by_no_packets() {
    threads_with(world(2), kernels, |comm| {
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let region = comm.alloc(800).unwrap();
        let peer = 1 - comm.rank();
        for round in 0..3 {
            if comm.rank() == 0 {
                region.upload(&values(0, round, 800)).unwrap();
                let store = comm.exchange(&[TransferRequest::store(800, peer, 0)]);
                let store = store.unwrap().remove(0);
                warplink::p2p::post_stores(&[&store], &stream, |targets| {
                    stream.copy(targets[0], &region)
                })
                .unwrap();
                // A send by packets has no buffer to store into.
                let send = one_way(comm, &region, Path::Multiprocessors);
                let error = send.target().unwrap_err();
                assert_says(&error, &["by packets", "TransferRequest::store"]);
                comm.synchronize(&stream).unwrap();
            } else {
                let request = [TransferRequest::receive(&region, peer, 0)];
                comm.once(&request, &stream).unwrap();
                one_way(comm, &region, Path::Multiprocessors);
                comm.synchronize(&stream).unwrap();
                assert_eq!(region.download().unwrap(), values(0, round, 800));
            }
        }
    });
}

/// Seven ranks store to rank 0, whose stream has a product of matrices before it receives: where they share a GPU, they
/// leave it multiprocessors.
#[test]
fn senders_by_kernels_leave_the_receiver_room() {
    const SIDE: usize = 256;
    // Of which a GPU's kernels keep many multiprocessors.
    let bytes = match kind() {
        DeviceKind::Host => 64 << 10,
        DeviceKind::Cuda => 4 << 20,
    };
    processes(world(8), |comm| {
        let (rank, world) = (comm.rank(), comm.world());
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let compute = comm.device().compute().unwrap();
        let spec = MatmulSpec::new(SIDE, SIDE, SIDE, DType::F32);
        compute.prepare_matmul(&spec).unwrap();
        let [a, b, c] = [(); 3].map(|()| comm.alloc(4 * SIDE * SIDE).unwrap());
        let regions: Vec<_> = (1..world).map(|_| comm.alloc(bytes).unwrap()).collect();
        let requests: Vec<_> = match rank {
            0 => (1..world)
                .map(|peer| TransferRequest::receive(&regions[peer - 1], peer, 0))
                .collect(),
            _ => vec![TransferRequest::send(&regions[0], 0, 0)],
        };
        let requests = requests.into_iter().map(|request| {
            let request = request.with_path(Path::Multiprocessors);
            request.with_protocol(Protocol::Put)
        });
        let transfers = comm.exchange(&requests.collect::<Vec<_>>()).unwrap();
        for round in 0..5 {
            if rank == 0 {
                // Their kernels wait by then.
                std::thread::sleep(Duration::from_millis(50));
                compute
                    .matmul(&stream, &spec, a.memory(), b.memory(), c.memory(), None)
                    .unwrap();
            } else {
                regions[0].upload(&values(rank, round, bytes)).unwrap();
            }
            complete(comm, &transfers, &stream).unwrap();
            if rank == 0 {
                for (peer, region) in (1..world).zip(&regions) {
                    assert!(region.download().unwrap() == values(peer, round, bytes));
                }
            }
            comm.barrier().unwrap();
        }
    });
}

/// A hundred times over, what an exchange takes comes back.
#[test]
fn scratch_memory_comes_back() {
    by_kernels(world(2), |comm| {
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let region = comm.alloc(16_000).unwrap();
        for round in 0..100 {
            if comm.rank() == 0 {
                region.upload(&values(0, round, 16_000)).unwrap();
            }
            // Scratch that another transfer has used begins with epoch 1 again.
            let transfer = one_way(comm, &region, Path::Multiprocessors);
            for _ in 0..=round % 3 {
                post_and_wait(&stream, [&transfer]);
            }
            comm.synchronize(&stream).unwrap();
            assert!(
                region.download().unwrap() == values(0, round, 16_000),
                "{round}"
            );
            comm.barrier().unwrap();
        }
    });
}
