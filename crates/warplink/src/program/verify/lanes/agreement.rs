//! Announcements of a launch: all ranks must announce the same values, or the launch fails.

use super::report::{place, told};
use super::run::{Place, Run};
use crate::error::Rank;
use crate::program::diagnostic::DiagnosticKind;
use crate::program::machine::Actor;
use crate::program::section::Part;
use crate::program::verify::diagnostics::Diagnostics;
use std::collections::BTreeMap;

/// Limit on recorded differences.
const MAX_KEPT: usize = 4096;

/// Location of announced words: owner of the memory, tensor or area, and start byte.
type Words = (Rank, Place, usize);

/// Values that a step announces or expects.
type Announced = (Actor, Vec<u32>);

/// Last announcements of each rank, and mismatches with expected ones.
#[derive(Debug, Default)]
pub(super) struct Announcements {
    last: BTreeMap<Words, Announced>,
    /// Expected values with the step that expects them, and the announcement found instead.
    differ: Vec<(Announced, Option<Announced>)>,
}

impl Announcements {
    /// Whether any rank expects another announcement than one that it gets.
    pub(super) const fn differ(&self) -> bool {
        !self.differ.is_empty()
    }
}

impl Run<'_> {
    /// Records an announcement of a lane.
    pub(super) fn announce(&mut self, actor: Actor, values: &[u32], target: &Part) {
        let key = self.words_of(actor, target);
        self.announcements
            .last
            .insert(key, (actor, values.to_vec()));
    }

    /// Compares the announcement received in this launch with the one that a lane expects.
    pub(super) fn agree(&mut self, actor: Actor, values: &[u32], peer: Rank, source: &Part) {
        let key = self.words_of(actor, source);
        let there = self.announcements.last.get(&key);
        let of_launch =
            there.filter(|(other, _)| (other.launch, other.rank as Rank) == (actor.launch, peer));
        let same = of_launch.is_some_and(|(_, theirs)| theirs == values);
        if !same && self.announcements.differ.len() < MAX_KEPT {
            let expected = (actor, values.to_vec());
            self.announcements
                .differ
                .push((expected, of_launch.cloned()));
        }
    }

    /// Records that a lane forwards announcements, if everything it copies was announced in this launch.
    pub(super) fn pass_on(
        &mut self,
        actor: Actor,
        elements: usize,
        targets: &[Part],
        source: &Part,
    ) {
        let key = self.words_of(actor, source);
        let announced = self.announcements.last.get(&key);
        let announced =
            announced.filter(|(of, words)| of.launch == actor.launch && words.len() == elements);
        let Some(announced) = announced.cloned() else {
            return;
        };
        for target in targets {
            let key = self.words_of(actor, target);
            self.announcements.last.insert(key, announced.clone());
        }
    }

    fn words_of(&self, actor: Actor, part: &Part) -> Words {
        let (place, range) = self.bytes_of(actor.launch as usize, part);
        (part.rank, place, range.start)
    }
}

/// Reports ranks with different announcements in one launch.
pub(super) fn report(run: &Run<'_>, diagnostics: &mut Diagnostics<'_>) {
    let words = |values: &[u32]| {
        let words: Vec<String> = values.iter().map(ToString::to_string).collect();
        words.join(", ")
    };
    for ((actor, values), other) in &run.announcements.differ {
        let mut places = vec![place(run, actor)];
        places.extend(other.iter().map(|(other, _)| place(run, other)));
        diagnostics.add(DiagnosticKind::Mismatch, places.clone(), |said| {
            let own = told(run, said, actor, &places[0]);
            match (other, places.get(1)) {
                (Some((other, theirs)), Some(place)) => format!(
                    "{own} expects {}, and {} announces {}; expected the same on every rank",
                    words(values),
                    told(run, said, other, place),
                    words(theirs)
                ),
                _ => format!(
                    "{own} reads packets that are no announcement of the launch; expected those of the other rank"
                ),
            }
        });
    }
}
