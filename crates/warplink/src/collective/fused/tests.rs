//! The programs of fused calls before they run.

use super::launch::Shape;
use super::program::Way;
use super::{Epilogue, Fused, Quantization};
use crate::collective::Algorithm;
use crate::collective::algorithm::tests::machine;
use crate::collective::call::{Call, CollectiveKind};
use crate::device::ReduceOp;
use crate::dtype::{DType, Element};
use crate::program::evaluate::Evaluator;
use crate::program::verify::{verify, verify_sharing};
use crate::program::{Parameters, Program, TensorInstance, unroll};
use half::bf16;

const WAYS: [Way; 2] = [Way::OneShot, Way::Direct];

/// Every kind of epilogue.
fn calls(tokens: usize, width: usize) -> Vec<Fused> {
    let mut all = Vec::new();
    for quantization in [
        None,
        Some(Quantization::Static),
        Some(Quantization::PerToken),
    ] {
        for weight_bias in [false, true] {
            all.push(Fused {
                tokens,
                width,
                dtype: DType::BF16,
                epilogue: Epilogue {
                    eps: 1e-5,
                    weight_bias,
                    quantization,
                },
            });
        }
    }
    all
}

/// The program of a call with so many lanes, and its parameters.
fn made(call: &Fused, way: Way, world: usize, lanes: usize) -> (Program, Parameters) {
    let shape = Shape {
        way,
        lanes,
        threads: 128,
        rows: call.tokens,
    };
    let parameters = call.parameters(&machine(world), &shape);
    (call.program(way).unwrap(), parameters)
}

#[test]
fn every_fused_program_is_verified_for_every_world() {
    let mut count = 0;
    for (tokens, width, lanes) in [(1, 1, 1), (5, 24, 2), (20, 37, 4)] {
        for call in calls(tokens, width) {
            for way in WAYS.into_iter().filter(|way| call.ways().contains(way)) {
                let worlds = if tokens < 20 {
                    &[1, 2, 3, 8][..]
                } else {
                    &[2, 3]
                };
                for &world in worlds {
                    let (program, given) = made(&call, way, world, lanes);
                    if let Err(found) = verify(&program, world, 1, &given) {
                        panic!("{way:?} × {world}, {given}: {}\n{program}", found[0]);
                    }
                    count += 1;
                }
            }
        }
    }
    assert_eq!(count, (2 * 4 + 2) * (4 * 2 + 2));
}

/// Whatever is reachable, they are what they expect, of residuals and weights that all ranks have.
#[test]
fn fused_programs_are_what_they_expect() {
    let inputs = |rank: usize, number: usize, tensor: &TensorInstance| {
        let rank = if &*tensor.name == "X" { rank } else { 0 };
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
    for call in calls(7, 37) {
        for way in WAYS.into_iter().filter(|way| call.ways().contains(way)) {
            for world in [1, 2, 3, 8] {
                for unreachable in [&[][..], &["X", "H", "N"]] {
                    let (program, given) = made(&call, way, world, 2);
                    let names: Vec<String> =
                        unreachable.iter().map(|it| (*it).to_owned()).collect();
                    let evaluator = Evaluator::new(&program, world, 1, &given).unwrap();
                    if way == Way::OneShot && !names.is_empty() {
                        continue;
                    }
                    let evaluator = evaluator.without_reaching(&names).unwrap();
                    if let Err(error) = evaluator.run(inputs) {
                        panic!("{way:?} × {world} without {names:?}: {error}\n{program}");
                    }
                }
            }
        }
    }
}

/// They follow, and are followed by, any collective in its workspace.
#[test]
fn fused_programs_share_the_workspace_of_collectives() {
    for world in [2, 3] {
        let machine = machine(world);
        let mut programs: Vec<(Program, Parameters)> = Vec::new();
        for call in [&calls(5, 24)[0], &calls(9, 40)[2]] {
            for way in WAYS {
                programs.push(made(call, way, world, 2));
            }
        }
        programs.push(made(&calls(6, 16)[4], Way::OneShot, world, 4));
        for algorithm in [Algorithm::OneShot, Algorithm::TwoShot, Algorithm::Direct] {
            let call = Call {
                kind: CollectiveKind::AllReduce,
                op: Some(ReduceOp::Sum),
                dtype: DType::F32,
                count: 100,
                root: None,
            };
            let choice = crate::collective::Choice {
                lanes: 2,
                threads: 128,
                ..machine.shape(algorithm, &call)
            };
            let program = algorithm.program(call.kind).unwrap().unwrap().clone();
            programs.push((program, machine.parameters(&call, &choice)));
        }
        let given: Vec<(&Program, &Parameters)> = programs.iter().map(|(a, b)| (a, b)).collect();
        if let Err(found) = verify_sharing(&given, world, 1) {
            panic!("{world} ranks: {}", found[0]);
        }
    }
}

/// The description changes the text, and numbers of rows do not change the kernel.
#[test]
fn epilogues_are_put_into_the_text() {
    let kernel = |call: &Fused, way: Way| {
        let (program, given) = made(call, way, 2, 2);
        let program = unroll(&program, 1, 2, 1, &given).unwrap();
        let section = crate::collective::launches::section(&program).unwrap();
        section.kernel(true).unwrap()
    };
    for way in WAYS {
        let texts: Vec<String> = calls(5, 24)
            .iter()
            .filter(|call| call.ways().contains(&way))
            .map(|call| kernel(call, way))
            .collect();
        for (number, text) in texts.iter().enumerate() {
            assert!(!texts[..number].contains(text), "{way:?}: {number}");
        }
        assert_eq!(kernel(&calls(5, 24)[0], way), kernel(&calls(6, 24)[0], way));
    }
    let words = calls(5, 24)
        .into_iter()
        .map(|call| call.words(Way::OneShot));
    let words: Vec<[u32; 4]> = words.collect();
    let told = Fused::difference(&words[0], &words[4]);
    assert!(
        told.contains("5 rows of 24 bf16, eps 1e-5, scales by token; expected a fused"),
        "{told}"
    );
    let other = Call {
        kind: CollectiveKind::AllGather,
        op: None,
        dtype: DType::U8,
        count: 7,
        root: None,
    };
    let told = Fused::difference(&words[0], &other.words(0));
    assert!(told.contains("all_gather of 7 bytes"), "{told}");
    assert_eq!(bf16::DTYPE, DType::BF16);
}
