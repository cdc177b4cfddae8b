//! Doing what a stream was given, one item at a time.

use super::clock::Clock;
use super::memory::{Access, Actor, Mode};
use super::state::{Item, Need, Run, copies};
use super::violation::Violations;
use crate::error::Rank;
use crate::program::ir::{Backend, Collective, Direction};
use crate::program::rank_program::{OperationKind, Range, TransferId};

impl Run<'_> {
    /// Does the next item of a stream; `false` where there is none or it has to wait.
    pub(super) fn advance(&mut self, stream: usize, violations: &mut Violations) -> bool {
        let Some(&item) = self.streams[stream].queue.front() else {
            return false;
        };
        match item {
            Item::Record(event) => {
                self.events[event].0 = Some(self.streams[stream].clock.clone());
                self.wake_rank(self.streams[stream].rank);
            }
            Item::WaitEvent(event, operation) => {
                let Some(mark) = &self.events[event].0 else {
                    return false;
                };
                self.streams[stream].clock.join(mark);
                self.streams[stream].clock.tick(stream);
                self.streams[stream].last = Some(operation);
            }
            Item::Operation(operation) => {
                if !self.streams[stream].begun && self.waits_for_engine(stream, operation).is_none()
                {
                    self.streams[stream].clock.tick(stream);
                    self.streams[stream].begun = true;
                    self.begin(stream, operation, violations);
                }
                if self.need(stream, operation).is_some() {
                    return false;
                }
                self.finish(stream, operation, violations);
                self.streams[stream].last = Some(operation);
                self.streams[stream].begun = false;
            }
        }
        self.streams[stream].queue.pop_front();
        true
    }

    fn waits_for_engine(&self, stream: usize, operation: usize) -> Option<Need> {
        let engine = &self.engines[self.streams[stream].rank];
        let turn = engine.order.binary_search(&operation).ok()?;
        (turn > engine.done).then(|| Need::Engine(engine.order[turn - 1]))
    }

    /// What the operation at the head of a stream still waits for.
    pub(super) fn need(&self, stream: usize, operation: usize) -> Option<Need> {
        let rank = self.streams[stream].rank;
        if let Some(need) = self.waits_for_engine(stream, operation) {
            return Some(need);
        }
        let rank_program = &self.ranks[rank];
        let counts = self.counts[rank][operation].iter().copied();
        match &rank_program.operations[operation].kind {
            OperationKind::Post(group) | OperationKind::PostMatmul { group, .. } => {
                group.iter().zip(counts).find_map(|(&id, number)| {
                    let transfer = &rank_program.transfers[id];
                    let here = match transfer.backend {
                        Backend::Direct(protocol) => {
                            !copies(transfer.direction, protocol)
                                || filled(&self.ends[rank][id].incoming, number)
                        }
                        Backend::Nccl => {
                            let partner = self.links.partners[rank][id];
                            filled(&self.ends[transfer.peer][partner].arrived, number)
                        }
                    };
                    (!here).then_some(Need::Peer(id, number))
                })
            }
            OperationKind::Wait(group) => group.iter().zip(counts).find_map(|(&id, number)| {
                let transfer = &rank_program.transfers[id];
                let end = &self.ends[rank][id];
                let all = |slots: &[Option<Clock>]| (1..=number).find(|n| !filled(slots, *n));
                match transfer.backend {
                    Backend::Direct(protocol) if !copies(transfer.direction, protocol) => {
                        all(&end.incoming).map(|missing| Need::Peer(id, missing))
                    }
                    _ => all(&end.completed).map(|missing| Need::Own(id, missing)),
                }
            }),
            OperationKind::Collective { .. } => {
                let number = self.collective_number(rank, operation)?;
                let arrived = &self.collectives[number];
                let absent = arrived.iter().position(Option::is_none)?;
                Some(Need::Collective(absent, number))
            }
            _ => None,
        }
    }

    /// What an operation does without waiting: signals, and its arrival at what others wait for.
    fn begin(&mut self, stream: usize, operation: usize, violations: &mut Violations) {
        let (rank, ranks) = (self.streams[stream].rank, self.ranks);
        match &ranks[rank].operations[operation].kind {
            OperationKind::Post(group) => {
                for (position, &id) in group.iter().enumerate() {
                    let transfer = &ranks[rank].transfers[id];
                    let number = self.counts[rank][operation][position];
                    match transfer.backend {
                        Backend::Direct(protocol) if copies(transfer.direction, protocol) => {}
                        Backend::Direct(_) => {
                            self.signal(stream, operation, id, number, violations)
                        }
                        Backend::Nccl => {
                            let clock = self.streams[stream].clock.clone();
                            fill(&mut self.ends[rank][id].arrived, number, clock);
                            self.wake_rank(transfer.peer);
                        }
                    }
                }
            }
            OperationKind::Collective { .. } => {
                if let Some(number) = self.collective_number(rank, operation) {
                    let clock = self.streams[stream].clock.clone();
                    self.collectives[number][rank] = Some(clock);
                    if self.collectives[number].iter().all(Option::is_some) {
                        (0..ranks.len()).for_each(|rank| self.wake_rank(rank));
                    }
                }
            }
            _ => {}
        }
    }

    /// Writes the word that the peer waits for; its values must be written in order.
    fn signal(
        &mut self,
        stream: usize,
        operation: usize,
        id: TransferId,
        number: usize,
        violations: &mut Violations,
    ) {
        let rank = self.streams[stream].rank;
        let peer = self.ranks[rank].transfers[id].peer;
        let partner = self.links.partners[rank][id];
        let clock = self.streams[stream].clock.clone();
        let before = number
            .checked_sub(2)
            .map(|index| self.links.posts[rank][id][index]);
        let slots = &mut self.ends[peer][partner].incoming;
        if let Some(before) = before
            && !in_order(slots, number, &clock)
        {
            violations.unordered_signal(rank, before, operation);
        }
        fill(slots, number, clock);
        self.wake_rank(peer);
    }

    /// What an operation does once it has all that it waits for.
    fn finish(&mut self, stream: usize, operation: usize, violations: &mut Violations) {
        let (rank, ranks) = (self.streams[stream].rank, self.ranks);
        let mut touch = |run: &mut Self, range: Range, mode: Mode| {
            let time = run.streams[stream].clock.get(stream);
            let access = Access {
                actor: Actor::Operation(rank, operation),
                stream,
                time,
                mode,
            };
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
                touch(self, all, Mode::Deallocate);
            }
            OperationKind::Copy { target, source } => {
                touch(self, *source, Mode::Read);
                touch(self, *target, Mode::Write);
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
                    touch(self, *range, Mode::Read);
                }
                let mode = if *accumulate {
                    Mode::Update
                } else {
                    Mode::Write
                };
                touch(self, *c, mode);
            }
            OperationKind::Sum {
                target, sources, ..
            } => {
                for source in sources.iter().filter(|source| *source != target) {
                    touch(self, *source, Mode::Read);
                }
                let in_place = sources.contains(target);
                touch(
                    self,
                    *target,
                    if in_place { Mode::Update } else { Mode::Write },
                );
            }
            OperationKind::Post(group) => self.finish_post(stream, operation, group, violations),
            OperationKind::PostMatmul {
                group, a, b, bias, ..
            } => {
                for range in a.iter().chain([b]).chain(bias) {
                    touch(self, *range, Mode::Read);
                }
                self.finish_post(stream, operation, group, violations);
            }
            OperationKind::Wait(group) => {
                for (position, &id) in group.iter().enumerate() {
                    let number = self.counts[rank][operation][position];
                    let transfer = &ranks[rank].transfers[id];
                    let end = &self.ends[rank][id];
                    let slots = match transfer.backend {
                        Backend::Direct(protocol) if !copies(transfer.direction, protocol) => {
                            &end.incoming
                        }
                        _ => &end.completed,
                    };
                    // Signals are in order, or else reported: the last stands for all.
                    if let Some(Some(clock)) = slots.get(number.wrapping_sub(1)) {
                        self.streams[stream].clock.join(clock);
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
                self.streams[stream].clock.tick(stream);
                let (reads, writes) = match collective {
                    Collective::Broadcast(root) => (*root == rank, true),
                    Collective::Reduce(_, root) => (true, *root == rank),
                    _ => (true, true),
                };
                if target == source && reads && writes {
                    touch(self, *target, Mode::Update);
                } else {
                    if reads {
                        touch(self, *source, Mode::Read);
                    }
                    if writes {
                        touch(self, *target, Mode::Write);
                    }
                }
                if let Some(number) = self.collective_number(rank, operation) {
                    let from = match collective {
                        Collective::Broadcast(root) => *root..*root + 1,
                        Collective::Reduce(_, root) if *root != rank => rank..rank + 1,
                        _ => 0..ranks.len(),
                    };
                    for clock in self.collectives[number][from].iter().flatten() {
                        self.streams[stream].clock.join(clock);
                    }
                }
                self.engine_done(rank);
            }
        }
    }

    fn engine_done(&mut self, rank: Rank) {
        self.engines[rank].done += 1;
        self.wake_rank(rank);
    }

    /// Does the copies of a group. Each begins after the start of the group and its own signal, and
    /// no copy of a group counts on another's signal.
    fn finish_post(
        &mut self,
        stream: usize,
        operation: usize,
        group: &[TransferId],
        violations: &mut Violations,
    ) {
        let (rank, ranks) = (self.streams[stream].rank, self.ranks);
        let start = self.streams[stream].clock.clone();
        let mut end = start.clone();
        let mut engine = false;
        let kind = &ranks[rank].operations[operation].kind;
        let stored = matches!(kind, OperationKind::PostMatmul { .. });
        for (position, &id) in group.iter().enumerate() {
            let transfer = &ranks[rank].transfers[id];
            let number = self.counts[rank][operation][position];
            let (peer, partner) = (transfer.peer, self.links.partners[rank][id]);
            let theirs = ranks[peer].transfers[partner].range;
            let moves = match transfer.backend {
                Backend::Direct(protocol) => {
                    if !copies(transfer.direction, protocol) {
                        continue;
                    }
                    Some(protocol)
                }
                Backend::Nccl => None,
            };
            engine |= moves.is_none();
            // A time of its own, so that its signal does not vouch for copies after it.
            let mut clock = start.clone();
            let time = end.tick(stream);
            clock.set(stream, time);
            let receives = transfer.direction == Direction::Receive;
            let ordered_by = match moves {
                Some(_) => self.ends[rank][id].incoming.get(number - 1),
                None if receives => self.ends[peer][partner].arrived.get(number - 1),
                None => None,
            };
            if let Some(Some(signal)) = ordered_by {
                clock.join(signal);
            }
            end.join(&clock);
            self.streams[stream].clock = clock;
            let access = |mode| Access {
                actor: Actor::Operation(rank, operation),
                stream,
                time,
                mode,
            };
            let (own, other) = match receives {
                true => (Mode::Write, Mode::Read),
                false => (Mode::Read, Mode::Write),
            };
            if moves.is_some() {
                self.access(peer, theirs, access(other), violations);
            }
            // A product that is stored straight away leaves the sender's own memory alone.
            if !stored {
                self.access(rank, transfer.range, access(own), violations);
            }
            if moves.is_some() {
                self.signal(stream, operation, id, number, violations);
            }
            let clock = self.streams[stream].clock.clone();
            let before = number
                .checked_sub(2)
                .map(|index| self.links.posts[rank][id][index]);
            let slots = &mut self.ends[rank][id].completed;
            if let Some(before) = before
                && !in_order(slots, number, &clock)
            {
                violations.unordered_signal(rank, before, operation);
            }
            fill(slots, number, clock);
        }
        self.streams[stream].clock = end;
        self.wake_rank(rank);
        if engine {
            self.engine_done(rank);
        }
    }
}

fn filled(slots: &[Option<Clock>], number: usize) -> bool {
    matches!(slots.get(number.wrapping_sub(1)), Some(Some(_)))
}

fn fill(slots: &mut Vec<Option<Clock>>, number: usize, clock: Clock) {
    if slots.len() < number {
        slots.resize(number, None);
    }
    if let Some(slot) = number.checked_sub(1).and_then(|index| slots.get_mut(index)) {
        *slot = Some(clock);
    }
}

/// Whether the value before `number` was written, by something that precedes `clock`.
fn in_order(slots: &[Option<Clock>], number: usize, clock: &Clock) -> bool {
    match slots.get(number.wrapping_sub(2)) {
        Some(Some(before)) => before.precedes(clock),
        _ => false,
    }
}
