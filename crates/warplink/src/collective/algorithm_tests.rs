//! The programs of collectives before they run.

use super::*;
use crate::collective::call::Call;
use crate::collective::choice::{Choice, Machine};
use crate::device::ReduceOp;
use crate::dtype::DType;
use crate::p2p::TransferKernels;
use crate::program::Parameters;
use crate::program::verify::{verify, verify_sharing};

fn machine(world: usize) -> Machine {
    Machine {
        world,
        kernels: TransferKernels::default(),
        packet_bytes: 64 << 10,
        plain_bytes: 128 << 10,
        most_lanes: 128,
        forced: None,
    }
}

#[test]
fn ranks_that_share_a_device_have_room_for_all_their_lanes() {
    for (multiprocessors, ranks) in [(132, 2), (132, 4), (132, 8), (8, 8), (1, 2)] {
        let machine = Machine {
            most_lanes: Machine::most_lanes(multiprocessors, ranks),
            ..machine(8)
        };
        for kind in [CollectiveKind::AllReduce, CollectiveKind::AllGather] {
            for count in [1, 1000, 100_000, 100_000_000] {
                let call = Call {
                    kind,
                    op: kind.reduces().then_some(ReduceOp::Sum),
                    dtype: DType::F32,
                    count,
                    root: None,
                };
                let lanes = machine.choose(&call).unwrap().lanes + 1;
                let fit = (multiprocessors / ranks).max(2);
                assert!(
                    lanes <= fit,
                    "{lanes} lanes of {ranks} ranks on {multiprocessors}"
                );
            }
        }
    }
    assert_eq!(Machine::most_lanes(132, 1), 128);
}

/// A call of `count` elements as an algorithm does it, with lanes of so many threads and chunks.
fn parameters(
    entry: &Entry,
    world: usize,
    count: usize,
    (lanes, chunks): (usize, usize),
) -> Parameters {
    let rooted = matches!(
        entry.kind,
        CollectiveKind::Broadcast
            | CollectiveKind::Reduce
            | CollectiveKind::Gather
            | CollectiveKind::Scatter
    );
    let reduces = entry.kind.reduces();
    let call = Call {
        kind: entry.kind,
        op: reduces.then_some(ReduceOp::Sum),
        dtype: if reduces { DType::F32 } else { DType::U8 },
        count,
        root: rooted.then_some(world - 1),
    };
    let choice = Choice {
        algorithm: entry.algorithm,
        lanes,
        threads: 128,
        chunks,
    };
    machine(world).parameters(&call, &choice)
}

#[test]
fn every_program_is_verified_for_every_world() {
    for entry in &PROGRAMS {
        let program = entry.program().unwrap_or_else(|error| panic!("{error}"));
        for world in [1, 2, 3, 8] {
            for (count, lanes, chunks) in [(1, 1, 1), (37, 2, 3), (1000, 4, 2)] {
                let given = parameters(entry, world, count, (lanes, chunks));
                if let Err(found) = verify(program, world, 1, &given) {
                    panic!("{} × {world}, {given}: {}", program.name, found[0]);
                }
            }
        }
    }
}

/// Any algorithm may follow any other, with another length and another number of lanes.
fn share_a_workspace(world: usize, shapes: &'static [(usize, usize, usize)]) {
    // What goes directly is followed as several, one of which goes by chunks.
    let direct = |kind| Algorithm::Direct.program(kind).is_some();
    let entries = PROGRAMS
        .iter()
        .filter(|entry| entry.algorithm != Algorithm::Chunks || !direct(entry.kind));
    let programs: Vec<(&Program, Parameters)> = entries
        .flat_map(|entry| {
            let program = entry.program().unwrap();
            let shapes = match entry.algorithm {
                Algorithm::Direct => &[(100, 2, 2)],
                _ => shapes,
            };
            shapes.iter().map(move |&(count, lanes, chunks)| {
                (program, parameters(entry, world, count, (lanes, chunks)))
            })
        })
        .collect();
    let given: Vec<(&Program, &Parameters)> = programs
        .iter()
        .map(|(program, given)| (*program, given))
        .collect();
    if let Err(found) = verify_sharing(&given, world, 1) {
        panic!("{world} ranks: {}", found[0]);
    }
}

#[test]
fn all_programs_share_a_workspace() {
    share_a_workspace(2, &[(100, 1, 2), (333, 2, 1)]);
}

#[test]
fn all_programs_share_a_workspace_of_more_ranks() {
    share_a_workspace(3, &[(333, 2, 1)]);
}

/// One kernel serves all counts: what is compiled for one is found again for the next.
#[test]
fn the_text_of_a_kernel_does_not_depend_on_the_count() {
    for entry in &PROGRAMS {
        let world = 2;
        let texts = [2, 3, 16, 32, 100, 1000].map(|count| {
            let program = entry.program().unwrap();
            let given = parameters(entry, world, count, (1, 2));
            let program = crate::program::unroll(program, 1, world, 1, &given).unwrap();
            let section = crate::collective::launches::section(&program).unwrap();
            section.kernel(true).unwrap()
        });
        assert!(
            texts.iter().all(|text| *text == texts[0]),
            "{:?} by {}",
            entry.kind,
            entry.algorithm
        );
    }
}
