//! Streams that do the work of several communicators, one of which loses a rank.

use crate::common::{
    Stopwatch, TimedBarrier, assert_error, assert_names_peer, assert_says, at_least,
    device_of_thread, ring, threads_that_end, values,
};
use std::collections::BTreeSet;
use std::time::Duration;
use warplink::device::{Priority, Stream};
use warplink::p2p::{Protocol, Transfer, TransferRequest};
use warplink::{Communicator, ErrorKind, Rank};

const BYTES: usize = 64 << 10;

/// How soon everybody concerned must know.
const SOON: Duration = Duration::from_secs(5);

/// As [`threads_that_end`], with a shorter timeout.
fn ranks(world: usize, body: impl Fn(Communicator) + Send + Sync) {
    let change = |config: &mut warplink::Config| config.timeout = Duration::from_secs(20);
    threads_that_end(world, change, body);
}

/// How the work of the second communicator comes behind the wait of the first.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Behind {
    SameStream,
    Event,
    Graph,
}

fn stream(comm: &Communicator) -> Stream {
    comm.create_stream(Priority::Normal).unwrap()
}

/// Ends as the victim, when `posted` says that the others have posted what it will not meet.
fn abort(comm: &Communicator, posted: &TimedBarrier) {
    posted.wait();
    // They are to wait for it.
    std::thread::sleep(Duration::from_millis(100));
    comm.abort("the disk is full");
}

/// Checks that the job goes on without `victim`, with right data.
fn go_on(comm: Communicator, victim: Rank) {
    let left = comm.survivors().unwrap();
    let ranks = left.job_ranks().to_vec();
    assert!(!ranks.contains(&victim));
    let devices: BTreeSet<usize> = ranks.iter().map(|rank| device_of_thread(*rank)).collect();
    if devices.len() == ranks.len() {
        ring(&left, Protocol::Put, 5, |_| {}).unwrap();
    } else {
        // A process has few queues on a GPU: of two ranks that wait for one another, one may hold the other up
        // there. So each pair on two GPUs goes on alone.
        for second in 1..left.world() {
            for first in (0..second)
                .filter(|first| device_of_thread(ranks[*first]) != device_of_thread(ranks[second]))
            {
                if [first, second].contains(&left.rank()) {
                    let pair = left.subgroup(&[first, second]).unwrap();
                    ring(&pair, Protocol::Put, 5, |_| {}).unwrap();
                }
                left.barrier().unwrap();
            }
        }
    }
    drop(comm);
    left.close().unwrap();
}

/// Rank 0 forwards to rank 1 what rank 2 never sends. Rank 1 has nothing to do with rank 2, and must not
/// take what comes for what was sent.
#[test]
fn who_relies_on_work_behind_a_lost_wait_is_told() {
    let Some(all) = at_least(3) else { return };
    for protocol in [Protocol::Put, Protocol::Get] {
        for behind in [Behind::SameStream, Behind::Event, Behind::Graph] {
            let posted = TimedBarrier::new(all);
            ranks(all, |comm| {
                let (first, second) = ([0, 2], [0, 1]);
                let (forwarded, received) =
                    (comm.alloc(BYTES).unwrap(), comm.alloc(BYTES).unwrap());
                forwarded.upload(&[7; BYTES]).unwrap();
                match comm.rank() {
                    0 => {
                        let (a, b) = (
                            comm.subgroup(&first).unwrap(),
                            comm.subgroup(&second).unwrap(),
                        );
                        let from_2 = [TransferRequest::receive(&forwarded, 1, 0)];
                        let from_2 = a.exchange(&from_2).unwrap();
                        let to_1 = TransferRequest::send(&forwarded, 1, 0).with_protocol(protocol);
                        let to_1 = b.exchange(&[to_1]).unwrap();
                        let shared = stream(&comm);
                        let graph = (behind == Behind::Graph).then(|| {
                            shared.begin_capture().unwrap();
                            to_1[0].post(&shared).unwrap();
                            to_1[0].wait(&shared).unwrap();
                            shared.end_capture().unwrap()
                        });
                        comm.barrier().unwrap();
                        from_2[0].post(&shared).unwrap();
                        from_2[0].wait(&shared).unwrap();
                        let sending = match behind {
                            Behind::Event => {
                                let event = comm.device().create_event(false).unwrap();
                                shared.record(&event).unwrap();
                                let follower = stream(&comm);
                                follower.wait_event(&event).unwrap();
                                follower
                            }
                            _ => shared.clone(),
                        };
                        match &graph {
                            Some(graph) => graph.launch(&shared).unwrap(),
                            // Without a wait: what it tells its peer is work all the same.
                            None => to_1[0].post(&sending).unwrap(),
                        }
                        posted.wait();
                        let error = a.synchronize(&shared).unwrap_err();
                        let named = (error.kind(), error.job_peer());
                        assert_eq!(named, (ErrorKind::PeerLost, Some(2)), "{error}");
                        assert!(b.synchronize(&sending).is_err());
                        let error = b.barrier().unwrap_err();
                        assert_eq!(error.kind(), ErrorKind::PeerFailed, "{error}");
                        drop((from_2, to_1, graph));
                        ring(&b.survivors().unwrap(), protocol, 5, |_| {}).unwrap();
                    }
                    1 => {
                        let b = comm.subgroup(&second).unwrap();
                        let from_0 =
                            TransferRequest::receive(&received, 0, 0).with_protocol(protocol);
                        let from_0 = b.exchange(&[from_0]).unwrap();
                        let own = stream(&comm);
                        let graph = (behind == Behind::Graph).then(|| {
                            own.begin_capture().unwrap();
                            from_0[0].post(&own).unwrap();
                            from_0[0].wait(&own).unwrap();
                            own.end_capture().unwrap()
                        });
                        comm.barrier().unwrap();
                        let begun = Stopwatch::start();
                        match &graph {
                            Some(graph) => graph.launch(&own).unwrap(),
                            None => {
                                from_0[0].post(&own).unwrap();
                                from_0[0].wait(&own).unwrap();
                            }
                        }
                        posted.wait();
                        let error = b.synchronize(&own).unwrap_err();
                        assert!(begun.elapsed() < SOON, "{:?}: {error}", begun.elapsed());
                        let named = (error.kind(), error.peer());
                        assert_eq!(
                            named,
                            (ErrorKind::PeerFailed, Some(0)),
                            "{behind:?}: {error}"
                        );
                        assert_says(&error, &["rank 2 was lost", "the disk is full"]);
                        let error = b.barrier().unwrap_err();
                        assert_says(&error, &["rank 2 was lost", "survivors()"]);
                        drop((from_0, graph));
                        ring(&b.survivors().unwrap(), protocol, 5, |_| {}).unwrap();
                    }
                    _ => {
                        let a = comm.subgroup(&first).unwrap();
                        let to_0 = [TransferRequest::send(&forwarded, 0, 0)];
                        let _never_posted = a.exchange(&to_0).unwrap();
                        comm.barrier().unwrap();
                        return abort(&comm, &posted);
                    }
                }
                go_on(comm, 2);
            });
        }
    }
}

