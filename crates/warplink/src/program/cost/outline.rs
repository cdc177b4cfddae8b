//! What a lane does, in outline.
//!
//! These are the conditions that it meets, the bounds of its loops, and whom it addresses. Of a loop the first two
//! iterations and the last are followed. Which part of a tensor a lane has does not matter, but how long it is does,
//! except that the last of several parts may be shorter.

use crate::program::construct::{Each, Loop, Selection, TensorRef};
use crate::program::expr::{Condition, Expr, Operator};
use crate::program::section::SectionInstance;
use crate::program::section::ir::{Place, Receiver, Source, Step, StepKind};
use std::collections::HashSet;

/// The most items of a list that are looked at.
const MAX_ITEMS: i64 = 64;

/// Stands for what has no value.
const UNKNOWN: i64 = i64::MIN;

/// Goes through what a lane does.
pub(super) struct Outline<'s> {
    section: &'s SectionInstance,
    lane: usize,
    /// Only what depends on these names is noted; all of it where there are none.
    varying: Option<&'s HashSet<&'s str>>,
    names: Vec<(&'s str, i64)>,
    said: Vec<i64>,
}

impl<'s> Outline<'s> {
    /// What `lane` does.
    pub(super) fn of(
        section: &'s SectionInstance,
        lane: usize,
        varying: Option<&'s HashSet<&'s str>>,
    ) -> Vec<i64> {
        let mut outline = Self {
            section,
            lane,
            varying,
            names: vec![(&section.section.lane, lane as i64), ("epoch", 0)],
            said: Vec::new(),
        };
        outline.body(&section.section.body);
        outline.said
    }

    fn body(&mut self, steps: &'s [Step]) {
        let known = self.names.len();
        for step in steps {
            self.step(&step.kind);
        }
        self.names.truncate(known);
    }

    fn step(&mut self, step: &'s StepKind) {
        match step {
            StepKind::LetInteger { name, value } => {
                let value = self.value(value);
                self.names.push((name, value));
            }
            StepKind::LetTensor { value, .. } => self.tensor(value),
            StepKind::Announce(it) => {
                if let Some(ranks) = &it.peers {
                    self.each(ranks, Self::rank);
                }
            }
            StepKind::Barrier | StepKind::Agree(_) => {}
            StepKind::Move(it) => {
                self.each(&it.targets, Self::place);
                self.each(&it.sources, |outline, source| match &source.otherwise {
                    Some((condition, place)) if !outline.holds(condition) => outline.place(place),
                    _ => outline.place(&source.place),
                });
            }
            StepKind::Signal(receivers) => self.each(receivers, Self::receiver),
            StepKind::Wait(ranks) => self.each(ranks, Self::rank),
            StepKind::For(it) => self.repeated(it),
            StepKind::If(branch) => {
                for arm in &branch.arms {
                    if self.holds(&arm.condition) {
                        return self.body(&arm.body);
                    }
                }
                self.body(&branch.otherwise);
            }
        }
    }

    /// Whether a condition holds, which is noted.
    fn holds(&mut self, condition: &Condition) -> bool {
        let holds = condition.evaluate(&|name| self.named(name));
        let holds = holds.unwrap_or(false);
        if self
            .varying
            .is_none_or(|names| condition_mentions(condition, names))
        {
            self.said.push(i64::from(holds));
        }
        holds
    }

    fn repeated(&mut self, it: &'s Loop<Step>) {
        if !self.matters(&it.from) && !self.matters(&it.to) && !self.any_matter(&it.body) {
            return;
        }
        let (from, to) = (self.value(&it.from), self.value(&it.to));
        if self.matters(&it.from) || self.matters(&it.to) {
            self.said.extend([from, to]);
        }
        self.over(&it.index, from, to, |outline| outline.body(&it.body));
    }

    /// Does `inner` for the first two values from `from` to before `to`, and the last.
    fn over(&mut self, index: &'s str, from: i64, to: i64, mut inner: impl FnMut(&mut Self)) {
        let mut done = None;
        for value in [from, from.saturating_add(1), to.saturating_sub(1)] {
            if value < to && value >= from && done.is_none_or(|done| done < value) {
                done = Some(value);
                self.names.push((index, value));
                inner(self);
                self.names.pop();
            }
        }
    }

