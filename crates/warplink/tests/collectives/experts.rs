//! Dispatch and combine of a layer of experts, compared with a reference.

use crate::common::{
    Stopwatch, TimedBarrier, assert_error, assert_says, delayed, lose, processes, recorded,
    runs_case, several, threads_that_end, unchanged, with_victim, world, worlds,
};
use crate::data::{calling, calling_with, library};
use crate::layer::{Choices, GUARD_BYTE, Input, Layer, download, inputs};
use std::time::Duration;
use warplink::collective::{
    Dispatched, ExpertOptions, Experts, Overflow, Quantization, RowLayout, Tokens,
};
use warplink::device::Priority;
use warplink::{Communicator, DType, Error, ErrorKind};

/// Any routing, on every number of ranks, with rows of any length: compared bit for bit.
#[test]
fn tokens_go_to_their_experts_and_come_back_as_weighted_sums() {
    for ranks in worlds(1..=8) {
        calling(ranks, |comm, collectives, stream| {
            let cases = [
                (Choices::Random, DType::BF16, 37),
                (Choices::AllToOne(ranks - 1), DType::F16, 8),
                (Choices::Careless, DType::F32, 130),
                (Choices::Nobody, DType::BF16, 16),
            ];
            for (number, (choices, dtype, elements)) in cases.into_iter().enumerate() {
                let options = ExpertOptions {
                    experts: 4 * ranks,
                    top_k: 3,
                    max_tokens: 29,
                    elements,
                    dtype,
                    ..ExpertOptions::default()
                };
                let layer = Layer::new(comm, collectives.experts(&options).unwrap(), options);
                for turn in 0..2 {
                    let all = inputs(&options, choices, ranks, 10 * number + turn);
                    layer.round(&all, stream);
                }
            }
        });
    }
}

/// Every layout with every treatment of overflow and form of rows, random and with all rows for one rank, compared bit for
/// bit. Rows overflow wherever they may be dropped. On GPUs some of them are run.
#[test]
fn every_layout_drops_what_overflows_and_quantizes() {
    for ranks in worlds([1, 2, 4, 8]) {
        calling(ranks, |comm, collectives, stream| {
            let mut number = 0;
            for layout in RowLayout::ALL {
                for (overflow, quantization, quantized_tokens) in [
                    (Overflow::Fail, None, false),
                    (Overflow::Drop, None, false),
                    (Overflow::Fail, Some(Quantization::PerBlock), false),
                    (Overflow::Drop, Some(Quantization::PerToken), false),
                    (Overflow::Drop, Some(Quantization::PerBlock), true),
                    (
                        Overflow::Drop,
                        Some(Quantization::PerBlockPowerOfTwo),
                        false,
                    ),
                ] {
                    number += 1;
                    if !runs_case(number, 4) {
                        continue;
                    }
                    let drops = overflow == Overflow::Drop;
                    let options = ExpertOptions {
                        experts: 3 * ranks,
                        top_k: 3,
                        max_tokens: 13,
                        max_rows: Some(if drops { 5 } else { 3 * 13 }),
                        elements: [140, 24][number % 2],
                        dtype: [DType::BF16, DType::F32, DType::F16][number % 3],
                        layout,
                        overflow,
                        quantization,
                        quantized_tokens,
                    };
                    let layer = Layer::new(comm, collectives.experts(&options).unwrap(), options);
                    for choices in [Choices::Careless, Choices::AllToOne(number % ranks)] {
                        let all = inputs(&options, choices, ranks, number);
                        layer.round(&all, stream);
                    }
                }
            }
        });
    }
}

/// Every number of experts of a token that models have, of few and of many experts. All slots of a token may name one expert,
/// so that there are as many rows as there can be.
#[test]
fn every_number_of_experts_of_a_token_is_served() {
    let ranks = world(2);
    calling(ranks, |comm, collectives, stream| {
        let mut number = 0;
        for (top_k, experts) in (1..=8).flat_map(|top_k| [8, 64, 256].map(|all| (top_k, all))) {
            for layout in RowLayout::ALL {
                number += 1;
                if !runs_case(number, 6) {
                    continue;
                }
                let options = ExpertOptions {
                    experts,
                    top_k,
                    max_tokens: 3,
                    elements: 16,
                    layout,
                    overflow: [Overflow::Drop, Overflow::Fail][number % 2],
                    ..ExpertOptions::default()
                };
                let layer = Layer::new(comm, collectives.experts(&options).unwrap(), options);
                for choices in [Choices::Random, Choices::OneExpert(experts - 1)] {
                    let all = inputs(&options, choices, ranks, number);
                    layer.round(&all, stream);
                }
            }
        }
    });
}