/// Each rank forwards to the next: the last is two communicators away from the loss. The first, which is
/// lost, may be the one that serves the store.
#[test]
fn who_relies_on_those_is_told_as_well() {
    for chain in [[3, 0, 1, 2], [0, 1, 2, 3]] {
        forward_along(chain);
    }
}

fn forward_along(chain: [Rank; 4]) {
    let Some(all) = at_least(4) else { return };
    let posted = TimedBarrier::new(all);
    ranks(all, |comm| {
        let rank = comm.rank();
        let memory = comm.alloc(BYTES).unwrap();
        let place = chain.iter().position(|&other| other == rank).unwrap();
        let pair = |other: usize| comm.subgroup(&[chain[other], chain[other + 1]]).unwrap();
        let from = (place > 0).then(|| pair(place - 1));
        let to = (place < 3).then(|| pair(place));
        let received: Vec<Transfer> = from
            .iter()
            .flat_map(|comm| {
                comm.exchange(&[TransferRequest::receive(&memory, 0, 0)])
                    .unwrap()
            })
            .collect();
        let sent: Vec<Transfer> = to
            .iter()
            .flat_map(|comm| {
                comm.exchange(&[TransferRequest::send(&memory, 1, 0)])
                    .unwrap()
            })
            .collect();
        comm.barrier().unwrap();
        if place == 0 {
            return abort(&comm, &posted);
        }
        let begun = Stopwatch::start();
        let shared = stream(&comm);
        for transfer in received.iter().chain(&sent) {
            transfer.post(&shared).unwrap();
            transfer.wait(&shared).unwrap();
        }
        posted.wait();
        let error = from.as_ref().unwrap().synchronize(&shared).unwrap_err();
        assert!(begun.elapsed() < SOON, "{:?}: {error}", begun.elapsed());
        let expected = if place == 1 {
            ErrorKind::PeerLost
        } else {
            ErrorKind::PeerFailed
        };
        assert_error(&error, expected, &[&format!("rank {} was lost", chain[0])]);
        drop((received, sent));
        go_on(comm, chain[0]);
    });
}

/// Results synchronized before the loss are valid: their communicator continues, also in the same stream.
#[test]
fn work_that_was_done_before_the_loss_stays_good() {
    let Some(all) = at_least(3) else { return };
    let done = TimedBarrier::new(all);
    ranks(all, |comm| {
        let (send, receive) = (comm.alloc(BYTES).unwrap(), comm.alloc(BYTES).unwrap());
        let shared = stream(&comm);
        // In both directions.
        let exchange = |pair: &Communicator| {
            let peer = 1 - pair.rank();
            pair.exchange(&[
                TransferRequest::send(&send, peer, 0),
                TransferRequest::receive(&receive, peer, 0),
            ])
            .unwrap()
        };
        let round = |pair: &Communicator, transfers: &[Transfer], round: usize| {
            let all: Vec<&Transfer> = transfers.iter().collect();
            let peer = pair.job_ranks()[1 - pair.rank()];
            send.upload(&values(comm.rank(), round, BYTES)).unwrap();
            warplink::p2p::post_all(&all, &shared).unwrap();
            warplink::p2p::wait_all(&all, &shared).unwrap();
            pair.synchronize(&shared).unwrap();
            assert!(receive.download().unwrap() == values(peer, round, BYTES));
            pair.barrier().unwrap();
        };
        let first = (comm.rank() != 1).then(|| comm.subgroup(&[0, 2]).unwrap());
        let second = (comm.rank() != 2).then(|| comm.subgroup(&[0, 1]).unwrap());
        let in_first = first.as_ref().map(exchange);
        let in_second = second.as_ref().map(exchange);
        for number in 0..3 {
            if let (Some(pair), Some(transfers)) = (&first, &in_first) {
                round(pair, transfers, number);
            }
            if let (Some(pair), Some(transfers)) = (&second, &in_second) {
                round(pair, transfers, number);
            }
        }
        comm.barrier().unwrap();
        if comm.rank() == 2 {
            return abort(&comm, &done);
        }
        done.wait();
        let error = comm.barrier().unwrap_err();
        assert_names_peer(&error, ErrorKind::PeerLost, 2);
        for number in 3..20 {
            round(
                second.as_ref().unwrap(),
                in_second.as_ref().unwrap(),
                number,
            );
        }
        drop((in_first, in_second));
        go_on(comm, 2);
    });
}
