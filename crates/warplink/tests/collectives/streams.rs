//! Calls on several streams of one communicator.

use crate::common::{delayed, threads, threads_with, world};
use crate::data::is_without_library;
use crate::launches::{download, integers, memory, sum, sums, upload};
use std::time::Duration;
use warplink::collective::{CollectiveOptions, CollectivePath, Parts};
use warplink::device::{DeviceSlice, Priority, ReduceOp, Stream};
use warplink::p2p::TransferRequest;
use warplink::{Collectives, Communicator, DType};

/// The collectives of each path that there is.
fn paths(comm: &Communicator) -> Vec<Collectives> {
    let by = [CollectivePath::Direct, CollectivePath::Engine].map(|path| {
        let options = CollectiveOptions::on(path);
        comm.collectives_with(&options)
    });
    let there = by
        .into_iter()
        .filter(|joined| !joined.as_ref().is_err_and(is_without_library));
    there.map(Result::unwrap).collect()
}

/// Streams that change from call to call, and are others on other ranks: calls happen in their order.
#[test]
fn streams_of_one_communicator_take_turns() {
    let ranks = world(3);
    threads(ranks, |comm| {
        for collectives in paths(comm) {
            let streams = [(); 3].map(|()| comm.create_stream(Priority::Normal).unwrap());
            let mut made = Vec::new();
            for round in 0..100 {
                let stream = &streams[(round * (comm.rank() + 1)) % 3];
                let count = 1 + 31 * round % 500;
                made.push(sums(comm, &collectives, stream, round, count));
            }
            // Longer than what is moved at once.
            made.push(sums(comm, &collectives, &streams[0], 200, 50_000));
            made.push(sums(comm, &collectives, &streams[1], 201, 50_000));
            for stream in &streams {
                comm.synchronize(stream).unwrap();
            }
            for (buffer, round, count) in made {
                assert_eq!(download(comm, &buffer), sum(ranks, round, count));
            }
        }
    });
}

/// One buffer, on streams of both priorities and by a graph in between: every call works on what the one before left.
#[test]
fn calls_of_any_priority_and_graphs_take_turns() {
    const COUNTS: [usize; 2] = [700, 300];
    let ranks = world(2);
    threads(ranks, |comm| {
        let collectives = comm.collectives().unwrap();
        let streams = [Priority::Normal, Priority::High, Priority::Normal]
            .map(|priority| comm.create_stream(priority).unwrap());
        let buffer = memory(comm, COUNTS[0]);
        upload(comm, &buffer, &integers(comm.rank(), 0, COUNTS[0]));
        let call = |number: usize, stream: &Stream| {
            let part = buffer.slice(0..4 * COUNTS[number % 2]).unwrap();
            let op = ReduceOp::Sum;
            collectives
                .all_reduce(&part, &part, DType::I32, op, stream)
                .unwrap();
        };
        streams[2].begin_capture().unwrap();
        call(1, &streams[2]);
        let graph = streams[2].end_capture().unwrap();
        // What one call after another makes of it.
        let mut expected = sum(ranks, 0, COUNTS[0]);
        let mut multiply = |number: usize| {
            let part = &mut expected[..COUNTS[number % 2]];
            part.iter_mut()
                .for_each(|value| *value = value.wrapping_mul(ranks as i32));
        };
        for round in 0..60 {
            call(round, &streams[round * (comm.rank() + 1) % 3]);
            if round > 0 {
                multiply(round);
            }
            if round % 10 == 9 {
                // Only what is recorded with a graph is ordered with it.
                let settle = |stream: &Stream| comm.synchronize(stream).unwrap();
                streams.iter().for_each(settle);
                graph.launch(&streams[round % 3]).unwrap();
                multiply(1);
                streams.iter().for_each(settle);
            }
        }
        assert_eq!(download(comm, &buffer), expected);
    });
}

