//! Selection of algorithms and launch shapes.

use super::*;
use crate::collective::estimate::rounded;
use crate::device::ReduceOp;
use crate::dtype::DType;
use crate::program::cost::HardwareModel;
use crate::program::cost::find::{all_shipped, shipped};
use crate::program::cost::model::Algorithms;
use std::time::Duration;
use stopwatch::time_on_processor;

#[path = "../../tests/common/stopwatch.rs"]
mod stopwatch;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

fn machine(model: &HardwareModel, world: usize) -> Machine {
    Machine {
        kernels: model.link.transfer_kernels(),
        packet_bytes: 512 * KIB,
        plain_bytes: 4096 * KIB,
        lined_bytes: 0,
        rates: [model.lanes().stored, model.lanes().loaded],
        estimates: Estimates::new(model).unwrap(),
        ..crate::collective::algorithm::tests::machine(world)
    }
}

fn call(kind: CollectiveKind, bytes: usize) -> Call {
    let dtype = if kind.reduces() {
        DType::BF16
    } else {
        DType::U8
    };
    Call::new(kind, ReduceOp::Max, dtype, bytes / dtype.size(), 1)
}

fn chosen(machine: &Machine, call: &Call) -> Algorithm {
    machine.choose(call).unwrap().algorithm
}

fn estimate(machine: &Machine, algorithm: Algorithm, call: &Call) -> f64 {
    machine.seconds(algorithm, call).unwrap()
}

/// docs/lab-notes.md: packets up to 512 KiB, then one pushed chunk, then direct reads; estimated times differ
/// as measured ones do.
#[test]
fn fastest_on_two_gpus_is_chosen() {
    let model = shipped("h200-2").unwrap();
    let machine = machine(&model, 2);
    for (bytes, packets, reading) in [
        (64 * KIB, 2.68, 5.81),
        (256 * KIB, 3.77, 6.26),
        (MIB, 8.20, 8.49),
        (4 * MIB, 25.9, 17.4),
    ] {
        let call = call(CollectiveKind::AllReduce, bytes);
        let [one_shot, direct] = [Algorithm::OneShot, Algorithm::Direct]
            .map(|algorithm| estimate(&machine, algorithm, &call));
        assert_eq!(
            one_shot < direct,
            packets < reading,
            "{bytes}: {one_shot} {direct}"
        );
    }
    for (bytes, algorithm) in [
        (KIB, Algorithm::OneShot),
        (64 * KIB, Algorithm::OneShot),
        (512 * KIB, Algorithm::OneShot),
        (MIB, Algorithm::Chunks),
        (4 * MIB, Algorithm::Chunks),
        (8 * MIB, Algorithm::Direct),
        (256 * MIB, Algorithm::Direct),
    ] {
        let call = call(CollectiveKind::AllReduce, bytes);
        assert_eq!(chosen(&machine, &call), algorithm, "{bytes}");
    }
}

/// One-shot sends the data to every peer; two-shot sends twice the data in total.
#[test]
fn two_shots_win_where_there_are_more_ranks_and_the_link_counts() {
    let model = shipped("h200-2").unwrap();
    for (world, bytes, wins) in [
        (2, 64 * KIB, false),
        (4, 64 * KIB, false),
        (4, 512 * KIB, true),
        (8, MIB, true),
    ] {
        let call = call(CollectiveKind::AllReduce, bytes);
        let machine = machine(&model, world);
        let [one, two] = [Algorithm::OneShot, Algorithm::TwoShot]
            .map(|algorithm| estimate(&machine, algorithm, &call));
        assert_eq!(two < one, wins, "{world} ranks, {bytes} bytes: {one} {two}");
    }
}

#[test]
fn every_call_is_chosen_on_every_machine() {
    for model in all_shipped() {
        for world in [2, 3, 8] {
            let machine = machine(model, world);
            for kind in CollectiveKind::ALL {
                for bytes in [2, 34, 5000, 300 * KIB, 64 * MIB] {
                    let call = call(kind, bytes);
                    let case = format!("{call} of {world} ranks on {}", model.name);
                    let algorithm = chosen(&machine, &call);
                    assert!(algorithm.program(kind).is_some(), "{case}");
                    if kind != CollectiveKind::Barrier {
                        let seconds = estimate(&machine, algorithm, &call);
                        assert!(seconds > 0.0 && seconds < 1.0, "{case}: {seconds}");
                        assert!(
                            bytes < MIB || algorithm == Algorithm::Direct,
                            "{case}: {algorithm}"
                        );
                    }
                }
            }
        }
    }
}

