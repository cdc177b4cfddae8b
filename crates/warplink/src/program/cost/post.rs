//! Steps of posts of transfers and waits for them.
//!
//! A transfer's *initiator* moves the bytes: the receiver of a get, the sender of a put. The other end, the *target*,
//! signals that it is ready, and is signalled when the bytes have arrived.

use super::Submission;
use super::bound::Bound;
use super::collective::EXCHANGE;
use super::model;
use super::schedule::{RankState, Schedule};
use super::step::{Class, EGRESS, INGRESS, MEMORY, PORT, Step, Work};
use crate::device::MatmulSpec;
use crate::program::ir::{Backend, Direction, Protocol};
use crate::program::{RankProgram, TransferId, TransferInstance};

/// Mechanism that moves the bytes of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mover {
    Engine,
    /// A kernel of one block, concurrent with matmuls.
    OneBlock,
    /// Kernels at both ends.
    Kernels,
}

/// Protocol of a transfer that this end initiates.
fn initiates(transfer: &TransferInstance) -> Option<Protocol> {
    match transfer.backend {
        Backend::Direct(protocol) => transfer.initiates().then_some(protocol),
        Backend::Nccl => None,
    }
}

/// Whether a rank copies to or from several peers in turn.
pub(super) fn rotates(program: &RankProgram) -> bool {
    let initiated = program.transfers.iter().filter(|t| initiates(t).is_some());
    let mut peers = initiated.map(|transfer| transfer.peer);
    let first = peers.next();
    peers.any(|peer| Some(peer) != first)
}

/// Host seconds to post `group`.
pub(super) fn host_seconds(program: &RankProgram, group: &[TransferId], host: &model::Host) -> f64 {
    let (mut initiated, mut engine) = (0, 0);
    for &id in group {
        let transfer = &program.transfers[id];
        initiated += usize::from(initiates(transfer).is_some());
        engine += usize::from(transfer.backend == Backend::Nccl);
    }
    // One group call of the library, however many transfers it has.
    let of_engine = if engine > 0 { host.collective } else { 0.0 };
    let direct = match (group.len() - engine, initiated) {
        (0, _) => 0.0,
        // Signals alone are one batch of memory operations; each copy is a call of its own.
        (_, 0) => host.word,
        (_, initiated) => initiated as f64 * host.transfer,
    };
    of_engine + direct
}

