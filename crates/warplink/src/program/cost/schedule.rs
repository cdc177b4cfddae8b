//! From the operations of rank programs to what each stream does, step by step.

use super::collective::larger_side;
use super::link::Partners;
use super::model::HardwareModel;
use super::report::Bound;
use super::{SimulateOptions, Submission};
use crate::dtype::DType;
use crate::error::Rank;
use crate::program::{OperationKind, RankProgram, StreamKind, TransferId};
use std::collections::HashMap;

/// Resources of a rank.
pub(super) const EGRESS: u32 = 0;
pub(super) const INGRESS: u32 = 1;
/// What leaves and arrives together, which is less than both apart.
pub(super) const PORT: u32 = 2;
pub(super) const MEMORY: u32 = 3;
pub(super) const PROCESSORS: u32 = 4;
/// How many resources a rank has.
pub(super) const RESOURCES: u32 = 5;

/// What a stream does next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Step {
    /// Nothing before this time: the host enqueues what follows then.
    NotBefore(f64),
    /// An operation starts here.
    Begin(u32),
    /// And is done here.
    End(u32),
    /// Waits until a counter has this value.
    Await(u32, u32),
    /// Adds one to a counter, so many seconds from now; the stream goes on at once.
    Add(u32, f64),
    /// So many seconds pass.
    Delay(f64),
    /// Work, by its index.
    Work(u32),
}

/// Which work slows which down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    Matmul,
    Put,
    Get,
    /// A kernel that needs room on a multiprocessor, and little of it.
    SmallKernel,
    Other,
}

/// What takes time and resources.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    /// Time of it alone.
    pub(super) seconds: f64,
    /// The share of its rank's multiprocessors that it keeps busy.
    pub(super) occupancy: f64,
    /// Whether its stream is of high priority.
    pub(super) high: bool,
    pub(super) class: Class,
    pub(super) bound: Bound,
    /// The ranks, of those that are simulated, that it runs on or touches.
    pub(super) ranks: [u32; 2],
    /// Where its demands start and end in [`Schedule::demands`].
    pub(super) demands: (u32, u32),
}

/// An operation of the schedule.
#[derive(Clone, Copy, Debug)]
pub(super) struct OperationId {
    pub(super) rank: Rank,
    pub(super) operation: usize,
}

/// What all simulated streams do.
pub(super) struct Schedule<'a> {
    pub(super) model: &'a HardwareModel,
    pub(super) programs: &'a [RankProgram],
    pub(super) partners: &'a Partners,
    pub(super) submission: Submission,
    pub(super) world: usize,
    /// How many ranks each simulated one stands for.
    pub(super) copies: f64,
    /// The steps of each stream, rank after rank.
    pub(super) lanes: Vec<Vec<Step>>,
    pub(super) works: Vec<Work>,
    /// Resource, and the share of it that the work needs at full speed.
    pub(super) demands: Vec<(u32, f64)>,
    pub(super) counters: u32,
    pub(super) operations: Vec<OperationId>,
    /// For each simulated rank, seconds that its host takes to enqueue everything.
    pub(super) host: Vec<f64>,
    // For each rank, its first counter: one for each transfer of signals, of own completion, and of
    // arrivals at the engine.
    first_counter: Vec<u32>,
    /// The counter of each collective, by its number.
    pub(super) collectives: Vec<u32>,
    /// Times of shapes that were looked up.
    pub(super) shapes: HashMap<(DType, usize, usize, usize), f64>,
}

/// What is known of a rank while its operations are gone through.
pub(super) struct RankState {
    pub(super) rank: usize,
    pub(super) first_lane: usize,
    /// The stream of the current operation.
    pub(super) stream: usize,
    pub(super) high: bool,
    /// Seconds at which the host has enqueued the current operation.
    pub(super) host: f64,
    /// For each stream, whether what it did last was a kernel, behind which the next starts at once.
    after_kernel: Vec<bool>,
    /// How often each transfer was posted, and the stream of the last post.
    pub(super) posts: Vec<(u32, usize)>,
    /// Peers that this rank copies to or from.
    pub(super) rotates: bool,
    /// The stream of the engine's last operation, and the counter behind it.
    pub(super) engine: Option<(usize, u32)>,
    /// For transfers of the engine: the same, of their last post.
    pub(super) carried: HashMap<TransferId, (usize, u32)>,
    pub(super) collectives: usize,
}

