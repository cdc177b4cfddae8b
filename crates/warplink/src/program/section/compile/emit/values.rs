//! Integers that a lane reads one after another: their loads are in flight together.

use super::code::Code;
use super::{Emitter, Result};
use crate::program::construct::NodeKind;
use crate::program::expr::Expr;
use crate::program::section::compile::hazard;
use crate::program::section::compile::scope::Scope;
use crate::program::section::{
    DeviceValue, FreeNames, Packing, ScratchInstance, Step, StepKind, Visitor, WordValue,
};
use std::collections::BTreeSet;

impl Emitter<'_> {
    /// The text of `steps`, within the scope of their body.
    pub(super) fn steps(&mut self, code: &mut Code, mut steps: &[Step]) -> Result<()> {
        while let Some((step, further)) = steps.split_first() {
            let values = self.values_together(steps);
            steps = match values.len() {
                0 | 1 => {
                    self.step(code, step)?;
                    further
                }
                count => {
                    self.values(code, &values)?;
                    &steps[count..]
                }
            };
        }
        Ok(())
    }

    /// The leading steps that read integers in plain memory, none of which selects the word of another.
    fn values_together<'s>(&self, steps: &'s [Step]) -> Vec<(&'s Step, &'s DeviceValue, &'s Expr)> {
        let mut together = Vec::new();
        let mut bound = BTreeSet::new();
        for step in steps {
            let NodeKind::Do(StepKind::Value(it)) = &step.kind else {
                break;
            };
            let WordValue::Word(most) = &it.gives else {
                break;
            };
            let mut names = FreeNames::default();
            names.device_value(it);
            let whole = self.whole(&it.place.tensor.name);
            let carried = whole.as_ref().ok().map(|part| part.tensor) == self.instance.carried;
            let scratch = whole.map(|part| self.instance.scratch_of(part.tensor));
            let plain = |scratch: &ScratchInstance| scratch.packing == Packing::Plain;
            // Steps of a group record no times.
            if self.traced
                || carried
                || !scratch.is_ok_and(|scratch| scratch.is_none_or(plain))
                || names.values.len() > 1
                // A place or bound that depends on a value needs that value to be checked first.
                || !names.integers.is_disjoint(&bound)
                || !bound.is_empty() && self.barriers.contains(&hazard::id(step))
            {
                break;
            }
            bound.insert(it.name.clone());
            together.push((step, it, most));
        }
        together
    }

    /// Several such steps: all words are loaded before the first is checked, so that one latency covers them.
    fn values(&mut self, code: &mut Code, values: &[(&Step, &DeviceValue, &Expr)]) -> Result<()> {
        let mut checks = Vec::new();
        for (step, it, most) in values {
            self.position = step.position;
            self.count(2)?;
            if self.barriers.contains(&hazard::id(step)) {
                code.line("self.sync();");
            }
            let word = self.operand(&it.place)?;
            let most = self.integer(most)?;
            let name = Scope::spell(&it.name);
            code.line(format!("// {}: {it}", self.position));
            code.line(format!(
                "const u64 at_{name} = {};",
                self.address("plain", &word)
            ));
            code.line(format!(
                "const i64 word_{name} = detail::load_word<{}>(at_{name});",
                self.loaded_word(&word)
            ));
            checks.push(format!(
                "const Index {name} = detail::checked(self, at_{name}, word_{name}, {});",
                self.bound(&most)
            ));
        }
        // A check branches on its word, and the compiler moves no load above a branch.
        checks.iter().for_each(|check| code.line(check));
        values.iter().for_each(|(_, it, _)| self.bind_value(it));
        Ok(())
    }
}