/// Several dispatches may wait for their combines, which take their routings in any order.
#[test]
fn dispatches_are_combined_by_their_routings() {
    let ranks = world(2);
    calling(ranks, |comm, collectives, stream| {
        let options = small(None, 24);
        let experts = collectives.experts(&options).unwrap();
        let batches: Vec<_> = (0..3)
            .map(|number| {
                let all = inputs(&options, Choices::Random, ranks, number);
                let layer = Layer::new(comm, experts.clone(), options);
                layer.clear();
                layer.fill(&all[comm.rank()]);
                (layer, all)
            })
            .collect();
        let rank = comm.rank();
        for (layer, all) in &batches {
            let tokens = layer.tokens_of(&all[rank]);
            layer.dispatch(tokens, stream).unwrap();
        }
        comm.synchronize(stream).unwrap();
        for (layer, all) in batches.iter().rev() {
            layer.work(all);
            let tokens = layer.tokens_of(&all[rank]);
            layer.combine(tokens, stream).unwrap();
            comm.synchronize(stream).unwrap();
            layer.check(&all[rank]);
        }
    });
}

/// Two layers, of ranks that are processes. scripts/device-sanitizer.sh runs this: it is short.
#[test]
fn processes_dispatch_and_combine() {
    processes(world(3), |comm| {
        let ranks = comm.world();
        let collectives = comm.collectives().unwrap();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        for (dtype, elements) in [(DType::BF16, 37), (DType::F32, 130)] {
            let options = ExpertOptions {
                experts: 2 * ranks,
                top_k: 2,
                max_tokens: 11,
                max_rows: None,
                elements,
                dtype,
                ..ExpertOptions::default()
            };
            let layer = Layer::new(comm, collectives.experts(&options).unwrap(), options);
            for (turn, choices) in [Choices::Random, Choices::AllToOne(0)]
                .into_iter()
                .enumerate()
            {
                let all = inputs(&options, choices, ranks, turn);
                layer.round(&all, &stream);
            }
        }
    });
}

/// The top 8 of 64 experts, with delays on the host device.
#[test]
fn the_top_8_of_64_experts_are_reached() {
    let ranks = world(4);
    calling_with(ranks, delayed(20), |comm, collectives, stream| {
        let options = ExpertOptions {
            experts: 64,
            top_k: 8,
            max_tokens: 64,
            max_rows: None,
            elements: 256,
            dtype: DType::BF16,
            ..ExpertOptions::default()
        };
        let layer = Layer::new(comm, collectives.experts(&options).unwrap(), options);
        for choices in [Choices::Random, Choices::AllToOne(1), Choices::Nobody] {
            let all = inputs(&options, choices, ranks, 3);
            layer.round(&all, stream);
        }
    });
}

/// The routing changes from launch to launch of one graph: it is in device memory alone.
#[test]
fn a_graph_serves_every_routing() {
    let ranks = world(3);
    calling(ranks, |comm, collectives, stream| {
        let options = ExpertOptions {
            experts: 12,
            top_k: 2,
            max_tokens: 20,
            max_rows: None,
            elements: 24,
            dtype: DType::F32,
            ..ExpertOptions::default()
        };
        let layer = Layer::new(comm, collectives.experts(&options).unwrap(), options);
        let tokens = options.max_tokens;
        let dispatch = recorded(stream, || layer.dispatch(tokens, stream).unwrap());
        let combine = recorded(stream, || layer.combine(tokens, stream).unwrap());
        for turn in 0..12 {
            let choices = [
                Choices::Random,
                Choices::AllToOne(turn % 3),
                Choices::Nobody,
            ];
            let mut all = inputs(&options, choices[turn % 3], ranks, turn);
            // A graph has as many tokens each time; those that are too many choose nobody.
            for input in &mut all {
                input.tokens.resize(tokens * options.elements, 1.0);
                input.experts.resize(tokens * options.top_k, -1);
                input.weights.resize(tokens * options.top_k, 0.5);
            }
            layer.clear();
            layer.fill(&all[comm.rank()]);
            dispatch.launch(stream).unwrap();
            comm.synchronize(stream).unwrap();
            layer.work(&all);
            combine.launch(stream).unwrap();
            comm.synchronize(stream).unwrap();
            layer.check(&all[comm.rank()]);
        }
    });
}

fn small(max_rows: Option<usize>, elements: usize) -> ExpertOptions {
    ExpertOptions {
        experts: 2 * world(3),
        top_k: 2,
        max_tokens: 16,
        max_rows,
        elements,
        dtype: DType::BF16,
        ..ExpertOptions::default()
    }
}

