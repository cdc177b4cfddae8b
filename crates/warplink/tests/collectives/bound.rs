//! Calls that are bound to their memory.

use crate::common::{
    Ranks, Stopwatch, TimedBarrier, allocate, assert_error, assert_names_peer, at_least, delayed,
    kind, lose, root, share_gpus, threads, threads_that_end, threads_with, with_timeout,
    with_victim, world, worlds,
};
use crate::data::calling;
use crate::expected::{Case, Made, Random, kinds};
use std::sync::Arc;
use std::time::Duration;
use warplink::collective::{
    Algorithm, BoundCall, Call, CollectiveKind, CollectiveOptions, CollectivePath, Message,
};
use warplink::device::{AllocationKind, Priority, Stream};
use warplink::{Collectives, Communicator, DType, DeviceKind, Error, ErrorKind};

/// How soon a rank must have its error.
const SOON: Duration = Duration::from_secs(5);

/// Collectives that allow the copy engine alone.
fn copying(comm: &Communicator) -> Collectives {
    let options = CollectiveOptions {
        algorithm: Some(Algorithm::CopyEngine),
        ..CollectiveOptions::default()
    };
    comm.collectives_with(&options).unwrap()
}

pub(crate) fn moved(kind: CollectiveKind, count: usize) -> Call {
    Call {
        kind,
        op: None,
        dtype: DType::U8,
        count,
        root: None,
    }
}

/// Runs calls by `enqueue` once on new inputs of each, and checks their outputs.
fn round<C>(
    comm: &Communicator,
    all: &mut [(Made, C)],
    stream: &Stream,
    enqueue: impl Fn(&[(Made, C)]),
) {
    all.iter_mut().for_each(|(made, _)| made.renewed(comm));
    comm.barrier().unwrap();
    enqueue(all);
    comm.synchronize(stream).unwrap();
    all.iter().for_each(|(made, _)| made.check(comm));
    comm.barrier().unwrap();
}

/// All-gathers, some in place, and all-to-alls.
fn cases(counts: &[usize]) -> Vec<Case> {
    let mut random = Random::new(41);
    let shapes = [
        (CollectiveKind::AllGather, false),
        (CollectiveKind::AllGather, true),
        (CollectiveKind::AllToAll, false),
    ];
    let calls = counts
        .iter()
        .flat_map(|count| shapes.map(|(kind, in_place)| (moved(kind, *count), in_place)));
    let cases = calls.map(|(call, in_place)| Case {
        call,
        in_place,
        shift: [0, 16, 1, 3][random.below(4)],
        seed: random.next(),
    });
    cases.collect()
}

/// The [`cases`] of one length, bound.
fn bound(comm: &Communicator, collectives: &Collectives) -> Vec<(Made, BoundCall)> {
    let made = cases(&[3000]).into_iter().map(|case| {
        let made = case.on_new_memory(comm).unwrap();
        let call = made.bind(collectives).unwrap();
        (made, call)
    });
    made.collect()
}

#[test]
fn copies_are_right_for_few_and_many_ranks() {
    for ranks in worlds([2, 3, 5, 8]) {
        threads_with(ranks, delayed(40), |comm| {
            let collectives = copying(comm);
            let streams = [Priority::Normal, Priority::High]
                .map(|priority| comm.create_stream(priority).unwrap());
            let counts: &[usize] = if share_gpus() {
                &[70_001]
            } else {
                &[1, 500, 70_001]
            };
            let mut bound = Vec::new();
            for case in cases(counts) {
                let made = case.on_new_memory(comm).unwrap();
                let call = made.bind(&collectives).unwrap();
                assert_eq!(call.choice().unwrap().algorithm, Algorithm::CopyEngine);
                assert_eq!(call.call().kind, case.call.kind);
                bound.push((made, call));
            }
            for round in 0..3 {
                bound.iter_mut().for_each(|(made, _)| made.renewed(comm));
                comm.barrier().unwrap();
                for (number, (_, call)) in bound.iter().enumerate() {
                    // In turn on both streams, as calls of one communicator are.
                    call.enqueue(&streams[(number + round) % 2]).unwrap();
                }
                for stream in &streams {
                    comm.synchronize(stream).unwrap();
                }
                bound.iter().for_each(|(made, _)| made.check(comm));
                comm.barrier().unwrap();
            }
        });
    }
}

