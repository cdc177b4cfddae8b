//! Outline of a lane's behaviour, for comparison.
//!
//! It records the lane's conditions, the bounds of its loops, and the ranks and lanes it addresses. Of a loop, the
//! first two iterations and the last are followed. The position of a lane's part of a tensor does not matter, but its
//! length does, except that the last of several parts may be shorter.

use crate::program::construct::{Branch, Each, Loop, Over, Selection};
use crate::program::expr::{Condition, Expr, Operator};
use crate::program::section::{
    DeviceValue, ExprUse, Otherwise, SectionInstance, Source, Step, StepKind, Visitor, WordValue,
};
use std::collections::HashSet;

/// Limit on the visited items of a list, which bounds the time.
const MAX_ITEMS: i64 = 64;

/// Placeholder for an unknown value.
const UNKNOWN: i64 = i64::MIN;

/// Visitor that records an outline.
pub(super) struct Outline<'s> {
    section: &'s SectionInstance,
    lane: usize,
    /// Only values that depend on these names are recorded; all values if `None`.
    varying: Option<&'s HashSet<&'s str>>,
    names: Vec<(&'s str, i64)>,
    said: Vec<i64>,
}

impl<'s> Outline<'s> {
    /// Outline of `lane`.
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

    fn matters(&self, expression: &Expr) -> bool {
        // Expressions without a varying name are equal for all lanes that are compared.
        self.varying.is_none_or(|names| mentions(expression, names))
    }

    /// Whether any recorded value in a body may depend on the names.
    fn any_matter(&self, steps: &'s [Step]) -> bool {
        self.varying.is_none_or(|names| {
            let mut any = AnyVaries {
                names,
                found: false,
            };
            any.body(steps);
            any.found
        })
    }

    /// Runs `inner` with the index of a loop or list bound to `value`.
    fn with(&mut self, index: &'s str, value: i64, inner: impl FnOnce(&mut Self)) {
        self.names.push((index, value));
        inner(self);
        self.names.pop();
    }

    /// Bounds of an index, which are recorded: the first value, and one past the last.
    fn bounds(&mut self, over: &'s Over) -> (i64, i64) {
        let (from, to) = (self.value(&over.from), self.value(&over.to));
        if self.matters(&over.from) || self.matters(&over.to) {
            self.said.extend([from, to]);
        }
        (from, to)
    }

    fn value(&self, expression: &Expr) -> i64 {
        // Unknown values are equal to one another: lanes that differ by memory only are alike.
        let value = expression.evaluate(&|name| self.named(name));
        value.unwrap_or(UNKNOWN)
    }

    fn named(&self, name: &str) -> Option<i64> {
        let bound = self.names.iter().rev().find(|(bound, _)| *bound == name);
        match (bound, name) {
            (Some((_, value)), _) => Some(*value),
            (None, "rank") => Some(self.section.rank as i64),
            (None, "world") => Some(self.section.world as i64),
            // Assumes that all ranks reach the announced tensors.
            (None, _) => self.section.integers.get(name).copied().or(Some(1)),
        }
    }

    /// Evaluates and records a condition.
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
}

