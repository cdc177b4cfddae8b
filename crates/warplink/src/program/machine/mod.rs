//! The machine that steps through the lanes of kernel sections, for all ranks.
//!
//! It owns the lanes, their schedule, and the signals between them. The meaning of a signal, a wait or a step is that of a
//! [`Domain`]: vector clocks for the verifier, values for the evaluator. A lane takes steps until one blocks, and is
//! scheduled again by a signal to it, or by a store to the packets that it waits for. No step disables another one, so the
//! schedule decides nothing: lanes that are blocked at the end are blocked in every schedule.

mod agenda;

use super::section::{LaneStep, LaneStepKind, OperandMemory, Part, SectionInstance};
use crate::error::Rank;
use agenda::Agenda;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Step of a lane in a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::program) struct Actor {
    pub(in crate::program) launch: u32,
    pub(in crate::program) rank: u32,
    pub(in crate::program) lane: u32,
    pub(in crate::program) step: u32,
}

/// Meaning of steps.
pub(in crate::program) trait Domain {
    /// Payload of a signal.
    type Signal;

    /// The section that a rank launches in launch `number`.
    fn section(&self, number: usize, rank: Rank) -> &SectionInstance;

    /// A lane signals lane `to` of a rank; `last` is the step that signalled the same word before.
    fn signal(&mut self, actor: Actor, to: usize, last: Option<Actor>) -> Self::Signal;

    /// A lane consumes the signal of `sender`.
    fn wait(&mut self, actor: Actor, sender: Actor, signal: Self::Signal);

    /// Whether all packets of an operand, in memory of `rank`, have been stored in this launch.
    fn has_packets(&mut self, actor: Actor, rank: Rank, packets: &OperandMemory) -> bool;

    /// Executes a step that reads or writes, once all packets that it reads are there.
    fn perform(&mut self, actor: Actor, step: &LaneStepKind);

    /// All steps of a lane that has taken the last one known so far, which reads a value; `None` if it cannot go on.
    fn resume(&mut self, actor: Actor) -> Option<Arc<[LaneStep]>>;
}

/// The lanes of all ranks; `S` is the payload of signals.
pub(in crate::program) struct Machine<S> {
    /// Largest number of lanes of a rank.
    width: usize,
    lanes: Vec<Lane>,
    /// For each rank, its launch, and the number of its lanes that have not ended.
    launches: Vec<(usize, usize)>,
    /// Signals, by the rank and lane that wait for them, and the rank that sends them.
    pub(in crate::program) words: BTreeMap<(Rank, usize, Rank), LaneSignals<S>>,
    agenda: Agenda,
}

#[derive(Clone, Default)]
struct Lane {
    steps: Arc<[LaneStep]>,
    next: usize,
    running: bool,
}

/// Signals from a rank to a lane of another.
#[derive(Debug)]
pub(in crate::program) struct LaneSignals<S> {
    /// Senders and payloads of signals that are not consumed yet.
    sent: VecDeque<(Actor, S)>,
    pub(in crate::program) signalled: u64,
    pub(in crate::program) awaited: u64,
    pub(in crate::program) last: Option<Actor>,
}

impl<S> Default for LaneSignals<S> {
    fn default() -> Self {
        Self {
            sent: VecDeque::new(),
            signalled: 0,
            awaited: 0,
            last: None,
        }
    }
}

impl<S> Machine<S> {
    /// A machine without any launch.
    pub(in crate::program) fn new(world: usize, width: usize) -> Self {
        Self {
            width,
            lanes: vec![Lane::default(); world * width],
            launches: vec![(0, 0); world],
            words: BTreeMap::new(),
            agenda: Agenda::new(world, world * width),
        }
    }

    /// Starts the lanes of launch `number` of a rank, each with its steps. The previous launch must have ended.
    pub(in crate::program) fn start(
        &mut self,
        rank: Rank,
        number: usize,
        steps: Vec<Arc<[LaneStep]>>,
    ) {
        self.launches[rank] = (number, steps.len());
        for (index, steps) in (rank * self.width..).zip(steps) {
            self.lanes[index] = Lane {
                steps,
                next: 0,
                running: true,
            };
            self.agenda.wake(index);
        }
    }