#[test]
fn bound_calls_may_be_captured_among_others() {
    threads(world(3), |comm| {
        let (copied, collectives) = (copying(comm), comm.collectives().unwrap());
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let mut all: Vec<_> = cases(&[3000])
            .into_iter()
            .map(|case| {
                let made = case.on_new_memory(comm).unwrap();
                let calls = [&copied, &collectives].map(|by| made.bind(by).unwrap());
                (made, calls)
            })
            .collect();
        for by in 0..2 {
            stream.begin_capture().unwrap();
            for (_, calls) in &all {
                calls[by].enqueue(&stream).unwrap();
            }
            let graph = stream.end_capture().unwrap();
            for _ in 0..4 {
                round(comm, &mut all, &stream, |_| graph.launch(&stream).unwrap());
                // And between its launches, one by one.
                round(comm, &mut all, &stream, |all| {
                    for (_, calls) in all {
                        calls[by].enqueue(&stream).unwrap();
                    }
                });
            }
        }
    });
}

/// Each graph that a bound call is recorded into may be launched as often as one likes, in any order among the others.
#[test]
fn a_bound_call_may_be_in_several_graphs() {
    threads(world(3), |comm| {
        let copied = copying(comm);
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let mut all = bound(comm, &copied);
        // Of one run each, and of two.
        let graphs = [1, 2].map(|runs| {
            stream.begin_capture().unwrap();
            for _ in 0..runs {
                for (_, call) in &all {
                    call.enqueue(&stream).unwrap();
                }
            }
            stream.end_capture().unwrap()
        });
        for number in [0, 0, 1, 0, 1, 1, 0] {
            round(comm, &mut all, &stream, |_| {
                graphs[number].launch(&stream).unwrap()
            });
        }
    });
}

/// Calls are made beside others that a graph records, on other streams.
#[test]
fn bound_calls_may_be_made_while_others_are_recorded() {
    threads(world(2), |comm| {
        let collectives = copying(comm);
        let [first, second, eager] =
            [(); 3].map(|()| comm.create_stream(Priority::Normal).unwrap());
        let mut all = bound(comm, &collectives);
        for _ in 0..3 {
            all.iter_mut().for_each(|(made, _)| made.renewed(comm));
            comm.barrier().unwrap();
            first.begin_capture().unwrap();
            all[0].1.enqueue(&first).unwrap();
            second.begin_capture().unwrap();
            all[1].1.enqueue(&second).unwrap();
            // One of a graph and one of none.
            for place in [0, 2] {
                all[place].1.enqueue(&eager).unwrap();
            }
            all[2].1.enqueue(&first).unwrap();
            let graphs = [&first, &second].map(|stream| stream.end_capture().unwrap());
            comm.synchronize(&eager).unwrap();
            all[0].0.check(comm);
            all[2].0.check(comm);
            comm.barrier().unwrap();
            all.iter_mut().for_each(|(made, _)| made.renewed(comm));
            comm.barrier().unwrap();
            for graph in &graphs {
                graph.launch(&first).unwrap();
            }
            comm.synchronize(&first).unwrap();
            all.iter().for_each(|(made, _)| made.check(comm));
            comm.barrier().unwrap();
        }
    });
}

/// Every kind can be bound, on either path, of short data, which kernels move.
#[test]
fn what_the_copy_engine_does_not_do_goes_as_without_binding() {
    threads(world(3), |comm| {
        let engine = CollectiveOptions::on(CollectivePath::Engine);
        let ways = [
            comm.collectives().ok(),
            comm.collectives_with(&engine)
                .ok()
                .filter(|_| !share_gpus()),
        ];
        let stream = comm.create_stream(Priority::Normal).unwrap();
        for collectives in ways.iter().flatten() {
            let mut random = Random::new(47);
            for kind in kinds() {
                let call = random.call(kind, comm.world(), |_, _| 900);
                let case = Case::new(call, random.next());
                let mut made = case.on_new_memory(comm).unwrap();
                let bound = made.bind(collectives).unwrap();
                let by_kernels = collectives.path_of(&call) == CollectivePath::Direct;
                assert_eq!(bound.choice().is_some(), by_kernels);
                assert!(
                    bound
                        .choice()
                        .is_none_or(|c| c.algorithm != Algorithm::CopyEngine)
                );
                for _ in 0..2 {
                    made.renewed(comm);
                    bound.enqueue(&stream).unwrap();
                    comm.synchronize(&stream).unwrap();
                    made.check(comm);
                }
            }
            let nothing = allocate(comm, 16);
            let nothing = nothing.slice(0..0).unwrap();
            let barrier = moved(CollectiveKind::Barrier, 0);
            let barrier = collectives.bind(&barrier, &nothing, &nothing).unwrap();
            barrier.enqueue(&stream).unwrap();
            comm.synchronize(&stream).unwrap();
        }
    });
}

