//! Names of a section in the kernel's text, and expressions over them.

use super::code::bare;
use super::range::Range;
use crate::program::expr::{Comparison, Condition, Expr, Operator, reachable};
use std::cell::Cell;

/// Meaning of a section's name.
#[derive(Clone, Debug)]
pub(super) struct Bound {
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
    bound: Vec<Bound>,
    /// Whether any value may need more than 32 bits.
    wide: Cell<bool>,
}

impl Scope {
    /// Kernel identifier for `name` of the section. Distinct names get distinct identifiers, and none collides with
    /// the language, the headers or the surrounding text.
    pub(super) fn spell(name: &str) -> String {
        format!("v_{name}")
    }

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
        self.bound.push(Bound {
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
                    self.wide.set(true);
                }
                self.range(a).with(*operator, by)
            }
        };
        self.note(range);
        range
    }

    fn find(&self, name: &str) -> Option<&Bound> {
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

    /// The expression as kernel text; the unbound name on failure.
    pub(super) fn integer(&self, expression: &Expr) -> Result<String, String> {
        self.range(expression);
        if let Some(value) = self.value(expression)
            && !matches!(expression, Expr::Name(_))
        {
            return Ok(value.to_string());
        }
        Ok(match expression {
            Expr::Number(value) => value.to_string(),
            Expr::Name(name) => match self.find(name) {
                Some(bound) => bound.text.clone(),
                None => return Err(name.clone()),
            },
            Expr::Negative(a) => format!("(-{})", self.integer(a)?),
            Expr::Log2(a) => format!("logarithm({})", bare(&self.integer(a)?)),
            Expr::Element(list, _) => return Err(list.clone()),
            Expr::Count(list) => return Err(format!("count({list})")),
            Expr::Binary(operator, a, b) => {
                let natural = self.range(a).is_natural() && self.range(b).is_natural();
                let clamped = *operator == Operator::Part && !self.range(a).is_natural();
                let (mut a, b) = (self.integer(a)?, self.integer(b)?);
                if clamped {
                    a = format!("greatest({}, 0)", bare(&a));
                }
                let function = match operator {
                    Operator::Divide if natural => "quotient",
                    Operator::Divide => "divide",
                    Operator::Remainder if natural => "remainder",
                    Operator::Remainder => "modulo",
                    Operator::Min => "least",
                    Operator::Max => "greatest",
                    Operator::Part => "part",
                    Operator::ShiftLeft
                    | Operator::ShiftRight
                    | Operator::Add
                    | Operator::Subtract
                    | Operator::Multiply
                    | Operator::Xor => return Ok(format!("({a} {} {b})", operator.sign())),
                };
                format!("{function}({}, {})", bare(&a), bare(&b))
            }
        })
    }

    /// The condition as kernel text; the unbound name on failure.
    pub(super) fn condition(&self, condition: &Condition) -> Result<String, String> {
        Ok(match condition {
            Condition::Compare(comparison, a, b) => {
                let sign = match comparison {
                    Comparison::Equal => "==",
                    Comparison::NotEqual => "!=",
                    Comparison::Less => "<",
                    Comparison::LessOrEqual => "<=",
                    Comparison::Greater => ">",
                    Comparison::GreaterOrEqual => ">=",
                };
                format!("({} {sign} {})", self.integer(a)?, self.integer(b)?)
            }
            Condition::Given(tensor) => return Err(format!("given({tensor})")),
            Condition::Reachable(tensor) => self.integer(&Expr::Name(reachable(tensor)))?,
            Condition::Not(a) => format!("(!{})", self.condition(a)?),
            Condition::And(a, b) => format!("({} && {})", self.condition(a)?, self.condition(b)?),
            Condition::Or(a, b) => format!("({} || {})", self.condition(a)?, self.condition(b)?),
        })
    }
}
