//! Communicators of some of a job's ranks: ranks, tags and keys of their own, and what they cost.

// A test fails by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{
    Ranks, Stopwatch, assert_error, assert_says, complete, config_of_thread, delays, kind,
    processes, ring_requests, tell, threads, threads_with, values, world,
};
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};
use warplink::bootstrap::UniqueId;
use warplink::device::Priority;
use warplink::p2p::{Transfer, TransferRequest, post_all, wait_all};
use warplink::{Communicator, Deadline, DeviceKind, ErrorKind, Job};

/// Lists of ranks of a job of four that overlap, in orders of their own.
const GROUPS: [&[usize]; 4] = [&[0, 1, 2], &[3, 2, 1], &[2, 0], &[1, 0, 3, 2]];

/// Whether a test has its minimum of ranks.
fn has_ranks(comm: &Communicator, ranks: usize) -> bool {
    comm.world() >= ranks
}

/// Two transfers in a ring of `comm`, sending `bytes` with the tag that every ring here uses.
struct Ring {
    send: warplink::memory::Region,
    receive: warplink::memory::Region,
    transfers: Vec<Transfer>,
}

impl Ring {
    fn new(comm: &Communicator, bytes: usize) -> Self {
        let (send, receive) = (comm.alloc(bytes).unwrap(), comm.alloc(bytes).unwrap());
        let transfers = comm.exchange(&ring_requests(comm, &send, &receive, 7));
        Self {
            send,
            receive,
            transfers: transfers.unwrap(),
        }
    }
}

#[test]
fn overlapping_groups_transfer_at_once_with_the_same_tags() {
    let slow = |config: &mut _| delays(config, Duration::from_micros(200));
    threads_with(world(4), slow, |comm| {
        if !has_ranks(comm, 4) {
            return;
        }
        let own = GROUPS.iter().enumerate();
        let own: Vec<_> = own
            .filter(|(_, ranks)| ranks.contains(&comm.rank()))
            .map(|(number, ranks)| (number, *ranks, comm.subgroup(ranks).unwrap()))
            .collect();
        let rings: Vec<_> = own.iter().map(|(.., comm)| Ring::new(comm, 4096)).collect();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let seed = |number: usize, rank: usize| number * 100 + rank;
        for round in 0..5 {
            for ((number, _, group), ring) in own.iter().zip(&rings) {
                let bytes = values(seed(*number, group.rank()), round, 4096);
                ring.send.upload(&bytes).unwrap();
            }
            comm.barrier().unwrap();
            let all: Vec<&Transfer> = rings.iter().flat_map(|ring| &ring.transfers).collect();
            post_all(&all, &stream).unwrap();
            wait_all(&all, &stream).unwrap();
            comm.synchronize(&stream).unwrap();
            for ((number, _, group), ring) in own.iter().zip(&rings) {
                let left = (group.rank() + group.world() - 1) % group.world();
                let expected = values(seed(*number, left), round, 4096);
                assert!(
                    ring.receive.download().unwrap() == expected,
                    "group {number}, round {round}"
                );
            }
        }
        for (_, ranks, group) in &own {
            assert_eq!(group.job_ranks(), *ranks);
            assert_eq!(ranks[group.rank()], comm.rank());
            group.barrier().unwrap();
            let all = group.all_gather_bytes(&[comm.rank() as u8]).unwrap();
            let expected: Vec<_> = ranks.iter().map(|rank| vec![*rank as u8]).collect();
            assert_eq!(all, expected);
        }
        drop(rings);
        for (.., group) in own {
            group.close().unwrap();
        }
        // The job goes on without them.
        comm.barrier().unwrap();
    });
}

#[test]
fn groups_of_one_list_are_told_apart_by_their_order() {
    threads(world(2), |comm| {
        if !has_ranks(comm, 2) {
            return;
        }
        let groups = [(); 3].map(|()| comm.subgroup(&[1, 0]).unwrap());
        let within = groups[0].subgroup(&[1, 0]).unwrap();
        assert_eq!(within.job_ranks(), [0, 1]);
        // Rank 0 asks in another order than rank 1, so that two of one name would meet.
        let mut order: Vec<&Communicator> = groups.iter().chain([&within, comm]).collect();
        let region = comm.alloc(64).unwrap();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let mut transfers = Vec::new();
        for group in &order {
            let request = match comm.rank() {
                0 => TransferRequest::send(&region, 1 - group.rank(), 0),
                _ => TransferRequest::receive(&region, 1 - group.rank(), 0),
            };
            transfers.extend(group.exchange(&[request]).unwrap());
        }
        if comm.rank() == 0 {
            order.reverse();
            transfers.reverse();
        }
        complete(comm, &transfers, &stream).unwrap();
        drop(transfers);
    });
}

