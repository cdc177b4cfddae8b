//! Running the lanes of all ranks as far as they get.

use super::agreement::Announcements;
use super::memory::{Actor, Bytes, Knowledge, Stamp, Wrong};
use super::{Launch, MAX_ALL_LANES, MAX_HELD_STEPS, MAX_STEPS, RankAccesses, too_large};
use crate::error::Rank;
use crate::program::diagnostic::{Diagnostic, DiagnosticKind};
use crate::program::ir::Program;
use crate::program::rank_program::{Range, RankProgram};
use crate::program::section::{
    LaneStep, LaneStepKind, Packing, Part, SectionInstance, SectionMemory,
};
use crate::program::verify::clock::Clocks;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The most findings that are kept.
const MAX_FINDINGS: usize = 4096;

/// Memory of a rank: a tensor, or an area of its workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Place {
    Tensor(usize),
    Area(Packing),
}

/// Something wrong that a step did.
#[derive(Clone, Copy, Debug)]
pub(super) struct Finding {
    pub(super) actor: Actor,
    pub(super) writes: bool,
    /// Whose memory, and which operand of the step.
    pub(super) part: Part,
    pub(super) wrong: Wrong,
}

/// Signals from a rank to a lane of another.
#[derive(Debug, Default)]
pub(super) struct Word {
    /// Who sent those that were not waited for, and what they knew.
    sent: VecDeque<(Actor, Knowledge)>,
    pub(super) signalled: u64,
    pub(super) awaited: u64,
    pub(super) last: Option<Actor>,
}

/// A lane of a launch.
pub(super) struct Lane {
    pub(super) steps: Vec<LaneStep>,
    pub(super) next: usize,
    pub(super) knows: Knowledge,
    scheduled: bool,
    /// Whether it is a lane of the launch that is under way, and has not ended.
    pub(super) running: bool,
}

/// A rank's stream.
pub(super) struct Stream {
    pub(super) knows: Knowledge,
    /// The launch that is under way, or comes next.
    pub(super) launch: usize,
    /// Lanes of it that have not ended.
    pub(super) left: usize,
    /// Steps and operands of it.
    held: usize,
}

pub(super) struct Run<'a> {
    pub(super) ranks: &'a [RankProgram],
    pub(super) kernels: &'a [Launch<'a>],
    pub(super) sequence: &'a [usize],
    /// For each launch, the one with which its program's run began.
    begun: Vec<u32>,
    /// Lanes of a rank at most.
    pub(super) width: usize,
    pub(super) lanes: Vec<Lane>,
    pub(super) streams: Vec<Stream>,
    pub(super) words: BTreeMap<(Rank, usize, Rank), Word>,
    pub(super) memory: Vec<BTreeMap<Place, Bytes>>,
    /// For each rank, lanes that wait for packets there, and which.
    waiting: Vec<Vec<(usize, Packing, std::ops::Range<usize>)>>,
    work: Vec<usize>,
    /// Steps and operands of lanes so far, and of the launches that are under way.
    taken: usize,
    held: usize,
    pub(super) findings: Vec<Finding>,
    /// What each kernel accesses on each rank in its first launch.
    pub(super) accesses: Vec<Vec<Option<RankAccesses>>>,
    /// Of each kernel, the ranks on which lanes wait or are waited for.
    pub(super) waits: Vec<Vec<bool>>,
    /// What ranks announced.
    pub(super) announcements: Announcements,
    /// Signals of two lanes to one word, in the same launch.
    pub(super) crossed: Vec<(Actor, Actor)>,
    /// Signals that are waited for in another run than that in which they were sent, and where.
    pub(super) outlived: Vec<(Actor, Actor)>,
    /// Of each kernel, which lanes learn from which others.
    pub(super) taught: Vec<BTreeSet<(usize, usize)>>,
    /// What a rank's launch accesses, and another of the same kernel does not.
    pub(super) unsteady: Vec<(Rank, usize, Range)>,
}

