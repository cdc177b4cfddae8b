//! Integers and conditions of a section as expressions of the kernel.

use super::code::bare;
use crate::program::expr::{Condition, Expr, Operator, reachable};
use crate::program::section::compile::scope::Scope;

impl Scope {
    /// Kernel identifier for `name` of the section. Distinct names get distinct identifiers, and none collides with
    /// the language, the headers or the surrounding text.
    pub(super) fn spell(name: &str) -> String {
        format!("v_{name}")
    }

    /// The expression as kernel text; the unbound name on failure.
    pub(super) fn integer(&self, expression: &Expr) -> Result<String, String> {
        // For its side effect: notes whether the expression, or a part of it, needs more than 32 bits.
        self.range(expression);
        if let Some(value) = self.value(expression)
            // A name stays readable in the text, and its declaration is a constant already.
            && !matches!(expression, Expr::Name(_))
        {
            return Ok(value.to_string());
        }
        Ok(match expression {
            Expr::Number(value) => value.to_string(),
            Expr::Name(name) => match self.text(name) {
                Some(text) => text.to_owned(),
                None => return Err(name.clone()),
            },
            Expr::Negative(a) => format!("(-{})", self.integer(a)?),
            Expr::Log2(a) => format!("logarithm({})", bare(&self.integer(a)?)),
            Expr::Element(list, _) => return Err(list.clone()),
            Expr::Count(list) => return Err(format!("count({list})")),
            Expr::Binary(operator, a, b) => {
                // C++ division truncates and `%` takes the dividend's sign, where the language rounds down. For
                // natural numbers they agree, which spares the correction.
                let natural = self.range(a).is_natural() && self.range(b).is_natural();
                // `part` of the headers takes natural lengths only.
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
                    // A literal is an int, whatever the kernel computes with.
                    Operator::ShiftLeft | Operator::ShiftRight => {
                        return Ok(format!("((Index){a} {} {b})", operator.sign()));
                    }
                    Operator::Add | Operator::Subtract | Operator::Multiply | Operator::Xor => {
                        return Ok(format!("({a} {} {b})", operator.sign()));
                    }
                };
                format!("{function}({}, {})", bare(&a), bare(&b))
            }
        })
    }

    /// The condition as kernel text; the unbound name on failure.
    pub(super) fn condition(&self, condition: &Condition) -> Result<String, String> {
        Ok(match condition {
            Condition::Compare(comparison, a, b) => {
                let sign = comparison.name();
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

/// Whether an integer is computed from the launch's epoch and a number, such as `epoch % 2`.
pub(super) fn is_of_epoch(value: &Expr) -> bool {
    let Expr::Binary(_, a, b) = value else {
        return false;
    };
    matches!(&**a, Expr::Name(name) if name == "epoch") && matches!(**b, Expr::Number(_))
}
