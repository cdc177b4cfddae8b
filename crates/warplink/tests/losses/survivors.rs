//! A lost rank ends the communicators that contain it; the ranks that are left go on.

use crate::common::{
    Ranks, Stopwatch, assert_names_peer, assert_says, kill_self, kind, ring, ring_requests,
};
use std::time::Duration;
use warplink::bootstrap::Wait;
use warplink::device::Priority;
use warplink::overlap::{AllGatherMatmul, AllGatherMatmulBuffers, Options};
use warplink::p2p::{Protocol, Transfer, TransferRequest, post_all, wait_all};
use warplink::{Communicator, DType, DeviceKind, ErrorKind};

/// How soon the others must have their error, and how soon they must have gone on.
const SOON: Duration = Duration::from_secs(5);

/// Runs four ranks, of which `victims` are killed in `body`; the others end it.
fn four(victims: &[usize], body: impl FnOnce(Communicator)) {
    if let Some(ranks) = Ranks::all(4) {
        ranks.run_losing(victims, body);
    }
}

#[test]
fn the_group_without_the_lost_rank_goes_on() {
    for protocol in [Protocol::Put, Protocol::Get] {
        four(&[3], |comm| {
            let half = comm.split(comm.rank() as u64 / 2, 0).unwrap();
            comm.barrier().unwrap();
            if comm.rank() >= 2 {
                let started = Stopwatch::start();
                let die = |round| {
                    if comm.rank() == 3 && round == 5 {
                        kill_self();
                    }
                };
                let error = ring(&half, protocol, usize::MAX, die).unwrap_err();
                assert!(started.elapsed() < SOON, "{error}");
                assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
                assert_eq!((error.peer(), error.job_peer()), (Some(1), Some(3)));
                assert_says(&error, &["rank 0 (rank 2 of the job)", "rank 3 was lost"]);
                let alone = half.survivors().unwrap();
                assert_eq!(alone.job_ranks(), [2]);
            } else {
                // In the middle of this the other half loses a rank.
                let rounds = || ring(&half, protocol, 300, |_| {}).unwrap();
                rounds();
                let error = comm.barrier().unwrap_err();
                assert_names_peer(&error, ErrorKind::PeerLost, 3);
                rounds();
                half.split(0, 1).unwrap().barrier().unwrap();
            }
            let left = comm.survivors().unwrap();
            assert_eq!(left.job_ranks(), [0, 1, 2]);
            left.close().unwrap();
        });
    }
}

#[test]
fn the_survivors_go_on_with_right_data_after_each_loss() {
    four(&[3, 1], |world| {
        let mut comm = world.clone();
        for victim in [3, 1] {
            let die = |round| {
                if world.rank() == victim && round == 4 {
                    kill_self();
                }
            };
            let error = ring(&comm, Protocol::default(), usize::MAX, die).unwrap_err();
            let lost = Stopwatch::start();
            assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
            assert_eq!(error.job_peer(), Some(victim), "{error}");
            comm = comm.survivors().unwrap();
            assert!(!comm.job_ranks().contains(&victim));
            ring(&comm, Protocol::default(), 10, |_| {}).unwrap();
            assert!(lost.elapsed() < SOON, "{:?}", lost.elapsed());
            // A program among those that are left.
            let (m, n, k) = (4 * comm.world(), 8, 8);
            let case = AllGatherMatmul {
                transposed_b: false,
                m,
                k,
                n: vec![n],
                dtype: DType::F32,
                bias: false,
                keep: false,
            };
            let bytes = |count: usize| comm.alloc(4 * count).unwrap();
            let (a, b, c) = (bytes(4 * k), bytes(k * n), bytes(m * n));
            let ones = 1f32.to_le_bytes();
            a.upload(&ones.repeat(4 * k)).unwrap();
            b.upload(&ones.repeat(k * n)).unwrap();
            let stream = comm.create_stream(Priority::Normal).unwrap();
            let buffers = AllGatherMatmulBuffers {
                a: a.memory().clone(),
                b: vec![b.memory().clone()],
                bias: Vec::new(),
                c: vec![c.memory().clone()],
                gathered: None,
            };
            let plan = case.plan(&comm.executor(), &Options::default(), &buffers);
            let plan = plan.unwrap();
            plan.run(&stream).unwrap();
            comm.synchronize(&stream).unwrap();
            let expected = (k as f32).to_le_bytes().repeat(m * n);
            assert!(c.download().unwrap() == expected, "a wrong product");
        }
        assert_eq!(comm.job_ranks(), [0, 2]);
        drop(world);
        comm.close().unwrap();
    });
}

