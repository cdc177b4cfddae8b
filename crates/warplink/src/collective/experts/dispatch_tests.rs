//! Static tests of the program that dispatches.

use super::super::tests::with_lanes;
use super::super::{ExpertOptions, Overflow, RowLayout, combine::Combine};
use super::{Dispatch, text::text};
use crate::collective::algorithm::tests::{check_refused, check_sharing, check_verified};
use crate::collective::choice::Machine;
use crate::collective::fused::Quantization;
use crate::dtype::DType;
use crate::program::evaluate::Evaluator;
use crate::program::{Parameters, Program, TensorInstance};

/// Options of a layer.
fn options(world: usize, (tokens, slots): (usize, usize), max_rows: usize) -> ExpertOptions {
    ExpertOptions {
        experts: 2 * world,
        top_k: slots,
        max_tokens: tokens,
        max_rows: Some(max_rows),
        elements: 24,
        ..ExpertOptions::default()
    }
}

/// Layouts, treatments of overflow and quantisations, each with each other at least once; and whether tokens are quantised.
fn variants() -> Vec<(RowLayout, Overflow, Option<Quantization>, bool)> {
    use Overflow::{Drop, Fail};
    use RowLayout::{ByExpert, BySource, OncePerRank};
    let (row, block) = (Some(Quantization::PerToken), Some(Quantization::PerBlock));
    let power_of_two = Some(Quantization::PerBlockPowerOfTwo);
    vec![
        (BySource, Fail, None, false),
        (BySource, Drop, None, false),
        (BySource, Fail, block, false),
        (BySource, Drop, row, true),
        (ByExpert, Fail, None, false),
        (ByExpert, Drop, None, false),
        (ByExpert, Fail, row, false),
        (ByExpert, Drop, block, true),
        (OncePerRank, Fail, None, false),
        (OncePerRank, Drop, None, false),
        (OncePerRank, Fail, block, true),
        (OncePerRank, Drop, row, false),
        (BySource, Drop, power_of_two, false),
    ]
}

fn varied(
    (layout, overflow, quantization, quantized_tokens): (
        RowLayout,
        Overflow,
        Option<Quantization>,
        bool,
    ),
    options: ExpertOptions,
) -> ExpertOptions {
    ExpertOptions {
        layout,
        overflow,
        quantization,
        quantized_tokens,
        ..options
    }
}

/// The program of a layer, and its parameters for the launch from a token on; rows go through scratch one at a time.
fn made(options: &ExpertOptions, machine: &Machine, from: usize) -> (Program, Parameters) {
    let dispatch = Dispatch::new(options, machine, (0, false)).unwrap();
    let mut parameters = dispatch.parameters(machine, from);
    parameters.insert("depth", 1);
    (dispatch.program().clone(), parameters)
}

fn check_layer(options: &ExpertOptions, world: usize, (lanes, depth): (usize, i64)) {
    let (program, mut given) = made(options, &with_lanes(world, lanes), 0);
    given.insert("depth", depth);
    check_verified(&program, world, &given);
}

#[test]
fn dispatch_is_verified_for_every_world() {
    for (world, lanes, shape, max_rows) in [
        (1, 1, (2, 2), 3),
        (2, 1, (2, 1), 2),
        (2, 2, (2, 1), 2),
        (3, 1, (1, 1), 1),
    ] {
        let options = varied(variants()[0], options(world, shape, max_rows));
        check_layer(&options, world, (lanes, 1));
    }
}

/// With all options on one rank, where rows overflow; and each layout on two, where they do if they may be dropped.
#[test]
fn every_variant_is_verified() {
    for variant in variants() {
        // With more rows than there can be, some would never be written.
        let rows = if variant.0 == RowLayout::OncePerRank {
            2
        } else {
            3
        };
        check_layer(&varied(variant, options(1, (2, 2), rows)), 1, (1, 1));
        if variant.2.is_none() {
            let drops = variant.1 == Overflow::Drop;
            let max_rows = if drops { 1 } else { 2 };
            check_layer(&varied(variant, options(2, (2, 1), max_rows)), 2, (1, 1));
        }
    }
}

/// Each layout on four ranks, and with quantised rows on two of which two are on their way at a time.
#[test]
fn each_layout_is_verified_for_more_ranks_and_rows() {
    for (plain, quantized) in [(0, 2), (4, 6), (8, 11)] {
        let most = varied(variants()[plain], options(4, (1, 1), 1));
        check_layer(&most, 4, (1, 1));
        let deep = varied(variants()[quantized], options(2, (2, 1), 2));
        check_layer(&deep, 2, (1, 2));
    }
}

