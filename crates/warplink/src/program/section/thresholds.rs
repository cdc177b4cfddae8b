//! Values at which a section may do something else with the integers that its lanes read from memory.

use super::instance::SectionInstance;
use super::ir::DeviceValue;
use super::visit::{ExprUse, Visitor};
use crate::program::expr::{Condition, Expr};
use std::collections::{BTreeSet, HashSet};

impl SectionInstance {
    /// The integers that such a value is compared or combined with, and those next to them; none is negative.
    pub(crate) fn thresholds(&self) -> BTreeSet<i64> {
        let mut visitor = Thresholds {
            instance: self,
            read: HashSet::new(),
            found: BTreeSet::new(),
        };
        visitor.body(&self.section.body);
        let found = visitor.found.into_iter();
        let beside = found.flat_map(|it| [it.saturating_sub(1), it, it.saturating_add(1)]);
        beside.filter(|value| *value >= 0).collect()
    }
}

struct Thresholds<'s> {
    instance: &'s SectionInstance,
    /// Integers that are read from memory, or computed from these. Text has them in order, and no name has two meanings.
    read: HashSet<&'s str>,
    found: BTreeSet<i64>,
}

impl<'s> Thresholds<'s> {
    fn is_read(&self, expression: &Expr) -> bool {
        let mut is_read = false;
        expression.walk(&mut |part| {
            is_read |= matches!(part, Expr::Name(name) if self.read.contains(&**name));
        });
        is_read
    }

    /// Two operands of an operator or a comparison.
    fn pair(&mut self, one: &Expr, other: &Expr) {
        let other = match (self.is_read(one), self.is_read(other)) {
            (true, false) => other,
            (false, true) => one,
            _ => return,
        };
        // Not those that depend on the lane, the launch or a loop: they have too many values to try.
        let value = other.evaluate(&|name| match name {
            "rank" => Some(self.instance.rank as i64),
            "world" => Some(self.instance.world as i64),
            name => self.instance.integers.get(name).copied(),
        });
        self.found.extend(value.ok());
    }
}

impl<'s> Visitor<'s> for Thresholds<'s> {
    fn device_value(&mut self, it: &'s DeviceValue) {
        for expression in it.expressions() {
            self.expression(expression, ExprUse::Bound);
        }
        self.read.insert(&it.name);
    }

    fn integer(&mut self, name: &'s str, value: &'s Expr) {
        self.expression(value, ExprUse::Value);
        if self.is_read(value) {
            self.read.insert(name);
        }
    }

    fn condition(&mut self, condition: &'s Condition) {
        condition.leaves(&mut |leaf| {
            if let Condition::Compare(_, a, b) = leaf {
                self.pair(a, b);
                self.expression(a, ExprUse::Compared);
                self.expression(b, ExprUse::Compared);
            }
        });
    }

    fn expression(&mut self, expression: &'s Expr, _: ExprUse) {
        expression.walk(&mut |part| {
            if let Expr::Binary(_, a, b) = part {
                self.pair(a, b);
            }
        });
    }
}