impl<'s> Visitor<'s> for Outline<'s> {
    fn scoped(&mut self, inner: impl FnOnce(&mut Self)) {
        let known = self.names.len();
        inner(self);
        self.names.truncate(known);
    }

    fn integer(&mut self, name: &'s str, value: &'s Expr) {
        let value = self.value(value);
        self.names.push((name, value));
    }

    /// Takes a value from memory for the greatest.
    fn device_value(&mut self, it: &'s DeviceValue) {
        self.place(&it.place);
        let most = match &it.gives {
            WordValue::Word(most) => self.value(most),
            // As many as there are in its part of a tensor.
            WordValue::Count(_) | WordValue::Position(..) => 1,
        };
        self.names.push((&it.name, most));
    }

    /// Follows the first two iterations and the last.
    fn repeat(&mut self, it: &'s Loop<StepKind>) {
        let Over { index, from, to } = &it.over;
        if !self.matters(from) && !self.matters(to) && !self.any_matter(&it.body) {
            return;
        }
        let (from, to) = self.bounds(&it.over);
        let mut done = None;
        for value in [from, from.saturating_add(1), to.saturating_sub(1)] {
            // Loops of one or two iterations visit none twice.
            // The second iteration stands for all in the middle; parts of the last one may be shorter.
            if value < to && value >= from && done.is_none_or(|done| done < value) {
                done = Some(value);
                self.with(index, value, |outline| outline.body(&it.body));
            }
        }
    }

    fn choose(&mut self, branch: &'s Branch<StepKind>) {
        for arm in &branch.arms {
            if self.holds(&arm.condition) {
                return self.body(&arm.body);
            }
        }
        self.body(&branch.otherwise);
    }

    fn over(&mut self, over: &'s Over, mut inner: impl FnMut(&mut Self)) {
        let (from, to) = self.bounds(over);
        for value in from..to.min(from.saturating_add(MAX_ITEMS)) {
            self.with(&over.index, value, &mut inner);
        }
    }

    /// The order of a list does not matter.
    fn each<T>(&mut self, list: &'s [Each<T>], item: impl Fn(&mut Self, &'s T)) {
        let before = self.said.len();
        for each in list {
            match &each.over {
                Some(over) => self.over(over, |outline| item(outline, &each.item)),
                None => item(self, &each.item),
            }
        }
        // Ranks name their peers from different starts, such as `(rank + r) % world`, and visit the same set.
        self.said[before..].sort_unstable();
    }

    fn source(&mut self, source: &'s Source) {
        match &source.otherwise {
            Some((condition, otherwise)) if !self.holds(condition) => match otherwise {
                Otherwise::Place(place) => self.place(place),
                Otherwise::Number(_) => {}
            },
            _ => self.place(&source.place),
        }
    }

    /// Records the distance of another rank, or its lane, from this one.
    fn expression(&mut self, expression: &'s Expr, is: ExprUse) {
        if !self.matters(expression) {
            return;
        }
        match is {
            ExprUse::Rank => {
                let world = self.section.world.max(1) as i64;
                // Relative to the own rank: `rank + 1` is the same behaviour on every rank, though it names different
                // ones.
                let distance = self
                    .value(expression)
                    .saturating_sub(self.section.rank as i64);
                self.said.push(distance.rem_euclid(world));
            }
            ExprUse::Lane => {
                let lane = self.value(expression).saturating_sub(self.lane as i64);
                self.said.push(lane);
            }
            ExprUse::Value
            | ExprUse::Bound
            | ExprUse::Compared
            | ExprUse::Index
            | ExprUse::Extent => {}
        }
    }

    /// Records the length of a selection.
    fn selection(&mut self, selection: &'s Selection) {
        let matters = lengths(selection).any(|length| self.matters(length));
        if matters {
            let length = match selection {
                Selection::Range(from, to) => match length(from, to) {
                    // The length alone: the position of a lane's part does not matter, and its start may be unknown.
                    Some(length) => self.value(length),
                    None => self.value(to).saturating_sub(self.value(from)),
                },
                Selection::Part(_, parts) => self.value(parts),
                Selection::Index(_) | Selection::Axes(_) => return,
            };
            self.said.push(length);
        }
    }
}

/// Whether any value that an outline records mentions one of some names.
struct AnyVaries<'n> {
    names: &'n HashSet<&'n str>,
    found: bool,
}

impl<'s> Visitor<'s> for AnyVaries<'_> {
    fn expression(&mut self, expression: &'s Expr, is: ExprUse) {
        let noted = !matches!(is, ExprUse::Value | ExprUse::Index);
        self.found |= noted && mentions(expression, self.names);
    }

    fn selection(&mut self, selection: &'s Selection) {
        self.found |= lengths(selection).any(|length| mentions(length, self.names));
    }
}

/// Names whose values depend on the lane.
pub(super) fn varying(section: &SectionInstance) -> HashSet<&str> {
    let mut varying = Varying(HashSet::from([section.section.lane.as_str()]));
    varying.body(&section.section.body);
    varying.0
}

struct Varying<'s>(HashSet<&'s str>);

impl<'s> Visitor<'s> for Varying<'s> {
    fn integer(&mut self, name: &'s str, value: &'s Expr) {
        if mentions(value, &self.0) {
            self.0.insert(name);
        }
    }

    fn device_value(&mut self, it: &'s DeviceValue) {
        if it.expressions().any(|one| mentions(one, &self.0)) {
            self.0.insert(&it.name);
        }
    }

    fn index(&mut self, over: &'s Over) {
        if mentions(&over.from, &self.0) || mentions(&over.to, &self.0) {
            self.0.insert(&over.index);
        }
    }
}

fn mentions(expression: &Expr, names: &HashSet<&str>) -> bool {
    let mut found = false;
    expression.walk(&mut |part| {
        found |= matches!(part, Expr::Name(name) if names.contains(name.as_str()));
    });
    found
}

fn condition_mentions(condition: &Condition, names: &HashSet<&str>) -> bool {
    let mut found = false;
    condition.leaves(&mut |leaf| {
        if let Condition::Compare(_, a, b) = leaf {
            found |= mentions(a, names) || mentions(b, names);
        }
    });
    found
}

/// Expressions that determine the recorded length of a selection.
fn lengths(selection: &Selection) -> impl Iterator<Item = &Expr> {
    let expressions = match selection {
        Selection::Range(from, to) => match length(from, to) {
            Some(length) => [Some(length), None],
            None => [Some(from), Some(to)],
        },
        Selection::Part(_, parts) => [Some(parts), None],
        Selection::Index(_) | Selection::Axes(_) => [None, None],
    };
    expressions.into_iter().flatten()
}

/// Length of `from..to` if it is syntactically evident: `b` for `a..a + b` and for `a * b..(a + 1) * b`. It avoids
/// evaluating positions for every lane.
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