    /// Does `with` for all of a list, whose order does not matter.
    fn each<T>(&mut self, list: &'s [Each<T>], mut with: impl FnMut(&mut Self, &'s T)) {
        let before = self.said.len();
        for each in list {
            let Some(over) = &each.over else {
                with(self, &each.item);
                continue;
            };
            let (from, to) = (self.value(&over.from), self.value(&over.to));
            if self.matters(&over.from) || self.matters(&over.to) {
                self.said.extend([from, to]);
            }
            for value in from..to.min(from.saturating_add(MAX_ITEMS)) {
                self.names.push((&over.index, value));
                with(self, &each.item);
                self.names.pop();
            }
        }
        self.said[before..].sort_unstable();
    }

    fn place(&mut self, place: &'s Place) {
        self.tensor(&place.tensor);
        if let Some(rank) = &place.on {
            self.rank(rank);
        }
    }

    /// Notes how long what is selected is.
    fn tensor(&mut self, tensor: &'s TensorRef) {
        for selection in &tensor.selections {
            match selection {
                Selection::Range(from, to) => match length(from, to) {
                    Some(length) if self.matters(length) => {
                        let length = self.value(length);
                        self.said.push(length);
                    }
                    None if self.matters(from) || self.matters(to) => {
                        let length = self.value(to).saturating_sub(self.value(from));
                        self.said.push(length);
                    }
                    _ => {}
                },
                Selection::Part(_, parts) if self.matters(parts) => {
                    let parts = self.value(parts);
                    self.said.push(parts);
                }
                _ => {}
            }
        }
    }

    fn receiver(&mut self, receiver: &'s Receiver) {
        self.rank(&receiver.rank);
        if let Some(lane) = &receiver.lane
            && self.matters(lane)
        {
            let lane = self.value(lane).saturating_sub(self.lane as i64);
            self.said.push(lane);
        }
    }

    /// Notes how far another rank is from this one.
    fn rank(&mut self, rank: &'s Expr) {
        if self.matters(rank) {
            let world = self.section.world.max(1) as i64;
            let distance = self.value(rank).saturating_sub(self.section.rank as i64);
            self.said.push(distance.rem_euclid(world));
        }
    }

    fn matters(&self, expression: &Expr) -> bool {
        self.varying.is_none_or(|names| mentions(expression, names))
    }

    /// Whether anything that is noted may depend on the names.
    fn any_matter(&self, steps: &[Step]) -> bool {
        let Some(names) = self.varying else {
            return true;
        };
        let tensor = |tensor: &TensorRef| {
            tensor.selections.iter().any(|selection| match selection {
                Selection::Range(from, to) => match length(from, to) {
                    Some(length) => mentions(length, names),
                    None => mentions(from, names) || mentions(to, names),
                },
                Selection::Part(_, parts) => mentions(parts, names),
                _ => false,
            })
        };
        let place = |place: &Place| {
            tensor(&place.tensor) || place.on.as_ref().is_some_and(|rank| mentions(rank, names))
        };
        steps.iter().any(|step| match &step.kind {
            StepKind::LetTensor { value, .. } => tensor(value),
            StepKind::LetInteger { .. } | StepKind::Barrier | StepKind::Agree(_) => false,
            StepKind::Announce(it) => {
                let mut peers = it.peers.iter();
                peers.any(|ranks| any_of(ranks, names, |rank| mentions(rank, names)))
            }
            StepKind::Move(it) => {
                let source = |source: &Source| {
                    let otherwise = source.otherwise.as_ref();
                    place(&source.place)
                        || otherwise.is_some_and(|(condition, other)| {
                            condition_mentions(condition, names) || place(other)
                        })
                };
                any_of(&it.targets, names, place) || any_of(&it.sources, names, source)
            }
            StepKind::Signal(receivers) => any_of(receivers, names, |receiver| {
                let lane = receiver.lane.as_ref();
                mentions(&receiver.rank, names) || lane.is_some_and(|lane| mentions(lane, names))
            }),
            StepKind::Wait(ranks) => any_of(ranks, names, |rank| mentions(rank, names)),
            StepKind::For(it) => {
                mentions(&it.from, names) || mentions(&it.to, names) || self.any_matter(&it.body)
            }
            StepKind::If(branch) => {
                let arm = |condition, body: &[Step]| {
                    condition_mentions(condition, names) || self.any_matter(body)
                };
                branch.arms.iter().any(|it| arm(&it.condition, &it.body))
                    || self.any_matter(&branch.otherwise)
            }
        })
    }

    fn value(&self, expression: &Expr) -> i64 {
        let value = expression.evaluate(&|name| self.named(name));
        value.unwrap_or(UNKNOWN)
    }

    fn named(&self, name: &str) -> Option<i64> {
        let bound = self.names.iter().rev().find(|(bound, _)| *bound == name);
        match (bound, name) {
            (Some((_, value)), _) => Some(*value),
            (None, "rank") => Some(self.section.rank as i64),
            (None, "world") => Some(self.section.world as i64),
            // As where all ranks reach what they announce.
            (None, _) => self.section.integers.get(name).copied().or(Some(1)),
        }
    }
}

