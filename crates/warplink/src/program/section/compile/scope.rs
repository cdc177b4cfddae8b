//! Integers of a section that are visible at a step: their expressions in the kernel, values and ranges.

use super::range::Range;
use crate::program::expr::{Condition, Expr, Operator};
use std::cell::Cell;

/// Meaning of a section's name.
#[derive(Clone, Debug)]
pub(super) struct KernelName {
    /// Its name in the section.
    name: String,
    /// Its expression in the kernel.
    text: String,
    /// Its value, if constant.
    value: Option<i64>,
    /// Its value range.
    range: Range,
}

/// Visible integers, innermost last.
#[derive(Clone, Debug, Default)]
pub(super) struct Scope {
    bound: Vec<KernelName>,
    /// Whether any value may need more than 32 bits.
    wide: Cell<bool>,
}

impl Scope {
    pub(super) fn len(&self) -> usize {
        self.bound.len()
    }

    pub(super) fn truncate(&mut self, len: usize) {
        self.bound.truncate(len);
    }

    /// Binds `name` to the kernel expression `text`, and to `value` if it is constant.
    pub(super) fn bind(&mut self, name: &str, text: impl Into<String>, value: Option<i64>) {
        let range = value.map_or(Range::ANY, Range::exactly);
        self.bind_within(name, text, value, range);
    }

    /// As [`bind`](Self::bind), to a value within `range`.
    pub(super) fn bind_within(
        &mut self,
        name: &str,
        text: impl Into<String>,
        value: Option<i64>,
        range: Range,
    ) {
        self.note(range);
        self.bound.push(KernelName {
            name: name.to_owned(),
            text: text.into(),
            value,
            range,
        });
    }

    /// Whether all expressions so far fit in 32 bits.
    pub(super) fn is_narrow(&self) -> bool {
        !self.wide.get()
    }

    fn note(&self, range: Range) {
        if !range.is_narrow() {
            self.wide.set(true);
        }
    }

    /// Value range of an expression.
    pub(super) fn range(&self, expression: &Expr) -> Range {
        let range = match expression {
            Expr::Number(value) => Range::exactly(*value),
            Expr::Name(name) => self.find(name).map_or(Range::ANY, |bound| bound.range),
            Expr::Negative(a) => self.range(a).negated(),
            Expr::Log2(_) => Range::of(0, 63),
            Expr::Element(..) | Expr::Count(_) => Range::ANY,
            Expr::Binary(operator, a, b) => {
                let by = self.range(b);
                let shifts = matches!(operator, Operator::ShiftLeft | Operator::ShiftRight);
                if shifts && !by.is_within_word() {
                    // The shift is done in the kernel's integer type, and by its width or more it is undefined in
                    // C++.
                    self.wide.set(true);
                }
                self.range(a).with(*operator, by)
            }
        };
        self.note(range);
        range
    }

    /// Kernel expression of an integer.
    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.find(name).map(|bound| bound.text.as_str())
    }

    fn find(&self, name: &str) -> Option<&KernelName> {
        self.bound.iter().rev().find(|bound| bound.name == name)
    }

    /// Value of an expression, if it is a kernel constant.
    pub(super) fn value(&self, expression: &Expr) -> Option<i64> {
        expression.evaluate(&|name| self.find(name)?.value).ok()
    }

    /// Value of a condition, if it is a kernel constant.
    pub(super) fn holds(&self, condition: &Condition) -> Option<bool> {
        match condition {
            // One side alone may decide the result.
            Condition::And(a, b) => match (self.holds(a), self.holds(b)) {
                (Some(false), _) | (_, Some(false)) => Some(false),
                (Some(true), other) | (other, Some(true)) => other,
                (None, None) => None,
            },
            Condition::Or(a, b) => match (self.holds(a), self.holds(b)) {
                (Some(true), _) | (_, Some(true)) => Some(true),
                (Some(false), other) | (other, Some(false)) => other,
                (None, None) => None,
            },
            Condition::Not(a) => self.holds(a).map(|holds| !holds),
            _ => condition.evaluate(&|name| self.find(name)?.value).ok(),
        }
    }
}
