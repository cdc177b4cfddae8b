//! Announcements of a launch: all ranks must announce the same values, or the launch fails.

use super::announcements::AnnouncedMemory;
use super::report::by_steps;
use super::state::LaneRun;
use crate::error::Rank;
use crate::named::comma;
use crate::program::diagnostic::DiagnosticKind;
use crate::program::machine::Actor;
use crate::program::section::{Part, SectionInstance};
use crate::program::site::Site;
use crate::program::verify::diagnostics::Diagnostics;
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// Limit on recorded differences.
// Far more than the 64 diagnostics that are reported; one mismatch in a loop yields one for each lane and launch.
const MAX_KEPT: usize = 4096;

/// An `agree` in any launch: rank, lane, peer and place.
pub(super) type Agreement = (u32, u32, Rank, Site);

impl LaneRun<'_> {
    /// Records an announcement of a lane.
    pub(super) fn announce(&mut self, actor: Actor, values: &[u32], target: &Part) {
        let key = self.words_of(actor, target);
        self.announcements
            .last
            .insert(key, (actor, values.to_vec()));
    }

    /// Records which tensors a lane announces, or agrees on.
    pub(super) fn locate(&mut self, actor: Actor, tensors: &[usize], announces: bool) {
        for tensor in tensors {
            let of = (actor.launch, actor.lane, *tensor);
            if announces {
                self.announcements
                    .located
                    .entry(of)
                    .or_default()
                    .push(actor);
            } else {
                self.announcements.met.insert((of, actor.rank));
            }
        }
    }

    /// Whether a lane knows where an operand is: of the tensors that kernels announce, those of ranks that have done so in
    /// this lane and launch.
    pub(super) fn is_located(&self, actor: Actor, part: &Part) -> bool {
        let (number, rank) = (actor.launch as usize, actor.rank as Rank);
        if part.rank == rank || part.elements == 0 {
            return true;
        }
        let announced = self.cache(number, rank);
        let announced = announced.announced(self.section(number, rank));
        let of = (actor.launch, actor.lane, part.tensor);
        let by_owner = |actors: &Vec<Actor>| actors.iter().any(|it| it.rank as Rank == part.rank);
        !announced.contains(&part.tensor)
            || self.announcements.located.get(&of).is_some_and(by_owner)
    }

    /// Lanes of a section that announce tensors on any rank: only these may find other tensors reachable than others.
    pub(super) fn locating(&self, section: &SectionInstance) -> BTreeSet<usize> {
        let launched = |launch: u32| self.kernels[self.sequence[launch as usize]].sections[0];
        let located = self.announcements.located.keys();
        let of_section = located.filter(|(launch, ..)| std::ptr::eq(launched(*launch), section));
        of_section.map(|(_, lane, _)| *lane as usize).collect()
    }

    /// Compares the announcement received in this launch with the one that a lane expects.
    pub(super) fn agree(&mut self, actor: Actor, values: &[u32], peer: Rank, source: &Part) {
        let key = self.words_of(actor, source);
        let there = self.announcements.last.get(&key);
        let of_launch =
            // Slots repeat, so the words may still hold, or already hold, what another launch announced.
            there.filter(|(other, _)| (other.launch, other.rank as Rank) == (actor.launch, peer));
        let same = of_launch.is_some_and(|(_, theirs)| theirs == values);
        if same && self.words.are_read() {
            self.announcements.agreed.push((actor, peer));
        } else if !same && self.announcements.differ.len() < MAX_KEPT {
            let expected = (actor, values.to_vec());
            let found = of_launch.cloned();
            self.announcements.differ.push((expected, peer, found));
        }
    }

    /// Steps that find what they expect, where kernels read words.
    pub(super) fn agreed(&self) -> HashSet<Agreement> {
        self.agreements(self.announcements.agreed.iter().copied())
    }

    /// Steps that find something else than they expect.
    pub(super) fn differing(&self) -> HashSet<Agreement> {
        let differ = self.announcements.differ.iter();
        self.agreements(differ.map(|((actor, _), peer, _)| (*actor, *peer)))
    }

    fn agreements(&self, steps: impl Iterator<Item = (Actor, Rank)>) -> HashSet<Agreement> {
        // Listing the steps of a lane takes long, so do it once for each lane of a launch.
        let mut lanes: BTreeMap<_, Vec<(u32, Rank)>> = BTreeMap::new();
        for (actor, peer) in steps {
            let lane = (actor.launch, actor.rank, actor.lane);
            lanes.entry(lane).or_default().push((actor.step, peer));
        }
        let mut found = HashSet::new();
        for ((launch, of, lane), steps) in lanes {
            let (number, rank) = (launch as usize, of as Rank);
            let listed = self.steps(number, rank, lane as usize);
            // A step is the same whatever values the lane has read.
            let values = self.cache(number, rank).read(self.section(number, rank));
            for (step, peer) in steps {
                let listed = listed.as_ref().ok().and_then(|all| all.get(step as usize));
                let mut site = listed.map(|step| step.site.clone()).unwrap_or_default();
                let indices = site.indices.iter();
                let indices = indices.filter(|(name, _)| !values.contains(&**name));
                site.indices = indices.cloned().collect();
                found.insert((of, lane, peer, site));
            }
        }
        found
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
        // Only a whole announcement can be matched by an `agree` at the receiver; a part of one is plain data there.
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

    fn words_of(&self, actor: Actor, part: &Part) -> AnnouncedMemory {
        let (place, range) = self.bytes_of(actor.launch as usize, part);
        (part.rank, place, range.start)
    }
}

/// Reports ranks with different announcements in one launch.
pub(super) fn report(run: &LaneRun<'_>, diagnostics: &mut Diagnostics<'_>) {
    for (of, actors) in &run.announcements.located {
        let met = |actor: &&Actor| run.announcements.met.contains(&(*of, actor.rank));
        // If one rank alone announces, it need not agree: nobody else decides by that tensor.
        let Some(deaf) = actors.iter().find(|actor| !met(actor)) else {
            continue;
        };
        if let Some(other) = actors.iter().find(|other| other.rank != deaf.rank) {
            let kind = DiagnosticKind::Malformed;
            by_steps(run, diagnostics, kind, [deaf, other], |[deaf, other]| {
                format!(
                    "{deaf} announces a tensor that {other} announces, too, and does not agree on it; expected it to, \
                     since the ranks would not find the same tensors reachable"
                )
            });
        }
    }
    for ((actor, values), _, other) in &run.announcements.differ {
        let actors = [actor, other.as_ref().map_or(actor, |(other, _)| other)];
        let kind = DiagnosticKind::Mismatch;
        by_steps(
            run,
            diagnostics,
            kind,
            actors,
            |[own, sender]| match other {
                Some((_, theirs)) => format!(
                    "{own} expects {}, and {sender} announces {}; expected the same on every rank",
                    comma(values),
                    comma(theirs)
                ),
                None => format!(
                    "{own} reads packets that are no announcement of the launch; expected those of the other rank"
                ),
            },
        );
    }
}