/// The names whose values depend on the lane.
pub(super) fn varying(section: &SectionInstance) -> HashSet<&str> {
    fn range<'s>(index: &'s str, bounds: [&'s Expr; 2], names: &mut HashSet<&'s str>) {
        if bounds.iter().any(|bound| mentions(bound, names)) {
            names.insert(index);
        }
    }
    fn list<'s, T>(list: &'s [Each<T>], names: &mut HashSet<&'s str>) {
        for over in list.iter().filter_map(|each| each.over.as_ref()) {
            range(&over.index, [&over.from, &over.to], names);
        }
    }
    fn note<'s>(steps: &'s [Step], names: &mut HashSet<&'s str>) {
        for step in steps {
            match &step.kind {
                StepKind::LetInteger { name, value } if mentions(value, names) => {
                    names.insert(name);
                }
                StepKind::LetInteger { .. }
                | StepKind::LetTensor { .. }
                | StepKind::Barrier
                | StepKind::Agree(_) => {}
                StepKind::Announce(it) => it.peers.iter().for_each(|peers| list(peers, names)),
                StepKind::Move(it) => {
                    list(&it.targets, names);
                    list(&it.sources, names);
                }
                StepKind::Signal(receivers) => list(receivers, names),
                StepKind::Wait(ranks) => list(ranks, names),
                StepKind::For(it) => {
                    range(&it.index, [&it.from, &it.to], names);
                    note(&it.body, names);
                }
                StepKind::If(branch) => {
                    branch.arms.iter().for_each(|arm| note(&arm.body, names));
                    note(&branch.otherwise, names);
                }
            }
        }
    }
    let mut names = HashSet::from([section.section.lane.as_str()]);
    note(&section.section.body, &mut names);
    names
}

fn mentions(expression: &Expr, names: &HashSet<&str>) -> bool {
    match expression {
        Expr::Number(_) | Expr::Count(_) => false,
        Expr::Name(name) => names.contains(name.as_str()),
        Expr::Negative(a) | Expr::Element(_, a) | Expr::Log2(a) => mentions(a, names),
        Expr::Binary(_, a, b) => mentions(a, names) || mentions(b, names),
    }
}

fn condition_mentions(condition: &Condition, names: &HashSet<&str>) -> bool {
    match condition {
        Condition::Compare(_, a, b) => mentions(a, names) || mentions(b, names),
        Condition::Given(_) | Condition::Reachable(_) => false,
        Condition::Not(a) => condition_mentions(a, names),
        Condition::And(a, b) | Condition::Or(a, b) => {
            condition_mentions(a, names) || condition_mentions(b, names)
        }
    }
}

/// How long `from..to` is, where that is said: of `a..a + b` and `a * b..(a + 1) * b`, it is `b`. So lanes need not be
/// gone through for where their parts lie.
fn length<'e>(from: &Expr, to: &'e Expr) -> Option<&'e Expr> {
    match (from, to) {
        (_, Expr::Binary(Operator::Add, a, b)) if **a == *from => Some(b),
        (
            Expr::Binary(Operator::Multiply, index, unit),
            Expr::Binary(Operator::Multiply, next, other),
        ) if unit == other => match &**next {
            Expr::Binary(Operator::Add, a, b) if a == index && **b == Expr::Number(1) => {
                Some(other)
            }
            _ => None,
        },
        _ => None,
    }
}

/// Whether a list is longer or shorter by the names, or one of its items matters.
fn any_of<T>(list: &[Each<T>], names: &HashSet<&str>, item: impl Fn(&T) -> bool) -> bool {
    list.iter().any(|each| {
        let over = each.over.as_ref();
        over.is_some_and(|over| mentions(&over.from, names) || mentions(&over.to, names))
            || item(&each.item)
    })
}
