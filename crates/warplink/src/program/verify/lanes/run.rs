//! Interprets steps of lanes over vector clocks, and detects violations.

use super::knowledge::{Knowledge, Proof, Stamp};
use super::memory::{RankMemory, Was, Wrong};
use super::state::{LaneRun, MAX_FINDINGS};
use crate::error::Rank;
use crate::program::diagnostic::Diagnostic;
use crate::program::machine::{Actor, Domain, Machine};
use crate::program::section::{
    LaneStep, LaneStepKind, OperandMemory, Part, RowStep, SectionInstance,
};
use std::sync::Arc;

impl LaneRun<'_> {
    /// Runs all launches as far as they get.
    pub(super) fn go(&mut self) -> Result<Machine<Knowledge>, Diagnostic> {
        let world = self.ranks.len();
        let mut machine = Machine::new(world, self.width);
        (0..world).for_each(|rank| self.prepare(rank));
        (0..world).try_for_each(|rank| self.launch(rank, &mut machine))?;
        while let Some(rank) = machine.run(self) {
            self.end(rank);
            self.launch(rank, &mut machine)?;
        }
        Ok(machine)
    }

    /// The threads of the actor's lane meet.
    fn meet(&mut self, actor: Actor) {
        let lane = self.lane_of(actor);
        self.knows[lane].meet();
    }

    /// Whether all threads of a lane wait for the packets that a step reads: an agreement on tensors, or a value.
    fn meets_after(&self, actor: Actor, step: &LaneStepKind) -> bool {
        match step {
            LaneStepKind::Agree { tensors, .. } => !tensors.is_empty(),
            LaneStepKind::Value { source, .. } => {
                let (place, _) = self.bytes_of(actor.launch as usize, source);
                matches!(place, RankMemory::Area(packing) if packing.is_packets())
            }
            _ => false,
        }
    }

    /// End of the elements of an operand in packets; its last packet may extend further.
    fn filled_end(&self, number: usize, part: &Part) -> usize {
        let section = self.section(number, part.rank);
        let from = section.tensors[part.tensor].offset + part.offset;
        let scratch = section.scratch_of(part.tensor);
        let filled = scratch.and_then(|scratch| scratch.filled(from, part.elements));
        filled.map_or(0, |filled| filled.end)
    }

    /// Reads of a step, and for each source the proof that each thread holds then which waits for it. `acquires` is whether all
    /// threads see then what senders published.
    fn read(
        &mut self,
        (stamp, acquires): (Stamp, bool),
        sources: &[Part],
        found: &mut Vec<(bool, Part, Wrong)>,
    ) -> Vec<Option<Proof>> {
        let mut held = Vec::with_capacity(sources.len());
        let actor = stamp.actor;
        let number = actor.launch as usize;
        let (lane, flag) = (self.lane_of(actor), number as u64 + 1);
        for source in sources {
            let (place, range) = self.bytes_of(number, source);
            let filled = self.filled_end(number, source);
            let scratch = self.section(number, source.rank).scratch_of(source.tensor);
            let since = match scratch {
                // What an earlier run left in scratch must not be read, as that run may have been of another program
                // in the same workspace.
                Some(scratch) if !scratch.persistent => self.begun(number as u32),
                _ => 0,
            };
            // An empty operand has no history.
            let Some(bytes) = self.memory[source.rank].get_mut(&place) else {
                held.push(None);
                continue;
            };
            let knows = &mut self.knows[lane];
            let tell = |wrong| found.push((false, *source, wrong));
            held.push(match place {
                RankMemory::Area(packing) if packing.is_packets() => {
                    let (synchronized, lane) =
                        (&mut self.synchronized[self.sequence[number]], actor.lane);
                    for sender in bytes.senders(&range, flag).filter(|sender| *sender != lane) {
                        synchronized.insert((sender as usize, lane as usize));
                    }
                    let flag = (flag, acquires);
                    bytes.read_packets(&range, filled, flag, stamp, knows, tell)
                }
                _ => bytes.read(&range, since, stamp, knows, tell),
            });
        }
        held
    }

    /// Writes of a step. `held` has for each source the proof that a thread holds which has read it; `rows` is what it
    /// computes.
    fn write(
        &mut self,
        (stamp, held): (Stamp, &[Option<Proof>]),
        (targets, sources, rows): (&[Part], &[Part], Option<&RowStep>),
        found: &mut Vec<(bool, Part, Wrong)>,
    ) {
        // A thread may store a result of a function before it reads sources that others depend on.
        let needs = rows.map(RowStep::needs);
        let actor = stamp.actor;
        let number = actor.launch as usize;
        let (lane, flag) = (self.lane_of(actor), number as u64 + 1);
        let all: Vec<Proof> = held.iter().flatten().cloned().collect();
        let (mut sent, mut kept) = (None, None);
        for (position, target) in targets.iter().enumerate() {
            self.check_overlaps(actor, target, sources, Was::Read);
            self.check_overlaps(actor, target, &targets[..position], Was::Write);
            let (place, range) = self.bytes_of(number, target);
            let filled = self.filled_end(number, target);
            let Some(bytes) = self.memory[target.rank].get_mut(&place) else {
                continue;
            };
            let packets = matches!(place, RankMemory::Area(packing) if packing.is_packets());
            let knows = &self.knows[lane];
            let needs = needs.as_ref().map(|needs| &needs[position]);
            let partial = needs.filter(|needs| needs.contains(&false)).map(|needs| {
                let held = held.iter().zip(needs).filter(|(_, is_needed)| **is_needed);
                held.filter_map(|(proof, _)| proof.clone())
                    .collect::<Vec<_>>()
            });
            let held = partial.as_deref().unwrap_or(&all);
            let proof = match (&partial, packets) {
                (Some(held), true) => &knows.sent(None, held),
                (Some(held), false) => &knows.kept(None, held),
                (None, true) => sent.get_or_insert_with(|| knows.sent(Some(&stamp), held)),
                (None, false) => kept.get_or_insert_with(|| knows.kept(Some(&stamp), held)),
            };
            let flag = packets.then_some(flag);
            bytes.write(&range, flag, stamp, (knows, held, proof), |wrong| {
                found.push((true, *target, wrong));
            });
            // A packet is stored as a whole: its flag arrives although the rest of its data is padding, which a
            // reader must not use.
            if packets && filled < range.end {
                bytes.leave_empty(&(filled..range.end));
            }
        }
    }

    /// Publishes a lane's visible memory with its announcement of tensors, as a signal does.
    fn hand_on(&mut self, actor: Actor, target: &Part) {
        let (place, range) = self.bytes_of(actor.launch as usize, target);
        let lane = self.lane_of(actor);
        if let Some(bytes) = self.memory[target.rank].get_mut(&place) {
            bytes.hand_on(&range, lane, &self.knows[lane]);
        }
    }

    /// Threads of a lane are unordered within a step, so its operands must be identical or disjoint: `others` are
    /// read, or written as well.
    fn check_overlaps(&mut self, actor: Actor, target: &Part, others: &[Part], was: Was) {
        let number = actor.launch as usize;
        let (place, range) = self.bytes_of(number, target);
        for other in others.iter().filter(|other| other.rank == target.rank) {
            let (other_place, other_range) = self.bytes_of(number, other);
            let apart = other_range.end <= range.start || range.end <= other_range.start;
            // In place, each thread reads an element before it writes the same one. Two stores to one range leave
            // either value.
            let same = other_range == range && was == Was::Read;
            if other_place == place && !apart && !same {
                self.find_operand(actor, true, target, Wrong::Unordered(actor, was));
            }
        }
    }
}

