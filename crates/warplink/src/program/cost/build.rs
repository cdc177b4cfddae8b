//! Builds a schedule from the operations of rank programs.

use super::collective::larger_side;
use super::launch::LaneCounters;
use super::link::Partners;
use super::model::HardwareModel;
use super::post::{self, rotates};
use super::schedule::{OperationId, RankState, Schedule};
use super::step::Step;
use super::{SimulateOptions, Submission};
use crate::error::Result;
use crate::program::{OperationKind, RankProgram, StreamKind};
use std::collections::HashMap;

impl<'a> Schedule<'a> {
    /// Schedules `programs`: those of all `world` ranks, or one that represents all; simulates about `iterations` of
    /// each kernel loop.
    ///
    /// # Errors
    /// [`ErrorKind::Verification`](crate::ErrorKind::Verification) for a kernel section that cannot be resolved.
    pub(super) fn new(
        programs: &'a [RankProgram],
        world: usize,
        partners: &'a Partners,
        model: &'a HardwareModel,
        options: SimulateOptions,
        iterations: u64,
    ) -> Result<Self> {
        let mut schedule = Self {
            model,
            programs,
            partners,
            submission: options.submission,
            world,
            copies: world as f64 / programs.len().max(1) as f64,
            streams: Vec::new(),
            works: Vec::new(),
            demands: Vec::new(),
            counters: 0,
            operations: Vec::new(),
            host: Vec::new(),
            suits_kernels: programs.iter().all(RankProgram::suits_transfer_kernels),
            first_counter: Vec::new(),
            collectives: HashMap::new(),
            shapes: HashMap::new(),
            lane_figures: model.lanes(),
            launches: Vec::new(),
            between_lanes: LaneCounters::default(),
        };
        // First, since a lane's steps depend on which classes of all ranks exchange packets.
        schedule.find_launches(iterations)?;
        for program in programs {
            schedule.first_counter.push(schedule.counters);
            schedule.counters += 3 * program.transfers.len() as u32;
        }
        for (rank, program) in programs.iter().enumerate() {
            schedule.add_rank(rank, program);
        }
        Ok(schedule)
    }

    fn add_rank(&mut self, rank: usize, program: &RankProgram) {
        let mut state = RankState {
            program,
            rank,
            first_stream: self.streams.len(),
            stream: 0,
            high: false,
            host: 0.0,
            after_kernel: vec![true; program.streams.len()],
            posts: vec![(0, 0); program.transfers.len()],
            rotates: rotates(program),
            engine: None,
            carried: HashMap::new(),
            collectives: HashMap::new(),
            launches: 0,
            waited: HashMap::new(),
        };
        self.streams
            .extend(program.streams.iter().map(|_| Vec::new()));
        if self.submission == Submission::Captured {
            // The only time that the host takes: everything is enqueued by this launch.
            state.host = self.model.host.graph;
        }
        for (index, operation) in program.operations.iter().enumerate() {
            state.stream = operation.stream;
            let kind = program.streams.get(operation.stream);
            state.high = matches!(kind, Some(StreamKind::High(_)));
            self.add_operation(&mut state, index, &operation.kind);
        }
        self.host.push(state.host);
    }

    fn add_operation(&mut self, state: &mut RankState<'_>, index: usize, kind: &OperationKind) {
        if matches!(
            kind,
            OperationKind::Allocate(_) | OperationKind::Deallocate(_) | OperationKind::Share(_)
        ) {
            // Performed when the program is bound.
            return;
        }
        if self.submission == Submission::Eager {
            state.host += self.host_seconds(state.program, kind);
        }
        let id = self.operations.len() as u32;
        self.operations.push(OperationId {
            rank: state.program.rank,
            operation: index,
        });
        // The device may be idle while the host still enqueues, which is the point of graphs for small operations.
        self.step(state, Step::NotBefore(state.host));
        self.step(state, Step::Begin(id));
        match kind {
            // Zeroing only writes, so the time of a copy is an upper bound.
            OperationKind::Zero(target) | OperationKind::Copy { target, .. } => {
                self.copy_work(state, target.bytes as f64)
            }
            OperationKind::Matmul(it) => self.add_matmul(state, &it.spec),
            OperationKind::Elementwise(it) => {
                let sources = it.sources.iter();
                let read: usize = sources.map(|source| source.bytes(it.source_dtype)).sum();
                let bytes = (it.target.bytes(it.dtype) + read) as f64;
                self.add_elementwise(state, bytes);
            }
            OperationKind::Post(group) => self.add_post(state, group),
            OperationKind::PostMatmul(it) => self.add_stored(state, &it.group, &it.spec),
            OperationKind::Wait(group) => self.add_wait(state, group),
            OperationKind::Collective(it) => {
                let bytes = larger_side(&it.collective, it.target.bytes, it.source.bytes);
                self.add_collective(state, it.members.as_ref(), it.collective.name(), bytes);
            }
            OperationKind::Kernel(section) => self.add_section(state, section),
            OperationKind::Synchronize(other) => self.add_synchronize(state, *other),
            OperationKind::Allocate(_) | OperationKind::Deallocate(_) | OperationKind::Share(_) => {
            }
        }
        self.step(state, Step::End(id));
    }

    fn host_seconds(&self, program: &RankProgram, kind: &OperationKind) -> f64 {
        let host = &self.model.host;
        match kind {
            OperationKind::Zero(_) | OperationKind::Copy { .. } => host.copy,
            OperationKind::Matmul(_) => host.matmul,
            OperationKind::Elementwise(_) | OperationKind::Kernel(_) => host.sum,
            OperationKind::Post(group) => post::host_seconds(program, group, host),
            OperationKind::PostMatmul(_) => host.transfer,
            OperationKind::Wait(_) => host.word,
            OperationKind::Collective(_) => host.collective,
            OperationKind::Synchronize(_) => 2.0 * host.event,
            OperationKind::Allocate(_) | OperationKind::Deallocate(_) | OperationKind::Share(_) => {
                0.0
            }
        }
    }
}