impl<'a> Schedule<'a> {
    /// Schedules `programs`: those of all `world` ranks, or of the one that stands for all.
    pub(super) fn new(
        programs: &'a [RankProgram],
        world: usize,
        partners: &'a Partners,
        model: &'a HardwareModel,
        options: SimulateOptions,
    ) -> Self {
        let mut schedule = Self {
            model,
            programs,
            partners,
            submission: options.submission,
            world,
            copies: world as f64 / programs.len().max(1) as f64,
            lanes: Vec::new(),
            works: Vec::new(),
            demands: Vec::new(),
            counters: 0,
            operations: Vec::new(),
            host: Vec::new(),
            first_counter: Vec::new(),
            collectives: Vec::new(),
            shapes: HashMap::new(),
        };
        for program in programs {
            schedule.first_counter.push(schedule.counters);
            schedule.counters += 3 * program.transfers.len() as u32;
        }
        for (rank, program) in programs.iter().enumerate() {
            schedule.add_rank(rank, program);
        }
        schedule
    }

    fn add_rank(&mut self, rank: usize, program: &RankProgram) {
        let mut state = RankState {
            rank,
            first_lane: self.lanes.len(),
            stream: 0,
            high: false,
            host: 0.0,
            after_kernel: vec![true; program.streams.len()],
            posts: vec![(0, 0); program.transfers.len()],
            rotates: super::post::rotates(program),
            engine: None,
            carried: HashMap::new(),
            collectives: 0,
        };
        self.lanes
            .extend(program.streams.iter().map(|_| Vec::new()));
        if self.submission == Submission::Captured {
            state.host = self.model.host.graph;
        }
        for (index, operation) in program.operations.iter().enumerate() {
            state.stream = operation.stream;
            let kind = program.streams.get(operation.stream);
            state.high = matches!(kind, Some(StreamKind::High(_)));
            self.add_operation(&mut state, program, index, &operation.kind);
        }
        self.host.push(state.host);
    }

    fn add_operation(
        &mut self,
        state: &mut RankState,
        program: &RankProgram,
        index: usize,
        kind: &OperationKind,
    ) {
        if matches!(
            kind,
            OperationKind::Allocate(_) | OperationKind::Deallocate(_) | OperationKind::Share(_)
        ) {
            // Done when the program is bound.
            return;
        }
        if self.submission == Submission::Eager {
            state.host += self.host_seconds(program, kind);
        }
        let id = self.operations.len() as u32;
        self.operations.push(OperationId {
            rank: program.rank,
            operation: index,
        });
        self.step(state, Step::NotBefore(state.host));
        self.step(state, Step::Begin(id));
        match kind {
            OperationKind::Copy { target, .. } => self.add_copy(state, target.bytes as f64),
            OperationKind::Matmul { dtype, m, n, k, .. } => {
                self.add_matmul(state, *dtype, (*m, *k, *n));
            }
            OperationKind::Sum {
                target, sources, ..
            } => self.add_sum(state, target.bytes as f64 * (sources.len() + 1) as f64),
            OperationKind::Post(group) => self.add_post(state, program, group),
            OperationKind::PostMatmul {
                group,
                dtype,
                m,
                n,
                k,
                ..
            } => self.add_stored(state, program, group, *dtype, (*m, *k, *n)),
            OperationKind::Wait(group) => self.add_wait(state, program, group),
            OperationKind::Collective {
                collective,
                target,
                source,
                ..
            } => {
                let bytes = larger_side(collective, target.bytes, source.bytes);
                self.add_collective(state, collective.name(), bytes);
            }
            OperationKind::Synchronize(other) => self.add_synchronize(state, *other),
            OperationKind::Allocate(_) | OperationKind::Deallocate(_) | OperationKind::Share(_) => {
            }
        }
        self.step(state, Step::End(id));
    }

