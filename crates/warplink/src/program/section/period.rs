//! How a section depends on the epoch: after how many launches it does the same again.
//!
//! The epoch counts up for ever, and what is verified is a few launches. So it may be used in remainders
//! only, `(epoch * chunks + c) % 4`: what a launch does then depends on the epoch modulo their divisors.

use super::MAX_PERIOD;
use super::ir::{Place, Section, Step, StepKind};
use super::remainders::greatest_common_divisor;
use crate::program::construct::{AxisSelection, Each, Selection, TensorRef};
use crate::program::expr::{Condition, Expr, Operator};
use crate::program::site::Position;
use std::collections::HashSet;

/// Where the epoch is used wrongly, and how.
pub(crate) type Misuse = (Position, String);

/// After how many launches the section does the same again; `value` gives what an expression over the names
/// around the section is.
///
/// # Errors
/// Where the epoch is used other than in remainders, or with too long a period.
pub(crate) fn period(
    section: &Section,
    value: &dyn Fn(&Expr) -> Option<i64>,
) -> Result<u64, Misuse> {
    let mut walk = Walk {
        value,
        growing: HashSet::from(["epoch"]),
        hidden: Vec::new(),
        period: 1,
        position: Position::default(),
    };
    walk.steps(&section.body)?;
    Ok(walk.period)
}

struct Walk<'s> {
    value: &'s dyn Fn(&Expr) -> Option<i64>,
    /// Names of integers that grow with the epoch.
    growing: HashSet<&'s str>,
    /// The names that were bound within the bodies around, and whether they grew before.
    hidden: Vec<(&'s str, bool)>,
    period: u64,
    position: Position,
}

impl<'s> Walk<'s> {
    /// Binds a name until the end of the body.
    fn bind(&mut self, name: &'s str, grows: bool) {
        let grew = if grows {
            !self.growing.insert(name)
        } else {
            self.growing.remove(name)
        };
        self.hidden.push((name, grew));
    }

    /// Does `inner`, and forgets the names that it binds.
    fn scoped(
        &mut self,
        inner: impl FnOnce(&mut Self) -> Result<(), Misuse>,
    ) -> Result<(), Misuse> {
        let bound = self.hidden.len();
        let done = inner(self);
        for (name, grew) in self.hidden.drain(bound..).rev() {
            if grew {
                self.growing.insert(name);
            } else {
                self.growing.remove(name);
            }
        }
        done
    }

    fn body(&mut self, steps: &'s [Step]) -> Result<(), Misuse> {
        self.scoped(|walk| walk.steps(steps))
    }

    fn steps(&mut self, steps: &'s [Step]) -> Result<(), Misuse> {
        for step in steps {
            self.position = step.position;
            match &step.kind {
                StepKind::LetInteger { name, value } => {
                    let grows = self.grows(value)?;
                    self.bind(name, grows);
                }
                StepKind::LetTensor { value, .. } => self.tensor(value)?,
                StepKind::Move(it) => {
                    self.each(&it.targets, Self::place)?;
                    self.each(&it.sources, |walk, source| {
                        walk.place(&source.place)?;
                        if let Some((condition, place)) = &source.otherwise {
                            walk.condition(condition)?;
                            walk.place(place)?;
                        }
                        Ok(())
                    })?;
                }
                StepKind::Signal(receivers) => self.each(receivers, |walk, receiver| {
                    walk.steady(&receiver.rank)?;
                    receiver.lane.iter().try_for_each(|lane| walk.steady(lane))
                })?,
                StepKind::Wait(ranks) => self.each(ranks, Self::steady)?,
                StepKind::Barrier => {}
                StepKind::Announce(it) | StepKind::Agree(it) => {
                    it.values.iter().try_for_each(|value| self.steady(value))?;
                    if let Some(peers) = &it.peers {
                        self.each(peers, Self::steady)?;
                    }
                    self.tensor(&it.rows)?;
                }
                StepKind::For(it) => {
                    self.steady(&it.from)?;
                    self.steady(&it.to)?;
                    self.scoped(|walk| {
                        walk.bind(&it.index, false);
                        walk.steps(&it.body)
                    })?;
                }
                StepKind::If(branch) => {
                    for arm in &branch.arms {
                        self.position = arm.position;
                        self.condition(&arm.condition)?;
                        self.body(&arm.body)?;
                    }
                    self.body(&branch.otherwise)?;
                }
            }
        }
        Ok(())
    }

