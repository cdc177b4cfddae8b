//! Static tests of the collectives' programs.

use super::*;
use crate::collective::MIN_BYTES_PER_RANK;
use crate::collective::call::Call;
use crate::collective::choice::{Choice, Machine};
use crate::collective::estimate::Estimates;
use crate::device::ReduceOp;
use crate::dtype::DType;
use crate::error::Rank;
use crate::p2p::TransferKernels;
use crate::program::Parameters;
use crate::program::cost::find::shipped;
use crate::program::verify::{verify, verify_links, verify_sharing};
use crate::topology::{CUBE_RANKS, is_cube_link};

/// Ranks by position of a hybrid cube mesh, in an arbitrary order.
const POSITIONS: [Rank; CUBE_RANKS] = [3, 6, 0, 5, 7, 2, 1, 4];

pub(in crate::collective) fn machine(world: usize) -> Machine {
    Machine {
        world,
        kernels: TransferKernels::default(),
        packet_bytes: 64 << 10,
        plain_bytes: 128 << 10,
        lined_bytes: 240 << 10,
        cluster_blocks: 1,
        most_blocks: 132,
        most_lanes: 128,
        forced_lanes: None,
        forced_threads: None,
        forced: None,
        cube: None,
        rates: [356e9, 334e9],
        estimates: Estimates::new(&shipped("h200-8").unwrap()).unwrap(),
    }
}

/// Fails unless the program is right on `world` ranks.
pub(in crate::collective) fn check_verified(program: &Program, world: usize, given: &Parameters) {
    if let Err(found) = verify(program, world, 1, given) {
        panic!("{world} ranks, {given}: {}\n{program}", found[0]);
    }
}

/// Fails unless each of the programs may follow each other in one workspace.
pub(in crate::collective) fn check_sharing(programs: &[(&Program, &Parameters)], world: usize) {
    if let Err(found) = verify_sharing(programs, world, 1) {
        panic!("{world} ranks: {}", found[0]);
    }
}

/// Fails unless the text with `wrong` in place of `right` is refused on two ranks, by a finding of a kind.
pub(in crate::collective) fn check_refused(
    text: &str,
    (right, wrong): (&str, &str),
    given: &Parameters,
    kind: &str,
) {
    assert!(text.contains(right), "{right}:\n{text}");
    let program = Program::parse(&text.replacen(right, wrong, 1)).unwrap();
    let Err(found) = verify(&program, 2, 1, given) else {
        panic!("'{wrong}' instead of '{right}' passes, {given}");
    };
    assert_eq!(found[0].kind.name(), kind, "{wrong}: {}", found[0]);
}

/// The worlds among `worlds` that an algorithm supports.
fn worlds<'a>(entry: &ProgramEntry, worlds: &'a [usize]) -> impl Iterator<Item = usize> + use<'a> {
    let cube = entry.algorithm == Algorithm::Cube;
    let worlds = worlds.iter().copied();
    worlds.filter(move |world| !cube || *world == CUBE_RANKS)
}

fn call(entry: &ProgramEntry, world: usize, count: usize) -> Call {
    let reduces = entry.kind.reduces();
    let dtype = if reduces { DType::F32 } else { DType::U8 };
    Call::new(entry.kind, ReduceOp::Sum, dtype, count, world - 1)
}