/// Work enqueued to a stream after a call does not delay the next call on another stream. Here rank 0's first
/// stream waits for data that rank 1 sends only after the second call.
#[test]
fn a_call_waits_for_the_last_call_and_nothing_after_it() {
    threads(world(2), |comm| {
        for (number, collectives) in paths(comm).iter().enumerate() {
            let streams = [(); 2].map(|()| comm.create_stream(Priority::Normal).unwrap());
            let (region, tag) = (comm.alloc(64).unwrap(), number as u64);
            let request = match comm.rank() {
                0 => TransferRequest::receive(&region, 1, tag),
                _ => TransferRequest::send(&region, 0, tag),
            };
            let transfer = comm.exchange(&[request]).unwrap().remove(0);
            let mut made = vec![sums(comm, collectives, &streams[0], 1, 10)];
            if comm.rank() == 0 {
                transfer.post(&streams[0]).unwrap();
                transfer.wait(&streams[0]).unwrap();
                made.push(sums(comm, collectives, &streams[1], 2, 20));
            } else {
                made.push(sums(comm, collectives, &streams[0], 2, 20));
                transfer.post(&streams[0]).unwrap();
                transfer.wait(&streams[0]).unwrap();
            }
            for stream in &streams {
                comm.synchronize(stream).unwrap();
            }
            for (buffer, round, count) in made {
                assert_eq!(download(comm, &buffer), sum(2, round, count));
            }
        }
    });
}

/// The first of two calls stands behind a wait in its stream; the second, in another stream, reads what the first one
/// writes, also what this rank gives itself, with whom no message is exchanged.
fn second_reads_what_first_writes(
    comm: &Communicator,
    call: impl Fn(&DeviceSlice, &DeviceSlice, &Stream),
    expected: &[i32],
    number: u64,
) {
    let (rank, ranks) = (comm.rank(), comm.world());
    let streams = [(); 3].map(|()| comm.create_stream(Priority::Normal).unwrap());
    let [first, second, third] = [(); 3].map(|()| memory(comm, 8 * ranks));
    upload(comm, &first, &vec![1 + rank as i32; 8 * ranks]);
    upload(comm, &second, &vec![-1; 8 * ranks]);
    let (gives, takes) = (comm.alloc(64).unwrap(), comm.alloc(64).unwrap());
    let transfers = comm.exchange(&[
        TransferRequest::receive(&takes, rank, number),
        TransferRequest::send(&gives, rank, number),
    ]);
    let transfers = transfers.unwrap();
    transfers[0].post(&streams[0]).unwrap();
    transfers[0].wait(&streams[0]).unwrap();
    call(&second, &first, &streams[0]);
    call(&third, &second, &streams[1]);
    std::thread::sleep(Duration::from_millis(50));
    assert!(!streams[1].is_idle().unwrap(), "the second call went ahead");
    transfers[1].post(&streams[2]).unwrap();
    transfers[1].wait(&streams[2]).unwrap();
    for stream in &streams {
        comm.synchronize(stream).unwrap();
    }
    assert_eq!(download(comm, &third), expected);
}

#[test]
fn what_a_rank_gives_itself_keeps_its_order() {
    let ranks = world(2);
    threads(ranks, |comm| {
        for (number, collectives) in paths(comm).iter().enumerate() {
            let (counts, displacements) = (
                vec![8; ranks],
                Vec::from_iter((0..ranks).map(|rank| 8 * rank)),
            );
            let parts = Parts {
                counts: &counts,
                displacements: &displacements,
            };
            // What goes to a rank and comes back is its own again.
            let twice = vec![1 + comm.rank() as i32; 8 * ranks];
            if collectives.path() == CollectivePath::Engine {
                // The vendor's library connects the ranks in its first call, and waits for all streams meanwhile.
                let (stream, buffer) = (
                    comm.create_stream(Priority::Normal).unwrap(),
                    memory(comm, 16 * ranks),
                );
                let [output, input] = [0, 1].map(|half| {
                    buffer
                        .slice(32 * ranks * half..32 * ranks * (half + 1))
                        .unwrap()
                });
                let (output, input) = ((&output, parts), (&input, parts));
                collectives
                    .all_to_all_v(output, input, DType::I32, &stream)
                    .unwrap();
                comm.synchronize(&stream).unwrap();
            }
            second_reads_what_first_writes(
                comm,
                |output, input, stream| {
                    let (output, input) = ((output, parts), (input, parts));
                    collectives
                        .all_to_all_v(output, input, DType::I32, stream)
                        .unwrap();
                },
                &twice,
                number as u64,
            );
        }
    });
}

