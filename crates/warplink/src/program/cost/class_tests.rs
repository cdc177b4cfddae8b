//! Equivalence classes of lanes and ranks.

use super::*;
use crate::program::{Parameters, Program, RankProgram, unroll};

fn ranks(lanes: usize, body: &str) -> Vec<RankProgram> {
    let text = format!(
        "program test() {{\n input X: u8[4096]\n output Y: u8[4096]\n scratch R: u8[4, 4096]\n \
         kernel lane in 0..{lanes} threads 64 {{\n{body}\n}}\n}}\n"
    );
    let program = Program::parse_text(&text).unwrap();
    let rank = |rank| unroll(&program, rank, 4, 1, &Parameters::new()).unwrap();
    (0..4).map(rank).collect()
}

/// First lane and number of lanes of each class.
fn found(classes: &[LaneClass]) -> Vec<(usize, usize)> {
    classes.iter().map(|it| (it.lane, it.count)).collect()
}

#[test]
fn lanes_are_told_apart_by_what_they_do() {
    for (body, expected) in [
        ("Y[lane of 8] = copy(X[lane of 8])", vec![(0, 8)]),
        (
            "let i = lane - 1\n if i < 0 { barrier } else { Y[i of 7] = copy(X[i of 7]) }",
            vec![(0, 1), (1, 7)],
        ),
        (
            "if lane % 2 == 0 { signal (rank + 1) % world at lane + 1 } else { wait (rank - 1) % world }",
            vec![(0, 4), (1, 4)],
        ),
        // An outline follows the first two iterations of a loop and the last.
        (
            "for c in 0..8 { if c == lane { barrier } }",
            vec![(0, 1), (1, 1), (2, 5), (7, 1)],
        ),
        (
            "for c in 0..lane { barrier }",
            (0..8).map(|lane| (lane, 1)).collect(),
        ),
        (
            "Y[lane..2 * lane + 1] = copy(X[lane..2 * lane + 1])",
            (0..8).map(|lane| (lane, 1)).collect(),
        ),
        (
            "Y[lane * 16..lane * 16 + 16] = copy(X[lane * 16..lane * 16 + 16])",
            vec![(0, 8)],
        ),
        (
            "Y[lane * 16..(lane + 1) * 16] = copy(X[lane * 16..(lane + 1) * 16])",
            vec![(0, 8)],
        ),
        (
            "Y[0..lane / 4 * 16 + 16] = copy(X[16..16 + (lane / 4 + 1) * 16])",
            vec![(0, 4), (4, 4)],
        ),
        (
            "put X[lane of 8] to R[0][lane of 8] on lane % world",
            vec![(0, 2), (1, 2), (2, 2), (3, 2)],
        ),
        (
            "signal (rank + r) % world for r in 1..1 + lane % 2",
            vec![(0, 4), (1, 4)],
        ),
        (
            "for c in 0..2 { signal (rank + r) % world for r in 1..1 + lane % 2 }",
            vec![(0, 4), (1, 4)],
        ),
        (
            "for c in 0..2 { wait (rank + r) % world for r in 1 + lane % 2..world }",
            vec![(0, 4), (1, 4)],
        ),
        (
            "for c in 0..2 { Y[0..16] on rank + r for r in 0..1 + lane % 2 = reduce(X[0..16], sum) }",
            vec![(0, 4), (1, 4)],
        ),
        (
            "for c in 0..2 { Y[0..16] = reduce(X[0..16], R[r][0..16] for r in 0..lane % 3, sum) }",
            vec![(0, 3), (1, 3), (2, 2)],
        ),
        // The peers that a lane addresses may depend on the bound even if the list has the same length.
        (
            "signal (rank + r) % world for r in lane % 2..lane % 2 + 1",
            vec![(0, 4), (1, 4)],
        ),
        (
            "for c in 0..2 { Y[0..16] = copy(X[0..16] if lane == 0 else R[0][0..16]) }",
            vec![(0, 1), (1, 7)],
        ),
    ] {
        let ranks = ranks(8, body);
        let section = ranks[0].sections().next().unwrap();
        let of_lane = classes(section);
        let classes = members(&of_lane);
        assert_eq!(found(&classes), expected, "{body}");
        for (class, it) in classes.iter().enumerate() {
            assert_eq!(of_lane[it.lane], class);
            assert_eq!(of_lane.iter().filter(|of| **of == class).count(), it.count);
        }
    }
}

#[test]
fn halves_are_the_first_and_the_last_lanes_of_a_class() {
    let ranks = ranks(
        8,
        "if lane == 2 { barrier } else { Y[lane of 8] = copy(X[lane of 8]) }",
    );
    let section = ranks[0].sections().next().unwrap();
    let (halves, of_lane) = halved(classes(section));
    assert_eq!(found(&halves), [(0, 4), (5, 3), (2, 1)]);
    assert_eq!(
        halves.iter().map(|it| it.half).collect::<Vec<_>>(),
        [0, 1, 0]
    );
    assert_eq!(of_lane, [0, 0, 2, 0, 0, 1, 1, 1]);
}

#[test]
fn ranks_that_turn_into_one_another_are_the_same() {
    for (body, expected) in [
        (
            "for r in 1..world { put X[lane of 2] to R[rank][lane of 2] on (rank + r) % world }",
            true,
        ),
        (
            "Y[lane of 2] = reduce(X[lane of 2] if r == rank else R[r][lane of 2] for r in 0..world, sum)",
            true,
        ),
        (
            "Y[lane of 2] on r for r in 0..world = reduce(X[lane of 2], sum)",
            true,
        ),
        ("put X[lane of 2] to R[rank][lane of 2] on 0", false),
        (
            "for r in 0..world { put X[lane of 2] to R[rank][lane of 2] on r }",
            false,
        ),
        ("if rank == 0 { barrier }", false),
        // A lane of another rank differs from this rank's representative of its class.
        ("if lane == 1 and rank == 1 { barrier }", false),
        ("if lane >= 3 - rank { barrier }", false),
        ("for c in 0..rank { barrier }", false),
        ("Y[0..rank * 16] = copy(X[0..rank * 16])", false),
    ] {
        let ranks = ranks(2, body);
        let all: Vec<&SectionInstance> = ranks.iter().flat_map(RankProgram::sections).collect();
        let own = classes(all[0]);
        let same = all[1..].iter().all(|other| same(all[0], &own, other));
        assert_eq!(same, expected, "{body}");
    }
}

#[test]
fn ranks_that_differ_have_classes_in_common() {
    let ranks = ranks(8, "if lane >= 8 - 2 * rank { barrier }");
    let of_ranks: Vec<Vec<usize>> = ranks
        .iter()
        .flat_map(RankProgram::sections)
        .map(classes)
        .collect();
    assert_eq!(of_ranks[0], [0; 8]);
    assert_eq!(of_ranks[1], [0, 0, 0, 0, 0, 0, 1, 1]);
    let all: Vec<&Vec<usize>> = of_ranks.iter().collect();
    assert_eq!(common(&all), [0, 0, 1, 1, 2, 2, 3, 3]);
    assert_eq!(common(&all[..1]), of_ranks[0]);
}