#[test]
fn split_orders_by_key_and_then_by_rank() {
    threads(world(4), |comm| {
        if !has_ranks(comm, 4) {
            return;
        }
        let rank = comm.rank();
        let halves = comm.split(rank as u64 % 2, -(rank as i64)).unwrap();
        let expected = [[2, 0], [3, 1]][rank % 2];
        assert_eq!(halves.job_ranks(), expected);
        let same = comm.split(5, 0).unwrap();
        assert_eq!(same.job_ranks(), [0, 1, 2, 3]);
        let alone = halves.split(rank as u64, 0).unwrap();
        assert_eq!((alone.rank(), alone.world()), (0, 1));
        alone.barrier().unwrap();
        // A ring in each half, at once.
        let ring = Ring::new(&halves, 512);
        ring.send.upload(&[rank as u8; 512]).unwrap();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        complete(comm, &ring.transfers, &stream).unwrap();
        let peer = halves.job_ranks()[1 - halves.rank()];
        assert_eq!(ring.receive.download().unwrap(), [peer as u8; 512]);
    });
}

#[test]
fn wrong_lists_are_refused_and_errors_name_both_numbers() {
    threads(world(3), |comm| {
        if !has_ranks(comm, 3) {
            return;
        }
        for (list, says) in [
            (&[0, 1, 2, 2][..], "listed twice"),
            (&[0, 1, 2, 3], "out of range"),
            (&[], "not in"),
        ] {
            let error = comm.subgroup(list).unwrap_err();
            let says = [says, &format!("rank {}", comm.rank())];
            assert_error(&error, ErrorKind::InvalidArgument, &says);
        }
        if comm.rank() == 0 {
            assert!(comm.subgroup(&[1, 2]).is_err());
            return comm.barrier().unwrap();
        }
        let group = comm.subgroup(&[2, 1]).unwrap();
        if group.rank() == 0 {
            let region = group.alloc(64).unwrap();
            let soon = Deadline::after(Duration::from_millis(200));
            let request = TransferRequest::receive(&region, 1, 3);
            let error = group.exchange_until(&[request], soon).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
            assert_eq!((error.peer(), error.job_peer()), (Some(1), Some(1)));
            assert_says(&error, &["rank 0 (rank 2 of the job)", "rank 1", "tag 3"]);
            let beyond = TransferRequest::receive(&region, 2, 3);
            let error = group.exchange(&[beyond]).unwrap_err();
            assert_says(&error, &["there are 2 ranks"]);
        }
        comm.barrier().unwrap();
    });
}

