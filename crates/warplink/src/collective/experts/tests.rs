//! Static tests of the program that combines.

use super::combine::{Combine, text};
use super::{ExpertOptions, RowLayout};
use crate::collective::Algorithm;
use crate::collective::algorithm::tests::{check_refused, check_sharing, check_verified, machine};
use crate::collective::call::{Call, CollectiveKind};
use crate::collective::choice::Machine;
use crate::device::ReduceOp;
use crate::dtype::DType;
use crate::program::evaluate::Evaluator;
use crate::program::parameters::Value;
use crate::program::{Parameters, Program, TensorInstance};

/// A machine of `world` ranks whose kernels have this many lanes for data.
pub(super) fn with_lanes(world: usize, lanes: usize) -> Machine {
    Machine {
        most_lanes: lanes,
        forced_threads: Some(128),
        ..machine(world)
    }
}

/// A layer with this number of experts of a token, the lanes of its kernels, and the first token of a launch.
type Shape = (usize, usize, usize);

const PLAIN: (RowLayout, bool) = (RowLayout::BySource, true);

fn options(world: usize, experts: usize, layout: RowLayout, elements: usize) -> ExpertOptions {
    ExpertOptions {
        experts: experts * world,
        top_k: experts,
        max_tokens: 3,
        max_rows: Some(4),
        elements,
        layout,
        ..ExpertOptions::default()
    }
}

/// The program of a layer with rows in a layout, with or without weights, and its parameters for the launch from a token on.
fn made(
    world: usize,
    (experts, lanes, from): Shape,
    kind: (RowLayout, bool),
    elements: usize,
) -> (Program, Parameters) {
    let tokens = options(world, experts, kind.0, elements).max_tokens;
    made_for(tokens, world, (experts, lanes, from), kind, elements)
}

/// The same for a call of so many tokens.
fn made_for(
    tokens: usize,
    world: usize,
    (experts, lanes, from): Shape,
    (layout, weighted): (RowLayout, bool),
    elements: usize,
) -> (Program, Parameters) {
    let machine = with_lanes(world, lanes);
    let options = ExpertOptions {
        max_tokens: tokens,
        ..options(world, experts, layout, elements)
    };
    let combine = Combine::new(&options, &machine, (0, false)).unwrap();
    let parameters = combine.parameters(&machine, (from, tokens), weighted);
    (combine.program(weighted).clone(), parameters)
}

#[test]
fn combine_is_verified_for_every_world() {
    for (world, shape, kind) in [
        (1, (1, 1, 0), PLAIN),
        (2, (1, 2, 0), PLAIN),
        (2, (3, 1, 1), PLAIN),
        (2, (9, 1, 2), PLAIN),
        (3, (2, 1, 1), PLAIN),
        (2, (2, 1, 0), (RowLayout::BySource, false)),
        (2, (2, 1, 1), (RowLayout::ByExpert, true)),
        (3, (1, 1, 0), (RowLayout::ByExpert, false)),
        (2, (3, 2, 0), (RowLayout::OncePerRank, false)),
        (3, (1, 1, 1), (RowLayout::OncePerRank, true)),
        (4, (1, 1, 0), PLAIN),
        (4, (1, 1, 0), (RowLayout::ByExpert, true)),
        (4, (1, 1, 0), (RowLayout::OncePerRank, false)),
    ] {
        let (program, given) = made(world, shape, kind, 24);
        check_verified(&program, world, &given);
    }
}

/// The sums are the expected ones whatever memory is accessible, with slots without an expert among them.
#[test]
fn combine_meets_its_expectation() {
    for (world, experts, from, kind) in [
        (1, 1, 0, PLAIN),
        (2, 3, 0, PLAIN),
        (2, 9, 1, PLAIN),
        (3, 2, 0, PLAIN),
        (2, 2, 0, (RowLayout::BySource, false)),
        (2, 20, 0, (RowLayout::BySource, false)),
        (3, 2, 1, (RowLayout::ByExpert, true)),
        (2, 3, 0, (RowLayout::OncePerRank, false)),
        (3, 1, 0, (RowLayout::OncePerRank, true)),
    ] {
        let places = options(world, experts, kind.0, 137).span(world);
        let made = made(world, (experts, 2, from), kind, 137);
        check_sums(made, (world, world * places), 3);
    }
}

