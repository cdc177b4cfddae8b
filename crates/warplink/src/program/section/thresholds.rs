//! Values at which a section may do something else with the integers that its lanes read from memory.

use super::instance::SectionInstance;
use super::ir::{DeviceValue, WordRange};
use super::visit::{ExprUse, Visitor};
use crate::program::expr::{Condition, Expr, Operator};
use std::collections::{BTreeSet, HashMap, HashSet};

/// Limit on the lanes, and on the launches, whose own numbers are derived, and on those that are derived from one comparison.
const MAX_LANES: usize = 16;
const MAX_EPOCHS: u64 = 2;
const MAX_SOLVED: usize = 64;

/// Integers at which a section may do something else; none is negative.
#[derive(Debug, Default)]
pub(crate) struct Thresholds {
    /// Those that follow from parameters and the rank, and those next to them.
    pub(crate) fixed: BTreeSet<i64>,
    /// Further ones, which follow from the lane or the launch.
    pub(crate) varying: BTreeSet<i64>,
    /// Ends of ranges of words that its lanes look for, in any arm; one may be negative.
    pub(crate) ends: BTreeSet<i64>,
}

impl SectionInstance {
    /// The integers that such a value, or what is computed from it, is compared or combined with.
    pub(crate) fn thresholds(&self) -> Thresholds {
        let mut all = Thresholds::default();
        let walk = |of_lane| {
            let mut walk = Walk {
                instance: self,
                of_lane,
                read: HashSet::new(),
                computed: HashMap::new(),
                known: HashMap::new(),
                found: BTreeSet::new(),
                ends: BTreeSet::new(),
            };
            walk.body(&self.section.body);
            let found = walk.found.into_iter();
            let beside = found.flat_map(|it| [it.saturating_sub(1), it, it.saturating_add(1)]);
            let found: BTreeSet<i64> = beside.filter(|value| *value >= 0).collect();
            (found, walk.ends)
        };
        (all.fixed, all.ends) = walk(None);
        for lane in 0..self.lanes.min(MAX_LANES) {
            for epoch in 0..self.period.clamp(1, MAX_EPOCHS) {
                let (found, ends) = walk(Some((lane as i64, epoch as i64)));
                all.varying.extend(found.difference(&all.fixed));
                all.ends.extend(ends);
            }
        }
        all
    }
}

struct Walk<'s> {
    instance: &'s SectionInstance,
    /// The lane and the epoch, if these are known.
    of_lane: Option<(i64, i64)>,
    /// Integers that are read from memory, or computed from these. Text has them in order, and no name has two meanings.
    read: HashSet<&'s str>,
    /// What those are computed from that are not read themselves.
    computed: HashMap<&'s str, &'s Expr>,
    /// Other integers.
    known: HashMap<&'s str, i64>,
    found: BTreeSet<i64>,
    ends: BTreeSet<i64>,
}

impl<'s> Walk<'s> {
    fn is_read(&self, expression: &Expr) -> bool {
        let mut is_read = false;
        expression.walk(&mut |part| {
            is_read |= matches!(part, Expr::Name(name) if self.read.contains(&**name));
        });
        is_read
    }

    /// Value of an integer that depends on no loop.
    fn value(&self, of: &Expr) -> Option<i64> {
        let value = of.evaluate(&|name| match (name, self.of_lane) {
            ("rank", _) => Some(self.instance.rank as i64),
            ("world", _) => Some(self.instance.world as i64),
            ("epoch", Some((_, epoch))) => Some(epoch),
            (name, Some((lane, _))) if *name == *self.instance.section.lane => Some(lane),
            (name, _) => {
                let outer = || self.instance.integers.get(name).copied();
                self.known.get(name).copied().or_else(outer)
            }
        });
        value.ok()
    }

    /// Of two operands, the one that is computed from what is read, and the value of the other.
    fn pair(&self, one: &'s Expr, other: &'s Expr) -> Option<(&'s Expr, i64)> {
        match (self.is_read(one), self.is_read(other)) {
            (true, false) => Some((one, self.value(other)?)),
            (false, true) => Some((other, self.value(one)?)),
            _ => None,
        }
    }

