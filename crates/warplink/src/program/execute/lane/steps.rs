//! Steps of a lane, which may depend on values that it reads from memory.

use super::{Lane, internal};
use crate::error::{Error, Result};
use crate::program::execute::row_values::integers;
use crate::program::section::{LaneStep, Matching, Part, ReadWord};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::Arc;

impl Lane<'_> {
    /// Steps of the lane from number `next` or an earlier one on, and the number of the first of them: as far as the values that it
    /// reads are known, with the tensors `missing` unreachable. Reads those that the step `next` and the following ones read, so
    /// that steps are not resolved again for each.
    pub(super) fn steps(
        &mut self,
        missing: &[usize],
        next: usize,
    ) -> Result<(usize, Arc<[LaneStep]>)> {
        let (section, launch) = (self.section, (self.lane, self.epoch));
        let (ahead, following) = (RefCell::new(BTreeMap::new()), Cell::new(next));
        let mut resolution = self.resolution.take();
        let values = |word: &ReadWord| {
            if let Some(known) = self.values.get(&word.number) {
                return Some(*known);
            }
            let is_packet = section.packets_of(&word.part).is_some();
            // A packet has to be waited for, which resolving cannot do.
            let follows = word.step == following.get() && !is_packet;
            if !follows && !section.is_constant(&word.part) {
                return None;
            }
            // An error appears again at the step itself, which reports it with its place.
            let value = self.word(&word.part, word.matching).ok()?;
            if follows {
                following.set(word.step + 1);
                ahead.borrow_mut().insert(word.number, value);
            }
            Some(value)
        };
        let steps = match &mut resolution {
            // Earlier steps are not listed again, so that a loop with a read in each round takes time in proportion
            // to its rounds.
            Some(resolution) if resolution.missing() == missing => {
                let all = resolution.go_on(&values);
                all.map(|all| (next, all.get(next..).unwrap_or_default().into()))
            }
            _ => {
                let begun = self.input.cache.begin(section, launch, missing, &values);
                begun.map(|(all, going)| {
                    resolution = going;
                    (0, all)
                })
            }
        };
        self.resolution = resolution;
        self.values.extend(ahead.into_inner());
        // The verifier has checked everything that does not depend on a value.
        steps.map_err(|diagnostic| {
            Error::invalid(diagnostic.message).with_help("check the values that kernels read")
        })
    }

    /// An integer in memory or that the launch carries, or what words in memory give.
    pub(super) fn word(&self, word: &Part, matching: Option<Matching>) -> Result<i64> {
        if self.section.carried == Some(word.tensor) {
            let carried = self.input.carried.get(word.offset).copied();
            let carried = carried.ok_or_else(|| internal("a launch carries too few words"))?;
            return Ok(carried as i64);
        }
        let operand = self.operand(word, &(0..word.elements))?;
        let dtype = self.section.tensors[word.tensor].dtype;
        let mut bytes = Vec::with_capacity(word.elements * dtype.size());
        self.block.load_into(&operand.memory, &mut bytes)?;
        let words = integers(dtype, &bytes);
        Ok(match matching {
            Some(matching) => matching.of(&words),
            None => words.first().copied().unwrap_or(-1),
        })
    }
}
