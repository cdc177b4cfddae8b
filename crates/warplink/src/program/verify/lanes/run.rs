//! Interprets steps of lanes over vector clocks, and detects violations.

use super::agreement::Announcements;
use super::knowledge::{Knowledge, Proof, Stamp};
use super::memory::{AreaHistory, Was, Wrong};
use super::values::{ReadWords, Valuation};
use super::{JointLaunch, MAX_ALL_LANES, MAX_HELD_STEPS, MAX_STEPS, too_large};
use crate::error::Rank;
use crate::program::diagnostic::{Diagnostic, DiagnosticKind};
use crate::program::ir::Program;
use crate::program::machine::{Actor, Domain, Machine};
use crate::program::rank_program::{Range, RankProgram};
use crate::program::section::{
    LaneStep, LaneStepKind, OperandMemory, Packing, Part, SectionInstance, SectionMemory, StepCache,
};
use crate::program::verify::clock::Clocks;
use crate::program::verify::kernel_accesses::RankAccesses;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Limit on recorded findings.
// Far more than are reported; bounds memory where one faulty step runs in all lanes and launches.
const MAX_FINDINGS: usize = 4096;

/// Memory of a rank: a tensor, or an area of its workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum RankMemory {
    Tensor(usize),
    Area(Packing),
}

impl RankMemory {
    fn of(operand: &OperandMemory) -> Self {
        match operand.memory {
            SectionMemory::Tensor(id) => Self::Tensor(id),
            SectionMemory::Scratch(_) => Self::Area(operand.packing),
        }
    }
}

/// A violation by a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Finding<'a> {
    pub(super) actor: Actor,
    pub(super) writes: bool,
    /// Owner of the memory, and the name of the tensor.
    pub(super) memory: (Rank, &'a str),
    pub(super) wrong: Wrong,
}

/// Stream of a rank.
pub(super) struct Stream {
    pub(super) knows: Knowledge,
    /// The launch in flight, or else the next one.
    pub(super) launch: usize,
    /// Number of steps and operands of that launch.
    held: usize,
}

pub(super) struct LaneRun<'a> {
    pub(super) ranks: &'a [RankProgram],
    pub(super) kernels: &'a [JointLaunch<'a>],
    pub(super) sequence: &'a [usize],
    /// For each launch, the launch with which its program's run began.
    begun: Vec<u32>,
    /// Largest number of lanes of a rank.
    width: usize,
    /// Clocks of each lane of each rank.
    pub(super) knows: Vec<Knowledge>,
    pub(super) streams: Vec<Stream>,
    pub(super) memory: Vec<BTreeMap<RankMemory, AreaHistory>>,
    /// Number of steps and operands of lanes so far, and of the launches in flight.
    taken: usize,
    held: usize,
    /// Number of statements that were resolved since it was last added to these steps.
    resolved: Cell<usize>,
    pub(super) findings: Vec<Finding<'a>>,
    /// Accesses of each kernel on each rank in its first launch; in all launches, if they read words.
    pub(super) accesses: Vec<Vec<Option<RankAccesses>>>,
    /// For each kernel, the ranks on which lanes wait or are waited for.
    pub(super) waits: Vec<Vec<bool>>,
    /// Announcements of the ranks.
    pub(super) announcements: Announcements,
    /// Signals of two lanes to one word in the same launch.
    pub(super) crossed: Vec<(Actor, Actor)>,
    /// Signals sent in one run and consumed in another, and the step that consumed them.
    pub(super) outlived: Vec<(Actor, Actor)>,
    /// For each kernel, pairs of lanes where one receives the clock of the other.
    pub(super) synchronized: Vec<BTreeSet<(usize, usize)>>,
    /// Accesses of a rank's launch that another launch of the same kernel does not make.
    pub(super) unsteady: Vec<(Rank, usize, Range)>,
    /// Words that lanes read as integers.
    pub(super) words: ReadWords,
    /// Why a lane cannot go on with a value that it has read.
    pub(super) failed: Option<Diagnostic>,
}