#[test]
fn members_that_make_different_subgroups_are_told_so() {
    // The lists of each rank.
    let cases: [[&[&[usize]]; 3]; 3] = [
        // Another list.
        [&[&[0, 1, 2]], &[&[0, 1]], &[&[0, 1, 2]]],
        // Another order of the ranks.
        [&[&[0, 1, 2]], &[&[2, 1, 0]], &[&[0, 1, 2]]],
        // Another order of the subgroups.
        [
            &[&[0, 1], &[0, 1, 2]],
            &[&[0, 1, 2], &[0, 1]],
            &[&[0, 1, 2]],
        ],
    ];
    threads(world(3), |comm| {
        if !has_ranks(comm, 3) {
            return;
        }
        for lists in cases {
            comm.barrier().unwrap();
            let begun = Stopwatch::start();
            let groups: Vec<_> = lists[comm.rank()]
                .iter()
                .map(|list| comm.subgroup(list).unwrap())
                .collect();
            let error = groups[0].barrier().unwrap_err();
            assert_error(
                &error,
                ErrorKind::Mismatch,
                &[
                    "creates a subgroup of the job's ranks [",
                    "rank 1",
                    "same order",
                ],
            );
            // So does everything else in it, and the job goes on.
            let region = comm.alloc(64).unwrap();
            let peer = (groups[0].rank() + 1) % groups[0].world();
            let request = TransferRequest::send(&region, peer, 0);
            let error = groups[0].exchange(&[request]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
            assert!(
                begun.elapsed() < Duration::from_secs(5),
                "{:?}",
                begun.elapsed()
            );
            comm.barrier().unwrap();
        }
        comm.split(0, 0)
            .unwrap()
            .subgroup(&[0, 1, 2])
            .unwrap()
            .barrier()
            .unwrap();
    });
}

fn entries(of: &str) -> usize {
    std::fs::read_dir(of).unwrap().count()
}

#[test]
fn two_hundred_communicators_take_no_thread_and_no_descriptor() {
    processes(world(2), |comm| {
        if !has_ranks(comm, 2) {
            return;
        }
        let count = || (entries("/proc/self/task"), entries("/proc/self/fd"));
        comm.split(0, 0).unwrap().barrier().unwrap();
        let before = count();
        let groups: Vec<_> = (0..200)
            .map(|number| match number % 2 {
                0 => comm.split(number, comm.rank() as i64).unwrap(),
                _ => comm.subgroup(&[1, 0]).unwrap(),
            })
            .collect();
        for group in &groups {
            group.barrier().unwrap();
        }
        // A thread that was joined may still be listed for a moment.
        let until = Instant::now() + Duration::from_secs(20);
        while count().0 > before.0 || count().1 > before.1 {
            assert!(Instant::now() < until, "{:?} of {before:?}", count());
            std::thread::sleep(Duration::from_millis(5));
        }
        // Signals cost a page each, of which the host device makes a descriptor, until they are gone.
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let region = comm.alloc(64).unwrap();
        let with_stream = count();
        for group in &groups {
            match comm.rank() {
                0 => group.send(&region, 1 - group.rank(), 0, &stream).unwrap(),
                _ => group
                    .receive(&region, 1 - group.rank(), 0, &stream)
                    .unwrap(),
            }
        }
        comm.synchronize(&stream).unwrap();
        // What was in use a moment ago is let go of by a thread that ends then.
        let until = Instant::now() + Duration::from_secs(20);
        while count().0 > with_stream.0 {
            assert!(Instant::now() < until, "{:?} of {with_stream:?}", count());
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(groups);
        comm.barrier().unwrap();
        while kind() == DeviceKind::Host && count().1 > with_stream.1 + 10 {
            assert!(Instant::now() < until, "{:?} of {with_stream:?}", count());
            comm.release_idle().unwrap();
            std::thread::sleep(Duration::from_millis(20));
        }
        comm.barrier().unwrap();
    });
}

#[test]
fn a_split_of_eight_ranks_is_quick() {
    let ranks = Ranks::of(world(8));
    ranks.run(|comm| {
        comm.barrier().unwrap();
        let mut took: Vec<Duration> = (0..51)
            .map(|round| {
                let start = Instant::now();
                let half = comm.split(comm.rank() as u64 % 2, round).unwrap();
                assert_eq!(half.world(), comm.world().div_ceil(2));
                start.elapsed()
            })
            .collect();
        took.sort_unstable();
        let (rank, median, most) = (comm.rank(), took[25], took[50]);
        tell(format!(
            "rank {rank}: a split takes {median:?}, at most {most:?}"
        ));
        if !cfg!(debug_assertions) {
            assert!(took[25] < Duration::from_millis(2), "{took:?}");
        }
    });
}

#[test]
fn one_thread_joins_several_ranks_of_one_process() {
    let id = UniqueId::create(IpAddr::V4(Ipv4Addr::LOCALHOST), 0).unwrap();
    let pending: Vec<_> = (0..world(3))
        .map(|rank| {
            let pending = Job::begin_join(&config_of_thread(&id, rank, world(3))).unwrap();
            // Not before all have come.
            assert!(rank + 1 == world(3) || !pending.is_finished());
            pending
        })
        .collect();
    let jobs: Vec<Job> = pending.into_iter().map(|job| job.wait().unwrap()).collect();
    for (rank, job) in jobs.iter().enumerate() {
        assert_eq!((job.rank(), job.world().world()), (rank, jobs.len()));
    }
    // The world is the same at every call, and a communicator keeps its job.
    let streams: Vec<_> = jobs
        .iter()
        .map(|job| job.world().create_stream(Priority::Normal).unwrap())
        .collect();
    let closing: Vec<_> = jobs
        .into_iter()
        .map(|job| std::thread::spawn(move || job.close()))
        .collect();
    drop(streams);
    for closed in closing {
        closed.join().unwrap().unwrap();
    }
}
