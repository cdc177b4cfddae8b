//! What ranks announce of a launch: all the same, or the launch fails.

use super::report::{place, told};
use super::run::{Place, Run};
use crate::error::Rank;
use crate::program::diagnostic::DiagnosticKind;
use crate::program::machine::Actor;
use crate::program::section::Part;
use crate::program::verify::diagnostics::Diagnostics;
use std::collections::BTreeMap;

/// The most differences that are kept.
const MAX_KEPT: usize = 4096;

/// Where words lie: whose memory, which, and from which byte.
type Words = (Rank, Place, usize);

/// What a step announces or expects.
type Announced = (Actor, Vec<u32>);

/// What ranks announced last, and where it differs from what was expected.
#[derive(Debug, Default)]
pub(super) struct Announcements {
    last: BTreeMap<Words, Announced>,
    /// What a step expects, and what was announced instead.
    differ: Vec<(Announced, Option<Announced>)>,
}

impl Run<'_> {
    /// Notes what a lane announces.
    pub(super) fn announce(&mut self, actor: Actor, values: &[u32], target: &Part) {
        let key = self.words_of(actor, target);
        self.announcements
            .last
            .insert(key, (actor, values.to_vec()));
    }

    /// Compares what came in this launch with what a lane expects.
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

    /// Notes what a lane passes on, where all that it copies was announced in this launch.
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

/// Reports ranks that announce different things in one launch.
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
