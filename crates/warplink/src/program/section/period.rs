//! Dependence of a section on the epoch: the number of launches after which its behaviour repeats.
//!
//! The epoch increases without bound, but only a few launches are verified. So it may occur only in remainders, as in
//! `(epoch * chunks + c) % 4`: the behaviour of a launch then depends on the epoch modulo the divisors.

use super::MAX_PERIOD;
use super::ir::Section;
use super::remainders::common_multiple;
use super::visit::{ExprUse, Visitor};
use crate::program::construct::Over;
use crate::program::expr::{Expr, Operator};
use crate::program::site::Position;
use std::collections::HashSet;

/// Position and description of a wrong use of the epoch.
pub(crate) type Misuse = (Position, String);

/// Number of launches after which the section's behaviour repeats; `value` evaluates an expression over the names
/// around the section.
///
/// # Errors
/// The epoch is used outside of remainders, or the period is too long.
pub(crate) fn period(
    section: &Section,
    value: &dyn Fn(&Expr) -> Option<i64>,
) -> Result<u64, Misuse> {
    let mut walk = PeriodWalk {
        value,
        growing: HashSet::from(["epoch"]),
        hidden: Vec::new(),
        period: 1,
        position: Position::default(),
        misuse: None,
    };
    walk.body(&section.body);
    walk.misuse.map_or(Ok(walk.period), Err)
}

struct PeriodWalk<'s> {
    value: &'s dyn Fn(&Expr) -> Option<i64>,
    /// Names of integers that depend on the unreduced epoch.
    growing: HashSet<&'s str>,
    /// Names bound in the enclosing bodies, and whether they were in `growing` before.
    hidden: Vec<(&'s str, bool)>,
    period: u64,
    position: Position,
    /// The first misuse.
    misuse: Option<Misuse>,
}

impl<'s> Visitor<'s> for PeriodWalk<'s> {
    fn at(&mut self, position: Position) {
        self.position = position;
    }

    fn scoped(&mut self, inner: impl FnOnce(&mut Self)) {
        let bound = self.hidden.len();
        inner(self);
        // Reversed: a name bound twice in the scope gets its outermost meaning back.
        for (name, grew) in self.hidden.drain(bound..).rev() {
            if grew {
                self.growing.insert(name);
            } else {
                self.growing.remove(name);
            }
        }
    }

    fn index(&mut self, over: &'s Over) {
        // Bounds of loops cannot grow, so that no index does; the name may hide one that does.
        self.bind(&over.index, false);
    }

    fn integer(&mut self, name: &'s str, value: &'s Expr) {
        let grows = self.grows(value);
        self.bind(name, grows);
    }

    /// Records a misuse if the expression grows with the epoch.
    fn expression(&mut self, expression: &'s Expr, _: ExprUse) {
        if self.grows(expression) {
            self.misused(format!(
                "{expression} grows with the epoch; expected a remainder such as 'epoch % 2', so that what a \
                 launch does is repeated"
            ));
        }
    }
}

impl<'s> PeriodWalk<'s> {
    /// Binds a name until the end of the body.
    fn bind(&mut self, name: &'s str, grows: bool) {
        let grew = if grows {
            !self.growing.insert(name)
        } else {
            self.growing.remove(name)
        };
        self.hidden.push((name, grew));
    }

    /// Whether the expression is a polynomial in the epoch; records its remainders.
    fn grows(&mut self, expression: &'s Expr) -> bool {
        match expression {
            Expr::Number(_) | Expr::Count(_) => false,
            Expr::Name(name) => self.growing.contains(name.as_str()),
            Expr::Negative(a) => self.grows(a),
            Expr::Element(_, a) | Expr::Log2(a) => {
                self.expression(a, ExprUse::Value);
                false
            }
            Expr::Binary(Operator::Add | Operator::Subtract | Operator::Multiply, a, b) => {
                // No short circuit: both sides are searched for misuses.
                self.grows(a) | self.grows(b)
            }
            Expr::Binary(Operator::Remainder, a, b) => {
                self.expression(b, ExprUse::Value);
                if self.grows(a) {
                    let divisor = (self.value)(b).and_then(|value| u64::try_from(value).ok());
                    self.repeats(expression, divisor);
                }
                false
            }
            // Quotients, shifts and the like of a growing number grow too, or repeat with a period that depends on
            // its size.
            Expr::Binary(_, a, b) => {
                self.expression(a, ExprUse::Value);
                self.expression(b, ExprUse::Value);
                false
            }
        }
    }

    fn repeats(&mut self, expression: &Expr, divisor: Option<u64>) {
        // Each launch of the period is verified on its own, which bounds the divisor.
        let Some(divisor) = divisor.filter(|divisor| (1..=MAX_PERIOD).contains(divisor)) else {
            self.misused(format!(
                "{expression} has another divisor than a number from 1 to {MAX_PERIOD} that is known \
                 outside of the kernel"
            ));
            return;
        };
        // Remainders by 2 and 3 together repeat after 6 launches.
        let multiple = common_multiple(self.period, divisor);
        if multiple > MAX_PERIOD {
            self.misused(format!(
                "the remainders of the epoch repeat after {multiple} launches only; expected at most \
                 {MAX_PERIOD}"
            ));
        } else {
            self.period = multiple;
        }
    }

    fn misused(&mut self, message: String) {
        self.misuse.get_or_insert((self.position, message));
    }
}

#[cfg(test)]
mod tests {
    use crate::program::{Parameters, Program, unroll};

    /// Period of a kernel with this body, if it has one.
    fn found(body: &str) -> Option<u64> {
        let text =
            format!("program test() {{\n kernel lane in 0..4 threads 64 {{\n{body}\n}}\n}}\n");
        let program = Program::parse(&text).unwrap();
        let rank = unroll(&program, 0, 4, 1, &Parameters::new()).ok()?;
        let section = rank.sections().next().unwrap();
        Some(section.period)
    }

    #[test]
    fn the_epoch_may_be_used_in_remainders() {
        for (body, expected) in [
            ("barrier", Some(1)),
            (
                "let c = epoch * 2\n if (c + lane) % 6 == 0 { barrier }",
                Some(6),
            ),
            (
                "let c = epoch % 4\n if c == 0 { barrier }\n if epoch % 6 == 0 { barrier }",
                Some(12),
            ),
            ("if epoch == 0 { barrier }", None),
            ("let c = epoch\n for i in 0..c { barrier }", None),
            (
                "let c = epoch\n if lane == 0 { let d = c\n if d == 0 { barrier } }",
                None,
            ),
        ] {
            assert_eq!(found(body), expected, "{body}");
        }
    }

    #[test]
    fn a_name_means_what_it_was_bound_to_where_it_is_visible() {
        let bound = "let c = epoch * 2\n if c % 2 == 0 { barrier }";
        for other in [
            "for c in 0..1 { if c == 0 { barrier } }",
            "let c = 1\n if c == 0 { barrier }",
            "wait c for c in 0..rank",
        ] {
            for body in [
                format!("if rank == 0 {{ {bound} }} else {{ {other} }}"),
                format!("if rank == 0 {{ {bound} }}\n {other}"),
                format!("for i in 0..2 {{ {bound} }}\n {other}"),
            ] {
                assert_eq!(found(&body), Some(2), "{body}");
            }
        }
        // A binding in a body shadows an outer one only until the end of the body.
        let body = "let c = epoch\n for i in 0..2 { let d = c % 2 }\n if c == 0 { barrier }";
        assert_eq!(found(body), None);
    }
}
