//! Doing what a stream was given, one item at a time.

use super::clock::Clock;
use super::memory::{Access, Actor, Mode as AccessMode};
use super::state::{Item, Mode, Need, Run, moves};
use super::violation::Violations;
use crate::error::Rank;
use crate::program::ir::Collective;
use crate::program::rank_program::{OperationKind, Range, TransferId};

impl Run<'_> {
    /// Does the next item of a stream; `false` where there is none or it has to wait.
    pub(super) fn advance(&mut self, stream: usize, violations: &mut Violations) -> bool {
        let Some(&item) = self.streams[stream].queue.front() else {
            return false;
        };
        match item {
            Item::Record(event) => {
                let snapshot = self.streams[stream].clock.snapshot(stream);
                let event = &mut self.events[event];
                event.reached = true;
                event.clock = Some(snapshot);
                if let Some(waiting) = event.waiting {
                    self.wake(waiting);
                }
            }
            Item::WaitEvent(event, operation) => {
                let event = &mut self.events[event];
                if !event.reached {
                    event.waiting = Some(stream);
                    return false;
                }
                if let Some(mark) = event.clock.take() {
                    self.streams[stream].clock.learn(&mark);
                }
                self.tick(stream);
                self.streams[stream].last = Some(operation);
            }
            Item::Operation(operation) => {
                if !self.perform(stream, operation, violations) {
                    return false;
                }
                let state = &mut self.streams[stream];
                state.last = Some(operation);
                state.begun = false;
            }
        }
        self.streams[stream].queue.pop_front();
        true
    }

    /// Does an operation as far as it gets; whether it is done.
    fn perform(&mut self, stream: usize, operation: usize, violations: &mut Violations) -> bool {
        if !self.streams[stream].begun {
            if self.waits_for_engine(stream, operation).is_some() {
                return false;
            }
            self.tick(stream);
            self.streams[stream].begun = true;
            self.streams[stream].progress = 0;
            self.begin(stream, operation, violations);
        }
        let rank = self.streams[stream].rank;
        let positions = self.positions(rank, operation);
        loop {
            let position = self.streams[stream].progress;
            if position >= positions {
                break;
            }
            if let Some(need) = self.need_at(stream, operation, position) {
                self.wait_for(stream, need);
                return false;
            }
            self.pass(stream, operation, position, violations);
            self.streams[stream].progress += 1;
        }
        self.finish(stream, operation, violations);
        true
    }

    /// What the operation at the head of a stream still waits for.
    pub(super) fn need(&self, stream: usize, operation: usize) -> Option<Need> {
        if self.streams[stream].begun {
            self.need_at(stream, operation, self.streams[stream].progress)
        } else {
            self.waits_for_engine(stream, operation)
        }
    }

    fn waits_for_engine(&self, stream: usize, operation: usize) -> Option<Need> {
        let engine = &self.engines[self.streams[stream].rank];
        let turn = engine.order.binary_search(&operation).ok()?;
        (turn > engine.done).then(|| Need::Engine(engine.order[turn - 1]))
    }

    /// How many things an operation may have to wait for, one after another. A post waits for the
    /// signals that it repeats in a graph, and then for those of the peers.
    fn positions(&self, rank: Rank, operation: usize) -> usize {
        match &self.ranks[rank].operations[operation].kind {
            OperationKind::Post(group) => 2 * group.len(),
            OperationKind::PostMatmul { group, .. } | OperationKind::Wait(group) => group.len(),
            OperationKind::Collective { .. } => 1,
            _ => 0,
        }
    }

    /// What has to be there before an operation gets past `position`, if it is not.
    fn need_at(&self, stream: usize, operation: usize, position: usize) -> Option<Need> {
        let rank = self.streams[stream].rank;
        match &self.ranks[rank].operations[operation].kind {
            OperationKind::Post(group) if position < group.len() => {
                let id = group[position];
                let again = self.again(rank, operation, position)?;
                let done = self.ends[rank][id].incoming.has(again - 1);
                (!done).then_some(Need::Peer(id, again - 1))
            }
            OperationKind::Post(group) => {
                self.needs_peer(rank, operation, group, position - group.len())
            }
            OperationKind::PostMatmul { group, .. } => {
                self.needs_peer(rank, operation, group, position)
            }
            OperationKind::Wait(group) => {
                let id = *group.get(position)?;
                let transfer = &self.ranks[rank].transfers[id];
                let number = self.links.numbers[rank].at(operation, position);
                let end = &self.ends[rank][id];
                if moves(transfer.direction, transfer.backend) {
                    return end.completed.missing(number).map(|n| Need::Own(id, n));
                }
                if self.mode == Mode::Captured && !end.placed {
                    return Some(Need::Own(id, 1));
                }
                end.incoming.missing(number).map(|n| Need::Peer(id, n))
            }
            OperationKind::Collective { .. } => {
                let number = self.collective_number(rank, operation)?;
                let meeting = &self.collectives[number];
                if meeting.count == self.ranks.len() {
                    return None;
                }
                let absent = meeting.present.iter().position(|present| !present)?;
                Some(Need::Collective(absent, number))
            }
            _ => None,
        }
    }

    /// The number of a post that in a graph waits until the post before it is done: one that only
    /// signals, and not for the first time.
    fn again(&self, rank: Rank, operation: usize, position: usize) -> Option<usize> {
        let &id = self.ranks[rank].operations[operation]
            .kind
            .posted()
            .get(position)?;
        let transfer = &self.ranks[rank].transfers[id];
        let number = self.links.numbers[rank].at(operation, position);
        let again = self.mode == Mode::Captured
            && number > 1
            && !moves(transfer.direction, transfer.backend);
        again.then_some(number)
    }

    fn needs_peer(
        &self,
        rank: Rank,
        operation: usize,
        group: &[TransferId],
        position: usize,
    ) -> Option<Need> {
        let id = *group.get(position)?;
        let transfer = &self.ranks[rank].transfers[id];
        let number = self.links.numbers[rank].at(operation, position);
        let there = !moves(transfer.direction, transfer.backend)
            || self.ends[rank][id].incoming.has(number);
        (!there).then_some(Need::Peer(id, number))
    }

    /// Has a stream woken when what it needs may be there.
    fn wait_for(&mut self, stream: usize, need: Need) {
        let rank = self.streams[stream].rank;
        match need {
            Need::Peer(id, _) => self.ends[rank][id].incoming.wait(stream),
            Need::Own(id, _) => self.ends[rank][id].completed.wait(stream),
            Need::Collective(_, number) => self.collectives[number].waiting.push(stream),
            // The engine's next operation is woken by the one before it, a mark's by the mark.
            Need::Engine(_) | Need::Event(_) => {}
        }
    }

    /// What an operation does without waiting: signals, and its arrival at what others wait for.
    fn begin(&mut self, stream: usize, operation: usize, violations: &mut Violations) {
        let (rank, ranks) = (self.streams[stream].rank, self.ranks);
        match &ranks[rank].operations[operation].kind {
            OperationKind::Post(group) => {
                for (position, &id) in group.iter().enumerate() {
                    let transfer = &ranks[rank].transfers[id];
                    if self.again(rank, operation, position).is_some() {
                        continue;
                    }
                    let number = self.links.numbers[rank].at(operation, position);
                    if transfer.is_engine() {
                        let partner = self.links.partners[rank][id];
                        let clock = self.streams[stream].clock.clone();
                        let word = &mut self.ends[transfer.peer][partner].incoming;
                        let woken = word.write(number, stream, &clock);
                        self.wake_all(woken);
                    } else if !moves(transfer.direction, transfer.backend) {
                        self.signal(stream, (operation, id, number), violations);
                    }
                }
            }
            OperationKind::Collective { collective, .. } => {
                if let Some(number) = self.collective_number(rank, operation) {
                    let root = match collective {
                        Collective::Broadcast(root) => Some(*root),
                        _ => None,
                    };
                    self.arrive(stream, number, root);
                }
            }
            _ => {}
        }
    }

    fn arrive(&mut self, stream: usize, number: usize, root: Option<Rank>) {
        let (rank, world) = (self.streams[stream].rank, self.ranks.len());
        let clock = &self.streams[stream].clock;
        let meeting = &mut self.collectives[number];
        meeting.present.resize(world, false);
        meeting.present[rank] = true;
        meeting.count += 1;
        if root == Some(rank) {
            meeting.root = Some(clock.clone());
        }
        match &mut meeting.all {
            Some(all) => all.join(clock),
            all => *all = Some(clock.clone()),
        }
        if meeting.count == world {
            meeting.present = Vec::new();
            let woken = std::mem::take(&mut meeting.waiting);
            self.wake_all(woken);
        }
    }

    /// What an operation does when it has got past `position`.
    fn pass(
        &mut self,
        stream: usize,
        operation: usize,
        position: usize,
        violations: &mut Violations,
    ) {
        if self.mode == Mode::Eager {
            return;
        }
        let (rank, ranks) = (self.streams[stream].rank, self.ranks);
        let OperationKind::Post(group) = &ranks[rank].operations[operation].kind else {
            return;
        };
        if let (Some(number), Some(&id)) =
            (self.again(rank, operation, position), group.get(position))
        {
            self.signal(stream, (operation, id, number), violations);
        }
        // Behind the last of these, other streams may wait.
        if position + 1 == group.len() {
            for &id in group {
                self.ends[rank][id].placed = true;
                let woken = self.ends[rank][id].completed.woken();
                self.wake_all(woken);
            }
        }
    }

    /// Writes the word that the peer waits for; its values must be written in order.
    fn signal(
        &mut self,
        stream: usize,
        (operation, id, number): (usize, TransferId, usize),
        violations: &mut Violations,
    ) {
        let rank = self.streams[stream].rank;
        let peer = self.ranks[rank].transfers[id].peer;
        let partner = self.links.partners[rank][id];
        let clock = &self.streams[stream].clock;
        let word = &mut self.ends[peer][partner].incoming;
        if self.mode == Mode::Eager && number > 1 && !word.in_order(number, clock) {
            let before = self.links.posts[rank][id][number - 2];
            violations.unordered_signal(rank, before, operation);
        }
        let woken = word.write(number, stream, clock);
        self.wake_all(woken);
    }

    /// What an operation does once it has all that it waits for.
    fn finish(&mut self, stream: usize, operation: usize, violations: &mut Violations) {
        let (rank, ranks) = (self.streams[stream].rank, self.ranks);
        let mut touch = |run: &mut Self, range: Range, mode: AccessMode| {
            let access = run.access_of(stream, operation, mode);
            run.access(rank, range, access, violations);
        };
        match &ranks[rank].operations[operation].kind {
            OperationKind::Allocate(_)
            | OperationKind::Share(_)
            | OperationKind::Synchronize(_) => {}
            OperationKind::Deallocate(tensor) => {
                let all = Range {
                    tensor: *tensor,
                    offset_bytes: 0,
                    bytes: ranks[rank].tensors[*tensor].bytes,
                };
                touch(self, all, AccessMode::Deallocate);
            }
            OperationKind::Copy { target, source } => {
                touch(self, *source, AccessMode::Read);
                touch(self, *target, AccessMode::Write);
            }
            OperationKind::Matmul {
                a,
                b,
                c,
                bias,
                accumulate,
                ..
            } => {
                for range in [Some(a), Some(b), bias.as_ref()].into_iter().flatten() {
                    touch(self, *range, AccessMode::Read);
                }
                let mode = if *accumulate {
                    AccessMode::Update
                } else {
                    AccessMode::Write
                };
                touch(self, *c, mode);
            }
            OperationKind::Sum {
                target, sources, ..
            } => {
                for source in sources.iter().filter(|source| *source != target) {
                    touch(self, *source, AccessMode::Read);
                }
                let mode = if sources.contains(target) {
                    AccessMode::Update
                } else {
                    AccessMode::Write
                };
                touch(self, *target, mode);
            }
            OperationKind::Post(group) => self.finish_post(stream, operation, group, violations),
            OperationKind::PostMatmul {
                group, a, b, bias, ..
            } => {
                for range in a.iter().chain([b]).chain(bias) {
                    touch(self, *range, AccessMode::Read);
                }
                self.finish_post(stream, operation, group, violations);
            }
            OperationKind::Wait(group) => {
                let links = self.links;
                for (&id, number) in group.iter().zip(links.numbers[rank].of(operation)) {
                    let transfer = &ranks[rank].transfers[id];
                    let end = &mut self.ends[rank][id];
                    let initiates = moves(transfer.direction, transfer.backend);
                    let first = self.first_stream[rank];
                    let posted_on = || {
                        let post = *links.posts[rank][id].get(number.checked_sub(1)?)?;
                        Some(first + ranks[rank].operations[post].stream)
                    };
                    // Signals are in order, or else reported: the last stands for all.
                    let clock = &mut self.streams[stream].clock;
                    if !initiates {
                        end.incoming.read(number, clock);
                    } else if posted_on() != Some(stream) {
                        end.completed.read(number, clock);
                    }
                }
            }
            OperationKind::Collective {
                collective,
                target,
                source,
                ..
            } => {
                // Others know that this rank came, not that it is done; and what it reads and writes
                // it may touch before they come.
                self.tick(stream);
                let (reads, writes) = match collective {
                    Collective::Broadcast(root) => (*root == rank, true),
                    Collective::Reduce(_, root) => (true, *root == rank),
                    _ => (true, true),
                };
                if let (Some(in_place), true, true) =
                    (in_place(collective, target, source, rank), reads, writes)
                {
                    for (range, mode) in in_place {
                        touch(self, range, mode);
                    }
                } else {
                    if reads {
                        touch(self, *source, AccessMode::Read);
                    }
                    if writes {
                        touch(self, *target, AccessMode::Write);
                    }
                }
                if let Some(number) = self.collective_number(rank, operation) {
                    self.leave(stream, number, collective);
                }
                self.engine_done(rank);
            }
        }
    }

    /// Adds what a rank learns from a collective.
    fn leave(&mut self, stream: usize, number: usize, collective: &Collective<Rank>) {
        let rank = self.streams[stream].rank;
        let meeting = &mut self.collectives[number];
        let learned = match collective {
            Collective::Broadcast(_) => &meeting.root,
            Collective::Reduce(_, root) if *root != rank => &None,
            _ => &meeting.all,
        };
        if let Some(learned) = learned {
            self.streams[stream].clock.join(learned);
        }
        meeting.left += 1;
        if meeting.left == self.ranks.len() {
            (meeting.all, meeting.root) = (None, None);
        }
    }

    fn access_of(&self, stream: usize, operation: usize, mode: AccessMode) -> Access {
        let state = &self.streams[stream];
        Access {
            actor: Actor::operation(state.rank, operation),
            stream: stream as u32,
            time: state.clock.get(stream),
            mode,
        }
    }

    /// Lets the engine's next operation on a rank begin.
    fn engine_done(&mut self, rank: Rank) {
        let engine = &mut self.engines[rank];
        engine.done += 1;
        if let Some(&next) = engine.order.get(engine.done) {
            let stream = self.first_stream[rank] + self.ranks[rank].operations[next].stream;
            self.wake(stream);
        }
    }

    /// Does what a group moves. Each part begins after the start of the group and its own signal, and
    /// counts on no other's; the signals that it is done come after all parts.
    fn finish_post(
        &mut self,
        stream: usize,
        operation: usize,
        group: &[TransferId],
        violations: &mut Violations,
    ) {
        let (rank, ranks, links) = (self.streams[stream].rank, self.ranks, self.links);
        let kind = &ranks[rank].operations[operation].kind;
        let stored = matches!(kind, OperationKind::PostMatmul { .. });
        let initiators: Vec<(TransferId, usize)> = group
            .iter()
            .copied()
            .zip(links.numbers[rank].of(operation))
            .filter(|&(id, _)| {
                let transfer = &ranks[rank].transfers[id];
                moves(transfer.direction, transfer.backend)
            })
            .collect();
        if initiators.is_empty() {
            return;
        }
        // What the group announced at its start says nothing of what it moves.
        self.tick(stream);
        let start = self.streams[stream].clock.clone();
        let mut end = start.clone();
        for &(id, number) in &initiators {
            let transfer = &ranks[rank].transfers[id];
            let (peer, partner) = (transfer.peer, self.links.partners[rank][id]);
            let theirs = ranks[peer].transfers[partner].range;
            let receives = transfer.direction == crate::program::ir::Direction::Receive;
            let mut clock = start.clone();
            // Through the engine, a receive comes after its send has started; a send says nothing
            // about its receive.
            if !transfer.is_engine() || receives {
                self.ends[rank][id].incoming.read(number, &mut clock);
            }
            end.join(&clock);
            self.streams[stream].clock = clock;
            let (own, other) = if receives {
                (AccessMode::Write, AccessMode::Read)
            } else {
                (AccessMode::Read, AccessMode::Write)
            };
            if !transfer.is_engine() {
                let access = self.access_of(stream, operation, other);
                self.access(peer, theirs, access, violations);
            }
            // A matmul that is stored straight away leaves the sender's own memory alone.
            if !stored {
                let access = self.access_of(stream, operation, own);
                self.access(rank, transfer.range, access, violations);
            }
        }
        self.streams[stream].clock = end;
        let mut engine = false;
        for (id, number) in initiators {
            if ranks[rank].transfers[id].is_engine() {
                engine = true
            } else {
                self.signal(stream, (operation, id, number), violations)
            }
            self.complete(stream, (operation, id, number), violations);
        }
        if engine {
            self.engine_done(rank);
        }
    }

    /// Tells this rank's other streams that its part of a transfer is done.
    fn complete(
        &mut self,
        stream: usize,
        (operation, id, number): (usize, TransferId, usize),
        violations: &mut Violations,
    ) {
        let rank = self.streams[stream].rank;
        let clock: &Clock = &self.streams[stream].clock;
        let word = &mut self.ends[rank][id].completed;
        if self.mode == Mode::Eager && number > 1 && !word.in_order(number, clock) {
            let before = self.links.posts[rank][id][number - 2];
            violations.unordered_signal(rank, before, operation);
        }
        let woken = word.write(number, stream, clock);
        self.wake_all(woken);
    }
}