impl Domain for LaneRun<'_> {
    type Signal = Knowledge;

    fn section(&self, number: usize, rank: Rank) -> &SectionInstance {
        LaneRun::section(self, number, rank)
    }

    fn signal(&mut self, actor: Actor, to: usize, last: Option<Actor>) -> Knowledge {
        self.meet(actor);
        self.stamp(actor);
        let lane = actor.lane as usize;
        if to != lane {
            self.synchronized[self.sequence[actor.launch as usize]].insert((lane, to));
        }
        // Signals of two lanes of one launch are unordered.
        if let Some(other) = last
            && (other.launch, other.rank) == (actor.launch, actor.rank)
            && other.lane != actor.lane
        {
            self.crossed.push((actor, other));
        }
        self.knows[self.lane_of(actor)].clone()
    }

    fn wait(&mut self, actor: Actor, sender: Actor, signal: Knowledge) {
        if self.begun(sender.launch) != self.begun(actor.launch)
            && self.outlived.len() < MAX_FINDINGS
        {
            self.outlived.push((sender, actor));
        }
        let lane = self.lane_of(actor);
        self.knows[lane].join(&signal);
        self.stamp(actor);
        self.meet(actor);
    }

    fn has_packets(&mut self, actor: Actor, rank: Rank, packets: &OperandMemory) -> bool {
        let flag = u64::from(actor.launch) + 1;
        self.memory[rank]
            .get_mut(&RankMemory::of(packets))
            .is_none_or(|bytes| bytes.has_packets(&packets.bytes, flag))
    }

    fn perform(&mut self, actor: Actor, step: &LaneStepKind) {
        if let LaneStepKind::Announce {
            values,
            tensors,
            target,
        } = step
        {
            if !tensors.is_empty() {
                self.meet(actor);
            }
            self.announce(actor, &announced(values, tensors), target);
        }
        let stamp = self.stamp(actor);
        if let LaneStepKind::Value {
            number,
            source,
            matching,
            most,
        } = step
        {
            self.read_value(actor, *number, (source, *matching, *most));
        }
        if self.words.are_read() {
            self.store_words(actor, step);
        }
        let (targets, sources) = (step.targets(), step.sources());
        let mut found = Vec::new();
        for (parts, writes) in [(targets, true), (sources, false)] {
            let unknown = parts.iter().filter(|part| !self.is_located(actor, part));
            found.extend(unknown.map(|part| (writes, *part, Wrong::Unannounced)));
        }
        let meets = self.meets_after(actor, step);
        // Of packets that announce tensors, only this step loads the flag with acquire, for all of the lane's threads.
        let acquires = meets && matches!(step, LaneStepKind::Agree { .. });
        let held = self.read((stamp, acquires), sources, &mut found);
        let rows = match step {
            LaneStepKind::Move(it) => it.rows.as_deref(),
            _ => None,
        };
        self.write((stamp, &held), (targets, sources, rows), &mut found);
        for (writes, part, wrong) in found {
            self.find_operand(actor, writes, &part, wrong);
        }
        if meets {
            self.meet(actor);
        }
        match step {
            LaneStepKind::Announce {
                tensors, target, ..
            } if !tensors.is_empty() => {
                self.locate(actor, tensors, true);
                self.hand_on(actor, target);
            }
            LaneStepKind::Agree {
                values,
                tensors,
                peer,
                source,
            } => {
                self.locate(actor, tensors, false);
                self.agree(actor, &announced(values, tensors), *peer, source);
            }
            LaneStepKind::Move(it) => {
                if let Some(source) = it.only_source() {
                    self.pass_on(actor, it.elements, targets, source);
                }
            }
            _ => {}
        }
    }

    fn resume(&mut self, actor: Actor) -> Option<Arc<[LaneStep]>> {
        let (launch, rank) = (actor.launch as usize, actor.rank as Rank);
        let resolved = self.steps(launch, rank, actor.lane as usize);
        let resolved = resolved.and_then(|steps| {
            // The steps up to here were counted when the lane started, or resumed the last time.
            let further = &steps[actor.step as usize + 1..];
            self.admit(launch, rank, further)?;
            Ok(steps)
        });
        match resolved {
            Ok(steps) => Some(steps),
            Err(diagnostic) => {
                self.failed.get_or_insert(diagnostic);
                None
            }
        }
    }
}

/// Words of an announcement that the verifier compares: integers, and numbers of tensors.
fn announced(values: &[u32], tensors: &[usize]) -> Vec<u32> {
    let tensors = tensors.iter().map(|tensor| *tensor as u32);
    values.iter().copied().chain(tensors).collect()
}
