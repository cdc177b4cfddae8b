//! Collectives with residual, norm and quantisation: right, and bit for bit the same on all ranks.

use crate::common::{
    TimedBarrier, assert_error, assert_says, recorded, runs_case, threads_that_end, threads_with,
    world, worlds,
};
use crate::data::by;
use crate::expected::assert_alike;
use crate::fused_rows::{Made, USUAL, Wanted, all_wanted, fused};
use crate::scaled::unhurried;
use warplink::collective::{Algorithm, Epilogue, Fused, FusedKind, FusedMemory, Quantization};
use warplink::device::Priority;
use warplink::{Collectives, Communicator, DType, ErrorKind};

/// Calls eagerly, and in a graph that is replayed so often, with other inputs each time, and checks all; what all ranks have of
/// it, they have alike.
pub(crate) fn play(comm: &Communicator, collectives: &Collectives, made: &Made, replays: usize) {
    let stream = comm.create_stream(Priority::Normal).unwrap();
    let run = |round: usize, launch: &dyn Fn()| {
        made.fill(comm, round);
        comm.barrier().unwrap();
        launch();
        comm.synchronize(&stream).unwrap();
        let found = made.found(comm);
        made.check(round, &found);
        let common = match made.call.kind {
            FusedKind::AllReduce => &found[..],
            FusedKind::ReduceScatter => &[],
            _ => &found[2..],
        };
        let common: Vec<u8> = common.iter().flatten().flatten().copied().collect();
        assert_alike(comm, &common, made.call.kind);
    };
    let enqueue = || {
        let enqueued = collectives.fused(&made.call, &made.memory(), &stream);
        enqueued.unwrap();
    };
    (0..2).for_each(|round| run(round, &enqueue));
    let graph = recorded(&stream, enqueue);
    (2..2 + replays).for_each(|round| run(round, &|| graph.launch(&stream).unwrap()));
}

/// With rows that fit at once and in pieces.
#[test]
fn fused_calls_are_right_and_the_same_on_all_ranks() {
    for ranks in worlds([1, 2, 3, 8]) {
        threads_with(ranks, unhurried, |comm| {
            let algorithms = [
                None,
                Some(Algorithm::OneShot),
                Some(Algorithm::Chunks),
                Some(Algorithm::Direct),
                Some(Algorithm::TwoShot),
            ];
            let all = algorithms.map(|algorithm| (algorithm, by(comm, algorithm, 2 << 20)));
            let shapes = [(5, 137), (2, 4100), (70, 257)];
            for (of, wanted) in all_wanted().into_iter().enumerate() {
                // Many ranks keep a small machine busy.
                let few = !(2..=3).contains(&ranks) || of > 3;
                for (number, (tokens, width)) in
                    shapes[..if few { 1 } else { 3 }].iter().enumerate()
                {
                    let call = fused(FusedKind::AllReduce, *tokens, *width, wanted);
                    for (which, (algorithm, collectives)) in all.iter().enumerate() {
                        // More tensors than a lane tells others of.
                        if wanted.sum && *algorithm == Some(Algorithm::Direct) {
                            continue;
                        }
                        // It is for results that follow from h, where that is stored.
                        if !wanted.residual_out && *algorithm == Some(Algorithm::TwoShot) {
                            continue;
                        }
                        if !runs_case(number + of + which, all.len()) {
                            continue;
                        }
                        let in_place = (number + of + which).is_multiple_of(2);
                        let made = Made::new(comm, (call, wanted), in_place);
                        play(comm, collectives, &made, 2);
                    }
                }
            }
        });
    }
}

/// Where ranks own rows, of the sum or of what is gathered.
#[test]
fn fused_calls_of_owned_rows_are_right() {
    for ranks in worlds([1, 2, 3, 8]) {
        threads_with(ranks, unhurried, |comm| {
            let collectives = by(comm, None, 2 << 20);
            for kind in FusedKind::ALL.into_iter().skip(1) {
                for (of, wanted) in all_wanted().into_iter().enumerate() {
                    if !runs_case(of + kind as usize, 3) {
                        continue;
                    }
                    let rows = if of == 0 && ranks < 8 { 40 } else { 2 };
                    let call = fused(kind, rows * ranks, 137, wanted);
                    let made = Made::new(comm, (call, wanted), of % 2 == 0);
                    play(comm, &collectives, &made, 2);
                }
            }
        });
    }
}