#[test]
fn a_loss_of_several_at_once_is_agreed_on() {
    four(&[2, 3], |comm| {
        let die = |round| {
            if comm.rank() >= 2 && round == 3 {
                kill_self();
            }
        };
        let error = ring(&comm, Protocol::default(), usize::MAX, die).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
        let mut left = comm.survivors().unwrap();
        while left.world() > 2 {
            // One of them was lost only after that.
            left.barrier().unwrap_err();
            left = left.survivors().unwrap();
        }
        assert_eq!(left.job_ranks(), [0, 1]);
        ring(&left, Protocol::default(), 20, |_| {}).unwrap();
        drop(comm);
        left.close().unwrap();
    });
}

#[test]
fn the_other_communicator_of_a_stream_fails_and_goes_on_in_another_stream() {
    let Some(ranks) = Ranks::all(3) else { return };
    ranks.run_losing(&[2], |comm| {
        const BYTES: usize = 4096;
        let region = comm.alloc(BYTES).unwrap();
        if comm.rank() == 2 {
            let to_both = [0, 1].map(|peer| TransferRequest::send(&region, peer, 0));
            let _never_posted = comm.exchange(&to_both).unwrap();
            comm.barrier().unwrap();
            // Both have work behind a wait for this rank.
            let posted = [0, 1].map(|rank| format!("{rank} posted"));
            let wait = Wait::on([0, 1], comm.deadline());
            comm.bootstrap().store().wait(&posted, &wait).unwrap();
            kill_self();
        }
        let pair = comm.subgroup(&[1, 0]).unwrap();
        let from_2 = TransferRequest::receive(&region, 2, 0);
        let from_2 = comm.exchange(&[from_2]).unwrap();
        let (send, receive) = (comm.alloc(BYTES).unwrap(), comm.alloc(BYTES).unwrap());
        send.upload(&[1; BYTES]).unwrap();
        receive.upload(&[7; BYTES]).unwrap();
        let requests = ring_requests(&pair, &send, &receive, 0);
        let in_pair = pair.exchange(&requests).unwrap();
        comm.barrier().unwrap();
        // The pair's transfers are behind a wait for the rank that is lost.
        let shared = comm.create_stream(Priority::Normal).unwrap();
        from_2[0].post(&shared).unwrap();
        from_2[0].wait(&shared).unwrap();
        let group: Vec<&Transfer> = in_pair.iter().collect();
        post_all(&group, &shared).unwrap();
        wait_all(&group, &shared).unwrap();
        let posted = format!("{} posted", comm.rank());
        comm.bootstrap().store().set(posted, b"").unwrap();
        for used_by in [&comm, &pair] {
            let error = used_by.synchronize(&shared).unwrap_err();
            // A rank may hear from its peer in the pair first that this cannot finish its work, and why. Then the other
            // communicator fails by this rank itself, whose stream waits for the pair.
            let named = (error.kind(), error.job_peer());
            let heard = named.0 == ErrorKind::PeerFailed && named.1.is_some_and(|peer| peer < 2);
            assert!(heard || named == (ErrorKind::PeerLost, Some(2)), "{error}");
            assert_says(&error, &["rank 2 was lost"]);
        }
        // Nothing more can be done in the stream, by either.
        let error = post_all(&group, &shared).unwrap_err();
        let kinds = [ErrorKind::PeerLost, ErrorKind::PeerFailed];
        assert!(kinds.contains(&error.kind()), "{error}");
        assert_says(&error, &["rank 2 was lost", "use another stream"]);
        if kind() == DeviceKind::Host {
            assert!(receive.download().unwrap() == [7; BYTES], "it went on");
        }
        // The pair has failed, as its work came to nothing. In streams of its own it goes on anew.
        let error = pair.barrier().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerFailed, "{error}");
        drop((from_2, in_pair));
        let pair = pair.survivors().unwrap();
        ring(&pair, Protocol::Put, 20, |_| {}).unwrap();
        ring(&pair, Protocol::Get, 20, |_| {}).unwrap();
        let left = comm.survivors().unwrap();
        drop((comm, pair));
        left.close().unwrap();
    });
}
