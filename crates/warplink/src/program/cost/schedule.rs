//! What each stream does, step by step, and what the steps need.

use super::Submission;
use super::lanes::Lanes;
use super::launch::{LaneCounters, Launch};
use super::link::Partners;
use super::model::HardwareModel;
use super::step::{MEMORY, PROCESSORS, RESOURCES, Step, Work};
use crate::dtype::DType;
use crate::error::Rank;
use crate::program::{RankProgram, TransferId};
use std::collections::HashMap;
use std::sync::Arc;

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
    /// Whether kernels at both ends may do the transfers of all ranks.
    pub(super) suits_kernels: bool,
    /// How many ranks each simulated one stands for.
    pub(super) copies: f64,
    /// The steps of each stream, rank after rank, with those of the lanes of kernels behind them.
    pub(super) streams: Vec<Vec<Step>>,
    pub(super) works: Vec<Work>,
    /// Resource, and the share of it that the work needs at full speed.
    pub(super) demands: Vec<(u32, f64)>,
    pub(super) counters: u32,
    pub(super) operations: Vec<OperationId>,
    /// For each simulated rank, seconds that its host takes to enqueue everything.
    pub(super) host: Vec<f64>,
    /// For each rank, its first counter: one for each transfer of signals, of own completion, and of
    /// arrivals at the engine.
    pub(super) first_counter: Vec<u32>,
    /// The counters of the collectives among the same ranks, in the order of the calls.
    pub(super) collectives: HashMap<Option<Arc<[Rank]>>, Vec<u32>>,
    /// Times of shapes that were looked up.
    pub(super) shapes: HashMap<(DType, usize, usize, usize), f64>,
    /// What lanes of kernels can do, what those of each rank's launches do, and what they wait for.
    pub(super) lane_figures: Lanes,
    pub(super) launches: Vec<Vec<Launch>>,
    pub(super) between_lanes: LaneCounters,
}

/// What is known of a rank while its operations are gone through.
pub(super) struct RankState {
    pub(super) rank: usize,
    pub(super) first_stream: usize,
    /// The stream of the current operation.
    pub(super) stream: usize,
    pub(super) high: bool,
    /// Seconds at which the host has enqueued the current operation.
    pub(super) host: f64,
    /// For each stream, whether what it did last was a kernel, behind which the next starts at once.
    pub(super) after_kernel: Vec<bool>,
    /// How often each transfer was posted, and the stream of the last post.
    pub(super) posts: Vec<(u32, usize)>,
    /// Peers that this rank copies to or from.
    pub(super) rotates: bool,
    /// The stream of the engine's last operation, and the counter behind it.
    pub(super) engine: Option<(usize, u32)>,
    /// For transfers of the engine: the same, of their last post.
    pub(super) carried: HashMap<TransferId, (usize, u32)>,
    /// How many collectives it has called among the same ranks.
    pub(super) collectives: HashMap<Option<Arc<[Rank]>>, usize>,
    /// How many kernels it has launched.
    pub(super) launches: usize,
    /// How often each of its lanes has waited, by how far away the rank is that it waits for.
    pub(super) waited: HashMap<(usize, usize), f64>,
}

impl Schedule<'_> {
    pub(super) fn step(&mut self, state: &RankState, step: Step) {
        self.streams[state.first_stream + state.stream].push(step);
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
        work.high = state.high;
        self.work_of(state.first_stream + state.stream, state.rank, first, work);
    }

    /// As [`work`](Self::work), on any stream of a rank, such as that of a lane.
    pub(super) fn work_of(&mut self, stream: usize, rank: usize, first: usize, mut work: Work) {
        if self.model.device.shared {
            // Nobody arrives first among processes; they share evenly.
            self.demand(rank, PROCESSORS, work.occupancy);
            work.occupancy = 0.0;
        }
        work.demands = (first as u32, self.demands.len() as u32);
        let index = self.works.len() as u32;
        self.works.push(work);
        self.streams[stream].push(Step::Work(index));
    }
}
