//! Transfers in graphs: recorded once, launched any number of times.

use super::common::{
    assert_says, complete, delayed, processes, recorded, threads, threads_with,
    transfer_from_first, values, world,
};
use super::{PROTOCOLS, neighbours, ring};
use warplink::Communicator;
use warplink::device::{Priority, Stream};
use warplink::p2p::{Batch, Protocol, Transfer, post_all, wait_all};

/// Several steps in one graph, of which each batch waits for one and posts the next.
#[test]
fn a_batch_waits_and_posts_again_in_a_graph() {
    processes(world(3), |comm| {
        let stream = comm.create_stream(Priority::Normal).unwrap();
        for (protocol, bytes) in PROTOCOLS.into_iter().flat_map(|p| [(p, 512), (p, 1 << 20)]) {
            let [send, receive] = [(); 2].map(|()| comm.alloc(bytes).unwrap());
            let transfers = ring(comm, &send, &receive, 6, protocol);
            let graph = recorded(&stream, || {
                Batch::new().post(&transfers).enqueue(&stream).unwrap();
                for _ in 0..3 {
                    let again = Batch::new().wait(&transfers).post(&transfers);
                    again.enqueue(&stream).unwrap();
                }
                Batch::new().wait(&transfers).enqueue(&stream).unwrap();
            });
            for round in 0..10 {
                send.upload(&values(comm.rank(), round, bytes)).unwrap();
                graph.launch(&stream).unwrap();
                comm.synchronize(&stream).unwrap();
                let want = values(neighbours(comm).1, round, bytes);
                assert_eq!(
                    receive.download().unwrap(),
                    want,
                    "{protocol}, {bytes} bytes"
                );
                // The right neighbour reads, or the left one writes, until it has launched too.
                comm.barrier().unwrap();
            }
        }
    });
}

/// A graph with a ring step in it, replayed many times; the data moves on by one rank each time.
pub(super) fn replay(comm: &Communicator, times: usize) {
    // Every replay orders the same accesses, which is all that the sanitizer looks at.
    let times = if cfg!(warplink_tsan) {
        times.div_ceil(10)
    } else {
        times
    };
    let (rank, world) = (comm.rank(), comm.world());
    let stream = comm.create_stream(Priority::Normal).unwrap();
    for protocol in PROTOCOLS {
        let (send, receive) = (comm.alloc(4096).unwrap(), comm.alloc(4096).unwrap());
        send.upload(&[rank as u8; 4096]).unwrap();
        let transfers = ring(comm, &send, &receive, 4, protocol);
        let graph = recorded(&stream, || {
            Batch::new().post(&transfers).enqueue(&stream).unwrap();
            Batch::new().wait(&transfers).enqueue(&stream).unwrap();
            stream.copy(&send, &receive).unwrap();
        });
        let mut replayed = 0;
        while replayed < times {
            // Not one after the other from the host: launches pile up in the stream.
            let batch = (times - replayed).min(100);
            (0..batch).for_each(|_| graph.launch(&stream).unwrap());
            comm.synchronize(&stream).unwrap();
            replayed += batch;
            let from = (rank + world * times - replayed) % world;
            assert_eq!(
                send.download().unwrap(),
                [from as u8; 4096],
                "{protocol} after {replayed} replays"
            );
        }
        // The same transfers, outside of a graph again.
        complete(comm, &transfers, &stream).unwrap();
        let from = (rank + world * (times + 1) - replayed - 1) % world;
        assert_eq!(receive.download().unwrap(), [from as u8; 4096]);
        comm.barrier().unwrap();
    }
}

#[test]
fn a_graph_replayed_ten_thousand_times_stays_right() {
    processes(world(3), |comm| replay(comm, 10_000));
}

#[test]
fn a_graph_replayed_with_random_delays_stays_right() {
    threads_with(world(3), delayed(200), |comm| replay(comm, 100));
}

/// Two steps of a ring in one graph, posted on one stream and waited for on two others.
pub(super) fn steps_that_other_streams_wait_for(comm: &Communicator) {
    const BYTES: usize = 1 << 16;
    let (rank, world) = (comm.rank(), comm.world());
    let stream = |priority| comm.create_stream(priority).unwrap();
    let (main, posts) = (stream(Priority::Normal), stream(Priority::High));
    let waits = [stream(Priority::Normal), stream(Priority::Normal)];
    let event = comm.device().create_event(false).unwrap();
    let after = |later: &Stream, earlier: &Stream| {
        earlier.record(&event).unwrap();
        later.wait_event(&event).unwrap();
    };
    for protocol in PROTOCOLS {
        let alloc = || comm.alloc(BYTES).unwrap();
        let (send, receive) = (alloc(), alloc());
        let seen = [[alloc(), alloc()], [alloc(), alloc()]];
        let transfers = ring(comm, &send, &receive, 5, protocol);
        let group: Vec<&Transfer> = transfers.iter().collect();
        main.begin_capture().unwrap();
        for other in [&posts, &waits[0], &waits[1]] {
            after(other, &main);
        }
        for step in &seen {
            post_all(&group, &posts).unwrap();
            for (wait, seen) in waits.iter().zip(step) {
                wait_all(&group, wait).unwrap();
                wait.copy(seen, &receive).unwrap();
            }
            for wait in &waits {
                after(&posts, wait);
            }
            posts.copy(&send, &receive).unwrap();
        }
        after(&main, &posts);
        let graph = main.end_capture().unwrap();
        for round in 0..20 {
            send.upload(&values(rank, round, BYTES)).unwrap();
            // Otherwise what was seen in the round before would do.
            for seen in seen.iter().flatten() {
                seen.upload(&[0; BYTES]).unwrap();
            }
            comm.barrier().unwrap();
            graph.launch(&main).unwrap();
            comm.synchronize(&main).unwrap();
            for (step, seen) in seen.iter().enumerate() {
                let from = (rank + 2 * world - 1 - step) % world;
                for seen in seen {
                    assert_eq!(
                        seen.download().unwrap(),
                        values(from, round, BYTES),
                        "{protocol}, round {round}, step {step}"
                    );
                }
            }
        }
    }
}

#[test]
fn any_number_of_streams_of_a_graph_may_wait() {
    processes(world(3), steps_that_other_streams_wait_for);
}

#[test]
fn any_number_of_streams_of_a_graph_may_wait_with_random_delays() {
    threads_with(world(3), delayed(500), steps_that_other_streams_wait_for);
}

#[test]
fn a_second_captured_post_needs_a_wait_between() {
    threads(world(2), |comm| {
        let region = comm.alloc(64).unwrap();
        let transfer = transfer_from_first(comm, &region, 1, Protocol::Get);
        let stream = comm.create_stream(Priority::Normal).unwrap();
        if comm.rank() == 0 {
            stream.begin_capture().unwrap();
            transfer.post(&stream).unwrap();
            let error = transfer.post(&stream).unwrap_err();
            assert_says(&error, &["posted twice in one graph", "peer 1"]);
            transfer.wait(&stream).unwrap();
            stream.end_capture().unwrap();
        }
        comm.barrier().unwrap();
    });
}
