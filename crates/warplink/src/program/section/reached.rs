//! Enumerates which announced tensors are reachable, in as many cases as the section's conditions distinguish.

use super::instance::SectionInstance;
use super::visit::Visitor;
use crate::program::expr::Condition;
use std::collections::BTreeSet;

/// Maximum number of tensors in a section's `reachable` conditions. Bounds the cases, which are exponential in it.
const MAX_ASKED: usize = 4;

/// Maximum number of other comparisons for which the relevance of `reachable` is analyzed. Bounds the combinations.
const MAX_COMPARED: usize = 6;

impl SectionInstance {
    /// Reachable announced tensors, by index, for each case that the section's conditions distinguish: first all,
    /// then none if that differs.
    ///
    /// # Errors
    /// A message, if it tests too many tensors.
    pub(crate) fn reachable_cases(&self) -> Result<Vec<Vec<usize>>, String> {
        let mut walk = ReachWalk::default();
        walk.body(&self.section.body);
        let asked: Vec<&str> = walk.asked.iter().copied().collect();
        if asked.len() > MAX_ASKED {
            return Err(format!(
                "the kernel asks of {} tensors whether they are reachable; expected at most {MAX_ASKED}",
                asked.len()
            ));
        }
        let all = (1_usize << asked.len()) - 1;
        let (mut cases, mut seen) = (Vec::new(), BTreeSet::new());
        for mask in [all].into_iter().chain(0..all) {
            let is = |name: &str| {
                let position = asked.iter().position(|other| *other == name);
                position.is_some_and(|position| mask >> position & 1 == 1)
            };
            // Two cases with equal outcomes of all conditions take the same branches, so that verifying one of them
            // suffices.
            if seen.insert(walk.outcomes(mask, &is)) {
                let reachable = asked.iter().filter(|name| is(name));
                cases.push(reachable.filter_map(|name| self.tensor(name)).collect());
            }
        }
        Ok(cases)
    }
}

/// Conditions with `reachable`, and their other inputs.
#[derive(Default)]
struct ReachWalk<'s> {
    conditions: Vec<&'s Condition>,
    asked: BTreeSet<&'s str>,
    compared: Vec<&'s Condition>,
}

impl<'s> Visitor<'s> for ReachWalk<'s> {
    fn condition(&mut self, condition: &'s Condition) {
        let mut asks = false;
        let mut compared = Vec::new();
        condition.leaves(&mut |leaf| match leaf {
            Condition::Reachable(name) => {
                asks = true;
                self.asked.insert(name);
            }
            other => compared.push(other),
        });
        if asks {
            self.conditions.push(condition);
            for other in compared {
                if !self.compared.contains(&other) {
                    self.compared.push(other);
                }
            }
        }
    }
}

impl ReachWalk<'_> {
    /// Outcomes of each condition over all values of the comparisons; `mask` itself if there are too many
    /// comparisons.
    fn outcomes(&self, mask: usize, is: &dyn Fn(&str) -> bool) -> Vec<bool> {
        // The mask itself is the outcome: every case is distinct, which is sound and bounds the table at 2^6 rows.
        if self.compared.len() > MAX_COMPARED {
            return (0..MAX_ASKED).map(|bit| mask >> bit & 1 == 1).collect();
        }
        let mut outcomes = Vec::new();
        // Other comparisons depend on rank, lane and values, and are left open: all their truth values count.
        for given in 0..1_usize << self.compared.len() {
            let leaf = |leaf: &Condition| match leaf {
                Condition::Reachable(name) => is(name),
                other => {
                    let position = self.compared.iter().position(|it| *it == other);
                    position.is_some_and(|position| given >> position & 1 == 1)
                }
            };
            let all = self.conditions.iter();
            outcomes.extend(all.map(|condition| holds(condition, &leaf)));
        }
        outcomes
    }
}

fn holds(condition: &Condition, leaf: &dyn Fn(&Condition) -> bool) -> bool {
    match condition {
        Condition::Not(a) => !holds(a, leaf),
        Condition::And(a, b) => holds(a, leaf) && holds(b, leaf),
        Condition::Or(a, b) => holds(a, leaf) || holds(b, leaf),
        other => leaf(other),
    }
}

#[cfg(test)]
mod tests {
    use crate::program::{Parameters, Program, unroll};

    /// Cases of a kernel that announces X and Y, by tensor index.
    fn cases(body: &str) -> Result<Vec<Vec<usize>>, String> {
        let text = format!(
            "program test(direct = 1 | 0) {{\n input X: u8[64]\n output Y: u8[64]\n \
             scratch C: packets16 i32[2, world, 6]\n kernel lane in 0..4 threads 64 {{\n \
             announce direct with X, Y in C[epoch % 2]\n agree direct with X, Y in C[epoch % 2]\n{body}\n}}\n}}\n"
        );
        let program = Program::parse_text(&text).unwrap();
        let rank = unroll(&program, 0, 4, 1, &Parameters::new()).unwrap();
        let section = rank.sections().next().unwrap();
        let cases = section.reachable_cases()?;
        let name = |index: &usize| usize::from(section.tensors[*index].name == "Y") + 1;
        let named = cases.iter().map(|case| case.iter().map(name).collect());
        Ok(named.collect())
    }

    #[test]
    fn cases_are_those_that_conditions_tell_apart() {
        for (body, expected) in [
            ("Y = copy(X)", &[&[][..]][..]),
            ("if direct == 1 { barrier }", &[&[]]),
            ("if reachable(Y) { barrier }", &[&[2], &[]]),
            ("if not reachable(Y) { barrier }", &[&[2], &[]]),
            (
                "if reachable(X) and reachable(Y) { barrier }",
                &[&[1, 2], &[]],
            ),
            (
                "if direct == 1 and reachable(X) and reachable(Y) { barrier }",
                &[&[1, 2], &[]],
            ),
            (
                "if reachable(X) { if not reachable(Y) { barrier } }",
                &[&[1, 2], &[], &[1], &[2]],
            ),
            (
                "if reachable(X) or direct == 1 and reachable(Y) { barrier }",
                &[&[1, 2], &[], &[2]],
            ),
            ("Y = copy(X if reachable(Y) else X)", &[&[2], &[]]),
        ] {
            assert_eq!(cases(body).unwrap(), expected, "{body}");
        }
    }
}