    /// Runs until all lanes of a rank have ended, and returns that rank; `None` if no lane can continue.
    pub(in crate::program) fn run<D: Domain<Signal = S>>(
        &mut self,
        domain: &mut D,
    ) -> Option<Rank> {
        while let Some(index) = self.agenda.next() {
            while self.advance(index, domain) {}
            let rank = index / self.width;
            let lane = &mut self.lanes[index];
            if lane.running && lane.next == lane.steps.len() {
                // Frees the steps now: launches in flight are bounded by the steps that they hold in memory.
                *lane = Lane::default();
                let (_, left) = &mut self.launches[rank];
                *left -= 1;
                if *left == 0 {
                    // Only the caller can start the rank's next launch, and lanes of other ranks may wait for it.
                    return Some(rank);
                }
            }
        }
        None
    }

    /// Executes the next step of a lane; `false` if it has none or is blocked.
    fn advance<D: Domain<Signal = S>>(&mut self, index: usize, domain: &mut D) -> bool {
        let actor = self.actor(index);
        let (rank, lane) = (index / self.width, index % self.width);
        let state = &self.lanes[index];
        let Some(step) = state.steps.get(state.next) else {
            return false;
        };
        match &step.kind {
            LaneStepKind::Signal { peer, lane: to } => {
                let word = self.words.entry((*peer, *to, rank)).or_default();
                let last = word.last.replace(actor);
                word.sent
                    .push_back((actor, domain.signal(actor, *to, last)));
                word.signalled += 1;
                // The lane may not wait for this word, or not yet. A spurious wake-up only makes it test its step
                // again.
                self.agenda.wake(peer * self.width + to);
            }
            LaneStepKind::Wait(peer) => {
                let word = self.words.entry((rank, lane, *peer)).or_default();
                let Some((sender, signal)) = word.sent.pop_front() else {
                    return false;
                };
                word.awaited += 1;
                domain.wait(actor, sender, signal);
            }
            kind if kind.is_empty() => {}
            kind => {
                let launch = actor.launch as usize;
                // A step begins only when all packets that it reads have been stored: a step is atomic here.
                for source in kind.sources() {
                    if let Some(packets) = packets(domain.section(launch, source.rank), source)
                        && !domain.has_packets(actor, source.rank, &packets)
                    {
                        self.agenda.wait_for_packets(index, source.rank, &packets);
                        // One missing source is enough to wait for: the step tests all of them again when it is
                        // woken.
                        return false;
                    }
                }
                domain.perform(actor, kind);
                for target in kind.targets() {
                    if let Some(packets) = packets(domain.section(launch, target.rank), target) {
                        self.agenda.wake_readers(target.rank, &packets);
                    }
                }
                // The list of steps ends at a read of a value that the later steps depend on, so it is extended only
                // here.
                let reads_value = matches!(kind, LaneStepKind::Value { .. });
                if reads_value
                    && state.next + 1 == state.steps.len()
                    && let Some(steps) = domain.resume(actor)
                {
                    self.lanes[index].steps = steps;
                }
            }
        }
        self.lanes[index].next += 1;
        true
    }

    /// Next step of the lane with this index.
    fn actor(&self, index: usize) -> Actor {
        let rank = index / self.width;
        Actor {
            launch: self.launches[rank].0 as u32,
            rank: rank as u32,
            lane: (index % self.width) as u32,
            step: self.lanes[index].next as u32,
        }
    }

    /// Steps at which lanes are blocked, once no lane can continue.
    pub(in crate::program) fn blocked(&self) -> impl Iterator<Item = Actor> {
        let running = (0..self.lanes.len()).filter(|index| self.lanes[*index].running);
        running.map(|index| self.actor(index))
    }

    /// Step at which a lane is blocked, and the later ones; empty for a lane that is not blocked.
    pub(in crate::program) fn steps_from(&self, actor: &Actor) -> &[LaneStep] {
        let lane = &self.lanes[actor.rank as usize * self.width + actor.lane as usize];
        lane.steps.get(lane.next..).unwrap_or_default()
    }
}

/// Memory of an operand in packets.
fn packets(section: &SectionInstance, part: &Part) -> Option<OperandMemory> {
    section
        .operand(part)
        .filter(|operand| operand.packing.is_packets())
}
