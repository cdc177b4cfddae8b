//! Eight ranks in a hybrid cube mesh: what the direct path does there, and what is left to the vendor's library.

use crate::common::{
    TimedBarrier, assert_error, assert_says, delays, kind, threads_that_end, threads_with, world,
};
use crate::data::{by, calls_of_the_library};
use crate::expected::{Case, Random, assert_alike};
use crate::launches::{download, integers, memory, sum, sums, upload};
use std::time::Duration;
use warplink::collective::{
    Algorithm, Call, CollectiveKind, CollectiveOptions, CollectivePath, Message, Parts,
};
use warplink::device::{Priority, ReduceOp};
use warplink::topology::{CUBE_RANKS, TopologyClass};
use warplink::{Collectives, Communicator, Config, DType, DeviceKind, Error, ErrorKind};

/// More elements than the workspace has room for.
const LARGE: usize = 400_000;

/// Says that the links of the ranks are those of the mesh.
fn forced(config: &mut Config) {
    config.topology = Some(TopologyClass::HybridCubeMesh);
    // Eight ranks with many calls keep a small machine busy.
    config.join.heartbeat_limit = Duration::from_secs(30);
    if kind() == DeviceKind::Host {
        delays(config, Duration::from_micros(40));
    }
}

fn in_a_cube(body: impl Fn(&Communicator) + Send + Sync) {
    if world(CUBE_RANKS) == CUBE_RANKS {
        threads_with(CUBE_RANKS, forced, body);
    }
}

/// Whether a link connects two ranks: of one half, or facing each other.
fn is_linked(a: usize, b: usize) -> bool {
    a != b && (a / 4 == b / 4 || a % 4 == b % 4)
}

fn all_reduce(dtype: DType, op: ReduceOp, count: usize) -> Call {
    Call::new(CollectiveKind::AllReduce, op, dtype, count, 0)
}

/// Whether the library is there: it does not serve several ranks on one GPU. Where it is not, its calls fail.
fn has_library(comm: &Communicator, collectives: &Collectives) -> bool {
    let there = collectives.communicator().is_some();
    assert_eq!(collectives.serves_messages(), there);
    let path = collectives.path_of_messages();
    assert_eq!(path, there.then_some(CollectivePath::Engine));
    assert!(there || kind() != DeviceKind::Host);
    if !there {
        let stream = comm.create_stream(Priority::Normal).unwrap();
        assert!(collectives.barrier(&stream).is_err());
    }
    there
}

/// Nothing else is mapped, so kernels that touch anything else fail.
#[test]
fn in_a_hybrid_cube_mesh_ranks_map_those_that_a_link_leads_to() {
    in_a_cube(|comm| {
        let collectives = comm.collectives().unwrap();
        assert_eq!(collectives.path(), CollectivePath::Direct);
        for peer in 0..CUBE_RANKS {
            let mapped = collectives.peer_buffer(peer).is_some();
            let reached = peer == comm.rank() || is_linked(comm.rank(), peer);
            assert_eq!(mapped, reached, "rank {peer}");
        }
    });
}

/// Odd counts, in place and not, from any start, with results that are the same on all ranks.
#[test]
fn in_a_hybrid_cube_mesh_every_type_and_operator_is_reduced() {
    in_a_cube(|comm| {
        let collectives = comm.collectives().unwrap();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let mut random = Random::new(5);
        let mut made = Vec::new();
        for dtype in DType::ALL {
            let scaled = dtype.is_float().then_some(ReduceOp::scaled_sum(0.3));
            for op in ReduceOp::ALL.into_iter().chain(scaled) {
                for most in [16, 4000] {
                    let call = all_reduce(dtype, op, 1 + random.below(most) / 2 * 2);
                    let choice = collectives.choice(&call).unwrap();
                    assert_eq!(choice.algorithm, Algorithm::Cube);
                    assert_eq!(collectives.path_of(&call), CollectivePath::Direct);
                    let case = Case::placed(&mut random, call);
                    made.push(case.make(comm, &collectives, &stream).unwrap());
                }
            }
        }
        comm.synchronize(&stream).unwrap();
        made.iter().for_each(|made| made.check(comm));
        let own: Vec<u8> = made.iter().flat_map(|made| made.reduced(comm)).collect();
        assert_alike(comm, &own, "all-reduces");
    });
}