/// Dispatches tokens that all choose the experts of rank 1 from rank 0, and of themselves elsewhere. Returns whether no row
/// came, and what went wrong.
fn dispatch_to_one(
    comm: &Communicator,
    experts: &Experts,
    options: &ExpertOptions,
) -> Result<(bool, Result<(), Error>), Error> {
    let stream = comm.create_stream(Priority::Normal)?;
    let layer = Layer::new(comm, experts.clone(), *options);
    let to = if comm.rank() == 0 { 1 } else { comm.rank() };
    let mut input = Input::new(options, Choices::AllToOne(to), 0, comm.world(), 1);
    let tokens = if comm.rank() == 0 { 10 } else { 2 };
    input.tokens.resize(tokens * options.elements, 1.0);
    input.experts = vec![2 * to as i32; tokens * options.top_k];
    input.weights = vec![1.0; tokens * options.top_k];
    layer.fill(&input);
    layer.dispatch(tokens, &stream)?;
    let done = comm.synchronize(&stream);
    let rows = download(comm, &layer.rows.slice(0..options.row_bytes())?);
    let untouched = rows.iter().all(|byte| *byte == GUARD_BYTE);
    Ok((untouched, done))
}

/// A routing with more rows than the memory is for is told on the rank that sends and on the one that gets them.
#[test]
fn more_rows_than_the_limit_are_told_on_both_ranks() {
    let says = "rank 0 has 20 rows for rank 1; expected at most 7";
    let options = |_| ExpertOptions {
        overflow: Overflow::Fail,
        ..small(Some(7), 12)
    };
    failing(options, &[(0, 1, says), (1, 0, says)]);
}

#[test]
fn ranks_with_other_options_are_named() {
    let last = world(3) - 1;
    for layout in RowLayout::ALL {
        let usual = ExpertOptions {
            layout,
            ..small(Some(32), 12)
        };
        let (elements, experts, top_k) = (13, 2 * usual.experts, 1);
        for other in [
            ExpertOptions { elements, ..usual },
            ExpertOptions { experts, ..usual },
            ExpertOptions { top_k, ..usual },
        ] {
            let says = format!(
                "expected a dispatch of up to 16 tokens of {} of {} experts, 32 rows of a rank, of {} bf16",
                other.top_k, other.experts, other.elements
            );
            let options = |rank| if rank == last { other } else { usual };
            failing(options, &[(last, usize::MAX, &says)]);
        }
    }
}

/// Each rank of `told` gets a mismatch with a peer, any where it is none, that says this; the others hear that they
/// cannot go on.
fn failing(options: impl Fn(usize) -> ExpertOptions + Sync, told: &[(usize, usize, &str)]) {
    let Some(ranks) = several(3) else { return };
    let all = TimedBarrier::new(ranks);
    threads_that_end(ranks, unchanged, |comm| {
        let options = options(comm.rank());
        let layer = comm.collectives().unwrap().experts(&options).unwrap();
        // Kernels are compiled by now.
        all.wait();
        let started = Stopwatch::start();
        let is_told = told.iter().any(|(rank, ..)| *rank == comm.rank());
        let (untouched, error) = match dispatch_to_one(&comm, &layer, &options) {
            // What was right for this rank is done; what comes next is not.
            Ok((untouched, Ok(()))) if !is_told => (untouched, next_failure(&comm, started)),
            Ok((untouched, done)) => (untouched, done.unwrap_err()),
            Err(error) => (true, error),
        };
        let took = started.elapsed();
        all.wait();
        comm.abort("the test is over");
        assert!(took < Duration::from_secs(5), "{error}");
        if !is_told {
            let kinds = [ErrorKind::Mismatch, ErrorKind::PeerFailed];
            assert!(kinds.contains(&error.kind()), "{error}");
        }
        for (rank, peer, says) in told {
            if *rank != comm.rank() {
                continue;
            }
            assert!(untouched || *rank != 1, "rows came that do not fit");
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
            assert!(
                *peer == usize::MAX || error.peer() == Some(*peer),
                "{error}"
            );
            assert_says(&error, &[says]);
        }
    });
}

