//! Steps of kernel launches: each lane is a stream of its own.
//!
//! Of equivalent lanes, two are simulated, and each represents half of them: its work demands as much of links and
//! memory as theirs together. Lanes of the first half move their data first, so that the second half moves its data
//! while the first one continues with steps that need no link. A few iterations of a long loop represent all of them.
//!
//! ```text
//!   stream:  ── launch ──┬───────────────────────────── all lanes done ──►
//!   lanes:               ├── steps of the first class ──────┤
//!                        └── steps of the second class ──┤
//! ```

use super::bound::Bound;
use super::launch::{Seen, Steps};
use super::schedule::{RankState, Schedule};
use super::step::{EGRESS, INGRESS, MEMORY, Step, Work};
use crate::error::Rank;
use crate::program::section::{
    LaneStepKind, MAX_THREADS, Packing, Part, ScratchId, SectionInstance,
};
use std::collections::HashMap;

/// Threads that store or load a packet of 128 bytes together.
const THREADS_OF_LINE: usize = 8;

/// State of a lane while its steps are scheduled.
struct LaneState<'l> {
    stream: usize,
    high: bool,
    /// The simulated rank, and its rank number.
    rank: usize,
    number: Rank,
    section: &'l SectionInstance,
    launch: usize,
    of_lane: &'l [usize],
    classes: &'l [Steps],
    class: usize,
    /// Whether an announcement needs a fence, because it follows accesses of the lane.
    accesses: bool,
    /// Whether it has stored at peers since its last signal.
    stored: bool,
    /// Whether it has agreed on tensors and not used them since.
    looks_up: bool,
    /// Number of packet elements read per scratch, and the packets read.
    read: HashMap<ScratchId, f64>,
    seen: Seen,
}

impl LaneState<'_> {
    /// Records a read of packets; returns the elements that the lane has read of that scratch so far.
    fn reads(&mut self, id: ScratchId, part: &Part, elements: f64) -> f64 {
        let read = self.read.entry(id).or_default();
        if self.seen.insert((id, part.offset)) {
            // Elements of a packet that is read twice arrive once.
            *read += elements;
        }
        *read
    }
}

/// Demands of a move: for each resource of a rank, its time at the full rate of that resource alone.
#[derive(Debug, Default)]
struct Needs(Vec<((usize, u32), f64)>);

impl Needs {
    fn add(&mut self, rank: usize, resource: u32, seconds: f64) {
        let found = self.0.iter_mut().find(|(key, _)| *key == (rank, resource));
        match found {
            Some((_, sum)) => *sum += seconds,
            None => self.0.push(((rank, resource), seconds)),
        }
    }
}