    fn host_seconds(&self, program: &RankProgram, kind: &OperationKind) -> f64 {
        let host = &self.model.host;
        match kind {
            OperationKind::Copy { .. } => host.copy,
            OperationKind::Matmul { .. } => host.matmul,
            OperationKind::Sum { .. } => host.sum,
            OperationKind::Post(group) => super::post::host_seconds(program, group, host),
            OperationKind::PostMatmul { .. } => host.matmul + host.transfer,
            OperationKind::Wait(_) => host.word,
            OperationKind::Collective { .. } => host.collective,
            OperationKind::Synchronize(_) => 2.0 * host.event,
            OperationKind::Allocate(_) | OperationKind::Deallocate(_) | OperationKind::Share(_) => {
                0.0
            }
        }
    }

    pub(super) fn step(&mut self, state: &RankState, step: Step) {
        self.lanes[state.first_lane + state.stream].push(step);
    }

    /// Seconds pass in which the stream does something other than a kernel.
    pub(super) fn delay(&mut self, state: &mut RankState, seconds: f64) {
        state.after_kernel[state.stream] = false;
        self.step(state, Step::Delay(seconds));
    }

    /// Notes that what follows is a kernel, which starts late behind anything else.
    pub(super) fn kernel(&mut self, state: &mut RankState) {
        if !std::mem::replace(&mut state.after_kernel[state.stream], true) {
            self.step(state, Step::Delay(self.model.latency.launch));
        }
    }

    /// Notes that what follows is done by the copy engine.
    pub(super) fn engine_copy(&mut self, state: &mut RankState) {
        state.after_kernel[state.stream] = false;
    }

    pub(super) fn new_counter(&mut self) -> u32 {
        self.counters += 1;
        self.counters - 1
    }

    /// The rank, of those that are simulated, that stands for `rank`.
    pub(super) fn stand_in(&self, rank: Rank) -> usize {
        if rank < self.programs.len() { rank } else { 0 }
    }

    /// Counts signals that reach a rank's end of a transfer.
    pub(super) fn incoming(&self, rank: Rank, transfer: TransferId) -> u32 {
        self.first_counter[self.stand_in(rank)] + 3 * transfer as u32
    }

    /// Counts copies that a rank has done, or that the engine has done for it.
    pub(super) fn completed(&self, rank: Rank, transfer: TransferId) -> u32 {
        self.incoming(rank, transfer) + 1
    }

    /// Counts arrivals of a rank's end at the engine.
    pub(super) fn arrived(&self, rank: Rank, transfer: TransferId) -> u32 {
        self.incoming(rank, transfer) + 2
    }

    /// The number of a resource of a simulated rank.
    pub(super) fn resource(&self, rank: usize, resource: u32) -> u32 {
        let shared = self.model.device.shared && matches!(resource, MEMORY | PROCESSORS);
        let rank = if shared { 0 } else { rank as u32 };
        rank * RESOURCES + resource
    }

    /// How much of a resource work needs that needs `share` of one rank's: where ranks share it, work
    /// of a rank that stands for several needs as much as of all.
    pub(super) fn demand(&mut self, rank: usize, resource: u32, share: f64) {
        let shared = self.model.device.shared && matches!(resource, MEMORY | PROCESSORS);
        let share = if shared {
            share * self.copies
        } else {
            share.min(1.0)
        };
        if share > 0.0 {
            let resource = self.resource(rank, resource);
            self.demands.push((resource, share));
        }
    }

    /// Adds work whose demands are those pushed since `first`.
    pub(super) fn work(&mut self, state: &RankState, first: usize, mut work: Work) {
        if self.model.device.shared {
            // Nobody arrives first among processes; they share evenly.
            self.demand(state.rank, PROCESSORS, work.occupancy);
            work.occupancy = 0.0;
        }
        work.high = state.high;
        work.demands = (first as u32, self.demands.len() as u32);
        let index = self.works.len() as u32;
        self.works.push(work);
        self.step(state, Step::Work(index));
    }
}

impl Work {
    /// Work without demands.
    pub(super) fn new(seconds: f64, bound: Bound, ranks: [usize; 2]) -> Self {
        Self {
            seconds,
            occupancy: 0.0,
            high: false,
            class: Class::Other,
            bound,
            ranks: ranks.map(|rank| rank as u32),
            demands: (0, 0),
        }
    }
}