/// What a collective accesses whose target and source are one buffer in the way that engines
/// document: the source of an all-gather is this rank's slot of the target, the target of a
/// reduce-scatter is this rank's part of the source, and those of a reduction or broadcast are one. An
/// all-to-all cannot be in place.
fn in_place(
    collective: &Collective<Rank>,
    target: &Range,
    source: &Range,
    rank: Rank,
) -> Option<Vec<(Range, AccessMode)>> {
    let (whole, own, others) = match collective {
        Collective::AllToAll => return None,
        Collective::AllGather => (target, source, AccessMode::Write),
        Collective::ReduceScatter(_) => (source, target, AccessMode::Read),
        Collective::AllReduce(_) | Collective::Broadcast(_) | Collective::Reduce(..) => {
            let update = vec![(*target, AccessMode::Update)];
            return (target == source).then_some(update);
        }
    };
    let offset = whole
        .offset_bytes
        .checked_add(own.bytes.checked_mul(rank)?)?;
    if own.tensor != whole.tensor || own.offset_bytes != offset {
        return None;
    }
    let part = |from: usize, to: usize| Range {
        tensor: whole.tensor,
        offset_bytes: from,
        bytes: to - from,
    };
    let parts = [
        (part(whole.offset_bytes, own.offset_bytes), others),
        (*own, AccessMode::Update),
        (part(own.end(), whole.end()), others),
    ];
    let not_empty = parts.into_iter().filter(|(range, _)| range.bytes > 0);
    Some(not_empty.collect())
}