impl Schedule<'_> {
    /// Adds a launch: its lanes start together, and it ends with the last of them.
    pub(super) fn add_section(&mut self, state: &mut RankState<'_>, section: &SectionInstance) {
        let number = state.launches;
        state.launches += 1;
        self.kernel(state);
        self.step(state, Step::Delay(self.lane_figures.launch));
        // Taken out while steps are added, which borrows the schedule mutably.
        let launches = std::mem::take(&mut self.launches);
        if let Some(launch) = launches.get(state.rank).and_then(|all| all.get(number)) {
            let (start, done) = (self.new_counter(), self.new_counter());
            self.step(state, Step::Add(start, 1.0, 0.0));
            for (class, steps) in launch.classes.iter().enumerate() {
                let stream = self.streams.len();
                self.streams.push(vec![Step::Await(start, 1.0)]);
                let mut lane = LaneState {
                    stream,
                    high: state.high,
                    rank: state.rank,
                    number: section.rank,
                    section,
                    launch: number,
                    of_lane: &launch.of_lane,
                    classes: &launch.classes,
                    class,
                    accesses: false,
                    stored: false,
                    looks_up: false,
                    read: HashMap::new(),
                    seen: Seen::new(),
                };
                for (step, weight) in &steps.steps {
                    self.add_lane_step(state, &mut lane, &step.kind, *weight);
                }
                self.streams[stream].push(Step::Add(done, 1.0, 0.0));
            }
            self.step(state, Step::Await(done, launch.classes.len() as f64));
        }
        self.launches = launches;
    }

    /// Adds a step that represents `weight` steps: its time is multiplied, and so is the latency of its signals and
    /// packets, but they are not repeated, because a wait is not either. So latency that other steps hide remains
    /// hidden.
    fn add_lane_step(
        &mut self,
        state: &mut RankState<'_>,
        lane: &mut LaneState<'_>,
        kind: &LaneStepKind,
        weight: f64,
    ) {
        let world = lane.section.world.max(1);
        let figures = &self.lane_figures;
        let (signal, packet, fence, load) =
            (figures.signal, figures.packet, figures.fence, figures.load);
        match kind {
            LaneStepKind::Announce {
                target, tensors, ..
            } => {
                if !tensors.is_empty() {
                    // It looks up its own tensors, and announces them after its accesses.
                    let fence = if lane.accesses { fence } else { 0.0 };
                    self.streams[lane.stream].push(Step::Delay((load + fence) * weight));
                }
                if let Some(id) = lane.section.packets_of(target) {
                    let amount = self.puts_for(lane, id);
                    for counter in self.packet_counters(lane, target.rank, id) {
                        self.streams[lane.stream].push(Step::Add(counter, amount, packet * weight));
                    }
                }
            }
            LaneStepKind::Agree {
                tensors, source, ..
            } => {
                if let Some(id) = lane.section.packets_of(source) {
                    let read = lane.reads(id, source, 1.0) * self.share(lane, id);
                    let [_, last] = self.packet_counters(lane, lane.number, id);
                    self.streams[lane.stream].push(Step::Await(last, read));
                }
                if !tensors.is_empty() {
                    self.streams[lane.stream].push(Step::Delay(load * weight));
                }
                // The first use looks up the mapped tensors of all ranks at once.
                lane.looks_up = !tensors.is_empty();
            }
            LaneStepKind::Signal { peer, lane: other } => {
                lane.accesses = true;
                if std::mem::take(&mut lane.stored) {
                    self.streams[lane.stream].push(Step::Delay(fence * weight));
                }
                let class = lane
                    .of_lane
                    .get(*other)
                    .and_then(|class| lane.classes.get(*class));
                // The signalled lane's representative waits on its behalf.
                let other = class.map_or(*other, |class| class.class.lane);
                let distance = (peer + world - lane.number) % world;
                let counter = self.signal_counter(self.stand_in(*peer), other, distance);
                self.streams[lane.stream].push(Step::Add(counter, 1.0, signal * weight));
            }
            LaneStepKind::Wait(peer) => {
                let own = lane.classes[lane.class].class.lane;
                let distance = (lane.number + world - peer) % world;
                let waited = state.waited.entry((own, distance)).or_default();
                *waited += 1.0;
                let waited = *waited;
                let counter = self.signal_counter(lane.rank, own, distance);
                self.streams[lane.stream].push(Step::Await(counter, waited));
            }
            LaneStepKind::Value { source, .. } => {
                self.add_move(lane, &[], std::slice::from_ref(source), weight);
            }
            moves => {
                if std::mem::take(&mut lane.looks_up) {
                    self.streams[lane.stream].push(Step::Delay(load * weight));
                }
                if !moves.is_empty() {
                    lane.accesses = true;
                    self.add_move(lane, moves.targets(), moves.sources(), weight);
                }
            }
        }
    }

    /// Adds a move from all sources to all targets.
    fn add_move(
        &mut self,
        lane: &mut LaneState<'_>,
        targets: &[Part],
        sources: &[Part],
        weight: f64,
    ) {
        let figures = self.lane_figures.clone();
        let memory = self.model.memory.rate;
        let mut needs = Needs::default();
        // Seconds of a block with all its threads, and the number of packet rounds of its threads.
        let (mut block, mut rounds): (f64, f64) = (0.0, 0.0);
        let mut latency: f64 = 0.0;
        let threads = if self.model.device.shared {
            1
        } else {
            lane.section.threads
        };
        let mut arriving = Vec::new();
        let mut leaving = Vec::new();
        for (part, is_target) in sources
            .iter()
            .map(|s| (s, false))
            .chain(targets.iter().map(|t| (t, true)))
        {
            let scratch = lane.section.scratch_of(part.tensor);
            let packing = scratch.map_or(Packing::Plain, |scratch| scratch.packing);
            let size = lane.section.tensors[part.tensor].dtype.size();
            let bytes = (part.elements * size) as f64;
            let (data, packet) = packing.packet();
            let moved = bytes * packet as f64 / data as f64;
            let peer = self.stand_in(part.rank);
            if packing.is_packets() {
                let together = if packing == Packing::Packets128 {
                    THREADS_OF_LINE
                } else {
                    1
                };
                let turns = bytes / data as f64 * together as f64 / threads as f64;
                rounds = rounds.max(turns);
            }
            // If ranks share their memory, there is only one.
            let whose = if self.model.device.shared { 0 } else { peer };
            needs.add(whose, MEMORY, moved / memory);
            if part.rank == lane.number {
                block += moved / figures.block_own;
            } else if is_target {
                block += moved / figures.block_stored;
                needs.add(lane.rank, EGRESS, moved / figures.stored);
                needs.add(peer, INGRESS, moved / figures.stored);
                // Packets need no fence: each carries its own flag.
                lane.stored |= !packing.is_packets();
            } else {
                block += moved / figures.block_loaded;
                needs.add(lane.rank, INGRESS, moved / figures.loaded);
                needs.add(peer, EGRESS, moved / figures.loaded);
                latency = latency.max(figures.peer_load);
            }
            match lane.section.packets_of(part) {
                Some(id) if is_target => leaving.push((part, id)),
                Some(id) => arriving.push((part, id)),
                None => {}
            }
        }
        // A round of packets includes the latency of its loads.
        if rounds <= 0.0 {
            latency = latency.max(figures.load);
        }
        if latency > 0.0 {
            self.streams[lane.stream].push(Step::Delay(latency * weight));
        }
        let mut reached = Vec::new();
        for (part, id) in arriving {
            let read = lane.reads(id, part, part.elements as f64) * self.share(lane, id);
            let [first, last] = self.packet_counters(lane, lane.number, id);
            // The step starts with the first packet and cannot end before the last.
            self.streams[lane.stream].push(Step::Await(first, read));
            reached.push(Step::Await(last, read));
        }
        // Packets are read one by one as they arrive, while later ones are still being stored. Packets of a round
        // arrive one after the other.
        let first_way = (figures.packet - figures.packet_round).max(0.0) * weight;
        let last_way = first_way + rounds.min(1.0) * figures.packet_round * weight;
        let mut put = Vec::new();
        for (part, id) in leaving {
            let [first, last] = self.packet_counters(lane, part.rank, id);
            let amount = part.elements as f64 * self.puts_for(lane, id);
            self.streams[lane.stream].push(Step::Add(first, amount, first_way));
            put.push(Step::Add(last, amount, last_way));
        }
        let full = figures.block_threads.clamp(
            1,
            if self.model.device.shared {
                1
            } else {
                usize::MAX
            },
        );
        // A lane with more threads than a block may have is several blocks.
        let blocks = (threads as f64 / MAX_THREADS as f64).max(1.0);
        let block = block * (full as f64 / threads as f64).max(1.0 / blocks);
        // All threads wait for the slowest, even if few of them have a packet.
        let rounds = if rounds > 0.0 {
            rounds.max(1.0) * figures.packet_round
        } else {
            0.0
        };
        self.add_lane_work(lane, block.max(rounds) * weight, &needs, weight);
        self.streams[lane.stream].extend(put);
        self.streams[lane.stream].extend(reached);
    }

    /// Adds work of all lanes of a class, which takes each of them `alone` seconds without sharing.
    fn add_lane_work(&mut self, lane: &LaneState<'_>, alone: f64, needs: &Needs, weight: f64) {
        let count = lane.classes[lane.class].class.count as f64;
        let most = needs.0.iter().max_by(|a, b| a.1.total_cmp(&b.1));
        let (mut seconds, mut bound) = (alone, Bound::Lanes);
        // The class is bound by a shared resource if its lanes together need that for longer than each of them needs
        // alone.
        if let Some(((_, resource), longest)) = most
            && longest * count * weight > alone
        {
            seconds = longest * count * weight;
            bound = if *resource == MEMORY {
                Bound::Memory
            } else {
                Bound::Link
            };
        }
        if seconds <= 0.0 {
            return;
        }
        let first = self.demands.len();
        for ((rank, resource), each) in &needs.0 {
            self.demand(*rank, *resource, each * count * weight / seconds);
        }
        let multiprocessors = self.model.device.multiprocessors as f64;
        let all = lane.of_lane.len().max(1) as f64;
        let occupancy = if self.model.device.shared {
            // The processors execute a lane's steps, and idle while it waits for a link.
            count / multiprocessors * alone / seconds
        } else {
            count / all.max(multiprocessors)
        };
        let work = Work {
            occupancy,
            high: lane.high,
            turn: Some(lane.classes[lane.class].class.half),
            ..Work::new(seconds, bound, [lane.rank, lane.rank])
        };
        self.work_of(lane.stream, lane.rank, first, work);
    }

    fn signal_counter(&mut self, rank: usize, lane: usize, distance: usize) -> u32 {
        let next = &mut self.counters;
        let counter = self.between_lanes.signals.entry((rank, lane, distance));
        *counter.or_insert_with(|| {
            *next += 1;
            *next - 1
        })
    }

    fn share(&self, lane: &LaneState<'_>, id: ScratchId) -> f64 {
        let shares = &self.between_lanes.shares;
        let share = shares.get(&(lane.launch, id, lane.rank, lane.class));
        share.copied().unwrap_or(1.0)
    }

    /// Number of lanes for which a lane stores packets: all of its class if lanes of other classes read them.
    fn puts_for(&self, lane: &LaneState<'_>, id: ScratchId) -> f64 {
        if self.between_lanes.crossed.contains(&(lane.launch, id)) {
            lane.classes[lane.class].class.count as f64
        } else {
            1.0
        }
    }

    /// Counters of packets that arrive at a rank from the lane, or at the lane.
    fn packet_counters(&mut self, lane: &LaneState<'_>, rank: Rank, id: ScratchId) -> [u32; 2] {
        let crossed = self.between_lanes.crossed.contains(&(lane.launch, id));
        let class = if crossed { 0 } else { lane.class };
        let key = (lane.launch, self.stand_in(rank), id, class);
        let next = &mut self.counters;
        let counters = self.between_lanes.packets.entry(key);
        *counters.or_insert_with(|| {
            *next += 2;
            [*next - 2, *next - 1]
        })
    }
}