/// The largest that the workspace has room for, with as many lanes as that takes.
#[test]
fn in_a_hybrid_cube_mesh_the_whole_workspace_is_for_packets() {
    in_a_cube(|comm| {
        let collectives = by(comm, None, 1 << 20);
        let stream = comm.create_stream(Priority::Normal).unwrap();
        // A quarter of the workspace, as packets are half data and epochs use it in turns, for eight ranks.
        let room = (1 << 20) / 4 / CUBE_RANKS / 4;
        let path = |count| collectives.path_of(&all_reduce(DType::I32, ReduceOp::Sum, count));
        assert_eq!(path(room), CollectivePath::Direct);
        assert_eq!(path(room + 1), CollectivePath::Engine);
        let all = [room, room - 1, 3, room].map(|count| {
            let made = sums(comm, &collectives, &stream, count % 7, count);
            (made, count)
        });
        comm.synchronize(&stream).unwrap();
        for ((buffer, round, count), _) in all {
            assert_eq!(download(comm, &buffer), sum(CUBE_RANKS, round, count));
        }
    });
}

#[test]
fn in_a_hybrid_cube_mesh_graphs_are_replayed() {
    const COUNT: usize = 501;
    in_a_cube(|comm| {
        let collectives = comm.collectives().unwrap();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let own = memory(comm, COUNT);
        stream.begin_capture().unwrap();
        for _ in 0..3 {
            let (dtype, op) = (DType::I32, ReduceOp::Sum);
            collectives
                .all_reduce(&own, &own, dtype, op, &stream)
                .unwrap();
        }
        let graph = stream.end_capture().unwrap();
        for round in 0..10 {
            upload(comm, &own, &integers(comm.rank(), round, COUNT));
            graph.launch(&stream).unwrap();
            comm.synchronize(&stream).unwrap();
            let sums = sum(CUBE_RANKS, round, COUNT);
            let expected: Vec<i32> = sums.iter().map(|sum| sum.wrapping_mul(64)).collect();
            assert_eq!(download(comm, &own), expected, "round {round}");
        }
    });
}

/// On two streams by turns, with what the library does in between.
#[test]
fn in_a_hybrid_cube_mesh_the_vendors_library_does_the_rest() {
    in_a_cube(|comm| {
        let collectives = comm.collectives().unwrap();
        if !has_library(comm, &collectives) {
            return;
        }
        let streams = [(); 2].map(|()| comm.create_stream(Priority::Normal).unwrap());
        let mut made = Vec::new();
        for number in 0..16 {
            let is_large = number % 4 == 0;
            let call = all_reduce(DType::I32, ReduceOp::Sum, if is_large { LARGE } else { 99 });
            let path = collectives.path_of(&call);
            assert_eq!(path == CollectivePath::Engine, is_large);
            assert_eq!(collectives.choice(&call).is_err(), is_large);
            let case = Case::new(call, number);
            let stream = &streams[number as usize / 2 % 2];
            made.push(case.make(comm, &collectives, stream).unwrap());
        }
        for stream in &streams {
            comm.synchronize(stream).unwrap();
        }
        made.iter().for_each(|made| made.check(comm));
        for kind in CollectiveKind::ALL {
            let count = usize::from(kind != CollectiveKind::AllReduce);
            let call = Call::new(kind, ReduceOp::Sum, DType::I32, count, 0);
            assert_eq!(collectives.path_of(&call), CollectivePath::Engine);
            let error = collectives.choice(&call).unwrap_err();
            let says = "in a hybrid cube mesh; expected an all_reduce of 1 to";
            assert_says(&error, &[says]);
        }
        calls_of_the_library(comm, &collectives, 40);
    });
}

