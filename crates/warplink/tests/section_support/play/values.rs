//! Integers that lanes read, on which their further steps depend.

use super::super::read::Read;
use super::super::stage::{Act, Steps};
use super::{Play, StepId};
use crate::program_support::interpreter::Fault;
use std::rc::Rc;
use warplink::program::DiagnosticKind;

impl Play<'_> {
    /// The steps of a lane of the launch at hand.
    pub(super) fn acts(&self, rank: usize, lane: usize) -> &[Act] {
        let first = |launch| &self.stage.first_steps((launch, rank, lane)).acts[..];
        let own = self.lanes[rank][lane].steps.as_deref();
        let first = || self.launch[rank].map(first).unwrap_or_default();
        own.map_or_else(first, |steps| &steps.acts[..])
    }

    /// The steps of a lane of a launch, shared.
    pub(super) fn steps(&self, id: StepId) -> Rc<Steps> {
        let own = self.lanes[id.rank][id.lane].steps.as_ref();
        let first = || self.stage.first_steps((id.launch, id.rank, id.lane));
        Rc::clone(own.unwrap_or_else(first))
    }

    /// Reads an integer on which the lane's further steps depend; `false` where its packet is not there.
    pub(super) fn read_value(&mut self, id: StepId, read: &Read) -> bool {
        let flag = id.launch as u64 + 1;
        for element in 0..read.word.elements {
            let (cell, _) = self.memory.cell(&read.word, element);
            while let Some(own) = self.own_store(id, &read.word, cell) {
                self.land(id.rank, id.lane, own);
            }
            if self.memory.packet(&read.word) > 0 && self.memory.flag(&read.word, cell) != flag {
                return false;
            }
        }
        let mut words = Vec::with_capacity(read.word.elements);
        for element in 0..read.word.elements {
            let by = (id.by(element, 0), id.rank, id.launch);
            let of = (read.word.rank, read.word.memory, read.word.from + element);
            words.push(match self.memory.load(by, &read.word, element) {
                value if value.is_nan() => {
                    self.stage.choice.left_behind((id.launch, of), read.most)
                }
                value => value as i64,
            });
        }
        let value = read.result(&words);
        let lane = &mut self.lanes[id.rank][id.lane];
        lane.read.truncate(read.number);
        lane.read.push(value);
        let steps = if (0..=read.most).contains(&value) {
            let of = (id.launch, id.rank, id.lane);
            self.stage.steps_after(of, &lane.read)
        } else {
            Err(DiagnosticKind::OutOfBounds)
        };
        match steps {
            Ok(steps) => lane.steps = Some(steps),
            Err(rule) => {
                // The launch fails there: the lane goes no further.
                lane.fails = true;
                let (rank, rule) = (id.rank, rule.name());
                self.memory.faults.insert(Fault::OutOfRange { rank, rule });
            }
        }
        true
    }

    /// Whether a lane of a rank's launch has read a value with which it cannot go on.
    pub(super) fn fails(&self, rank: usize) -> bool {
        self.lanes[rank].iter().any(|lane| lane.fails)
    }
}