    fn each<T>(
        &mut self,
        list: &'s [Each<T>],
        mut with: impl FnMut(&mut Self, &'s T) -> Result<(), Misuse>,
    ) -> Result<(), Misuse> {
        list.iter().try_for_each(|each| {
            let Some(over) = &each.over else {
                return with(self, &each.item);
            };
            self.steady(&over.from)?;
            self.steady(&over.to)?;
            self.scoped(|walk| {
                walk.bind(&over.index, false);
                with(walk, &each.item)
            })
        })
    }

    fn place(&mut self, place: &'s Place) -> Result<(), Misuse> {
        self.tensor(&place.tensor)?;
        place.on.iter().try_for_each(|rank| self.steady(rank))
    }

    fn tensor(&mut self, tensor: &'s TensorRef) -> Result<(), Misuse> {
        tensor
            .selections
            .iter()
            .try_for_each(|selection| match selection {
                Selection::Index(index) => self.steady(index),
                Selection::Range(a, b) | Selection::Part(a, b) => {
                    self.steady(a)?;
                    self.steady(b)
                }
                Selection::Axes(axes) => axes.iter().try_for_each(|axis| match axis {
                    AxisSelection::All => Ok(()),
                    AxisSelection::Index(index) => self.steady(index),
                    AxisSelection::Range(a, b) => {
                        self.steady(a)?;
                        self.steady(b)
                    }
                }),
            })
    }

    fn condition(&mut self, condition: &'s Condition) -> Result<(), Misuse> {
        match condition {
            Condition::Compare(_, a, b) => {
                self.steady(a)?;
                self.steady(b)
            }
            Condition::Given(_) | Condition::Reachable(_) => Ok(()),
            Condition::Not(a) => self.condition(a),
            Condition::And(a, b) | Condition::Or(a, b) => {
                self.condition(a)?;
                self.condition(b)
            }
        }
    }

    /// Fails where the expression grows with the epoch.
    fn steady(&mut self, expression: &'s Expr) -> Result<(), Misuse> {
        if self.grows(expression)? {
            return Err(self.misused(expression));
        }
        Ok(())
    }

    /// Whether the expression is a polynomial in the epoch; notes the remainders in it.
    fn grows(&mut self, expression: &'s Expr) -> Result<bool, Misuse> {
        match expression {
            Expr::Number(_) | Expr::Count(_) => Ok(false),
            Expr::Name(name) => Ok(self.growing.contains(name.as_str())),
            Expr::Negative(a) => self.grows(a),
            Expr::Element(_, a) | Expr::Log2(a) => {
                self.steady(a)?;
                Ok(false)
            }
            Expr::Binary(Operator::Add | Operator::Subtract | Operator::Multiply, a, b) => {
                Ok(self.grows(a)? | self.grows(b)?)
            }
            Expr::Binary(Operator::Remainder, a, b) => {
                self.steady(b)?;
                if self.grows(a)? {
                    let divisor = (self.value)(b).and_then(|value| u64::try_from(value).ok());
                    self.repeats(expression, divisor)?;
                }
                Ok(false)
            }
            Expr::Binary(_, a, b) => {
                self.steady(a)?;
                self.steady(b)?;
                Ok(false)
            }
        }
    }

    fn repeats(&mut self, expression: &Expr, divisor: Option<u64>) -> Result<(), Misuse> {
        let Some(divisor) = divisor.filter(|divisor| (1..=MAX_PERIOD).contains(divisor)) else {
            let message = format!(
                "{expression} has another divisor than a number from 1 to {MAX_PERIOD} that is known \
                 outside of the kernel"
            );
            return Err((self.position, message));
        };
        self.period = self.period / greatest_common_divisor(self.period, divisor) * divisor;
        if self.period > MAX_PERIOD {
            let message = format!(
                "the remainders of the epoch repeat after {} launches only; expected at most \
                 {MAX_PERIOD}",
                self.period
            );
            return Err((self.position, message));
        }
        Ok(())
    }

    fn misused(&self, expression: &Expr) -> Misuse {
        let message = format!(
            "{expression} grows with the epoch; expected a remainder such as 'epoch % 2', so that what a \
             launch does is repeated"
        );
        (self.position, message)
    }
}

#[cfg(test)]
mod tests {
    use crate::program::{OperationKind, Parameters, Program, unroll};

    /// The period of a kernel of this body, where it has one.
    fn found(body: &str) -> Option<u64> {
        let text =
            format!("program test() {{\n kernel lane in 0..4 threads 64 {{\n{body}\n}}\n}}\n");
        let program = Program::parse(&text).unwrap();
        let rank = unroll(&program, 0, 4, 1, &Parameters::new()).ok()?;
        let OperationKind::Kernel(section) = &rank.operations[0].kind else {
            panic!("{:?} is no kernel", rank.operations[0]);
        };
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
        // What a body binds does not hide what is bound around it for longer.
        let body = "let c = epoch\n for i in 0..2 { let d = c % 2 }\n if c == 0 { barrier }";
        assert_eq!(found(body), None);
    }
}