impl Schedule<'_> {
    /// Posts a group: first the signals, then waits and copies, then the completion signals.
    pub(super) fn add_post(&mut self, state: &mut RankState<'_>, group: &[TransferId]) {
        let (mut targets, mut initiated, mut engine) = (Vec::new(), Vec::new(), Vec::new());
        for &id in group {
            // Counted before the steps: waits compare the word with the number of posts so far, this one included.
            let (posts, posted_on) = &mut state.posts[id];
            *posts += 1;
            *posted_on = state.stream;
            let transfer = &state.program.transfers[id];
            match (transfer.backend, initiates(transfer)) {
                (Backend::Nccl, _) => engine.push(id),
                (Backend::Direct(_), None) => targets.push(id),
                (Backend::Direct(_), Some(protocol)) => initiated.push((id, protocol)),
            }
        }
        let bytes = |id: &TransferId| state.program.transfers[*id].range.bytes as u64;
        let largest = initiated.iter().map(|(id, _)| bytes(id)).max();
        let in_kernels = largest.is_some_and(|most| most <= self.model.link.kernel_limit);
        let direct = initiated.iter().map(|(id, _)| id).chain(&targets);
        let most = direct.map(bytes).max();
        // The largest decides for the group, as in the executor, which posts a group by one path.
        if most.is_some_and(|most| self.has_kernels_for(most)) {
            self.post_by_kernels(state, &targets, &initiated);
        } else if in_kernels {
            self.post_in_kernels(state, &targets, &initiated);
        } else {
            self.post_by_engine(state, &targets, &initiated);
        }
        if !engine.is_empty() {
            self.post_to_engine(state, &engine);
        }
    }

    /// Whether kernels at both ends perform a transfer of `bytes`, as multiprocessors are free.
    fn has_kernels_for(&self, bytes: u64) -> bool {
        let link = &self.model.link;
        self.suits_kernels && !link.kernels_put.0.is_empty() && bytes <= link.kernels.limit
    }

    /// Each transfer takes the measured one-way time, which includes the receiver's kernel.
    fn post_by_kernels(
        &mut self,
        state: &mut RankState<'_>,
        targets: &[TransferId],
        initiated: &[(TransferId, Protocol)],
    ) {
        let program = state.program;
        let by_packets = |id: TransferId, protocol| {
            let bytes = program.transfers[id].range.bytes as u64;
            protocol == Protocol::Put && bytes <= self.model.link.kernels.packet_limit
        };
        // A receiver of packets sends no ready signal.
        let announced = targets.iter().filter(|id| {
            !matches!(program.transfers[**id].backend, Backend::Direct(protocol) if by_packets(**id, protocol))
        });
        let announced = announced.count();
        let awaited: Vec<TransferId> = initiated
            .iter()
            .filter(|(id, protocol)| !by_packets(*id, *protocol))
            .map(|(id, _)| *id)
            .collect();
        if announced > 0 || !initiated.is_empty() {
            self.kernel(state);
        }
        for &id in targets {
            self.signal(state, id, 0.0);
        }
        // A kernel that only signals takes its launch; with copies, their measured time includes it.
        if announced > 0 && initiated.is_empty() {
            self.step(state, Step::Delay(self.model.memory.kernel));
        }
        for id in awaited {
            self.await_target(state, id);
        }
        for &(id, protocol) in initiated {
            self.copy(state, id, protocol, Mover::Kernels);
            self.signal(state, id, 0.0);
            let done = self.completed(program.rank, id);
            self.step(state, Step::Add(done, 1.0, 0.0));
        }
    }

    fn post_in_kernels(
        &mut self,
        state: &mut RankState<'_>,
        targets: &[TransferId],
        initiated: &[(TransferId, Protocol)],
    ) {
        let word = self.model.latency.kernel_word;
        self.kernel(state);
        for &id in targets {
            self.signal(state, id, word);
        }
        for &(id, _) in initiated {
            self.await_target(state, id);
            self.step(state, Step::Delay(word));
        }
        for &(id, protocol) in initiated {
            self.copy(state, id, protocol, Mover::OneBlock);
            self.signal(state, id, word);
            let done = self.completed(state.program.rank, id);
            // For waits on other streams of this rank, which watch a word of their own.
            self.step(state, Step::Add(done, 1.0, word));
        }
        self.step(state, Step::Delay(word));
    }

    fn post_by_engine(
        &mut self,
        state: &mut RankState<'_>,
        targets: &[TransferId],
        initiated: &[(TransferId, Protocol)],
    ) {
        if !targets.is_empty() {
            self.words(state, targets.len());
            for &id in targets {
                self.signal(state, id, 0.0);
            }
        }
        if initiated.is_empty() {
            return;
        }
        // All peers first: the copies are enqueued behind one batch of waits, and a late peer delays all of them.
        for &(id, _) in initiated {
            self.await_target(state, id);
        }
        self.words(state, initiated.len());
        for &(id, protocol) in initiated {
            self.copy(state, id, protocol, Mover::Engine);
        }
        self.tell(state, initiated.iter().map(|(id, _)| *id));
    }

    /// Signals completion of `group` to the peers and to this rank's streams.
    fn tell(
        &mut self,
        state: &mut RankState<'_>,
        group: impl ExactSizeIterator<Item = TransferId>,
    ) {
        let latency = &self.model.latency;
        // In a graph, this rank's streams follow through graph edges instead of words.
        // Eagerly, a post completes two words: the peer's, and the one of this rank's streams.
        let each = match self.submission {
            Submission::Eager => 2.0,
            Submission::Captured => 1.0,
        };
        let (first, more) = (latency.word, latency.more_words);
        for (position, id) in group.enumerate() {
            // Words of one batch are written in order, each after the cost of those before it.
            self.delay(state, if position == 0 { first } else { each * more });
            self.signal(state, id, 0.0);
            let done = self.completed(state.program.rank, id);
            self.step(state, Step::Add(done, 1.0, (each - 1.0) * more));
        }
        self.step(state, Step::Delay((each - 1.0) * more));
    }

    /// Adds simultaneous operations on words.
    fn words(&mut self, state: &mut RankState<'_>, count: usize) {
        let latency = &self.model.latency;
        if state.stream == 0 && latency.words_in_kernel > 0 && count >= latency.words_in_kernel {
            let seconds = self.model.memory.kernel + latency.kernel_word;
            self.kernel(state);
            self.step(state, Step::Delay(seconds));
        } else {
            let seconds = latency.word + (count - 1) as f64 * latency.more_words;
            self.delay(state, seconds);
        }
    }

    /// Sets the word of the matching end of a transfer.
    fn signal(&mut self, state: &RankState<'_>, id: TransferId, seconds: f64) {
        let peer = state.program.transfers[id].peer;
        let word = self.incoming(peer, self.partners[state.program.rank][id]);
        self.step(state, Step::Add(word, 1.0, seconds));
    }

    /// Waits until the target of the last post has signalled.
    fn await_target(&mut self, state: &RankState<'_>, id: TransferId) {
        let word = self.incoming(state.program.rank, id);
        self.step(state, Step::Await(word, f64::from(state.posts[id].0)));
    }

    /// Adds the copy of a transfer; a transfer of a rank to itself takes the time of a local copy.
    fn copy(
        &mut self,
        state: &mut RankState<'_>,
        id: TransferId,
        protocol: Protocol,
        mover: Mover,
    ) {
        let transfer = &state.program.transfers[id];
        if transfer.peer == state.program.rank {
            // No link is involved, and both ends' traffic is in one memory.
            return self.copy_work(state, transfer.range.bytes as f64);
        }
        let (link, memory) = (&self.model.link, &self.model.memory);
        let (engine, ring, rotated) = match protocol {
            Protocol::Put => (&link.put, link.put_ring, link.put_rotated),
            Protocol::Get => (&link.get, link.get_ring, link.get_rotated),
        };
        let moved = match (mover, protocol) {
            (Mover::Engine, _) => engine,
            (Mover::OneBlock, Protocol::Put) => &link.kernel_put,
            (Mover::OneBlock, Protocol::Get) => &link.kernel_get,
            (Mover::Kernels, Protocol::Put) => &link.kernels_put,
            (Mover::Kernels, Protocol::Get) => &link.kernels_get,
        };
        let bytes = transfer.range.bytes as f64;
        let seconds = moved.seconds(bytes);
        let rate = bytes / seconds;
        let (share, in_memory) = (rate / engine.peak(), rate / memory.rate);
        // Each end has traffic of one direction; the port's rate is for both at once, so one direction takes half of
        // it.
        let port = rate / 2.0 / if state.rotates { rotated } else { ring };
        let multiprocessors = self.model.device.multiprocessors as f64;
        // Multiprocessors that matmuls lose meanwhile.
        let occupancy = match mover {
            Mover::Engine => memory.copy_occupancy,
            Mover::OneBlock => 1.0 / multiprocessors,
            Mover::Kernels => {
                let blocks = link.kernels.blocks(transfer.range.bytes);
                (f64::from(blocks) / multiprocessors).min(1.0)
            }
        };
        let peer = self.stand_in(transfer.peer);
        let (from, to) = match transfer.direction {
            Direction::Send => (state.rank, peer),
            Direction::Receive => (peer, state.rank),
        };
        let first = self.demands.len();
        self.demand(from, EGRESS, share);
        self.demand(to, INGRESS, share);
        for rank in [from, to] {
            self.demand(rank, PORT, port);
            self.demand(rank, MEMORY, in_memory);
        }
        if mover == Mover::Engine {
            self.engine_copy(state);
            if self.submission == Submission::Captured {
                self.delay(state, self.model.latency.captured_copy);
            }
        }
        let class = match (mover, protocol) {
            (Mover::OneBlock, _) => Class::SmallKernel,
            (Mover::Kernels, _) => Class::Other,
            (Mover::Engine, Protocol::Put) => Class::Put,
            (Mover::Engine, Protocol::Get) => Class::Get,
        };
        let work = Work {
            occupancy,
            class,
            ..Work::new(seconds, Bound::Link, [state.rank, peer])
        };
        self.work(state, first, work);
    }

    /// Sends and receives of the engine: each starts once both ends have arrived.
    fn post_to_engine(&mut self, state: &mut RankState<'_>, group: &[TransferId]) {
        let program = state.program;
        self.follow_engine(state);
        for &id in group {
            let arrived = self.arrived(program.rank, id);
            self.step(state, Step::Add(arrived, 1.0, 0.0));
        }
        self.kernel(state);
        let of = |direction| {
            let ids = group.iter().copied();
            ids.filter(move |id| program.transfers[*id].direction == direction)
        };
        for id in of(Direction::Send) {
            let transfer = &program.transfers[id];
            let partner = self.partners[program.rank][id];
            let there = self.arrived(transfer.peer, partner);
            self.step(state, Step::Await(there, f64::from(state.posts[id].0)));
            let bytes = transfer.range.bytes as f64;
            let seconds = self.engine_seconds(EXCHANGE, self.world, bytes);
            self.engine_work(state, seconds, bytes);
            // The sender's work stands for both ends, since the engine moves the bytes once.
            let received = self.completed(transfer.peer, partner);
            self.step(state, Step::Add(received, 1.0, 0.0));
        }
        for id in of(Direction::Receive) {
            let received = self.completed(program.rank, id);
            self.step(state, Step::Await(received, f64::from(state.posts[id].0)));
        }
        self.mark_engine(state);
        if let Some(engine) = state.engine {
            state.carried.extend(group.iter().map(|id| (*id, engine)));
        }
    }

    /// Adds multiplications that store their results to the receivers' memory.
    pub(super) fn add_stored(
        &mut self,
        state: &mut RankState<'_>,
        group: &[TransferId],
        &MatmulSpec { m, n, k, dtype, .. }: &MatmulSpec,
    ) {
        for &id in group {
            state.posts[id].0 += 1;
            state.posts[id].1 = state.stream;
            self.await_target(state, id);
        }
        self.words(state, group.len());
        // Products for several peers run as one batched matmul.
        let rows = m * group.len();
        let matmul = self.gemm(dtype, (rows, k, n));
        let link = &self.model.link;
        let each = (m * n * dtype.size()) as f64;
        let bytes = each * group.len() as f64;
        // Stores overlap with the multiplication, except for a share that is measured.
        let stored = bytes / link.stored + link.stored_exposed * matmul;
        let seconds = stored.max(matmul);
        let (peak, ring) = (link.put.peak(), link.put_ring);
        let read = ((rows * k + k * n) * dtype.size()) as f64;
        let in_memory = read / seconds / self.model.memory.rate;
        let first = self.demands.len();
        self.demand(state.rank, EGRESS, bytes / seconds / peak);
        self.demand(state.rank, PORT, bytes / seconds / 2.0 / ring);
        self.demand(state.rank, MEMORY, in_memory);
        for &id in group {
            let peer = self.stand_in(state.program.transfers[id].peer);
            self.demand(peer, INGRESS, each / seconds / peak);
            self.demand(peer, PORT, each / seconds / 2.0 / ring);
            self.demand(peer, MEMORY, each / seconds / self.model.memory.rate);
        }
        self.kernel(state);
        let bound = if stored > matmul {
            Bound::Link
        } else {
            Bound::Matmul
        };
        let multiprocessors = self.model.device.multiprocessors;
        let work = Work {
            occupancy: self.model.gemm.occupancy(rows, n, multiprocessors),
            class: Class::Matmul,
            ..Work::new(seconds, bound, [state.rank, state.rank])
        };
        self.work(state, first, work);
        self.tell(state, group.iter().copied());
    }

    /// Waits until all posts of `group` so far are complete.
    pub(super) fn add_wait(&mut self, state: &mut RankState<'_>, group: &[TransferId]) {
        let program = state.program;
        let (mut words, mut events) = (0, 0);
        for &id in group {
            let (posts, posted_on) = state.posts[id];
            let transfer = &program.transfers[id];
            if let Backend::Nccl = transfer.backend {
                if let Some(&(stream, done)) = state.carried.get(&id)
                    // On the engine's own stream, the order of the stream suffices.
                    && stream != state.stream
                {
                    self.step(state, Step::Await(done, 1.0));
                    events += 1;
                }
            } else if initiates(transfer).is_none() {
                let word = self.incoming(program.rank, id);
                self.step(state, Step::Await(word, f64::from(posts)));
                if self.has_kernels_for(transfer.range.bytes as u64) {
                    self.kernel(state);
                } else {
                    words += 1;
                }
            // On the stream of the post, its order suffices, without a wait.
            } else if posted_on != state.stream {
                let done = self.completed(program.rank, id);
                self.step(state, Step::Await(done, f64::from(posts)));
                match self.submission {
                    Submission::Eager => words += 1,
                    Submission::Captured => events += 1,
                }
            }
        }
        if words > 0 {
            self.words(state, words);
        }
        if events > 0 {
            self.delay(state, self.model.latency.event);
        }
    }
}
