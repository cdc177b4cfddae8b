//! Steps of each stream, and the resources that they need.

use super::Submission;
use super::lanes::Lanes;
use super::launch::{LaneCounters, RankLaunch};
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

/// Steps of all simulated streams.
pub(super) struct Schedule<'a> {
    pub(super) model: &'a HardwareModel,
    pub(super) programs: &'a [RankProgram],
    pub(super) partners: &'a Partners,
    pub(super) submission: Submission,
    pub(super) world: usize,
    /// Whether kernels at both ends may perform the transfers of all ranks.
    pub(super) suits_kernels: bool,
    /// Number of ranks that each simulated one represents.
    pub(super) copies: f64,
    /// Steps of each stream, rank by rank, followed by those of the lanes of kernels.
    pub(super) streams: Vec<Vec<Step>>,
    pub(super) works: Vec<Work>,
    /// Resource, and the share of it that the work needs at full speed.
    pub(super) demands: Vec<(u32, f64)>,
    pub(super) counters: u32,
    pub(super) operations: Vec<OperationId>,
    /// For each simulated rank, total host seconds to enqueue everything.
    pub(super) host: Vec<f64>,
    /// First counter of each rank. A transfer has three: incoming signals, local completion, and arrivals at the
    /// engine.
    pub(super) first_counter: Vec<u32>,
    /// Counters of the collectives among the same ranks, in call order.
    pub(super) collectives: HashMap<Option<Arc<[Rank]>>, Vec<u32>>,
    /// Memoized times of matrix shapes.
    pub(super) shapes: HashMap<(DType, usize, usize, usize), f64>,
    /// Lane figures, steps of each rank's launches, and the counters between lanes.
    pub(super) lane_figures: Lanes,
    pub(super) launches: Vec<Vec<RankLaunch>>,
    pub(super) between_lanes: LaneCounters,
}

/// State of a rank while its operations are scheduled.
pub(super) struct RankState<'a> {
    pub(super) program: &'a RankProgram,
    pub(super) rank: usize,
    pub(super) first_stream: usize,
    /// Stream of the current operation.
    pub(super) stream: usize,
    pub(super) high: bool,
    /// Time at which the host has enqueued the current operation.
    pub(super) host: f64,
    /// For each stream, whether its last operation was a kernel, after which the next kernel starts without delay.
    pub(super) after_kernel: Vec<bool>,
    /// Number of posts of each transfer, and the stream of the last one.
    pub(super) posts: Vec<(u32, usize)>,
    /// Whether this rank copies to or from several peers in turn.
    pub(super) rotates: bool,
    /// Stream of the engine's last operation, and the counter of its completion.
    pub(super) engine: Option<(usize, u32)>,
    /// For transfers of the engine, the same for their last post.
    pub(super) carried: HashMap<TransferId, (usize, u32)>,
    /// Number of collectives called among the same ranks.
    pub(super) collectives: HashMap<Option<Arc<[Rank]>>, usize>,
    /// Number of launched kernels.
    pub(super) launches: usize,
    /// Number of waits of each lane, by the distance of the rank it waits for.
    pub(super) waited: HashMap<(usize, usize), f64>,
}

impl Schedule<'_> {
    pub(super) fn step(&mut self, state: &RankState<'_>, step: Step) {
        self.streams[state.first_stream + state.stream].push(step);
    }

    /// Adds a delay in which the stream does something other than run a kernel.
    pub(super) fn delay(&mut self, state: &mut RankState<'_>, seconds: f64) {
        state.after_kernel[state.stream] = false;
        self.step(state, Step::Delay(seconds));
    }

    /// Prepares for a kernel, which has a launch latency unless it follows another kernel.
    pub(super) fn kernel(&mut self, state: &mut RankState<'_>) {
        if !std::mem::replace(&mut state.after_kernel[state.stream], true) {
            self.step(state, Step::Delay(self.model.latency.launch));
        }
    }

    /// Prepares for an operation of the copy engine.
    pub(super) fn engine_copy(&mut self, state: &mut RankState<'_>) {
        state.after_kernel[state.stream] = false;
    }

    pub(super) fn new_counter(&mut self) -> u32 {
        self.counters += 1;
        self.counters - 1
    }

    /// The simulated rank that represents `rank`.
    pub(super) fn stand_in(&self, rank: Rank) -> usize {
        if rank < self.programs.len() { rank } else { 0 }
    }

    /// Counter of signals that reach a rank's end of a transfer.
    pub(super) fn incoming(&self, rank: Rank, transfer: TransferId) -> u32 {
        self.first_counter[self.stand_in(rank)] + 3 * transfer as u32
    }

    /// Counter of copies completed by a rank, or by the engine for it.
    pub(super) fn completed(&self, rank: Rank, transfer: TransferId) -> u32 {
        self.incoming(rank, transfer) + 1
    }

    /// Counter of arrivals of a rank's end at the engine.
    pub(super) fn arrived(&self, rank: Rank, transfer: TransferId) -> u32 {
        self.incoming(rank, transfer) + 2
    }

    /// Number of a resource of a simulated rank.
    pub(super) fn resource(&self, rank: usize, resource: u32) -> u32 {
        let shared = self.model.device.shared && matches!(resource, MEMORY | PROCESSORS);
        // One resource for all ranks of the machine.
        let rank = if shared { 0 } else { rank as u32 };
        rank * RESOURCES + resource
    }

    /// Adds a demand of `share` of one rank's resource. If ranks share the resource, work of a representative rank
    /// demands it for all ranks that it represents.
    pub(super) fn demand(&mut self, rank: usize, resource: u32, share: f64) {
        let shared = self.model.device.shared && matches!(resource, MEMORY | PROCESSORS);
        let share = if shared {
            share * self.copies
        } else {
            // No more than the resource: measured times alone may be shorter than its rate allows, which must not
            // slow the work down.
            share.min(1.0)
        };
        if share > 0.0 {
            let resource = self.resource(rank, resource);
            self.demands.push((resource, share));
        }
    }

    /// Adds work whose demands are those pushed since `first`.
    pub(super) fn work(&mut self, state: &RankState<'_>, first: usize, mut work: Work) {
        work.high = state.high;
        self.work_of(state.first_stream + state.stream, state.rank, first, work);
    }

    /// Like [`work`](Self::work), on any stream of a rank, such as that of a lane.
    pub(super) fn work_of(&mut self, stream: usize, rank: usize, first: usize, mut work: Work) {
        if self.model.device.shared {
            // Processes share processors evenly, without an order of arrival.
            self.demand(rank, PROCESSORS, work.occupancy);
            work.occupancy = 0.0;
        }
        work.demands = (first as u32, self.demands.len() as u32);
        let index = self.works.len() as u32;
        self.works.push(work);
        self.streams[stream].push(Step::Work(index));
    }
}