impl<'a> Run<'a> {
    pub(super) fn new(
        ranks: &'a [RankProgram],
        kernels: &'a [Launch<'a>],
        sequence: &'a [usize],
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
        let clocks = Clocks::new(world * (width + 1));
        let knows = || Knowledge {
            seen: clocks.clock(),
            over: clocks.clock(),
        };
        let lane = |_| Lane {
            steps: Vec::new(),
            next: 0,
            knows: knows(),
            scheduled: false,
            running: false,
        };
        let mut run = Self {
            ranks,
            kernels,
            sequence,
            begun: begun.collect(),
            width,
            lanes: (0..world * width).map(lane).collect(),
            streams: (0..world)
                .map(|_| Stream {
                    knows: knows(),
                    launch: 0,
                    left: 0,
                    held: 0,
                })
                .collect(),
            words: BTreeMap::new(),
            memory: vec![BTreeMap::new(); world],
            waiting: vec![Vec::new(); world],
            work: Vec::new(),
            taken: 0,
            held: 0,
            findings: Vec::new(),
            accesses: kernels.iter().map(|_| vec![None; world]).collect(),
            waits: vec![vec![false; world]; kernels.len()],
            announcements: Announcements::default(),
            crossed: Vec::new(),
            outlived: Vec::new(),
            taught: vec![BTreeSet::new(); kernels.len()],
            unsteady: Vec::new(),
        };
        for rank in 0..world {
            run.prepare(rank);
        }
        for rank in 0..world {
            run.launch(rank)?;
        }
        Ok(run)
    }

    /// The program of launch `number`, where several are followed.
    pub(super) fn program(&self, number: usize) -> Option<&'a Program> {
        self.kernels[self.sequence[number]].program
    }

    /// What a lane does in launch `number`.
    pub(super) fn steps(
        &self,
        number: usize,
        rank: Rank,
        lane: usize,
    ) -> Result<Vec<LaneStep>, Diagnostic> {
        let kernel = &self.kernels[self.sequence[number]];
        let section = self.section(number, rank);
        section.steps_where(lane, number as u64, &|tensor| {
            kernel.is_reachable(lane, tensor)
        })
    }

    /// The section that a rank launches in launch `number`.
    pub(super) fn section(&self, number: usize, rank: Rank) -> &'a SectionInstance {
        self.kernels[self.sequence[number]].sections[rank]
    }

    pub(super) fn stream_number(&self, rank: Rank) -> usize {
        self.ranks.len() * self.width + rank
    }

    pub(super) fn tick_stream(&mut self, rank: Rank) -> u32 {
        let number = self.stream_number(rank);
        let knows = &mut self.streams[rank].knows;
        knows.over.tick(number);
        knows.seen.tick(number)
    }

    pub(super) fn wake(&mut self, lane: usize) {
        if !self.lanes[lane].scheduled {
            self.lanes[lane].scheduled = true;
            self.work.push(lane);
        }
    }

    /// Runs as far as it goes.
    pub(super) fn go(&mut self) -> Result<(), Diagnostic> {
        while let Some(lane) = self.work.pop() {
            self.lanes[lane].scheduled = false;
            while self.advance(lane) {}
            let rank = lane / self.width;
            let state = &mut self.lanes[lane];
            if state.running && state.next == state.steps.len() {
                state.running = false;
                self.streams[rank].left -= 1;
                let knows = state.knows.clone();
                join(&mut self.streams[rank].knows, &knows);
                if self.streams[rank].left == 0 {
                    self.end(rank);
                    self.launch(rank)?;
                }
            }
        }
        Ok(())
    }

    /// What a rank has launched is over.
    pub(super) fn release(&mut self, rank: Rank) {
        self.held -= std::mem::take(&mut self.streams[rank].held);
    }

    /// Counts steps of a lane that a rank launches.
    pub(super) fn count(&mut self, rank: Rank, steps: &[LaneStep]) -> Result<(), Diagnostic> {
        let operands = steps.iter().map(|step| match &step.kind {
            LaneStepKind::Move {
                targets, sources, ..
            } => targets.len() + sources.len(),
            _ => 0,
        });
        // A lane without steps costs something, too.
        let taken = 1 + steps.len() + operands.sum::<usize>();
        self.taken += taken;
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

    /// The launch that a rank is at.
    pub(super) fn launch_of(&self, rank: Rank) -> usize {
        self.streams[rank].launch
    }

    pub(super) fn find(&mut self, actor: Actor, writes: bool, part: Part, wrong: Wrong) {
        if self.findings.len() < MAX_FINDINGS {
            self.findings.push(Finding {
                actor,
                writes,
                part,
                wrong,
            });
        }
    }

    /// Does the next step of a lane; `false` where there is none or it has to wait.
    fn advance(&mut self, index: usize) -> bool {
        let (rank, lane) = (index / self.width, index % self.width);
        let number = self.streams[rank].launch;
        let state = &mut self.lanes[index];
        let Some(step) = state.steps.get(state.next) else {
            return false;
        };
        let actor = Actor {
            launch: number as u32,
            rank: rank as u32,
            lane: lane as u32,
            step: state.next as u32,
        };
        match &step.kind {
            LaneStepKind::Signal { peer, lane: to } => {
                let (peer, to) = (*peer, *to);
                tick(&mut state.knows, index);
                let knows = state.knows.clone();
                let word = self.words.entry((peer, to, rank)).or_default();
                if to != lane {
                    self.taught[self.sequence[number]].insert((lane, to));
                }
                let other = word.last.replace(actor);
                word.sent.push_back((actor, knows));
                word.signalled += 1;
                // Of two lanes of one launch, nothing says whose signal comes first.
                if let Some(other) = other
                    && (other.launch, other.rank) == (actor.launch, actor.rank)
                    && other.lane != actor.lane
                {
                    self.crossed.push((actor, other));
                }
                self.wake(peer * self.width + to);
            }
            LaneStepKind::Wait(peer) => {
                let word = self.words.entry((rank, lane, *peer)).or_default();
                let Some((sender, knows)) = word.sent.pop_front() else {
                    return false;
                };
                word.awaited += 1;
                if self.begun[sender.launch as usize] != self.begun[number]
                    && self.outlived.len() < MAX_FINDINGS
                {
                    self.outlived.push((sender, actor));
                }
                join(&mut state.knows, &knows);
                tick(&mut state.knows, index);
            }
            LaneStepKind::Announce {
                values,
                tensors,
                target,
            } => {
                let elements = LaneStepKind::announced_words(values, tensors);
                let (told, target) = (said(values, tensors), *target);
                let hands_on = !tensors.is_empty();
                self.announce(actor, &told, &target);
                self.movement(index, actor, elements, &[target], &[]);
                if hands_on {
                    self.hand_on(index, actor, &target);
                }
            }
            LaneStepKind::Agree {
                values,
                tensors,
                peer,
                source,
            } => {
                let elements = LaneStepKind::announced_words(values, tensors);
                let (values, peer, source) = (said(values, tensors), *peer, *source);
                if !self.movement(index, actor, elements, &[], &[source]) {
                    return false;
                }
                self.agree(actor, &values, peer, &source);
            }
            LaneStepKind::Move {
                elements,
                targets,
                sources,
                rows,
                ..
            } => {
                let (elements, targets, sources) = (*elements, targets.clone(), sources.clone());
                let copies = rows.is_none();
                if !self.movement(index, actor, elements, &targets, &sources) {
                    return false;
                }
                if let ([source], true) = (&sources[..], copies) {
                    self.pass_on(actor, elements, &targets, source);
                }
            }
        }
        self.lanes[index].next += 1;
        true
    }

    /// Where an operand lies, and in which bytes.
    pub(super) fn bytes_of(&self, number: usize, part: &Part) -> (Place, std::ops::Range<usize>) {
        let section = self.section(number, part.rank);
        let tensor = &section.tensors[part.tensor];
        let (from, elements) = (tensor.offset + part.offset, part.elements);
        match tensor.memory {
            SectionMemory::Tensor(id) => {
                let size = tensor.dtype.size();
                (Place::Tensor(id), from * size..(from + elements) * size)
            }
            SectionMemory::Scratch(id) => {
                let scratch = &section.scratch[id];
                let range = scratch.packed(from, elements).unwrap_or(0..0);
                (Place::Area(scratch.packing), range)
            }
        }
    }

    /// Where the elements of an operand that is packets end; the last packet may go on.
    fn filled_end(&self, number: usize, part: &Part) -> usize {
        let section = self.section(number, part.rank);
        let from = section.tensors[part.tensor].offset + part.offset;
        let scratch = section.scratch_of(part.tensor);
        let filled = scratch.and_then(|scratch| scratch.filled(from, part.elements));
        filled.map_or(0, |filled| filled.end)
    }

    fn movement(
        &mut self,
        index: usize,
        actor: Actor,
        elements: usize,
        targets: &[Part],
        sources: &[Part],
    ) -> bool {
        if elements == 0 {
            return true;
        }
        let number = actor.launch as usize;
        let flag = number as u64 + 1;
        // Every packet has to be there before anything is done.
        for source in sources {
            let (place, range) = self.bytes_of(number, source);
            let Place::Area(packing) = place else {
                continue;
            };
            if !packing.is_packets() {
                continue;
            }
            let there = self.memory[source.rank]
                .get_mut(&place)
                .is_none_or(|bytes| bytes.has_packets(&range, flag));
            if !there {
                self.waiting[source.rank].push((index, packing, range));
                return false;
            }
        }
        let time = {
            let knows = &mut self.lanes[index].knows;
            tick(knows, index)
        };
        let stamp = Stamp {
            actor,
            stream: index as u32,
            time,
        };
        let mut knows = self.lanes[index].knows.clone();
        let mut found: Vec<(bool, Part, Wrong)> = Vec::new();
        for source in sources {
            let (place, range) = self.bytes_of(number, source);
            let filled = self.filled_end(number, source);
            let scratch = self.section(number, source.rank).scratch_of(source.tensor);
            let since = match scratch {
                Some(scratch) if !scratch.persistent => self.begun[number],
                _ => 0,
            };
            let Some(bytes) = self.memory[source.rank].get_mut(&place) else {
                continue;
            };
            let tell = |wrong| found.push((false, *source, wrong));
            match place {
                Place::Area(packing) if packing.is_packets() => {
                    let (taught, lane) = (&mut self.taught[self.sequence[number]], actor.lane);
                    for sender in bytes.senders(&range, flag).filter(|sender| *sender != lane) {
                        taught.insert((sender as usize, lane as usize));
                    }
                    bytes.read_packets(&range, filled, flag, stamp, &mut knows, tell);
                }
                _ => bytes.read(&range, since, stamp, &knows, tell),
            }
        }
        self.lanes[index].knows = knows.clone();
        for (position, target) in targets.iter().enumerate() {
            let (place, range) = self.bytes_of(number, target);
            self.check_overlaps(actor, number, (target, place, &range), sources, false);
            let others = &targets[..position];
            self.check_overlaps(actor, number, (target, place, &range), others, true);
            let filled = self.filled_end(number, target);
            let Some(bytes) = self.memory[target.rank].get_mut(&place) else {
                continue;
            };
            let packets = matches!(place, Place::Area(packing) if packing.is_packets());
            let flag = packets.then_some(flag);
            bytes.write(&range, flag, stamp, &knows, |wrong| {
                found.push((true, *target, wrong));
            });
            if let (true, Place::Area(packing)) = (packets, place) {
                if filled < range.end {
                    bytes.leave_empty(&(filled..range.end));
                }
                self.wake_readers(target.rank, packing, &range);
            }
        }
        for (writes, part, wrong) in found {
            self.find(actor, writes, part, wrong);
        }
        true
    }

    /// An announcement of tensors tells its reader what a signal would.
    fn hand_on(&mut self, index: usize, actor: Actor, target: &Part) {
        let (place, range) = self.bytes_of(actor.launch as usize, target);
        if let Some(bytes) = self.memory[target.rank].get_mut(&place) {
            bytes.hand_on(&range, index, &self.lanes[index].knows);
        }
    }

    /// Threads of a lane are in no order within a step, so that its operands are the same or apart.
    fn check_overlaps(
        &mut self,
        actor: Actor,
        number: usize,
        (target, place, range): (&Part, Place, &std::ops::Range<usize>),
        others: &[Part],
        both_written: bool,
    ) {
        for other in others.iter().filter(|other| other.rank == target.rank) {
            let (other_place, other_range) = self.bytes_of(number, other);
            let apart = other_range.end <= range.start || range.end <= other_range.start;
            let same = other_range == *range && !both_written;
            if other_place == place && !apart && !same {
                let was = if both_written {
                    super::memory::Was::Write
                } else {
                    super::memory::Was::Read
                };
                self.find(actor, true, *target, Wrong::Unordered(actor, was));
            }
        }
    }

    fn wake_readers(&mut self, rank: Rank, packing: Packing, range: &std::ops::Range<usize>) {
        let mut woken = Vec::new();
        self.waiting[rank].retain(|(lane, other, wanted)| {
            let touched = *other == packing && wanted.start < range.end && range.start < wanted.end;
            if touched {
                woken.push(*lane);
            }
            !touched
        });
        woken.into_iter().for_each(|lane| self.wake(lane));
    }

    /// Whether an operand is packets.
    pub(super) fn is_packets(&self, actor: &Actor, part: &Part) -> bool {
        let section = self.section(actor.launch as usize, part.rank);
        let scratch = section.scratch_of(part.tensor);
        scratch.is_some_and(|scratch| scratch.packing.is_packets())
    }

    /// The name of an operand's tensor.
    pub(super) fn name_of(&self, actor: &Actor, part: &Part) -> &'a str {
        let section = self.section(actor.launch as usize, part.rank);
        &section.tensors[part.tensor].name
    }
}

/// What an announcement says to the verifier: integers, and which tensors.
fn said(values: &[u32], tensors: &[usize]) -> Vec<u32> {
    let tensors = tensors.iter().map(|tensor| *tensor as u32);
    values.iter().copied().chain(tensors).collect()
}

fn tick(knows: &mut Knowledge, stream: usize) -> u32 {
    knows.over.tick(stream);
    knows.seen.tick(stream)
}

pub(super) fn join(knows: &mut Knowledge, other: &Knowledge) {
    knows.seen.join(&other.seen);
    knows.over.join(&other.over);
}
