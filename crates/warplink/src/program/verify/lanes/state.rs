//! State of a simulation of lanes.

use super::announcements::Announcements;
use super::knowledge::{Knowledge, Stamp};
use super::memory::{AreaHistory, RankMemory, Wrong};
use super::words::{ReadWords, Valuation, WordUse};
use super::{JointLaunch, MAX_ALL_LANES, MAX_HELD_STEPS, MAX_STEPS, too_large};
use crate::error::Rank;
use crate::program::diagnostic::{Diagnostic, DiagnosticKind};
use crate::program::ir::Program;
use crate::program::machine::Actor;
use crate::program::rank_program::{Range, RankProgram};
use crate::program::section::{LaneStep, LaneStepKind, Packing, Part, SectionInstance, StepCache};
use crate::program::verify::clock::Clocks;
use crate::program::verify::kernel_accesses::RankAccesses;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Limit on recorded findings.
// Far more than are reported; bounds memory where one faulty step runs in all lanes and launches.
pub(super) const MAX_FINDINGS: usize = 4096;

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

/// Accesses of a kernel to a rank's tensors.
#[derive(Clone, Debug, Default)]
pub(super) struct NotedAccesses {
    /// In its first launch.
    pub(super) first: RankAccesses,
    /// In any launch, where those of another one differ by the words that lanes read.
    pub(super) any: Option<RankAccesses>,
}

pub(super) struct LaneRun<'a> {
    pub(super) ranks: &'a [RankProgram],
    pub(super) kernels: &'a [JointLaunch<'a>],
    pub(super) sequence: &'a [usize],
    /// For each launch, the launch with which its program's run began.
    begun: Vec<u32>,
    /// Largest number of lanes of a rank.
    pub(super) width: usize,
    /// Clocks of each lane of each rank.
    pub(super) knows: Vec<Knowledge>,
    pub(super) streams: Vec<Stream>,
    pub(super) memory: Vec<BTreeMap<RankMemory, AreaHistory>>,
    /// Number of steps and operands of lanes so far, and of the launches in flight.
    pub(super) taken: usize,
    held: usize,
    /// Number of statements that were resolved since it was last added to these steps.
    resolved: Cell<usize>,
    pub(super) findings: Vec<Finding<'a>>,
    /// Accesses of each kernel on each rank.
    pub(super) accesses: Vec<Vec<Option<NotedAccesses>>>,
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
    /// Accesses of a rank's launch that another launch of the same kernel does not make, though lanes read the same words.
    pub(super) unsteady: Vec<(Rank, usize, Range)>,
    /// Words that lanes read as integers.
    pub(super) words: ReadWords<'a>,
    /// Why a lane cannot go on with a value that it has read.
    pub(super) failed: Option<Diagnostic>,
}

impl<'a> LaneRun<'a> {
    pub(super) fn new(
        ranks: &'a [RankProgram],
        kernels: &'a [JointLaunch<'a>],
        sequence: &'a [usize],
        (valuation, uses): (Valuation, &'a WordUse),
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
            words: ReadWords::new(valuation, uses),
            failed: None,
        })
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

    pub(super) fn lane_of(&self, actor: Actor) -> usize {
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
    pub(super) fn find_operand(&mut self, actor: Actor, writes: bool, part: &Part, wrong: Wrong) {
        let memory = (part.rank, self.name_of(&actor, part));
        self.find(Finding {
            actor,
            writes,
            memory,
            wrong,
        });
    }

    pub(super) fn stamp(&mut self, actor: Actor) -> Stamp {
        let lane = self.lane_of(actor);
        Stamp {
            actor,
            stream: lane as u32,
            time: self.knows[lane].tick(lane),
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

    /// Name of an operand's tensor.
    pub(super) fn name_of(&self, actor: &Actor, part: &Part) -> &'a str {
        let section = self.section(actor.launch as usize, part.rank);
        &section.tensors[part.tensor].name
    }
}
