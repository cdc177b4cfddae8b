//! Groups of transfers: their signals, what they move, and waits for them.

use super::clock::Clock;
use super::memory::Mode as AccessMode;
use super::state::{Mode, Run, Waited};
use super::violation::Violations;
use crate::error::Rank;
use crate::program::ir::Direction;
use crate::program::rank_program::{OperationKind, Range, TransferId};

impl Run<'_> {
    /// Writes the word that the peer waits for, behind the post of the transfer before: its values, and those
    /// of the word that tells of this rank's copy, must be written in order.
    pub(super) fn signal(
        &mut self,
        stream: usize,
        (operation, id, number): (usize, TransferId, usize),
        violations: &mut Violations,
    ) {
        let rank = self.streams[stream].rank;
        let peer = self.ranks[rank].transfers[id].peer;
        let partner = self.links.partners[rank][id];
        let clock = &self.streams[stream].clock;
        if self.mode == Mode::Eager {
            if number > 1 && !self.is_over((rank, id), number - 1, clock) {
                let before = self.links.posts[rank][id][number - 2];
                violations.unordered_signal(rank, before, operation);
            }
            let waits = &mut self.ends[rank][id].waits;
            waits.retain(|wait| wait.number >= number);
        }
        let word = &mut self.ends[peer][partner].incoming;
        let woken = word.write(number, stream, clock);
        self.wake_all(woken);
    }

    /// Whether post `number` of an end of a direct transfer has set all its words before what knows `clock`.
    /// What another transfer of its group tells does not say so, as the words of a group are set one by one:
    /// its stream has gone on, or the transfer itself was waited for; or, where it copies nothing, the peer
    /// has told that it met the post.
    pub(super) fn is_over(
        &self,
        (rank, id): (Rank, TransferId),
        number: usize,
        clock: &Clock,
    ) -> bool {
        let transfer = &self.ranks[rank].transfers[id];
        let end = &self.ends[rank][id];
        let told = &self.ends[transfer.peer][self.links.partners[rank][id]].incoming;
        let waited = |wait: &Waited| wait.number >= number && clock.get(wait.stream) >= wait.time;
        told.is_behind(number, clock)
            || end.waits.iter().any(waited)
            || (!transfer.initiates() && end.incoming.precedes(number, clock))
    }

    /// Does what a group moves. Each part begins after the start of the group and its own signal, and
    /// counts on no other's; the signals that it is done come after all parts.
    pub(super) fn finish_post(
        &mut self,
        stream: usize,
        operation: usize,
        group: &[TransferId],
        violations: &mut Violations,
    ) {
        let (rank, ranks, links) = (self.streams[stream].rank, self.ranks, self.links);
        let kind = &ranks[rank].operations[operation].kind;
        let initiators = || {
            let numbered = group.iter().copied().zip(links.numbers[rank].of(operation));
            numbered.filter(|&(id, _)| ranks[rank].transfers[id].initiates())
        };
        if initiators().next().is_none() {
            return;
        }
        // What the group announced at its start says nothing of what it moves.
        self.tick(stream);
        let start = self.streams[stream].clock.clone();
        let mut end = start.clone();
        for (position, (id, number)) in initiators().enumerate() {
            let transfer = &ranks[rank].transfers[id];
            let (peer, partner) = (transfer.peer, links.partners[rank][id]);
            let theirs = ranks[peer].transfers[partner].range;
            let receives = transfer.direction == Direction::Receive;
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
            let mut touch = |run: &mut Self, place: (Rank, Range), mode: AccessMode| {
                run.touch((stream, operation), place, mode, violations);
            };
            // A matmul that is stored straight away leaves what the send names alone; like a copy, it
            // begins after its own signal.
            if let OperationKind::PostMatmul { a, b, bias, .. } = kind {
                for range in a.get(position).into_iter().chain([b]).chain(bias) {
                    touch(self, (rank, *range), AccessMode::Read);
                }
            } else {
                touch(self, (rank, transfer.range), own);
            }
            if !transfer.is_engine() {
                touch(self, (peer, theirs), other);
            }
        }
        self.streams[stream].clock = end;
        let mut engine = false;
        for (id, number) in initiators() {
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
        // The engine's groups tell of all that they did at once.
        let in_order = || number <= 1 || word.precedes(number - 1, clock);
        let is_engine = self.ranks[rank].transfers[id].is_engine();
        if self.mode == Mode::Eager && is_engine && !in_order() {
            let before = self.links.posts[rank][id][number - 2];
            violations.unordered_signal(rank, before, operation);
        }
        let woken = word.write(number, stream, clock);
        self.wake_all(woken);
    }

    /// Adds what a stream learns from a wait.
    pub(super) fn finish_wait(&mut self, stream: usize, operation: usize, group: &[TransferId]) {
        let (rank, ranks) = (self.streams[stream].rank, self.ranks);
        let links = self.links;
        for (&id, number) in group.iter().zip(links.numbers[rank].of(operation)) {
            let transfer = &ranks[rank].transfers[id];
            let end = &mut self.ends[rank][id];
            let initiates = transfer.initiates();
            let first = self.first_stream[rank];
            let posted_on = || {
                let post = *links.posts[rank][id].get(number.checked_sub(1)?)?;
                Some(first + ranks[rank].operations[post].stream)
            };
            // Signals are in order, or else reported: the last stands for all.
            let clock = &mut self.streams[stream].clock;
            if self.mode == Mode::Eager {
                let time = clock.get(stream);
                end.waits.push(Waited {
                    number,
                    stream,
                    time,
                });
            }
            if !initiates {
                end.incoming.read(number, clock);
            } else if posted_on() != Some(stream) {
                end.completed.read(number, clock);
            }
        }
    }
}