/// Error of a stream once this rank learns that the communicator has failed.
fn next_failure(comm: &Communicator, since: Stopwatch) -> Error {
    let stream = comm.create_stream(Priority::Normal).unwrap();
    loop {
        if let Err(error) = comm.synchronize(&stream) {
            return error;
        }
        assert!(
            since.elapsed() < Duration::from_secs(5),
            "it hears of no failure"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_rank_that_dies_ends_the_dispatch_of_the_others() {
    let victim = 1;
    with_victim(victim, |comm| {
        let options = small(None, 64);
        dispatch_to_one_right(comm, &options).unwrap();
        lose(comm, victim, || dispatch_to_one_right(comm, &options));
    });
}

/// Dispatches and combines a few tokens.
fn dispatch_to_one_right(comm: &Communicator, options: &ExpertOptions) -> Result<(), Error> {
    let collectives = comm.collectives()?;
    let stream = comm.create_stream(Priority::Normal)?;
    let layer = Layer::new(comm, collectives.experts(options)?, *options);
    let input = Input::new(options, Choices::Random, comm.rank(), comm.world(), 2);
    let tokens = layer.tokens_of(&input);
    layer.fill(&input);
    layer.dispatch(tokens, &stream)?;
    layer.combine(tokens, &stream)?;
    comm.synchronize(&stream)
}

#[test]
fn only_what_was_dispatched_is_combined() {
    calling(world(2), |comm, collectives, stream| {
        let options = small(None, 64);
        let layer = Layer::new(comm, collectives.experts(&options).unwrap(), options);
        let input = Input::new(&options, Choices::Random, comm.rank(), comm.world(), 2);
        let tokens = layer.tokens_of(&input);
        layer.fill(&input);
        let refused = |done: Result<(), Error>, says: &str| {
            let error = done.unwrap_err();
            assert_error(&error, ErrorKind::InvalidArgument, &["combine", says]);
        };
        layer.dispatch(tokens, stream).unwrap();
        refused(layer.combine(tokens - 1, stream), "as the dispatch had");
        let other = collectives.experts(&options).unwrap();
        let by_other = layer.combine_by(&other, tokens, stream);
        refused(by_other, "a routing of another layer");
        layer.combine(tokens, stream).unwrap();
        comm.synchronize(stream).unwrap();
    });
}

/// A single rank has no peer to agree with that a call fails.
#[test]
fn a_single_rank_may_drop_rows_only() {
    calling(1, |_, collectives, _| {
        let options = |max_rows| ExpertOptions {
            overflow: Overflow::Fail,
            ..small(Some(max_rows), 8)
        };
        let error = collectives.experts(&options(31)).unwrap_err();
        let says = "max_rows is 31; expected at least 32";
        assert_error(&error, ErrorKind::InvalidArgument, &[says]);
        collectives.experts(&options(32)).unwrap();
    });
}

#[test]
fn layers_that_cannot_be_are_refused() {
    calling(world(2), |comm, collectives, stream| {
        let good = ExpertOptions {
            experts: 4,
            overflow: Overflow::Fail,
            ..small(None, 8)
        };
        let refused = |options: ExpertOptions, kind: ErrorKind, says: &str| {
            let error = collectives.experts(&options).unwrap_err();
            assert_error(&error, kind, &["make a layer of experts", says]);
        };
        let (dtype, elements, max_tokens) = (DType::I32, 1 << 20, 1 << 33);
        let quantization = Some(Quantization::Mxfp8);
        let quantized_tokens = true;
        let kinds = "expected per_token, per_block or per_block_power_of_two";
        for (options, says) in [
            (ExpertOptions { experts: 5, ..good }, "5 experts on 2 ranks"),
            (ExpertOptions { top_k: 0, ..good }, "at least one of each"),
            (
                ExpertOptions { top_k: 256, ..good },
                "256 experts of a token; expected at most 255",
            ),
            (
                ExpertOptions {
                    experts: 1 << 16,
                    ..good
                },
                "65536 experts; expected at most 65535",
            ),
            (ExpertOptions { dtype, ..good }, "rows of i32"),
            (ExpertOptions { max_tokens, ..good }, "2^32 rows"),
            (
                ExpertOptions {
                    quantization,
                    ..good
                },
                &format!("quantization mxfp8; {kinds}"),
            ),
            (
                ExpertOptions {
                    quantized_tokens,
                    ..good
                },
                "tokens arrive quantised, and no quantization is given",
            ),
        ] {
            refused(options, ErrorKind::InvalidArgument, says);
        }
        let options = ExpertOptions { elements, ..good };
        refused(options, ErrorKind::Unsupported, "rows of 2097152 bytes");
        let layer = Layer::new(comm, collectives.experts(&good).unwrap(), good);
        let short = Dispatched {
            counts: &layer.counts.slice(0..4).unwrap(),
            ..layer.dispatched()
        };
        let none = layer.tokens.slice(0..0).unwrap();
        let nobody = layer.choices.slice(0..0).unwrap();
        let sent = Tokens::new(&none, &nobody);
        let dispatch = |into: &Dispatched<'_>| layer.experts.dispatch(&sent, into, stream);
        let error = dispatch(&short).unwrap_err();
        let says = "the counts of rows have 4 bytes; expected 8";
        assert_says(&error, &["dispatch", says]);
        let counted = Dispatched {
            dropped: Some(&layer.counts),
            ..layer.dispatched()
        };
        let error = dispatch(&counted).unwrap_err();
        let says = "the counts of dropped rows are given; expected none with these options";
        assert_says(&error, &[says]);
        if let Some(collectives) = library(comm) {
            let error = collectives.experts(&good).unwrap_err();
            assert_says(&error, &["cannot read counts from device memory"]);
        }
    });
}