#[test]
fn fused_calls_that_do_not_fit_are_refused() {
    threads_with(world(2), unhurried, |comm| {
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let collectives = by(comm, None, 2 << 20);
        let call = fused(FusedKind::AllReduce, 3, 40, USUAL);
        let made = Made::new(comm, (call, USUAL), false);
        let memory = made.memory();
        let half = made.slices[6].slice(0..100).unwrap();
        let of = |kind| Fused { kind, ..call };
        let with = |quantization| Fused {
            epilogue: Epilogue {
                quantization: Some(quantization),
                ..call.epilogue
            },
            ..call
        };
        let refused = [
            (
                Fused { tokens: 0, ..call },
                memory,
                "expected at least one of one",
            ),
            (
                Fused {
                    dtype: DType::F64,
                    ..call
                },
                memory,
                "expected f16, bf16 or f32",
            ),
            (
                Fused { width: 41, ..call },
                memory,
                "expected 246 at a multiple of 2",
            ),
            (
                call,
                FusedMemory {
                    output: memory.residual,
                    residual_out: memory.residual,
                    ..memory
                },
                "overlaps",
            ),
            (
                call,
                FusedMemory {
                    output: memory.weight,
                    ..memory
                },
                "output has 80 bytes",
            ),
            (
                call,
                FusedMemory {
                    output: Some(&half),
                    ..memory
                },
                "output has 100 bytes",
            ),
            (
                call,
                FusedMemory {
                    scale: Some(&half),
                    ..memory
                },
                "a quantisation is given without memory",
            ),
            (
                with(Quantization::Static),
                memory,
                "a quantisation is given without memory",
            ),
            (
                call,
                FusedMemory {
                    weight: None,
                    ..memory
                },
                "a norm without a weight",
            ),
            (
                call,
                FusedMemory {
                    output: None,
                    ..memory
                },
                "nothing is stored of the norm",
            ),
        ];
        let odd = if comm.world() == 2 {
            Some(FusedKind::ALL)
        } else {
            None
        };
        let odd = odd.into_iter().flatten().skip(1);
        let odd = odd.map(|kind| (of(kind), memory, "which own as many each"));
        for (call, memory, text) in refused.into_iter().chain(odd) {
            let error = collectives.fused(&call, &memory, &stream).unwrap_err();
            let says = ["fused collective", text];
            assert_error(&error, ErrorKind::InvalidArgument, &says);
        }
        let wide = fused(FusedKind::AllReduce, 1, 1 << 20, USUAL);
        let made = Made::new(comm, (wide, USUAL), false);
        let error = collectives
            .fused(&wide, &made.memory(), &stream)
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    });
}

/// Ranks that call different things find that out in the call: other numbers of rows, and a bias on some only.
#[test]
fn fused_calls_that_differ_are_named() {
    let ranks = world(2);
    for (more, bias, text) in [(1, false, "rows of 40 bf16"), (0, true, "residual, bias")] {
        let all = TimedBarrier::new(ranks);
        threads_that_end(ranks, unhurried, |comm| {
            let stream = comm.create_stream(Priority::Normal).unwrap();
            let collectives = by(&comm, None, 2 << 20);
            let odd = comm.rank() % 2;
            let wanted = Wanted {
                bias: bias && odd == 1,
                ..USUAL
            };
            let call = fused(FusedKind::AllReduce, 3 + more * odd, 40, wanted);
            let made = Made::new(&comm, (call, wanted), false);
            made.fill(&comm, 0);
            let enqueued = collectives.fused(&call, &made.memory(), &stream);
            let done = enqueued.and_then(|()| comm.synchronize(&stream));
            if comm.world() > 1 {
                let error = done.unwrap_err();
                // A rank may hear of it from one that has found it.
                let kinds = [ErrorKind::Mismatch, ErrorKind::PeerFailed];
                assert!(kinds.contains(&error.kind()), "{error}");
                assert_says(&error, &[text]);
            }
            // None leaves while another still waits.
            all.wait();
            comm.abort("the test is over");
        });
    }
}