/// docs/performance.md: few lanes saturate a link, of reductions at any length and otherwise until data is long. A limit is used fully, even if that
/// leaves one lane less than a power of two.
#[test]
fn lanes_follow_the_link_and_the_bound() {
    use CollectiveKind::{AllGather, AllReduce, ReduceScatter};
    let model = shipped("h200-2").unwrap();
    for (most_lanes, kind, bytes, lanes, threads) in [
        (128, AllGather, 128 * MIB, 128, 512),
        (128, AllGather, 32 * MIB, 64, 512),
        (128, AllReduce, 64 * MIB, 32, 512),
        (128, AllReduce, 256 * MIB, 32, 512),
        (128, ReduceScatter, 32 * MIB, 32, 512),
        (128, ReduceScatter, 256 * MIB, 32, 512),
        (107, AllGather, 128 * MIB, 64, 512),
        (63, AllGather, 128 * MIB, 63, 512),
        (31, AllGather, 128 * MIB, 31, 512),
        (15, ReduceScatter, 128 * MIB, 15, 1024),
        (7, AllReduce, 128 * MIB, 7, 1024),
        (1, AllGather, 128 * MIB, 1, 1024),
        (128, AllGather, 128 * KIB, 1, 512),
    ] {
        let machine = Machine {
            most_lanes,
            ..machine(&model, 2)
        };
        let choice = machine.shape(Algorithm::Direct, &call(kind, bytes));
        let case = format!("{kind} of {bytes} bytes, at most {most_lanes}");
        assert_eq!((choice.lanes, choice.threads), (lanes, threads), "{case}");
    }
    // A tenth of the bandwidth needs a tenth of the lanes.
    let slow = Machine {
        rates: [35e9, 33e9],
        ..machine(&model, 2)
    };
    let choice = slow.shape(Algorithm::Direct, &call(AllGather, 32 * MIB));
    assert_eq!(choice.lanes, 4);
}

/// All choices are listed in the programs.
#[test]
fn programs_have_all_lanes_and_threads() {
    let machine = machine(&shipped("h200-2").unwrap(), 2);
    let call = call(CollectiveKind::AllReduce, 4096);
    for lanes in LANES {
        for threads in THREADS {
            for algorithm in [Algorithm::OneShot, Algorithm::Direct] {
                let choice = Choice {
                    algorithm,
                    lanes,
                    threads,
                    chunks: 1,
                };
                let program = machine.rank_program(0, &call, &choice);
                assert!(program.is_ok(), "{choice:?}: {:?}", program.err());
            }
        }
    }
}

/// So the order of earlier calls does not matter.
#[test]
fn calls_of_about_the_same_length_go_alike() {
    let model = shipped("h200-8").unwrap();
    let sizes = [
        700 * KIB,
        3 * KIB,
        130 * KIB,
        513 * KIB,
        100 * KIB,
        2 * KIB + 2,
    ];
    let all = |order: &mut dyn Iterator<Item = &usize>| {
        let machine = machine(&model, 4);
        let mut found: Vec<(usize, Algorithm)> = order
            .map(|bytes| {
                (
                    *bytes,
                    chosen(&machine, &call(CollectiveKind::AllReduce, *bytes)),
                )
            })
            .collect();
        found.sort();
        found
    };
    assert_eq!(all(&mut sizes.iter()), all(&mut sizes.iter().rev()));
    assert_eq!(
        [1, 3, 4, 5, 6, 7, 8, 9, 12, 13].map(rounded),
        [1, 3, 4, 6, 6, 8, 8, 12, 12, 16]
    );
    assert_eq!([0, 2, usize::MAX].map(rounded), [0, 2, usize::MAX]);
}