    /// Adds the integers with which an expression has a value, as far as they follow from it alone.
    fn solve(&mut self, expression: &'s Expr, value: i64) {
        let mut open = vec![(expression, value)];
        for _ in 0..MAX_SOLVED {
            let Some((expression, value)) = open.pop() else {
                return;
            };
            self.found.insert(value);
            match expression {
                Expr::Name(name) => {
                    let of = self.computed.get(&**name);
                    open.extend(of.map(|of| (*of, value)));
                }
                Expr::Negative(a) => open.extend(value.checked_neg().map(|value| (&**a, value))),
                Expr::Binary(operator, a, b) => {
                    let Some((read, other)) = self.pair(a, b) else {
                        continue;
                    };
                    let is_first = std::ptr::eq(read, &raw const **a);
                    let values = inverse(*operator, is_first, other, value);
                    open.extend(values.into_iter().flatten().map(|value| (read, value)));
                }
                Expr::Number(_) | Expr::Element(..) | Expr::Count(_) | Expr::Log2(_) => {}
            }
        }
    }
}

/// The ends of the operands, first or second, with which an operator gives `value`.
fn inverse(operator: Operator, is_first: bool, other: i64, value: i64) -> [Option<i64>; 2] {
    let of = |operator: Operator, a: i64, b: i64| operator.apply(a, b).ok();
    let next = value.saturating_add(1);
    match (operator, is_first) {
        (Operator::Add, _) => [of(Operator::Subtract, value, other), None],
        (Operator::Subtract, true) => [of(Operator::Add, value, other), None],
        (Operator::Subtract, false) => [of(Operator::Subtract, other, value), None],
        (Operator::Multiply, _) => [of(Operator::Divide, value, other), None],
        (Operator::Divide, true) => [value, next].map(|it| of(Operator::Multiply, it, other)),
        (Operator::Remainder, true) => [Some(value), of(Operator::Add, value, other)],
        (Operator::ShiftLeft, true) => [of(Operator::ShiftRight, value, other), None],
        (Operator::ShiftRight, true) => [value, next].map(|it| of(Operator::ShiftLeft, it, other)),
        (Operator::Xor, _) => [of(Operator::Xor, value, other), None],
        (Operator::Min | Operator::Max, _) => [Some(value), None],
        (Operator::Divide | Operator::Remainder, false)
        | (Operator::ShiftLeft | Operator::ShiftRight, false)
        | (Operator::Part, _) => [None, None],
    }
}

impl<'s> Visitor<'s> for Walk<'s> {
    fn device_value(&mut self, it: &'s DeviceValue) {
        for expression in it.expressions() {
            self.expression(expression, ExprUse::Bound);
        }
        if let Some(WordRange { from, to, .. }) = it.range() {
            let ends = [self.value(from), self.value(to)];
            self.ends.extend(ends.into_iter().flatten());
        }
        self.read.insert(&it.name);
    }

    fn integer(&mut self, name: &'s str, value: &'s Expr) {
        self.expression(value, ExprUse::Value);
        if self.is_read(value) {
            self.read.insert(name);
            self.computed.insert(name, value);
        } else if let Some(value) = self.value(value) {
            self.known.insert(name, value);
        }
    }

    fn condition(&mut self, condition: &'s Condition) {
        condition.leaves(&mut |leaf| {
            if let Condition::Compare(_, a, b) = leaf {
                if let Some((read, value)) = self.pair(a, b) {
                    self.solve(read, value);
                }
                self.expression(a, ExprUse::Compared);
                self.expression(b, ExprUse::Compared);
            }
        });
    }

    fn expression(&mut self, expression: &'s Expr, _: ExprUse) {
        expression.walk(&mut |part| {
            if let Expr::Binary(_, a, b) = part {
                let value = self.pair(a, b).map(|(_, value)| value);
                self.found.extend(value);
            }
        });
    }
}