/// The rows are the expected ones whatever memory is accessible, with slots without an expert among them.
#[test]
fn dispatch_meets_its_expectation() {
    for (number, variant) in variants().into_iter().enumerate() {
        for (world, lanes, shape, from) in [
            (1, 1, (3, 2), 0),
            (2, 2, (5, 3), 0),
            (2, 2, (5, 3), 2),
            (3, 4, (4, 1), 0),
        ] {
            let expert = |rank: usize, element: usize| {
                let at = (7 * element + 5 * rank + element * element + number) % 11;
                at as i32 % (2 * world as i32 + 3) - 1
            };
            let inputs = |rank: usize, _: usize, tensor: &TensorInstance| {
                let elements = 0..tensor.bytes / tensor.dtype.size();
                let bytes = |element: usize| match tensor.dtype {
                    DType::U32 => ((shape.0 - rank) as u32).to_le_bytes().to_vec(),
                    DType::I32 => expert(rank, element).to_le_bytes().to_vec(),
                    dtype => dtype.encode([((7 * element + 5 * rank) % 11) as f64 - 5.0]),
                };
                elements.flat_map(bytes).collect::<Vec<u8>>()
            };
            let options = varied(variant, options(world, shape, shape.0 * shape.1));
            let (program, given) = made(&options, &with_lanes(world, lanes), from);
            let evaluator = || Evaluator::new(&program, world, 1, &given).unwrap();
            let hidden = evaluator().without_reaching(&["Y".to_owned(), "L".to_owned()]);
            for evaluator in [evaluator(), hidden.unwrap()] {
                if let Err(error) = evaluator.run(inputs) {
                    panic!("{world}, {lanes}, {variant:?}: {error}\n{program}");
                }
            }
        }
    }
}

/// Dispatches may precede and follow combines in their workspace.
#[test]
fn dispatch_shares_the_workspace_of_others() {
    let machine = with_lanes(2, 1);
    for variant in [variants()[0], variants()[7], variants()[10]] {
        let options = varied(variant, options(2, (1, 1), 1));
        let (program, given) = made(&options, &machine, 0);
        let combine = Combine::new(&options, &machine, (0, false)).unwrap();
        let of_combine = combine.parameters(&machine, (0, options.max_tokens), true);
        let both = [(&program, &given), (combine.program(true), &of_combine)];
        check_sharing(&both, 2);
    }
}

/// The program with one fault is rejected for that fault.
#[test]
fn faulty_variants_are_refused() {
    let before = "let before = count(E[0..start] in q * per..(q + 1) * per)";
    let [by_source, drops, by_expert, once] = [0, 1, 5, 9].map(|number| variants()[number]);
    let faults = [
        // Rows of two lanes begin at the same place.
        (
            by_source,
            before,
            "let before = count(E[0..first] in q * per..(q + 1) * per)",
            "race",
        ),
        // Numbers of rows are copied before they have arrived.
        (
            by_source,
            "barrier\n                for p in 0..world { K",
            "for p in 0..world { K",
            "race",
        ),
        // The receiver leaves before all rows are there.
        (
            by_source,
            "                barrier\n            } else",
            "            } else",
            "race",
        ),
        // Rows are copied before they have arrived.
        (
            by_source,
            "                    barrier\n                    let came",
            "                    let came",
            "race",
        ),
        // Rows of two ranks are put in one place.
        (
            by_source,
            "put X[t] to Y[rank][before + j] on q",
            "put X[t] to Y[0][before + j] on q",
            "race",
        ),
        // The receiver copies as many rows as it sends itself.
        (
            by_source,
            "let came = R[slot][world + i * world + p] at most tokens * slots",
            "let came = count(E[start..stop] in p * per..(p + 1) * per)",
            "race",
        ),
        // A word that names no expert is taken for one.
        (
            by_source,
            "let x = E[start + s] at most experts - 1",
            "let x = E[(start + s + 1) % (tokens * slots)] at most experts - 1",
            "out-of-bounds",
        ),
        // Rows that are dropped are stored behind the others.
        (
            drops,
            "if before + j < rows {",
            "if before + j <= rows {",
            "out-of-bounds",
        ),
        // An expert's rows begin behind those of one rank.
        (by_expert, "= integer(up0 + up1)", "= integer(up0)", "race"),
        // A rank states how many rows it has, and not how many it sends.
        (
            by_expert,
            "let up = count(E[0..cut] in",
            "let up = count(E[0..whole] in",
            "out-of-bounds",
        ),
        // Two lanes count the rows of one expert before their own.
        (
            by_expert,
            "let earlier = count(E[0..start] in x..x + 1)",
            "let earlier = count(E[0..first] in x..x + 1)",
            "race",
        ),
        // A token of two experts of a rank has two rows there.
        (
            once,
            "let own = count(rows of E[start..stop]",
            "let own = count(E[start..stop]",
            "out-of-bounds",
        ),
        // The other half of the workspace is another launch's.
        (
            by_expert,
            "M[slot][each + ((rank * world",
            "M[0][each + ((rank * world",
            "deadlock",
        ),
    ];
    for (variant, right, wrong, kind) in faults {
        let options = varied(variant, options(2, (2, 2), 4));
        let options = ExpertOptions {
            max_rows: Some(if variant == by_source { 4 } else { 3 }),
            ..options
        };
        let (_, given) = made(&options, &with_lanes(2, 2), 0);
        let text = text(&options, 2);
        check_refused(&text, (right, wrong), &given, kind);
    }
}
