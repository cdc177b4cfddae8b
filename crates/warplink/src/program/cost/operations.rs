//! Steps of operations other than transfers.

use super::bound::Bound;
use super::collective::link_bytes;
use super::schedule::{RankState, Schedule};
use super::step::{Class, EGRESS, INGRESS, MEMORY, PORT, Step, Work};
use crate::device::MatmulSpec;
use crate::dtype::DType;
use crate::error::Rank;
use std::sync::Arc;

impl Schedule<'_> {
    /// Seconds of a matrix multiplication.
    pub(super) fn gemm(&mut self, dtype: DType, (m, k, n): (usize, usize, usize)) -> f64 {
        let gemm = &self.model.gemm;
        let shapes = &mut self.shapes;
        *shapes
            .entry((dtype, m, k, n))
            .or_insert_with(|| gemm.seconds(dtype, m, k, n))
    }

    pub(super) fn add_matmul(
        &mut self,
        state: &mut RankState<'_>,
        &MatmulSpec { m, n, k, dtype, .. }: &MatmulSpec,
    ) {
        let seconds = self.gemm(dtype, (m, k, n));
        let bytes = (m * k + k * n + m * n) as f64 * dtype.size() as f64;
        let first = self.demands.len();
        self.demand(state.rank, MEMORY, bytes / seconds / self.model.memory.rate);
        self.kernel(state);
        let multiprocessors = self.model.device.multiprocessors;
        let work = Work {
            occupancy: self.model.gemm.occupancy(m, n, multiprocessors),
            class: Class::Matmul,
            ..Work::new(seconds, Bound::Matmul, [state.rank, state.rank])
        };
        self.work(state, first, work);
    }

    /// Adds a copy within a rank's memory.
    pub(super) fn copy_work(&mut self, state: &mut RankState<'_>, bytes: f64) {
        let memory = &self.model.memory;
        let (seconds, occupancy) = (memory.copy.seconds(bytes), memory.copy_occupancy);
        self.engine_copy(state);
        self.memory_work(state, seconds, 2.0 * bytes, occupancy);
    }

    /// Adds an element-wise operation that reads and writes `bytes` bytes; it is bound by memory.
    pub(super) fn add_elementwise(&mut self, state: &mut RankState<'_>, bytes: f64) {
        let memory = &self.model.memory;
        let seconds = memory.kernel + bytes / memory.sum_rate;
        let occupancy = memory.sum_occupancy;
        self.kernel(state);
        self.memory_work(state, seconds, bytes, occupancy);
    }

    /// Adds work bound by the rank's memory, which it reads and writes `bytes` bytes of.
    fn memory_work(&mut self, state: &RankState<'_>, seconds: f64, bytes: f64, occupancy: f64) {
        let first = self.demands.len();
        self.demand(state.rank, MEMORY, bytes / seconds / self.model.memory.rate);
        let work = Work {
            occupancy,
            ..Work::new(seconds, Bound::Memory, [state.rank, state.rank])
        };
        self.work(state, first, work);
    }

    /// Adds a collective among `members`, or among all ranks.
    pub(super) fn add_collective(
        &mut self,
        state: &mut RankState<'_>,
        members: Option<&Arc<[Rank]>>,
        name: &str,
        bytes: f64,
    ) {
        self.follow_engine(state);
        let number = state.collectives.entry(members.cloned()).or_default();
        let counters = self.collectives.entry(members.cloned()).or_default();
        if counters.len() == *number {
            self.counters += 1;
            counters.push(self.counters - 1);
        }
        let arrived = counters[*number];
        *number += 1;
        // A representative rank represents all members.
        let coming = members.map_or(self.programs.len(), |members| members.len());
        self.step(state, Step::Add(arrived, 1.0, 0.0));
        self.step(state, Step::Await(arrived, coming as f64));
        self.kernel(state);
        self.delay(state, self.model.latency.collective);
        let world = members.map_or(self.world, |members| members.len());
        let seconds = self.engine_seconds(name, world, bytes);
        let crossing = link_bytes(name, world, bytes);
        self.engine_work(state, seconds, crossing);
        self.mark_engine(state);
    }

    /// Seconds of an engine operation; if none was measured, the time of its bytes over the link.
    pub(super) fn engine_seconds(&self, name: &str, world: usize, bytes: f64) -> f64 {
        if self.model.collectives.0.is_empty() {
            return link_bytes(name, world, bytes) / self.model.link.put_ring;
        }
        self.model.collectives.seconds(name, world, bytes)
    }

    /// Adds work of the engine in which `bytes` bytes leave this rank and as many arrive.
    pub(super) fn engine_work(&mut self, state: &RankState<'_>, seconds: f64, bytes: f64) {
        let (link, memory) = (&self.model.link, &self.model.memory);
        let rate = if seconds > 0.0 { bytes / seconds } else { 0.0 };
        let (peak, ring, occupancy) = (link.put.peak(), link.put_ring, memory.copy_occupancy);
        let memory = rate / memory.rate;
        let first = self.demands.len();
        self.demand(state.rank, EGRESS, rate / peak);
        self.demand(state.rank, INGRESS, rate / peak);
        self.demand(state.rank, PORT, rate / ring);
        self.demand(state.rank, MEMORY, 2.0 * memory);
        let work = Work {
            occupancy,
            ..Work::new(seconds, Bound::Collective, [state.rank, state.rank])
        };
        self.work(state, first, work);
    }

    /// The engine runs its operations in the host's order, across streams.
    pub(super) fn follow_engine(&mut self, state: &mut RankState<'_>) {
        if let Some((stream, done)) = state.engine
            && stream != state.stream
        {
            self.step(state, Step::Await(done, 1.0));
            self.delay(state, self.model.latency.event);
        }
    }

    pub(super) fn mark_engine(&mut self, state: &mut RankState<'_>) {
        let done = self.new_counter();
        self.step(state, Step::Add(done, 1.0, 0.0));
        state.engine = Some((state.stream, done));
    }

    pub(super) fn add_synchronize(&mut self, state: &mut RankState<'_>, other: usize) {
        let event = self.new_counter();
        let stream = &mut self.streams[state.first_stream + other];
        // The event is recorded after what the other stream was given so far, and not before the host has recorded
        // it.
        stream.extend([Step::NotBefore(state.host), Step::Add(event, 1.0, 0.0)]);
        self.step(state, Step::Await(event, 1.0));
        self.delay(state, self.model.latency.event);
    }
}
