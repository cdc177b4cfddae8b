//! Threads of a lane that are behind others: units of earlier steps that are moved later.

use super::super::stage::{Act, Movement, Operand};
use super::{Hold, Lag, Play, StepId};

impl Play<'_> {
    /// Before a step: has threads that are behind catch up where the lane's threads meet, or where the step touches what they
    /// touch, so that kernels have a barrier there. Whether some did, if the step has to wait for them.
    pub(super) fn wait_for_threads(
        &mut self,
        id: StepId,
        act: &Act,
        held_too: bool,
    ) -> Option<bool> {
        let behind = &self.lanes[id.rank][id.lane].behind;
        if behind.is_empty() {
            return None;
        }
        let meets = match act {
            Act::Signal { .. } | Act::Wait(_) => true,
            Act::Value(read) => self.memory.packet(&read.word) > 0,
            Act::Move(it) => it.meets,
        };
        let steps = self.steps(id);
        let waits = behind
            .iter()
            .any(|(earlier, _)| match (act, &steps.acts[earlier.step]) {
                _ if meets => true,
                (Act::Move(it), Act::Move(earlier)) => self.conflict(earlier, it),
                (Act::Value(read), Act::Move(earlier)) => earlier
                    .targets
                    .iter()
                    .any(|target| self.overlap(target, &read.word)),
                _ => false,
            });
        if !waits {
            return None;
        }
        // Where threads divide both steps alike, there is no barrier, and those with no part of either go on.
        let goes_on = !meets && self.schedule.lag == Lag::Waiting && self.random.chance(2);
        let left = goes_on && self.leave_behind(id, act);
        Some(left || self.catch_up(id.rank, id.lane, held_too))
    }

    /// Lets the lane go on although some threads have not done their part of a step, or none has.
    pub(super) fn leave_behind(&mut self, id: StepId, act: &Act) -> bool {
        let Act::Move(it) = act else {
            return false;
        };
        if self.schedule.lag == Lag::Never || it.meets {
            return false;
        }
        let has_come = |source: &Operand| {
            let mut elements = 0..source.elements;
            self.memory.packet(source) == 0
                || elements.all(|element| {
                    let (cell, _) = self.memory.cell(source, element);
                    self.memory.flag(source, cell) == id.launch as u64 + 1
                })
        };
        if self.schedule.lag == Lag::Behind && !it.sources.iter().all(has_come) {
            return false;
        }
        let lane = &mut self.lanes[id.rank][id.lane];
        let units = lane.units.take();
        let units = units.unwrap_or_else(|| (0..it.elements.div_ceil(it.unit)).collect());
        lane.behind.push((id, units));
        lane.next += 1;
        true
    }

    /// Has threads that are behind do what they can; whether they did anything.
    pub(super) fn catch_up(&mut self, rank: usize, lane: usize, held_too: bool) -> bool {
        let mut behind = std::mem::take(&mut self.lanes[rank][lane].behind);
        let mut moved = false;
        for place in 0..behind.len() {
            let (earlier, rest) = behind.split_at_mut(place);
            let (id, units) = &mut rest[0];
            let steps = self.steps(*id);
            let Act::Move(it) = &steps.acts[id.step] else {
                continue;
            };
            let waits = earlier
                .iter()
                .any(|(earlier, left)| match &steps.acts[earlier.step] {
                    Act::Move(earlier) => !left.is_empty() && self.conflict(earlier, it),
                    _ => false,
                });
            if waits || self.is_held(Hold::Step(*id), held_too) {
                continue;
            }
            let before = units.len();
            units.retain(|unit| !self.unit(*id, it, *unit));
            moved |= units.len() < before;
        }
        behind.retain(|(_, units)| !units.is_empty());
        self.lanes[rank][lane].behind = behind;
        moved
    }

    /// Whether one step writes plain memory that another reads or writes.
    fn conflict(&self, earlier: &Movement, later: &Movement) -> bool {
        let any = |some: &[Operand], others: &[Operand]| {
            some.iter()
                .any(|one| others.iter().any(|other| self.overlap(one, other)))
        };
        any(&earlier.targets, &later.targets)
            || any(&earlier.targets, &later.sources)
            || any(&earlier.sources, &later.targets)
    }

    /// Whether two operands share plain memory: packets order themselves.
    fn overlap(&self, one: &Operand, other: &Operand) -> bool {
        (one.rank, one.memory) == (other.rank, other.memory)
            && self.memory.packet(one) == 0
            && one.from < other.from + other.elements
            && other.from < one.from + one.elements
    }
}