#[test]
fn calls_of_a_rank_alone_keep_their_order() {
    threads(1, |comm| {
        for (number, collectives) in paths(comm).iter().enumerate() {
            second_reads_what_first_writes(
                comm,
                |output, input, stream| {
                    let (dtype, sum) = (DType::I32, ReduceOp::Sum);
                    collectives
                        .all_reduce(output, input, dtype, sum, stream)
                        .unwrap();
                },
                &[1; 8],
                number as u64,
            );
        }
    });
}

/// A capture in between, on a third stream or on that of the last call, changes nothing for eager calls.
#[test]
fn calls_that_are_recorded_leave_the_order_of_others_alone() {
    let ranks = world(2);
    threads(ranks, |comm| {
        let collectives = comm.collectives().unwrap();
        let streams = [(); 3].map(|()| comm.create_stream(Priority::Normal).unwrap());
        for start in (0..60).step_by(3) {
            let mut made = vec![sums(comm, &collectives, &streams[0], start, 3000)];
            let recorded = &streams[[2, 0][start / 3 % 2]];
            recorded.begin_capture().unwrap();
            collectives.barrier(recorded).unwrap();
            made.push(sums(comm, &collectives, &streams[1], start + 1, 700));
            let graph = recorded.end_capture().unwrap();
            made.push(sums(comm, &collectives, &streams[0], start + 2, 1500));
            for stream in &streams {
                comm.synchronize(stream).unwrap();
            }
            graph.launch(recorded).unwrap();
            comm.synchronize(recorded).unwrap();
            for (buffer, round, count) in made {
                assert_eq!(download(comm, &buffer), sum(ranks, round, count));
            }
        }
    });
}

/// Calls on two branches of one graph use the workspace one after the other, each time that it is launched.
#[test]
fn calls_on_branches_of_a_graph_take_turns() {
    let ranks = world(2);
    threads_with(ranks, delayed(300), |comm| {
        let collectives = comm.collectives().unwrap();
        let [trunk, branch] = [(); 2].map(|()| comm.create_stream(Priority::Normal).unwrap());
        let [forked, joined] = [(); 2].map(|()| comm.device().create_event(false).unwrap());
        trunk.begin_capture().unwrap();
        trunk.record(&forked).unwrap();
        branch.wait_event(&forked).unwrap();
        let made: Vec<_> = (0..6)
            .map(|round| {
                let stream = [&trunk, &branch][round % 2];
                let count = 300 + 100 * round;
                let [output, input] = [(); 2].map(|()| memory(comm, count));
                collectives
                    .all_reduce(&output, &input, DType::I32, ReduceOp::Sum, stream)
                    .unwrap();
                (output, input, count)
            })
            .collect();
        branch.record(&joined).unwrap();
        trunk.wait_event(&joined).unwrap();
        let graph = trunk.end_capture().unwrap();
        for start in 0..20 {
            for (place, (output, input, count)) in made.iter().enumerate() {
                upload(comm, input, &integers(comm.rank(), start + place, *count));
                upload(comm, output, &vec![-1; *count]);
            }
            graph.launch(&trunk).unwrap();
            comm.synchronize(&trunk).unwrap();
            for (place, (output, _, count)) in made.iter().enumerate() {
                assert_eq!(download(comm, output), sum(ranks, start + place, *count));
            }
        }
    });
}