impl<'a> LaneRun<'a> {
    pub(super) fn new(
        ranks: &'a [RankProgram],
        kernels: &'a [JointLaunch<'a>],
        sequence: &'a [usize],
        valuation: Valuation,
    ) -> Result<Self, Diagnostic> {
        let world = ranks.len();
        let widths = kernels.iter().flat_map(|kernel| &kernel.sections);
        let width = widths.map(|section| section.lanes).max().unwrap_or(1);
        if world * width > MAX_ALL_LANES {
            let message = format!(
                "the kernels are too large to verify: {world} ranks have {width} lanes each; expected at most \
                 {MAX_ALL_LANES} lanes of all ranks"
            );
            return Err(Diagnostic::new(
                DiagnosticKind::Malformed,
                message,
                Vec::new(),
            ));
        }
        let mut first = 0;
        let begun = sequence.iter().enumerate().map(|(launch, kernel)| {
            if kernels[*kernel].begins {
                first = launch as u32;
            }
            first
        });
        // One more per rank for its stream.
        let clocks = Clocks::new(world * (width + 1));
        let knows = || Knowledge::new(&clocks);
        Ok(Self {
            ranks,
            kernels,
            sequence,
            begun: begun.collect(),
            width,
            knows: (0..world * width).map(|_| knows()).collect(),
            streams: (0..world)
                .map(|_| Stream {
                    knows: knows(),
                    launch: 0,
                    held: 0,
                })
                .collect(),
            memory: vec![BTreeMap::new(); world],
            taken: 0,
            held: 0,
            resolved: Cell::new(0),
            findings: Vec::new(),
            accesses: kernels.iter().map(|_| vec![None; world]).collect(),
            waits: vec![vec![false; world]; kernels.len()],
            announcements: Announcements::default(),
            crossed: Vec::new(),
            outlived: Vec::new(),
            synchronized: vec![BTreeSet::new(); kernels.len()],
            unsteady: Vec::new(),
            words: ReadWords::new(
                valuation,
                kernels.iter().flat_map(|kernel| &kernel.sections).copied(),
            ),
            failed: None,
        })
    }

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

    /// Program of launch `number`, if several are simulated.
    pub(super) fn program(&self, number: usize) -> Option<&'a Program> {
        self.kernels[self.sequence[number]].program
    }

    /// Steps of a lane in launch `number`.
    pub(super) fn steps(
        &self,
        number: usize,
        rank: Rank,
        lane: usize,
    ) -> Result<Arc<[LaneStep]>, Diagnostic> {
        let kernel = &self.kernels[self.sequence[number]];
        let section = self.section(number, rank);
        let cache = self.cache(number, rank);
        let announced = cache.announced(section).iter().copied();
        let missing = announced.filter(|tensor| !kernel.is_reachable(lane, *tensor));
        let missing: Vec<usize> = missing.collect();
        let of = (number as u32, rank as u32, lane as u32);
        let found = cache.steps(section, (lane, number as u64), &missing, &|word| {
            self.value(of, word)
        });
        found.map(|(steps, resolved)| {
            self.resolved.set(self.resolved.get() + resolved);
            steps
        })
    }

    /// Cache of the steps that a rank launches in launch `number`.
    pub(super) fn cache(&self, number: usize, rank: Rank) -> &'a StepCache {
        &self.kernels[self.sequence[number]].caches[rank]
    }

    /// Launch with which the run of a launch began.
    pub(super) fn begun(&self, launch: u32) -> u32 {
        self.begun[launch as usize]
    }

    /// Section that a rank launches in launch `number`.
    pub(super) fn section(&self, number: usize, rank: Rank) -> &'a SectionInstance {
        self.kernels[self.sequence[number]].sections[rank]
    }

    pub(super) fn stream_number(&self, rank: Rank) -> usize {
        self.ranks.len() * self.width + rank
    }

    /// Stream number of a lane in the clocks. Lanes with equal numbers, which mostly wait for one another, are
    /// adjacent, so that their counts share few nodes of a clock.
    pub(super) fn lane_number(&self, rank: Rank, lane: usize) -> usize {
        lane * self.ranks.len() + rank
    }

    fn lane_of(&self, actor: Actor) -> usize {
        self.lane_number(actor.rank as Rank, actor.lane as usize)
    }

    pub(super) fn tick_stream(&mut self, rank: Rank) -> u32 {
        let number = self.stream_number(rank);
        self.streams[rank].knows.tick(number)
    }

    /// Releases the steps of a rank's launch, which has ended.
    pub(super) fn release(&mut self, rank: Rank) {
        self.held -= std::mem::take(&mut self.streams[rank].held);
    }

    /// Counts the steps of a lane that a rank launches against the limits.
    pub(super) fn count(&mut self, rank: Rank, steps: &[LaneStep]) -> Result<(), Diagnostic> {
        // Each word that is looked at has a cost.
        let words = |kind: &LaneStepKind| match kind {
            LaneStepKind::Value { source, .. } => source.elements,
            _ => kind.targets().len() + kind.sources().len(),
        };
        let operands = steps.iter().map(|step| words(&step.kind));
        // A lane without steps has a cost, too.
        let taken = 1 + steps.len() + operands.sum::<usize>();
        // Statements that make no steps, such as integers and empty arms, take time as well.
        self.taken += taken + self.resolved.take();
        self.held += taken;
        self.streams[rank].held += taken;
        if self.taken > MAX_STEPS || self.held > MAX_HELD_STEPS {
            return Err(too_large());
        }
        Ok(())
    }

    /// Whether all launches have ended.
    pub(super) fn is_over(&self) -> bool {
        let all = self.sequence.len();
        self.streams.iter().all(|stream| stream.launch == all)
    }

    pub(super) fn find(&mut self, finding: Finding<'a>) {
        if self.findings.len() < MAX_FINDINGS {
            self.findings.push(finding);
        }
    }

    /// Records a violation by a step on one of its operands.
    fn find_operand(&mut self, actor: Actor, writes: bool, part: &Part, wrong: Wrong) {
        let memory = (part.rank, self.name_of(&actor, part));
        self.find(Finding {
            actor,
            writes,
            memory,
            wrong,
        });
    }

    fn stamp(&mut self, actor: Actor) -> Stamp {
        let lane = self.lane_of(actor);
        Stamp {
            actor,
            stream: lane as u32,
            time: self.knows[lane].tick(lane),
        }
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

    /// Place of an operand, and its bytes there.
    pub(super) fn bytes_of(
        &self,
        number: usize,
        part: &Part,
    ) -> (RankMemory, std::ops::Range<usize>) {
        let section = self.section(number, part.rank);
        let operand = section.operand(part);
        operand.map_or((RankMemory::Area(Packing::Plain), 0..0), |operand| {
            (RankMemory::of(&operand), operand.bytes)
        })
    }

    /// End of the elements of an operand in packets; its last packet may extend further.
    fn filled_end(&self, number: usize, part: &Part) -> usize {
        let section = self.section(number, part.rank);
        let from = section.tensors[part.tensor].offset + part.offset;
        let scratch = section.scratch_of(part.tensor);
        let filled = scratch.and_then(|scratch| scratch.filled(from, part.elements));
        filled.map_or(0, |filled| filled.end)
    }

    /// Reads of a step, and the proofs that each of its threads holds then.
    fn read(
        &mut self,
        stamp: Stamp,
        sources: &[Part],
        found: &mut Vec<(bool, Part, Wrong)>,
    ) -> Vec<Proof> {
        let mut held = Vec::new();
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
                Some(scratch) if !scratch.persistent => self.begun[number],
                _ => 0,
            };
            // An empty operand has no history.
            let Some(bytes) = self.memory[source.rank].get_mut(&place) else {
                continue;
            };
            let knows = &mut self.knows[lane];
            let tell = |wrong| found.push((false, *source, wrong));
            match place {
                RankMemory::Area(packing) if packing.is_packets() => {
                    let (synchronized, lane) =
                        (&mut self.synchronized[self.sequence[number]], actor.lane);
                    for sender in bytes.senders(&range, flag).filter(|sender| *sender != lane) {
                        synchronized.insert((sender as usize, lane as usize));
                    }
                    held.extend(bytes.read_packets(&range, filled, flag, stamp, knows, tell));
                }
                _ => held.extend(bytes.read(&range, since, stamp, knows, tell)),
            }
        }
        held
    }

    /// Writes of a step, each thread of which holds `held`.
    fn write(
        &mut self,
        (stamp, held): (Stamp, &[Proof]),
        (targets, sources): (&[Part], &[Part]),
        found: &mut Vec<(bool, Part, Wrong)>,
    ) {
        let actor = stamp.actor;
        let number = actor.launch as usize;
        let (lane, flag) = (self.lane_of(actor), number as u64 + 1);
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
            let proof = if packets {
                sent.get_or_insert_with(|| knows.sent(&stamp, held))
            } else {
                kept.get_or_insert_with(|| knows.kept(&stamp, held))
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

    /// Name of an operand's tensor.
    pub(super) fn name_of(&self, actor: &Actor, part: &Part) -> &'a str {
        let section = self.section(actor.launch as usize, part.rank);
        &section.tensors[part.tensor].name
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
        if self.begun[sender.launch as usize] != self.begun[actor.launch as usize]
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
        let held = self.read(stamp, sources, &mut found);
        self.write((stamp, &held), (targets, sources), &mut found);
        for (writes, part, wrong) in found {
            self.find_operand(actor, writes, &part, wrong);
        }
        if self.meets_after(actor, step) {
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
