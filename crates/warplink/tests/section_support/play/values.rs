//! Integers that lanes read, on which their further steps depend.

use super::super::stage::{Act, Operand};
use super::{Play, StepId};
use crate::program_support::interpreter::Fault;
use std::rc::Rc;

impl Play<'_> {
    /// The steps of a lane of the launch at hand.
    pub(super) fn acts(&self, rank: usize, lane: usize) -> &[Act] {
        let known = self.launch[rank].map(|launch| &self.stage.launches[launch][rank][lane][..]);
        let own = self.lanes[rank][lane].acts.as_deref();
        own.map_or(known.unwrap_or_default(), |acts| &acts[..])
    }

    /// Reads an integer on which the lane's further steps depend; `false` where its packet is not there.
    pub(super) fn read_value(&mut self, id: StepId, number: usize, word: &Operand) -> bool {
        let (cell, _) = self.memory.cell(word, 0);
        while let Some(own) = self.own_store(id, word, cell) {
            self.land(id.rank, id.lane, own);
        }
        let flag = id.launch as u64 + 1;
        if self.memory.packet(word) > 0 && self.memory.flag(word, cell) != flag {
            return false;
        }
        let value = self.memory.load((id.by(0, 0), id.rank, id.launch), word, 0);
        let lane = &mut self.lanes[id.rank][id.lane];
        lane.read.truncate(number);
        lane.read.push(value as i64);
        let place = (id.launch, id.rank, id.lane);
        match self.stage.steps_after(place, &lane.read) {
            Some(acts) => lane.acts = Some(Rc::new(acts)),
            None => {
                // The launch fails there.
                self.memory
                    .faults
                    .insert(Fault::OutOfRange { rank: id.rank });
                let known = self.acts(id.rank, id.lane)[..=id.step].to_vec();
                self.lanes[id.rank][id.lane].acts = Some(Rc::new(known));
            }
        }
        true
    }
}