/// The evaluator finds what is expected on ranks of which the first has so many tokens, and each other one less.
fn check_sums(
    (program, given): (Program, Parameters),
    (world, places): (usize, usize),
    tokens: usize,
) {
    let inputs = |rank: usize, number: usize, tensor: &TensorInstance| {
        let at = |element: usize| (7 * element + 5 * number + 3 * rank) % 11;
        let elements = 0..tensor.bytes / tensor.dtype.size();
        let bytes = |element: usize| match tensor.dtype {
            DType::I32 => (tokens.saturating_sub(rank) as u32).to_le_bytes().to_vec(),
            // Any row of any rank, and none.
            DType::U32 => ((at(element) + element) as u32 % (places as u32 + 1))
                .to_le_bytes()
                .to_vec(),
            dtype => dtype.encode([at(element) as f64 - 5.0]),
        };
        elements.flat_map(bytes).collect::<Vec<u8>>()
    };
    let evaluator = || Evaluator::new(&program, world, 1, &given).unwrap();
    for evaluator in [
        evaluator(),
        evaluator().without_reaching(&["X".to_owned()]).unwrap(),
    ] {
        if let Err(error) = evaluator.run(inputs) {
            panic!("{given}: {error}\n{program}");
        }
    }
}

/// Lanes may add up parts of one token.
#[test]
fn several_lanes_add_up_a_token() {
    for (experts, kind) in [
        (2, PLAIN),
        (9, PLAIN),
        (2, (RowLayout::ByExpert, false)),
        (2, (RowLayout::OncePerRank, true)),
    ] {
        let (program, given) = made_for(1, 2, (experts, 2, 0), kind, 16);
        assert_eq!(given.value("parts"), Some(&Value::from(2)), "{given}");
        check_verified(&program, 2, &given);
        let places = options(2, experts, kind.0, 16).span(2);
        check_sums((program, given), (2, 2 * places), 1);
    }
}

/// Combines may precede and follow a collective in its workspace.
#[test]
fn combine_shares_the_workspace_of_collectives() {
    let machine = with_lanes(2, 1);
    let (combine, of_combine) = made(2, (1, 1, 2), PLAIN, 24);
    let call = Call {
        kind: CollectiveKind::AllReduce,
        op: Some(ReduceOp::Sum),
        dtype: DType::F32,
        count: 100,
        root: None,
    };
    let choice = crate::collective::Choice {
        lanes: 1,
        threads: 128,
        ..machine.shape(Algorithm::Direct, &call)
    };
    let program = Algorithm::Direct.program(call.kind).unwrap().unwrap();
    let given = [
        (&combine, &of_combine),
        (program, &machine.parameters(&call, &choice)),
    ];
    check_sharing(&given, 2);
}

/// The program with one fault is rejected for that fault.
#[test]
fn faulty_variants_are_refused() {
    let variants = [
        // Scratch of the previous launch is overwritten while a rank may still read it.
        ("let slot = epoch % 2", "let slot = 0", "race"),
        // Experts' rows are overwritten while a peer may still read them.
        (
            "\n                barrier\n            } else",
            "\n            } else",
            "race",
        ),
        // Requests are read before they have arrived.
        ("barrier\n                    for p", "for p", "race"),
        // Rows are read before they have arrived.
        (
            "barrier\n                    if t < own",
            "if t < own",
            "race",
        ),
        // Two lanes state what they need in the same place.
        (
            "let asking = (i * world + rank)",
            "let asking = rank",
            "race",
        ),
        // A slot without an expert is taken for a row.
        (
            "if p0 < none else 0",
            "if p0 <= none else 0",
            "out-of-bounds",
        ),
        // A rank without a token states nothing.
        (
            "put N to R[slot][asking..asking + 2] on (rank + r) % world",
            "",
            "unwritten-read",
        ),
    ];
    let (_, given) = made(2, (2, 2, 0), PLAIN, 24);
    let text = text(&options(2, 2, RowLayout::BySource, 24), 2, true);
    for (right, wrong, kind) in variants {
        check_refused(&text, (right, wrong), &given, kind);
    }
}
