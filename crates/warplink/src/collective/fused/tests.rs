//! Static tests of fused calls' programs.

use super::launch::LaunchShape;
use super::samples::calls;
use super::way::Way;
use super::{Described, FusedKind, Wire};
use crate::collective::Algorithm;
use crate::collective::algorithm::tests::{check_refused, check_sharing, check_verified, machine};
use crate::collective::call::{Call, CollectiveKind};
use crate::collective::choice::Machine;
use crate::collective::diagnosis::difference;
use crate::collective::estimate::Estimates;
use crate::device::ReduceOp;
use crate::dtype::{DType, Element};
use crate::program::cost::find::shipped;
use crate::program::evaluate::Evaluator;
use crate::program::section::kernel_text;
use crate::program::{Parameters, Program, TensorInstance, unroll};
use half::bf16;

/// Calls of every kind, by every wire format.
fn all_calls(tokens: usize, width: usize) -> Vec<Described> {
    let all = Wire::ALL.map(|wire| calls(tokens, width, &FusedKind::ALL, wire));
    all.concat()
}

/// The program of a call with this number of lanes, and its parameters.
fn made(call: &Described, way: Way, world: usize, lanes: usize) -> (Program, Parameters) {
    let shape = LaunchShape {
        way,
        lanes,
        threads: 128,
        blocks: 1,
        rows: call.call.tokens,
    };
    let mut parameters = call.parameters(&machine(world), &shape);
    if way == Way::Quantized {
        // Rows take several turns in scratch.
        parameters.insert("deep", if world == 1 { 2 } else { 1 });
    }
    (call.program(way, world, lanes).unwrap(), parameters)
}

#[test]
fn every_fused_program_is_verified_for_every_world() {
    let mut count = 0;
    for (tokens, width, lanes) in [(1, 1, 1), (6, 24, 2), (12, 137, 4)] {
        for call in all_calls(tokens, width) {
            for way in call.ways() {
                let worlds = match tokens {
                    12 => &[2][..],
                    _ => &[1, 2, 3],
                };
                let owns = call.call.kind != FusedKind::AllReduce;
                for &world in worlds.iter().filter(|world| !owns || tokens % **world == 0) {
                    let (program, given) = made(&call, way, world, lanes);
                    check_verified(&program, world, &given);
                    count += 1;
                }
            }
        }
    }
    assert!(count > 250, "{count}");
}

/// Results equal the expected ones whatever memory is accessible, with residuals and weights that all ranks have.
#[test]
fn fused_programs_meet_their_expectations() {
    let inputs = |rank: usize, number: usize, tensor: &TensorInstance| {
        // If ranks own rows of the residual, it differs.
        let own = matches!(&*tensor.name, "X") || (&*tensor.name == "R" && tensor.shape[0] < 6);
        let rank = if own { rank } else { 0 };
        let at = |element: usize| (7 * element + 5 * number + 3 * rank) % 11 + 1;
        let count = tensor.bytes / tensor.dtype.size();
        let values = (0..count).map(|element| at(element) as f32);
        values
            .flat_map(|value| match tensor.dtype {
                DType::F32 => value.to_le_bytes().to_vec(),
                _ => bf16::from_f64(value.into()).to_f32().to_le_bytes()[2..].to_vec(),
            })
            .collect::<Vec<u8>>()
    };
    for call in all_calls(6, 137) {
        for way in call.ways() {
            for world in [1, 2, 3] {
                let (program, given) = made(&call, way, world, 2);
                let evaluator = || Evaluator::new(&program, world, 1, &given).unwrap();
                if let Err(error) = evaluator().run(inputs) {
                    panic!("{way:?} × {world}: {error}\n{program}");
                }
                if !matches!(way, Way::Direct | Way::Gathered) {
                    continue;
                }
                let names: Vec<String> =
                    call.announced(way).map(|it| it.name().to_owned()).collect();
                let evaluator = evaluator().without_reaching(&names).unwrap();
                if let Err(error) = evaluator.run(inputs) {
                    panic!("{way:?} × {world} without {names:?}: {error}\n{program}");
                }
            }
        }
    }
}

