//! Static tests of the program that dispatches.

use super::super::tests::with_lanes;
use super::super::{ExpertOptions, combine::Combine};
use super::{Dispatch, text};
use crate::collective::choice::Machine;
use crate::dtype::DType;
use crate::program::evaluate::Evaluator;
use crate::program::verify::{verify, verify_sharing};
use crate::program::{Parameters, Program, TensorInstance};

/// Options of a layer.
fn options(world: usize, (tokens, slots): (usize, usize), max_rows: usize) -> ExpertOptions {
    ExpertOptions {
        experts: 2 * world,
        top_k: slots,
        max_tokens: tokens,
        max_rows: Some(max_rows),
        elements: 24,
        dtype: DType::BF16,
    }
}

/// The program of a layer, and its parameters for the launch from a token on; rows go through scratch one at a time.
fn made(options: &ExpertOptions, machine: &Machine, from: usize) -> (Program, Parameters) {
    let dispatch = Dispatch::new(options, machine, (0, false)).unwrap();
    let mut parameters = dispatch.parameters(machine, from);
    parameters.insert("depth", 1);
    (dispatch.program().clone(), parameters)
}

#[test]
#[cfg_attr(
    warplink_tsan,
    ignore = "takes a minute under the sanitizer, which sees the verifier in other tests"
)]
fn dispatch_is_verified_for_every_world() {
    for (world, lanes, shape, max_rows) in [
        (1, 1, (2, 2), 3),
        (2, 1, (2, 1), 2),
        (2, 2, (2, 1), 2),
        (3, 1, (1, 1), 1),
    ] {
        let (program, given) = made(
            &options(world, shape, max_rows),
            &with_lanes(world, lanes),
            0,
        );
        if let Err(found) = verify(&program, world, 1, &given) {
            panic!("{world}, {given}: {}\n{program}", found[0]);
        }
    }
}

/// The rows are the expected ones whatever memory is accessible, with slots without an expert among them.
#[test]
fn dispatch_meets_its_expectation() {
    for (world, lanes, shape, from) in [
        (1, 1, (3, 2), 0),
        (2, 2, (5, 3), 0),
        (2, 2, (5, 3), 2),
        (3, 4, (4, 1), 0),
    ] {
        let inputs = |rank: usize, _: usize, tensor: &TensorInstance| {
            let at = |element: usize| (7 * element + 5 * rank + element * element) % 11;
            let elements = 0..tensor.bytes / tensor.dtype.size();
            let bytes = |element: usize| match tensor.dtype {
                DType::U32 => ((shape.0 - rank) as u32).to_le_bytes().to_vec(),
                DType::I32 => (at(element) as i32 % (2 * world as i32 + 3) - 1)
                    .to_le_bytes()
                    .to_vec(),
                dtype => dtype.encode([at(element) as f64 - 5.0]),
            };
            elements.flat_map(bytes).collect::<Vec<u8>>()
        };
        let options = options(world, shape, shape.0 * shape.1);
        let (program, given) = made(&options, &with_lanes(world, lanes), from);
        let evaluator = || Evaluator::new(&program, world, 1, &given).unwrap();
        let hidden = evaluator().without_reaching(&["Y".to_owned(), "L".to_owned()]);
        for evaluator in [evaluator(), hidden.unwrap()] {
            if let Err(error) = evaluator.run(inputs) {
                panic!("{world}, {lanes}: {error}\n{program}");
            }
        }
    }
}

/// Dispatches may precede and follow combines in their workspace.
#[test]
#[cfg_attr(
    warplink_tsan,
    ignore = "takes a minute under the sanitizer, which sees the verifier in other tests"
)]
fn dispatch_shares_the_workspace_of_others() {
    let (machine, options) = (with_lanes(2, 1), options(2, (1, 1), 1));
    let (program, given) = made(&options, &machine, 0);
    let combine = Combine::new(&options, &machine, (0, false)).unwrap();
    let of_combine = combine.parameters(&machine, (0, options.max_tokens));
    let both = [(&program, &given), (combine.program(), &of_combine)];
    if let Err(found) = verify_sharing(&both, 2, 1) {
        panic!("{}", found[0]);
    }
}

/// The program with one fault is rejected for that fault.
#[test]
#[cfg_attr(
    warplink_tsan,
    ignore = "takes a minute under the sanitizer, which sees the verifier in other tests"
)]
fn faulty_variants_are_refused() {
    let before = "let before = count(E[0..start] in q * per..(q + 1) * per)";
    let variants = [
        // Rows of two lanes begin at the same place.
        (
            before,
            "let before = count(E[0..first] in q * per..(q + 1) * per)",
            "race",
        ),
        // Numbers of rows are copied before they have arrived.
        (
            "barrier\n                for p in 0..world { K",
            "for p in 0..world { K",
            "race",
        ),
        // The receiver leaves before all rows are there.
        (
            "                barrier\n            } else",
            "            } else",
            "race",
        ),
        // Rows are copied before they have arrived.
        (
            "                    barrier\n                    for p",
            "                    for p",
            "race",
        ),
        // Rows of two ranks are put in one place.
        (
            "put X[t] to Y[rank][before + j] on q",
            "put X[t] to Y[0][before + j] on q",
            "race",
        ),
        // The receiver copies as many rows as it sends itself.
        (
            "let own = R[slot][head + 1] at most tokens * slots",
            "let own = count(E[start..stop] in p * per..(p + 1) * per)",
            "race",
        ),
        // A word that names no expert is taken for one.
        (
            "let e = E[t][s % slots] at most experts - 1",
            "let e = E[t][(s + 1) % slots] at most experts - 1",
            "out-of-bounds",
        ),
    ];
    let (_, given) = made(&options(2, (2, 2), 4), &with_lanes(2, 2), 0);
    let text = text(2);
    for (right, wrong, kind) in variants {
        assert!(text.contains(right), "{right}:\n{text}");
        let program = Program::parse(&text.replacen(right, wrong, 1)).unwrap();
        let Err(found) = verify(&program, 2, 1, &given) else {
            panic!("'{wrong}' instead of '{right}' passes");
        };
        assert_eq!(found[0].kind.name(), kind, "{wrong}: {}", found[0]);
    }
}
