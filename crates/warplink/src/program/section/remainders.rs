//! Period of a loop: the number of iterations after which the remainders of its index repeat.
//!
//! Only the executing lane, the peer and the length of operands matter, not their addresses. So `c % 4` matters in
//! `if c % 4 == 0`, but not in `R[c % 4]`.

use super::ir::StepKind;
use super::visit::{ExprUse, Visitor};
use crate::program::construct::{Loop, Over};
use crate::program::expr::{Expr, Operator};

/// Number of iterations after which a loop's behaviour repeats, as far as remainders determine it, at most `most`.
/// `value` evaluates an expression at the start of the loop.
pub(super) fn period(it: &Loop<StepKind>, value: &dyn Fn(&Expr) -> Option<i64>, most: u64) -> u64 {
    let mut walk = RemainderWalk {
        value,
        changing: vec![(&it.over.index, Changing::default())],
        found: Vec::new(),
    };
    walk.body(&it.body);
    // Short periods first: more of them fit below the limit.
    walk.found.sort_unstable();
    let multiple = |period: u64, other: &u64| {
        let multiple = common_multiple(period, *other);
        // A period that is too long to sample is left out: the estimate is then less exact, not wrong.
        if multiple <= most { multiple } else { period }
    };
    walk.found
        .iter()
        .filter(|found| **found <= most)
        .fold(1, multiple)
}

/// Least common multiple of two positive numbers.
pub(crate) fn common_multiple(a: u64, b: u64) -> u64 {
    let (mut divisor, mut rest) = (a, b);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    (a / divisor).saturating_mul(b)
}

/// Dependence of an expression on the loop index.
#[derive(Clone, Debug)]
struct Changing {
    /// Number of iterations during which it is constant.
    after: u64,
    /// Period, in iterations, of each remainder in it.
    periods: Vec<u64>,
}

impl Default for Changing {
    fn default() -> Self {
        Self {
            after: 1,
            periods: Vec::new(),
        }
    }
}

struct RemainderWalk<'s> {
    value: &'s dyn Fn(&Expr) -> Option<i64>,
    /// Names of integers that depend on the index, innermost last.
    changing: Vec<(&'s str, Changing)>,
    /// Periods of relevant expressions.
    found: Vec<u64>,
}

impl<'s> RemainderWalk<'s> {
    /// Dependence of an expression on the index; `None` if it is constant.
    fn change(&self, expression: &Expr) -> Option<Changing> {
        match expression {
            Expr::Number(_) | Expr::Count(_) => None,
            Expr::Name(name) => {
                let mut known = self.changing.iter().rev();
                let found = known.find(|(changing, _)| changing == name);
                found.map(|(_, change)| change.clone())
            }
            Expr::Negative(a) | Expr::Element(_, a) | Expr::Log2(a) => self.change(a),
            Expr::Binary(operator, a, b) => {
                let (Some(mut change), other) = (match (self.change(a), self.change(b)) {
                    (None, other) => (other, None),
                    (one, other) => (one, other),
                }) else {
                    return None;
                };
                let by = || (self.value)(b).map(i64::unsigned_abs);
                match (operator, other) {
                    (_, Some(other)) => {
                        // The sum changes when either side does.
                        change.after = change.after.min(other.after);
                        change.periods.extend(other.periods);
                    }
                    (Operator::Divide, None) => {
                        let by = by().unwrap_or(1);
                        change.after = change.after.saturating_mul(by.max(1));
                    }
                    (Operator::ShiftRight, None) => {
                        // A larger shift leaves a constant in any loop, and `1 << 64` would overflow.
                        let by = by().unwrap_or(0).min(62);
                        change.after = change.after.saturating_mul(1 << by);
                    }
                    (Operator::Remainder, None) => {
                        // `(index / after) % by` repeats after `after * by` iterations. A remainder by 1 is constant.
                        if let Some(by) = by().filter(|by| *by > 1) {
                            change.periods.push(change.after.saturating_mul(by));
                        }
                    }
                    _ => {}
                }
                Some(change)
            }
        }
    }
}

impl<'s> Visitor<'s> for RemainderWalk<'s> {
    fn scoped(&mut self, inner: impl FnOnce(&mut Self)) {
        let known = self.changing.len();
        inner(self);
        self.changing.truncate(known);
    }

    fn integer(&mut self, name: &'s str, value: &'s Expr) {
        if let Some(change) = self.change(value) {
            self.changing.push((name, change));
        }
    }

    /// An inner index depends on the outer one as its first value does.
    fn index(&mut self, over: &'s Over) {
        if let Some(change) = self.change(&over.from) {
            self.changing.push((&over.index, change));
        }
    }

    fn expression(&mut self, expression: &'s Expr, is: ExprUse) {
        let matters = match is {
            ExprUse::Rank
            | ExprUse::Lane
            | ExprUse::Bound
            | ExprUse::Compared
            | ExprUse::Extent => true,
            ExprUse::Value | ExprUse::Index => false,
        };
        if matters && let Some(change) = self.change(expression) {
            self.found.extend(change.periods);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::construct::NodeKind;
    use crate::program::{Parameters, Program, unroll};

    /// Period of the first loop of a kernel whose lanes loop over `c`.
    fn found(body: &str) -> u64 {
        let text = format!(
            "program test() {{\n input X: u8[64]\n output Y: u8[64]\n scratch R: u8[4, 64]\n \
             kernel lane in 0..4 threads 64 {{\n for c in 0..100 {{\n{body}\n}}\n}}\n}}\n"
        );
        let program = Program::parse_text(&text).unwrap();
        let rank = unroll(&program, 0, 4, 1, &Parameters::new()).unwrap();
        let section = rank.sections().next().unwrap();
        let NodeKind::For(it) = &section.section.body[0].kind else {
            panic!("{:?} is no loop", section.section.body[0]);
        };
        let named = |name: &str| (name == "world").then_some(4);
        period(it, &|expression| expression.evaluate(&named).ok(), 32)
    }

    #[test]
    fn periods_are_found_where_remainders_matter() {
        for (body, expected) in [
            ("barrier", 1),
            ("if c % 2 == 0 { barrier }", 2),
            (
                "if (c + 1) % 4 == 0 { barrier } else if c % 6 == 1 { barrier }",
                12,
            ),
            (
                "let d = c + lane\n let e = d % 5\n if e == 0 { barrier }",
                5,
            ),
            ("if c / 2 % 3 == 0 { barrier }", 6),
            ("if (c >> 2) % 2 == 0 { barrier }", 8),
            ("if lane % 3 == 0 { barrier }", 1),
            ("if c % lane == 1 { barrier }", 1),
            ("signal (c + rank) % world", 4),
            ("wait (rank + r) % world for r in 1..1 + c % 2", 2),
            ("for d in 0..c % 3 { barrier }", 3),
            ("for d in c..c + 2 { if d % 7 == 0 { barrier } }", 7),
            ("for d in 0..2 { if d % 7 == 0 { barrier } }", 1),
            ("Y[c % 4 * 16..64] = copy(X[c % 4 * 16..64])", 4),
            // The address does not matter.
            ("let slot = c % 3\n put X to R[slot] on 1", 1),
            ("Y = copy(X if c % 3 == 0 else R[0])", 3),
            // The period is limited.
            (
                "if c % 3 == 0 and c % 2 == 1 and c % 31 == 0 { barrier }",
                6,
            ),
            ("if c % 33 == 0 { barrier }", 1),
        ] {
            assert_eq!(found(body), expected, "{body}");
        }
    }
}