/// Fused calls may precede and follow any collective in its workspace.
#[test]
fn fused_programs_share_the_workspace_of_collectives() {
    for world in [2, 3] {
        let machine = machine(world);
        let mut programs: Vec<(Program, Parameters)> = Vec::new();
        let all = all_calls(6, 24);
        for call in [3, 10, 33, 49].map(|number| &all[number]) {
            for way in call.ways() {
                programs.push(made(call, way, world, 2));
            }
        }
        for algorithm in [Algorithm::TwoShot, Algorithm::Direct] {
            let call = Call::new(CollectiveKind::AllReduce, ReduceOp::Sum, DType::F32, 100, 0);
            let choice = crate::collective::Choice {
                lanes: 2,
                threads: 128,
                ..machine.shape(algorithm, &call)
            };
            let program = algorithm.program(call.kind).unwrap().unwrap().clone();
            programs.push((program, machine.parameters(&call, &choice)));
        }
        let given: Vec<(&Program, &Parameters)> = programs.iter().map(|(a, b)| (a, b)).collect();
        check_sharing(&given, world);
    }
}

/// Shipped texts with one fault each are rejected for that fault.
#[test]
fn faulty_variants_are_refused() {
    let variants = [
        // Scratch of the previous launch is overwritten while a rank may still read it.
        (Way::OneShot, "let slot = epoch % 2", "let slot = 0", "race"),
        // Two lanes have the same rows.
        (Way::OneShot, "let t = next - each", "let t = j - 1", "race"),
        // A row is divided among lanes.
        (Way::OneShot, "N[t]", "N[t][lane - 1 of 2]", "mismatch"),
        // The residual is overwritten, or a launch ends, while peers still read and store.
        (
            Way::Direct,
            "\n                barrier\n            } else",
            "\n            } else",
            "race",
        ),
        // Results are computed from h before h has arrived.
        (
            Way::Gathered,
            "barrier\n                for j",
            "for j",
            "race",
        ),
        // A row is overwritten while a peer may still read it.
        (Way::Pushed, "/ each, 3)", "/ each, 2)", "race"),
        // Rows are read before they have arrived.
        (
            Way::Direct,
            "on (rank + r) % world }\n                            barrier",
            "on (rank + r) % world }",
            "race",
        ),
        // Scales of inputs, and of sums, are read before they have arrived.
        (
            Way::Quantized,
            "barrier\n                for d",
            "for d",
            "race",
        ),
        (
            Way::Quantized,
            "barrier\n                for d in 0..deep {\n                    let g = i + (c * deep + d) * each\n                    for k",
            "for d in 0..deep {\n                    let g = i + (c * deep + d) * each\n                    for k",
            "race",
        ),
    ];
    let call = &calls(12, 24, &[FusedKind::AllReduce], Wire::Exact)[0];
    let quantized = &calls(12, 24, &[FusedKind::AllReduce], Wire::Fp8)[0];
    for (way, right, wrong, kind) in variants {
        let call = if way == Way::Quantized {
            quantized
        } else {
            call
        };
        let (_, given) = made(call, way, 2, 2);
        let text = call.text(way, 2, 2);
        check_refused(&text, (right, wrong), &given, kind);
    }
}

