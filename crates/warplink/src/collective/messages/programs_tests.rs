//! Static tests of the programs of messages.

use super::*;
use crate::collective::algorithm::tests::check_sharing;
use crate::program::diagnostic::DiagnosticKind;
use crate::program::section::LaneStepKind;
use crate::program::verify::verify;
use std::collections::BTreeSet;

const TEXT: &str = TEXTS[PLAIN].0;

/// Parameters of messages of at most `most` bytes, with short packets and chunks, and of counts of at most `counts`.
fn parameters(text: &str, most: i64, counts: (i64, i64), (lines, lanes): (i64, i64)) -> Parameters {
    let of_counts = [("largest", counts.0), ("top", counts.1)];
    let of_counts = of_counts.into_iter().filter(|_| text != TEXT);
    let all = [
        ("most", most),
        ("packed", 16),
        ("lined", 240),
        ("lines", lines),
        ("chunk", 32),
        ("lanes", lanes),
        ("threads", 32),
    ];
    all.into_iter().chain(of_counts).collect()
}

fn plain(most: i64) -> Parameters {
    parameters(TEXT, most, (0, 0), (1, 2))
}

fn verdict(text: &str, parameters: &Parameters) -> Result<(), DiagnosticKind> {
    let program = Program::parse(text).unwrap();
    let verified = verify(&program, 2, 1, parameters);
    verified.map(drop).map_err(|found| {
        found
            .first()
            .map_or(DiagnosticKind::Malformed, |it| it.kind)
    })
}

const SHAPES: [(i64, i64); 4] = [(0, 1), (1, 1), (0, 2), (1, 2)];

#[test]
fn messages_of_every_length_are_verified() {
    let of_one_lane = [1, 16, 33, 100].map(|most| (most, (0, 1)));
    for (most, shape) in of_one_lane
        .into_iter()
        .chain(SHAPES.map(|shape| (700, shape)))
    {
        let found = verdict(TEXT, &parameters(TEXT, most, (0, 0), shape));
        assert_eq!(found, Ok(()), "{most} bytes, {shape:?}");
    }
}

/// Counts within the limit, which is that of units of 16 bytes, and over it.
#[test]
fn messages_of_every_count_are_verified() {
    for (most, shape) in [(16, (0, 1)), (100, (0, 1)), (700, (1, 2))] {
        for counts in [(most / 16, 0), (most, 1)] {
            let text = TEXTS[COUNTED].0;
            let found = verdict(text, &parameters(text, most, counts, shape));
            assert_eq!(found, Ok(()), "{most} bytes, {shape:?}, counts {counts:?}");
        }
    }
}

/// One launch may have messages of the one program, and the next one of the other.
#[test]
fn both_programs_share_a_workspace() {
    let programs = TEXTS.map(|(text, _)| Program::parse(text).unwrap());
    for (most, shape) in [(100, (0, 1)), (320, (1, 1))] {
        let given = TEXTS.map(|(text, _)| parameters(text, most, (most / 16, 0), shape));
        let given: Vec<_> = programs.iter().zip(&given).collect();
        check_sharing(&given, 2);
    }
}

/// Each fault is found, in messages that have lines of packets, direct stores and chunks.
#[test]
fn faults_of_messages_are_refused() {
    use DiagnosticKind::{Deadlock, LostSignal, Malformed, Race};
    for (right, wrong, kind) in [
        ("P[slot]", "P[0]", Race),
        ("S[slot]", "S[0]", Race),
        ("L[slot]", "L[0]", Race),
        ("c % 2", "0", Race),
        ("if c > 1 { wait 1 }", "", LostSignal),
        ("if rank == 0 { agree 0 with Y in A[lane] }", "", Malformed),
        ("if at + 2 * step < end { signal 0 }", "", Deadlock),
        (
            "} else {\n                            wait 0\n",
            "} else {\n",
            LostSignal,
        ),
        ("wait 0\n                                Y", "Y", LostSignal),
        ("agree 0 with Y", "agree 1 with Y", DiagnosticKind::Mismatch),
    ] {
        assert!(TEXT.contains(right), "{right}");
        let found = verdict(&TEXT.replace(right, wrong), &plain(700));
        assert_eq!(found, Err(kind), "{right} -> {wrong}");
    }
}

/// The two directions between two ranks share scratch: none of it is used by both ranks of the program in one place.
#[test]
fn both_directions_use_scratch_apart() {
    for (text, _) in TEXTS {
        scratch_is_apart(text);
    }
}

fn scratch_is_apart(text: &str) {
    let program = Program::parse(text).unwrap();
    let parameters = parameters(text, 700, (700 / 16, 0), (1, 2));
    let mut used: [BTreeSet<(usize, usize)>; 2] = Default::default();
    for role in 0..2 {
        let ranks = unroll(&program, role, 2, 1, &parameters).unwrap();
        let section = section(&ranks).unwrap();
        for (lane, epoch, share) in [(0, 0), (0, 1), (1, 0), (1, 1)]
            .into_iter()
            .flat_map(|(lane, epoch)| [1, 4, 60].map(|share| (lane, epoch, share)))
        {
            for reachable in [true, false] {
                let steps = section.steps_where(lane, epoch, &|_| reachable, &|word| {
                    Some(if word.most == 1 { 1 } else { word.most / share })
                });
                for step in steps.unwrap().0 {
                    if matches!(step.kind, LaneStepKind::Value { .. }) {
                        continue;
                    }
                    let parts = step.kind.sources().iter().chain(step.kind.targets());
                    let parts = parts.filter(|part| section.scratch_of(part.tensor).is_some());
                    for part in parts {
                        let elements = part.offset..part.offset + part.elements;
                        used[part.rank].extend(elements.map(|element| (part.tensor, element)));
                    }
                }
            }
        }
    }
    let both = used[0].intersection(&used[1]);
    assert_eq!(both.count(), 0);
    assert!(used.iter().all(|used| !used.is_empty()));
}

/// Kernels have both ends, and sizes that no launch has to pass.
#[test]
fn both_ends_are_one_kernel() {
    for text in kernels().unwrap() {
        for part in [
            "constexpr Index rank = 0;",
            "constexpr Index rank = 1;",
            "at.v_N[0]",
            "located[0].reachable()",
            "if (!announced[0]) locate_of_others(self, located[0], rank, at.v_Y[rank]);",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
        assert!(!text.contains("at.size"), "{text}");
    }
}