/// Where one rank passes its input in place and another does not, kernels do it.
#[test]
fn ranks_may_differ_in_what_is_in_place() {
    calling(world(2), |comm, collectives, stream| {
        let mut case = cases(&[5000])[0];
        case.in_place = comm.rank() == 0;
        let bytes = case.memory_bytes(comm.world()) + (1 << 16);
        let memory = comm.device().allocate(bytes, AllocationKind::Plain);
        let mut made = case.place(comm, memory.unwrap()).unwrap();
        let bound = made.bind(collectives).unwrap();
        assert_ne!(bound.choice().unwrap().algorithm, Algorithm::CopyEngine);
        made.renewed(comm);
        bound.enqueue(stream).unwrap();
        comm.synchronize(stream).unwrap();
        // Inputs of ranks that differ in place differ too.
        let error = made.bind(&copying(comm)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    });
}

#[test]
fn the_copy_engine_alone_does_no_calls_that_are_not_bound() {
    threads(world(2), |comm| {
        let collectives = copying(comm);
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let memory = allocate(comm, 64);
        let [output, input] = [0..32, 32..48].map(|range| memory.slice(range).unwrap());
        let refused = |error: Error| {
            let says = ["algorithm copy-engine does not support"];
            assert_error(&error, ErrorKind::Unsupported, &says);
            assert!(format!("{error:?}").contains("Collectives::bind"));
        };
        refused(
            collectives
                .all_gather(&output, &input, &stream)
                .unwrap_err(),
        );
        let broadcast = Call {
            root: Some(1),
            ..moved(CollectiveKind::Broadcast, 16)
        };
        refused(collectives.bind(&broadcast, &input, &input).unwrap_err());
        let call = moved(CollectiveKind::AllGather, 16);
        let bound = collectives.bind(&call, &output, &input).unwrap();
        bound.enqueue(&stream).unwrap();
        comm.synchronize(&stream).unwrap();
    });
}

/// Binds an all-gather of `count` bytes to new memory.
fn bind(comm: &Communicator, collectives: &Collectives, count: usize) -> Result<BoundCall, Error> {
    let bytes = count * (comm.world() + 1);
    let memory = comm.device().allocate(bytes, AllocationKind::Plain)?;
    let (output, input) = (memory.slice(count..bytes)?, memory.slice(0..count)?);
    collectives.bind(&moved(CollectiveKind::AllGather, count), &output, &input)
}

#[test]
fn ranks_that_bind_different_calls_are_told() {
    threads(world(3), |comm| {
        let collectives = copying(comm);
        let count = if comm.rank() == 1 { 200 } else { 100 };
        let error = bind(comm, &collectives, count).unwrap_err();
        assert_error(
            &error,
            ErrorKind::Mismatch,
            &[
                "the peer calls all_gather of",
                "as this rank calls",
                "bind all_gather",
            ],
        );
        // One that cannot bind is told to all, who try again.
        let failed = if comm.rank() == 1 {
            let memory = allocate(comm, 64);
            let call = moved(CollectiveKind::AllGather, 16);
            collectives.bind(&call, &memory, &memory)
        } else {
            bind(comm, &collectives, 16)
        };
        let expected = match comm.rank() {
            1 => ErrorKind::InvalidArgument,
            _ => ErrorKind::PeerFailed,
        };
        let error = failed.unwrap_err();
        assert_eq!(error.kind(), expected, "{error}");
        let bound = bind(comm, &collectives, 100).unwrap();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        bound.enqueue(&stream).unwrap();
        comm.synchronize(&stream).unwrap();
    });
}

#[test]
fn a_rank_that_does_not_bind_or_call_is_named() {
    let (timeout, ranks) = (Duration::from_secs(5), world(3));
    let all = TimedBarrier::new(ranks);
    threads_that_end(ranks, with_timeout(timeout), |comm| {
        let collectives = copying(&comm);
        let bound = bind(&comm, &collectives, 1000).unwrap();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        bound.enqueue(&stream).unwrap();
        comm.synchronize(&stream).unwrap();
        comm.barrier().unwrap();
        if comm.rank() != 1 {
            let started = Stopwatch::start();
            bound.enqueue(&stream).unwrap();
            let error = comm.synchronize(&stream).unwrap_err();
            assert_names_peer(&error, ErrorKind::Timeout, 1);
            assert!(started.elapsed() < timeout + SOON, "{error}");
        } else {
            std::thread::sleep(timeout + Duration::from_secs(1));
        }
        all.wait();
        comm.abort("the test is over");
    });
    let all = TimedBarrier::new(ranks);
    threads_that_end(ranks, with_timeout(timeout), |comm| {
        let collectives = copying(&comm);
        if comm.rank() != 1 {
            let error = bind(&comm, &collectives, 1000).unwrap_err();
            assert_names_peer(&error, ErrorKind::Timeout, 1);
        }
        all.wait();
        comm.abort("the test is over");
    });
}

#[test]
fn a_rank_that_dies_ends_bound_calls_of_the_others() {
    let victim = 1;
    with_victim(victim, |comm| {
        let collectives = copying(comm);
        let bound = bind(comm, &collectives, 100_000).unwrap();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        for _ in 0..5 {
            bound.enqueue(&stream).unwrap();
        }
        comm.synchronize(&stream).unwrap();
        lose(comm, victim, || {
            bound.enqueue(&stream)?;
            comm.synchronize(&stream)
        });
        let error = bound.enqueue(&stream).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
    });
}

/// Where the model has the copy engine ahead, it is chosen, unless a rank's memory is of a kind that peers cannot map.
#[test]
fn memory_that_peers_cannot_map_is_bound_all_the_same() {
    if kind() != DeviceKind::Host {
        return;
    }
    let model = root().join("models/h200-2.json").display().to_string();
    let ranks = Ranks::of(2).with_env("WARPLINK_MODEL", &model);
    ranks.run(|comm| {
        const COUNT: usize = 64 << 20;
        let collectives = comm.collectives().unwrap();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let memory = |bytes| allocate(comm, bytes);
        let (output, input) = (memory(2 * COUNT), memory(COUNT));
        let call = moved(CollectiveKind::AllGather, COUNT);
        let bound = collectives.bind(&call, &output, &input).unwrap();
        assert_eq!(bound.choice().unwrap().algorithm, Algorithm::CopyEngine);
        // Of no file, on one rank.
        let mut private = vec![0_u8; 2 * COUNT];
        let address = private.as_mut_ptr() as u64;
        // SAFETY: it is memory of the host, which is held, and accessed by the device alone.
        let private = unsafe {
            comm.device()
                .borrow(address, private.len(), Arc::new(private))
        };
        let private = private.unwrap();
        let output = if comm.rank() == 1 { &private } else { &output };
        let part = |rank: usize| vec![1 + rank as u8; COUNT];
        comm.device().upload(&input, &part(comm.rank())).unwrap();
        let bound = collectives.bind(&call, output, &input).unwrap();
        assert_ne!(bound.choice().unwrap().algorithm, Algorithm::CopyEngine);
        bound.enqueue(&stream).unwrap();
        comm.synchronize(&stream).unwrap();
        let mut gathered = vec![0; 2 * COUNT];
        comm.device().download(output, &mut gathered).unwrap();
        assert!(gathered == [part(0), part(1)].concat());
        let error = copying(comm).bind(&call, output, &input).unwrap_err();
        let expected = [ErrorKind::PeerFailed, ErrorKind::Unsupported][comm.rank()];
        assert_eq!(error.kind(), expected, "{error}");
    });
}

/// A rank that waits for others to bind learns of it at once when these can do no more work, though none is lost.
#[test]
fn a_communicator_that_fails_ends_the_wait_for_those_that_bind() {
    let Some(ranks) = at_least(3) else { return };
    let all = TimedBarrier::new(ranks);
    threads_that_end(ranks, with_timeout(Duration::from_secs(60)), |comm| {
        let collectives = comm.collectives().unwrap();
        let copied = copying(&comm);
        let started = Stopwatch::start();
        let failed = match comm.rank() {
            0 => bind(&comm, &copied, 1000).map(drop),
            rank => {
                let stream = comm.create_stream(Priority::Normal).unwrap();
                let memory = allocate(&comm, 64);
                let part = memory.slice(0..8 * rank).unwrap();
                let message = match rank {
                    1 => Message::send(2, &part),
                    _ => Message::receive(1, &part),
                };
                collectives.send_receive(&[message], &stream).unwrap();
                comm.synchronize(&stream)
            }
        };
        let error = failed.unwrap_err();
        let expected = if comm.rank() == 0 {
            ErrorKind::PeerFailed
        } else {
            ErrorKind::Mismatch
        };
        assert_eq!(error.kind(), expected, "{error}");
        assert!(started.elapsed() < SOON, "{error}");
        all.wait();
        comm.abort("the test is over");
    });
}