/// The fastest strategy and its shape as measured on two GPUs of a server (docs/performance.md). Links limit many rows:
/// results derived from h, which all ranks store, are not sent as well.
#[test]
fn the_number_of_rows_selects_the_strategy() {
    let estimates = Estimates::new(&shipped("h200-2").unwrap()).unwrap();
    let machine = Machine {
        packet_bytes: 512 << 10,
        plain_bytes: 4 << 20,
        lined_bytes: 8 << 20,
        cluster_blocks: 8,
        estimates,
        ..machine(2)
    };
    let epilogues = calls(1, 8192, &[FusedKind::AllReduce], Wire::Exact);
    let [norm, sum] = [0, 10].map(|number| epilogues[number]);
    let expected = [
        (1, Way::OneShot, [1, 1024, 8]),
        (4, Way::OneShot, [4, 1024, 8]),
        (8, Way::Lined, [8, 1024, 4]),
        (16, Way::Lined, [16, 1024, 2]),
        (32, Way::Lined, [32, 1024, 2]),
        (48, Way::Lined, [64, 1024, 1]),
        (128, Way::Lined, [128, 1024, 1]),
        (256, Way::Lined, [128, 1024, 1]),
        (512, Way::Gathered, [128, 1024, 1]),
        (1024, Way::Gathered, [128, 1024, 1]),
        (8192, Way::Gathered, [128, 1024, 1]),
    ];
    let chosen = expected.map(|(tokens, ..)| {
        let call = norm.of(tokens);
        let seconds = |way: &Way| call.seconds(&machine, *way).unwrap();
        let mut ways = call.ways();
        ways.sort_by(|a, b| seconds(a).total_cmp(&seconds(b)));
        let shape = call.shape(&machine, ways[0]).unwrap();
        (tokens, ways[0], [shape.lanes, shape.threads, shape.blocks])
    });
    assert_eq!(chosen, expected);
    // Longer rows have two blocks' threads at least, as far as there are blocks.
    let wide = calls(2, 16384, &[FusedKind::AllReduce], Wire::Exact)[0];
    for (tokens, shape, way) in [
        (2, [2, 2048, 8], Way::OneShot),
        (8, [8, 2048, 4], Way::Lined),
        (33, [64, 1024, 1], Way::Lined),
    ] {
        let wide = wide.of(tokens);
        let seconds = |way: Way| wide.seconds(&machine, way).unwrap();
        let lined = seconds(Way::Lined) < seconds(Way::OneShot);
        let made = wide.shape(&machine, way).unwrap();
        assert_eq!(
            (lined, [made.lanes, made.threads, made.blocks]),
            (way == Way::Lined, shape),
            "{tokens}"
        );
    }
    assert!(!sum.ways().contains(&Way::Gathered));
}

/// So their addresses do not decide how the others are accessed.
#[test]
fn single_values_are_not_loaded_in_vectors() {
    let mut count = 0;
    for call in all_calls(6, 24) {
        for way in call.ways() {
            let (program, given) = made(&call, way, 2, 2);
            let program = unroll(&program, 1, 2, 1, &given).unwrap();
            let section = crate::collective::launches::section(&program).unwrap();
            for single in call.form.tensors().filter(|tensor| tensor.is_single()) {
                let names = section.tensors.iter().map(|tensor| &*tensor.name);
                let aligned: Vec<bool> = names.map(|name| name != single.name()).collect();
                assert!(aligned.contains(&false), "{}", single.name());
                let text = kernel_text(&section, &aligned).unwrap();
                assert_eq!(text, section.kernel(true).unwrap(), "{way:?}");
                count += 1;
            }
        }
    }
    assert!(count > 10, "{count}");
}

/// The description changes the text, but the number of rows does not change the kernel.
#[test]
fn epilogues_are_put_into_the_text() {
    let kernel = |call: &Described, way: Way| {
        let (program, given) = made(call, way, 2, 2);
        let program = unroll(&program, 1, 2, 1, &given).unwrap();
        let section = crate::collective::launches::section(&program).unwrap();
        section.kernel(true).unwrap()
    };
    let all = all_calls(6, 24);
    for way in [
        Way::OneShot,
        Way::Pushed,
        Way::Direct,
        Way::Gathered,
        Way::Quantized,
        Way::Lined,
    ] {
        let these = all.iter().filter(|call| call.ways().contains(&way));
        let texts: Vec<String> = these.map(|call| kernel(call, way)).collect();
        for (number, text) in texts.iter().enumerate() {
            assert!(!texts[..number].contains(text), "{way:?}: {number}");
        }
        let first = |all: &[Described]| {
            let mut these = all.iter().filter(|call| call.ways().contains(&way));
            kernel(these.next().unwrap(), way)
        };
        assert_eq!(first(&all), first(&all_calls(4, 24)));
    }
    let words = |call: usize| all[call].words(Way::OneShot);
    let text = difference(&words(0), &words(3));
    assert!(
        text.contains("all_reduce of 6 rows of 24 bf16, norm rms, eps 1e-5, quantization per_block, with residual"),
        "{text}"
    );
    let lanes = |call: usize| [all[call].form_word(Way::Direct), 6];
    assert_ne!(lanes(0), lanes(3));
    let text = difference(&lanes(0), &lanes(3));
    assert!(
        text.contains("a fused collective of 6 rows, form"),
        "{text}"
    );
    let other = Call {
        kind: CollectiveKind::AllGather,
        op: None,
        dtype: DType::U8,
        count: 7,
        root: None,
    };
    let text = difference(&words(0), &other.words(0));
    assert!(text.contains("all_gather of 7 bytes"), "{text}");
    assert_eq!(bf16::DTYPE, DType::BF16);
}