#[test]
fn the_choice_follows_the_machine() {
    let mut model = (*shipped("h200-8").unwrap()).clone();
    let call = call(CollectiveKind::AllReduce, 32 * KIB);
    assert_eq!(chosen(&machine(&model, 8), &call), Algorithm::OneShot);
    let before = format!("{:?}", Estimates::new(&model).unwrap());
    let mut lanes = model.lanes();
    lanes.packet *= 20.0;
    lanes.packet_round *= 20.0;
    model.lanes = Some(lanes);
    assert_eq!(chosen(&machine(&model, 8), &call), Algorithm::Chunks);
    // Ranks that compare their machines at joining would notice.
    assert_ne!(before, format!("{:?}", Estimates::new(&model).unwrap()));
}

/// Only one algorithm keeps to the links of a hybrid cube mesh.
#[test]
fn a_cube_leaves_no_choice() {
    let model = shipped("h200-8").unwrap();
    let cube = Machine {
        cube: Some([3, 6, 0, 5, 7, 2, 1, 4]),
        ..machine(&model, 8)
    };
    let call = call(CollectiveKind::AllReduce, 16 * KIB);
    assert_eq!(chosen(&cube, &call), Algorithm::Cube);
    let seconds = estimate(&cube, Algorithm::Cube, &call);
    assert!((1e-6..100e-6).contains(&seconds), "{seconds}");
}

#[test]
fn a_measured_table_goes_before_estimates() {
    let mut model = (*shipped("h200-8").unwrap()).clone();
    model.algorithms = vec![Algorithms {
        collective: "all_reduce".to_owned(),
        world: 4,
        // Older files without the field, meaning elements of 2 bytes.
        element_bytes: None,
        limits: vec![
            (KIB as u64, "direct".to_owned()),
            (64 * KIB as u64, "two-shot".to_owned()),
            (MIB as u64, "one-shot".to_owned()),
        ],
    }];
    let four = machine(&model, 4);
    let of = |machine: &Machine, bytes| chosen(machine, &call(CollectiveKind::AllReduce, bytes));
    let two_shot = of(&four, 2 * KIB);
    assert_eq!(
        (of(&four, KIB), two_shot),
        (Algorithm::Direct, Algorithm::TwoShot)
    );
    assert_eq!(of(&four, 65 * KIB), Algorithm::OneShot);
    // Too long for packets, and the table is for four ranks.
    assert_eq!(of(&four, 16 * MIB), Algorithm::Direct);
    assert_eq!(of(&machine(&model, 8), 2 * KIB), Algorithm::OneShot);
    // Other types have their own tables; types of one size share them.
    let as_type = |machine: &Machine, dtype: DType| {
        let two_bytes = call(CollectiveKind::AllReduce, KIB);
        let count = KIB / dtype.size();
        chosen(
            machine,
            &Call {
                dtype,
                count,
                ..two_bytes
            },
        )
    };
    let (f16, f64) = (as_type(&four, DType::F16), as_type(&four, DType::F64));
    assert_eq!((f16, f64), (Algorithm::Direct, Algorithm::OneShot));
    model.algorithms.push(Algorithms {
        element_bytes: Some(8),
        limits: vec![(KIB as u64, "two-shot".to_owned())],
        ..model.algorithms[0].clone()
    });
    let model_again = HardwareModel::from_json(&model.to_json().unwrap()).unwrap();
    assert_eq!(model_again, model);
    let four = machine(&model, 4);
    for (dtype, algorithm) in [
        (DType::F64, Algorithm::TwoShot),
        (DType::I64, Algorithm::TwoShot),
        (DType::BF16, Algorithm::Direct),
        (DType::F32, Algorithm::OneShot),
        (DType::F8E4M3, Algorithm::OneShot),
    ] {
        assert_eq!(as_type(&four, dtype), algorithm, "{dtype}");
    }
    model.algorithms[0].limits.swap(0, 1);
    let error = HardwareModel::from_json(&model.to_json().unwrap()).unwrap_err();
    assert!(
        error.to_string().contains("limits of 'all_reduce'"),
        "{error}"
    );
}