fn choice(entry: &ProgramEntry, lanes: usize, chunks: usize) -> Choice {
    Choice {
        algorithm: entry.algorithm,
        lanes,
        threads: 128,
        chunks,
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
                let call = Call::new(kind, ReduceOp::Sum, DType::F32, count, 0);
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
    assert_eq!(Machine::most_lanes(114, 1), 113);
}

/// Also in the smallest workspace, with as many lanes as a model may request.
#[test]
fn chunks_of_all_lanes_fit_into_a_workspace() {
    for world in 2..=8 {
        for workspace in [MIN_BYTES_PER_RANK * world, 10 << 20] {
            let plain_bytes = workspace / 5 * 2 / 4096 * 4096;
            let machine = Machine {
                plain_bytes,
                kernels: TransferKernels {
                    store_blocks: vec![(0, 128)],
                    ..TransferKernels::default()
                },
                ..machine(world)
            };
            let chunked = PROGRAMS
                .iter()
                .filter(|entry| entry.algorithm == Algorithm::Chunks);
            for entry in chunked {
                for (dtype, count) in [
                    (DType::U8, 1_000_000),
                    (DType::F64, 1000),
                    (DType::F64, 10_000_000),
                ] {
                    let call = Call {
                        dtype,
                        op: entry.kind.reduces().then_some(ReduceOp::Sum),
                        ..call(entry, world, count)
                    };
                    let Choice { lanes, chunks, .. } = machine.chunks(entry.algorithm, &call);
                    let rows = lanes * entry.algorithm.rows(entry.kind, world, chunks);
                    let least = 16 * rows * dtype.size();
                    assert!(
                        least <= plain_bytes,
                        "{call:?}: {lanes} lanes need {least} bytes"
                    );
                }
            }
        }
    }
}

/// Parameters for a call of `count` elements, with lanes of so many threads and chunks.
fn parameters(
    entry: &ProgramEntry,
    world: usize,
    count: usize,
    (lanes, chunks): (usize, usize),
) -> Parameters {
    let cube = (entry.algorithm == Algorithm::Cube).then_some(POSITIONS);
    let machine = Machine {
        cube,
        ..machine(world)
    };
    let call = call(entry, world, count);
    let choice = match entry.algorithm {
        Algorithm::CopyEngine => machine.shape(entry.algorithm, &call),
        _ => choice(entry, lanes, chunks),
    };
    machine.parameters(&call, &choice)
}

#[test]
fn every_program_is_verified_for_every_world() {
    for entry in PROGRAMS.iter().chain([&ALL_GATHER_IN_PLACE]) {
        let program = entry.program().unwrap_or_else(|error| panic!("{error}"));
        for world in worlds(entry, &[1, 2, 3, 8]) {
            // Mixes of direct and chunked lanes are the same in every world, so many lanes are tested in one.
            let shapes = [(1, 1, 1), (37, 2, 3), (1000, 4, 2), (300, 16, 1)];
            let most = if world <= 2 { 4 } else { 3 };
            for (count, lanes, chunks) in shapes.into_iter().take(most) {
                let given = parameters(entry, world, count, (lanes, chunks));
                check_verified(program, world, &given);
            }
        }
    }
}

#[test]
fn an_all_to_all_in_pieces_is_verified() {
    let found = PROGRAMS.iter().find(|entry| {
        (entry.kind, entry.algorithm) == (CollectiveKind::AllToAll, Algorithm::Direct)
    });
    let entry = found.unwrap();
    // Two pieces for each lane.
    let given = parameters(entry, 2, 3_000_001, (4, 96));
    check_verified(entry.program().unwrap(), 2, &given);
}

/// Any algorithm may follow any other, with different length and number of lanes.
fn share_a_workspace(world: usize, shapes: &'static [(usize, usize, usize)]) {
    // A direct launch is followed by several, one of which falls back to chunks.
    let direct = |kind| Algorithm::Direct.program(kind).is_some();
    let entries = PROGRAMS
        .iter()
        .filter(|entry| !matches!(entry.algorithm, Algorithm::Cube | Algorithm::CopyEngine))
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
    check_sharing(&given, world);
}

#[test]
fn all_programs_share_a_workspace() {
    share_a_workspace(2, &[(100, 1, 2), (333, 2, 1)]);
}

#[test]
fn all_programs_share_a_workspace_of_more_ranks() {
    share_a_workspace(3, &[(333, 2, 1)]);
}

fn of_cube() -> (&'static ProgramEntry, &'static Program) {
    let mut entries = PROGRAMS.iter();
    let entry = entries.find(|entry| entry.algorithm == Algorithm::Cube);
    let entry = entry.unwrap();
    (entry, entry.program().unwrap())
}

/// With the hybrid cube mesh's program, no other program uses the workspace.
#[test]
fn calls_in_a_hybrid_cube_mesh_share_a_workspace() {
    let (entry, program) = of_cube();
    let given = [(100, 1), (333, 2), (7, 4)]
        .map(|(count, lanes)| parameters(entry, CUBE_RANKS, count, (lanes, 1)));
    let all: Vec<_> = given.iter().map(|given| (program, given)).collect();
    check_sharing(&all, CUBE_RANKS);
}

#[test]
fn the_program_of_a_hybrid_cube_mesh_keeps_to_its_links() {
    let linked = |a, b| is_cube_link(&POSITIONS, a, b);
    let check = |entry: &ProgramEntry| {
        let given = parameters(entry, CUBE_RANKS, 100, (2, 2));
        verify_links(entry.program().unwrap(), CUBE_RANKS, 1, &given, linked)
    };
    // Rank 0 is at position 2, adjacent to the ranks at 0, 1 and 3, and opposite the one at 6.
    let beside: Vec<Rank> = (0..CUBE_RANKS).filter(|peer| linked(0, *peer)).collect();
    assert_eq!(beside, [1, 3, 5, 6]);
    for entry in PROGRAMS.iter() {
        let checked = check(entry);
        let keeps = entry.algorithm == Algorithm::Cube;
        assert_eq!(
            checked.is_ok(),
            keeps,
            "{:?} by {}: {checked:?}",
            entry.kind,
            entry.algorithm
        );
    }
    // With another order of ranks, the same program would use missing links.
    let (entry, program) = of_cube();
    let given = parameters(entry, CUBE_RANKS, 100, (2, 1));
    let in_order = std::array::from_fn(|rank| rank);
    let other = |a, b| is_cube_link(&in_order, a, b);
    let found = verify_links(program, CUBE_RANKS, 1, &given, other).unwrap_err();
    assert!(
        found[0]
            .to_string()
            .contains("that a link connects it with"),
        "{}",
        found[0]
    );
}

/// Every rank receives the data it needs, whatever the positions.
#[test]
fn a_hybrid_cube_mesh_may_have_its_ranks_in_any_order() {
    let (entry, program) = of_cube();
    for positions in [
        POSITIONS,
        [7, 6, 5, 4, 3, 2, 1, 0],
        std::array::from_fn(|rank| rank),
    ] {
        let machine = Machine {
            cube: Some(positions),
            ..machine(CUBE_RANKS)
        };
        let call = call(entry, CUBE_RANKS, 50);
        let given = machine.parameters(&call, &choice(entry, 1, 1));
        check_verified(program, CUBE_RANKS, &given);
    }
}

/// One kernel serves all counts: the text compiled for one count is a cache hit for the next.
#[test]
fn the_text_of_a_kernel_does_not_depend_on_the_count() {
    // Bound calls have one count.
    let any = |entry: &&ProgramEntry| entry.algorithm != Algorithm::CopyEngine;
    for entry in PROGRAMS.iter().filter(any) {
        let world = if entry.algorithm == Algorithm::Cube {
            CUBE_RANKS
        } else {
            2
        };
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