/// Between all ranks, linked or not.
#[test]
fn in_a_hybrid_cube_mesh_the_vendors_library_carries_messages() {
    in_a_cube(|comm| {
        let collectives = comm.collectives().unwrap();
        if !has_library(comm, &collectives) {
            return;
        }
        let rank = comm.rank();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let (own, come) = (memory(comm, 77), memory(comm, 77));
        upload(comm, &own, &integers(rank, 1, 77));
        // No link connects ranks that are so far apart.
        let (to, from) = ((rank + 3) % CUBE_RANKS, (rank + 5) % CUBE_RANKS);
        let messages = [Message::send(to, &own), Message::receive(from, &come)];
        collectives.send_receive(&messages, &stream).unwrap();

        // Rank a sends 1 + a + b elements to rank b.
        let counts: Vec<usize> = (0..CUBE_RANKS).map(|peer| 1 + rank + peer).collect();
        let starts: Vec<usize> = (0..CUBE_RANKS).map(|peer| 20 * peer).collect();
        let parts = Parts {
            counts: &counts,
            displacements: &starts,
        };
        let (input, output) = (memory(comm, 160), memory(comm, 160));
        upload(comm, &input, &integers(rank, 2, 160));
        upload(comm, &output, &[0; 160]);
        collectives
            .all_to_all_v((&output, parts), (&input, parts), DType::I32, &stream)
            .unwrap();
        comm.synchronize(&stream).unwrap();
        assert_eq!(download(comm, &come), integers(from, 1, 77));
        let mut expected = vec![0; 160];
        for (peer, count) in counts.iter().enumerate() {
            let sent = &integers(peer, 2, 160)[20 * rank..20 * rank + count];
            expected[20 * peer..20 * peer + count].copy_from_slice(sent);
        }
        assert_eq!(download(comm, &output), expected);
    });
}

#[test]
fn in_a_hybrid_cube_mesh_the_direct_path_alone_refuses_the_rest() {
    in_a_cube(|comm| {
        let options = CollectiveOptions::on(CollectivePath::Direct);
        let collectives = comm.collectives_with(&options).unwrap();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let (own, large) = (memory(comm, 8), memory(comm, LARGE));
        let refused = |refused: warplink::Result<()>| {
            let error = refused.unwrap_err();
            let says = ["hybrid cube mesh", "leave the path open"];
            assert_error(&error, ErrorKind::Unsupported, &says);
        };
        let (dtype, op) = (DType::I32, ReduceOp::Sum);
        refused(collectives.all_reduce(&large, &large, dtype, op, &stream));
        refused(collectives.broadcast(&own, &own, 0, &stream));
        refused(collectives.barrier(&stream));
        assert!(!collectives.serves_messages());
        assert_eq!(collectives.path_of_messages(), None);
        let peer = (comm.rank() + 1) % CUBE_RANKS;
        refused(collectives.send_receive(&[Message::send(peer, &own)], &stream));
        // They leave nothing behind.
        let (buffer, round, count) = sums(comm, &collectives, &stream, 3, 8);
        comm.synchronize(&stream).unwrap();
        assert_eq!(download(comm, &buffer), sum(CUBE_RANKS, round, count));
    });
}

/// Runs eight ranks, of which rank 2 calls something else, or nothing; checks the errors of all that call.
fn fail(timeout: Duration, count_of_rank_2: Option<usize>, check: impl Fn(&Error) + Send + Sync) {
    if world(CUBE_RANKS) < CUBE_RANKS {
        return;
    }
    let all = TimedBarrier::new(CUBE_RANKS);
    let change = |config: &mut Config| {
        forced(config);
        config.timeout = timeout;
    };
    threads_that_end(CUBE_RANKS, change, |comm| {
        let collectives = comm.collectives().unwrap();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let (buffer, round, count) = sums(&comm, &collectives, &stream, 1, 10);
        comm.synchronize(&stream).unwrap();
        assert_eq!(download(&comm, &buffer), sum(CUBE_RANKS, round, count));
        let count = if comm.rank() == 2 {
            count_of_rank_2
        } else {
            Some(10)
        };
        let failed = count.map(|count| {
            sums(&comm, &collectives, &stream, 2, count);
            comm.synchronize(&stream).unwrap_err()
        });
        // None leaves while another still waits.
        all.wait();
        comm.abort("the test is over");
        failed.iter().for_each(&check);
    });
}

/// Also by the ranks that no link connects with the one that differs.
#[test]
fn in_a_hybrid_cube_mesh_another_count_is_told_on_all_ranks() {
    fail(Duration::from_secs(20), Some(9), |error| {
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        assert_says(
            error,
            &["all_reduce of 9 i32", "all_reduce of 10 i32", "(peer"],
        );
    });
}

#[test]
fn in_a_hybrid_cube_mesh_a_rank_that_never_calls_is_named() {
    fail(Duration::from_secs(6), None, |error| {
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        assert_says(error, &["a rank has not arrived at a collective", "peer 2"]);
    });
}