/// The first call of a length waits for this. Ten times faster in optimized builds.
#[test]
fn a_choice_is_made_quickly() {
    let model = shipped("h200-8").unwrap();
    for kind in [CollectiveKind::AllReduce, CollectiveKind::Broadcast] {
        let mut least = Duration::MAX;
        for _ in 0..5 {
            let machine = machine(&model, 8);
            let ((), took) = time_on_processor(|| {
                assert_eq!(chosen(&machine, &call(kind, 128 * MIB)), Algorithm::Direct);
                chosen(&machine, &call(kind, 64 * KIB));
            });
            least = least.min(took);
        }
        println!("{kind}: {least:?}");
        assert!(least < Duration::from_millis(300), "{kind}: {least:?}");
    }
}

#[test]
fn unknown_or_duplicate_model_entries_are_errors() {
    let of = |collective: &str, algorithm: &str| Algorithms {
        collective: collective.to_owned(),
        world: 2,
        element_bytes: None,
        limits: vec![(1024, algorithm.to_owned())],
    };
    let right = of("all_reduce", "one-shot");
    for (algorithms, expected) in [
        (
            vec![of("allreduce", "one-shot")],
            "unknown collective 'allreduce'",
        ),
        (vec![of("all_reduce", "oneshot")], "oneshot"),
        (
            vec![
                right.clone(),
                Algorithms {
                    element_bytes: Some(2),
                    ..right.clone()
                },
            ],
            "all_reduce of 2 ranks for elements of 2 bytes are listed twice",
        ),
        (
            vec![Algorithms {
                element_bytes: Some(3),
                ..right
            }],
            "all_reduce for elements of 3 bytes",
        ),
    ] {
        let model = HardwareModel {
            algorithms,
            ..(*shipped("h200-8").unwrap()).clone()
        };
        let error = Estimates::new(&model).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// Also if some ranks have less to reduce than others, or nothing.
#[test]
fn the_shortest_calls_have_estimates() {
    let model = shipped("h200-8").unwrap();
    for world in [2, 3, 8] {
        let machine = machine(&model, world);
        for kind in CollectiveKind::ALL {
            for bytes in [2, 4, 6, 16, 34, 66, 100, 258, 1026] {
                let call = call(kind, bytes);
                let fitting = Algorithm::CHOICES
                    .into_iter()
                    .filter(|one| machine.fits(*one, &call));
                for algorithm in fitting.filter(|_| kind != CollectiveKind::Barrier) {
                    let seconds = machine.seconds(algorithm, &call);
                    let case = format!("{call} by {algorithm} on {world} ranks: {seconds:?}");
                    assert!(seconds.is_ok_and(|seconds| seconds < 1e-3), "{case}");
                }
            }
        }
    }
}

/// docs/performance.md: on two GPUs, copies beat kernels from 128 or 256 MiB on, and kernels win up to 16
/// MiB.
#[test]
fn bound_calls_of_large_data_go_by_the_copy_engine() {
    let model = shipped("h200-2").unwrap();
    for kind in [CollectiveKind::AllGather, CollectiveKind::AllToAll] {
        let machine = machine(&model, 2);
        let by = |machine: &Machine, bytes: usize, overlap: Overlap| {
            let chosen = machine.choose_bound(&call(kind, bytes / 2), overlap);
            chosen.map(|choice| choice.algorithm)
        };
        for (mib, copied) in [(1, false), (8, false), (256, true), (1024, true)] {
            let algorithm = by(&machine, mib * MIB, Overlap::Apart).unwrap();
            let case = format!("{kind} of {mib} MiB by {algorithm}");
            assert_eq!(algorithm == Algorithm::CopyEngine, copied, "{case}");
        }
        let in_place = by(&machine, 1024 * MIB, Overlap::Shared).unwrap();
        let copied = kind == CollectiveKind::AllGather;
        assert_eq!(in_place == Algorithm::CopyEngine, copied);
        let forced = Machine {
            forced: Some(Algorithm::CopyEngine),
            ..machine
        };
        assert_eq!(
            by(&forced, 1024, Overlap::Apart).unwrap(),
            Algorithm::CopyEngine
        );
        assert!(forced.choose(&call(kind, 1024)).is_err());
    }
    let machine = machine(&model, 2);
    let reduced = call(CollectiveKind::AllReduce, 1024 * MIB);
    let choice = machine.choose_bound(&reduced, Overlap::Apart).unwrap();
    assert_eq!(choice, machine.choose(&reduced).unwrap());
}
