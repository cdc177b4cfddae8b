//! After how many iterations a loop does the same again, as the remainders of its index say.
//!
//! What matters is who does a step, with whom, and how long its operands are; not where they lie. So `c % 4` matters in
//! `if c % 4 == 0`, but not in `R[c % 4]`.

use super::ir::{Place, Receiver, Source, Step, StepKind};
use crate::program::construct::{Each, Loop, Selection, TensorRef};
use crate::program::expr::{Condition, Expr, Operator};

/// How many iterations a loop takes until it does the same again, as far as that is said by remainders and is at most
/// `most`; `value` gives what an expression is where the loop starts.
pub(super) fn period(it: &Loop<Step>, value: &dyn Fn(&Expr) -> Option<i64>, most: u64) -> u64 {
    let mut walk = Walk {
        value,
        changing: vec![(&it.index, Changing::default())],
        found: Vec::new(),
    };
    walk.steps(&it.body);
    walk.found.sort_unstable();
    let multiple = |period: u64, other: &u64| {
        let multiple = period / greatest_common_divisor(period, *other) * other;
        if multiple <= most { multiple } else { period }
    };
    walk.found
        .iter()
        .filter(|found| **found <= most)
        .fold(1, multiple)
}

pub(super) fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 {
        a
    } else {
        greatest_common_divisor(b, a % b)
    }
}

/// How an expression changes with the index.
#[derive(Clone, Debug)]
struct Changing {
    /// After how many iterations it may be another one.
    after: u64,
    /// After how many iterations each remainder in it comes again.
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

struct Walk<'s> {
    value: &'s dyn Fn(&Expr) -> Option<i64>,
    /// Names of integers that change with the index, the latest last.
    changing: Vec<(&'s str, Changing)>,
    /// Periods of what matters.
    found: Vec<u64>,
}

impl<'s> Walk<'s> {
    /// How an expression changes with the index, if it does.
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
                        change.after = change.after.min(other.after);
                        change.periods.extend(other.periods);
                    }
                    (Operator::Divide, None) => {
                        let by = by().unwrap_or(1);
                        change.after = change.after.saturating_mul(by.max(1));
                    }
                    (Operator::ShiftRight, None) => {
                        let by = by().unwrap_or(0).min(62);
                        change.after = change.after.saturating_mul(1 << by);
                    }
                    (Operator::Remainder, None) => {
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

    fn matters(&mut self, expression: &Expr) {
        if let Some(change) = self.change(expression) {
            self.found.extend(change.periods);
        }
    }

    fn condition(&mut self, condition: &Condition) {
        match condition {
            Condition::Compare(_, a, b) => {
                self.matters(a);
                self.matters(b);
            }
            Condition::Given(_) | Condition::Reachable(_) => {}
            Condition::Not(a) => self.condition(a),
            Condition::And(a, b) | Condition::Or(a, b) => {
                self.condition(a);
                self.condition(b);
            }
        }
    }

    fn steps(&mut self, steps: &'s [Step]) {
        let known = self.changing.len();
        for step in steps {
            self.step(&step.kind);
        }
        self.changing.truncate(known);
    }

    fn step(&mut self, step: &'s StepKind) {
        match step {
            StepKind::LetInteger { name, value } => {
                if let Some(change) = self.change(value) {
                    self.changing.push((name, change));
                }
            }
            StepKind::LetTensor { value, .. } => self.tensor(value),
            StepKind::Move(it) => {
                self.each(&it.targets, Self::place);
                self.each(&it.sources, Self::source);
            }
            StepKind::Signal(receivers) => self.each(receivers, Self::receiver),
            StepKind::Wait(ranks) => self.each(ranks, Self::matters),
            StepKind::Barrier => {}
            StepKind::Announce(it) | StepKind::Agree(it) => {
                if let Some(peers) = &it.peers {
                    self.each(peers, Self::matters);
                }
            }
            StepKind::For(it) => {
                let known = self.changing.len();
                self.range(&it.index, &it.from, &it.to);
                self.steps(&it.body);
                self.changing.truncate(known);
            }
            StepKind::If(branch) => {
                for arm in &branch.arms {
                    self.condition(&arm.condition);
                    self.steps(&arm.body);
                }
                self.steps(&branch.otherwise);
            }
        }
    }

    /// Notes the bounds of an index, which changes as the first of them does.
    fn range(&mut self, index: &'s str, from: &Expr, to: &Expr) {
        self.matters(from);
        self.matters(to);
        if let Some(change) = self.change(from) {
            self.changing.push((index, change));
        }
    }

    fn each<T>(&mut self, list: &'s [Each<T>], with: impl Fn(&mut Self, &'s T)) {
        for each in list {
            let known = self.changing.len();
            if let Some(over) = &each.over {
                self.range(&over.index, &over.from, &over.to);
            }
            with(self, &each.item);
            self.changing.truncate(known);
        }
    }

    fn place(&mut self, place: &'s Place) {
        self.tensor(&place.tensor);
        if let Some(rank) = &place.on {
            self.matters(rank);
        }
    }

    fn source(&mut self, source: &'s Source) {
        self.place(&source.place);
        if let Some((condition, place)) = &source.otherwise {
            self.condition(condition);
            self.place(place);
        }
    }

    fn receiver(&mut self, receiver: &'s Receiver) {
        self.matters(&receiver.rank);
        if let Some(lane) = &receiver.lane {
            self.matters(lane);
        }
    }

    fn tensor(&mut self, tensor: &'s TensorRef) {
        for selection in &tensor.selections {
            match selection {
                Selection::Range(from, to) => {
                    self.matters(from);
                    self.matters(to);
                }
                Selection::Part(_, parts) => self.matters(parts),
                Selection::Index(_) | Selection::Axes(_) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::{OperationKind, Parameters, Program, unroll};

    /// The period of the first loop of a kernel whose lanes loop over `c`.
    fn found(body: &str) -> u64 {
        let text = format!(
            "program test() {{\n input X: u8[64]\n output Y: u8[64]\n scratch R: u8[4, 64]\n \
             kernel lane in 0..4 threads 64 {{\n for c in 0..100 {{\n{body}\n}}\n}}\n}}\n"
        );
        let program = Program::parse_text(&text).unwrap();
        let rank = unroll(&program, 0, 4, 1, &Parameters::new()).unwrap();
        let OperationKind::Kernel(section) = &rank.operations[0].kind else {
            panic!("{:?} is no kernel", rank.operations[0]);
        };
        let StepKind::For(it) = &section.section.body[0].kind else {
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
            // Where it lies does not matter.
            ("let slot = c % 3\n put X to R[slot] on 1", 1),
            ("Y = copy(X if c % 3 == 0 else R[0])", 3),
            // As far as there is room.
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
