//! Groups of transfers: their signals, their copies, and waits for them.

use super::clock::Clock;
use super::memory::Mode as AccessMode;
use super::state::{Mode, SimulatedRun, Waited};
use super::violation::Violations;
use crate::error::Rank;
use crate::program::ir::Direction;
use crate::program::rank_program::{OperationKind, Range, TransferId};

impl SimulatedRun<'_> {
    /// Writes the word that the peer waits for, after the previous post of the transfer. Its values, and those of the
    /// word that signals completion of this rank's copy, must be written in order.
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
            // `is_over` is only asked about this post or later ones from here on.
            waits.retain(|wait| wait.number >= number);
        }
        let word = &mut self.ends[peer][partner].incoming;
        let woken = word.write(number, stream, clock);
        self.wake_all(woken);
    }

    /// Whether post `number` of an end of a direct transfer has set all its words before a point with `clock`. The
    /// signal of another transfer of its group does not imply that, because the words of a group are set one by one.
    /// Instead, its stream must have advanced, or the transfer itself was waited for; or, if it copies nothing, the
    /// peer has signalled that it matched the post.
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

    /// Performs the copies of a group. Each part begins after the start of the group and its own signal, and relies
    /// on no other part's signal; the completion signals follow all parts.
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
        // Signals sent at the start of the group do not cover its copies, so these get a later time.
        self.tick(stream);
        let start = self.streams[stream].clock.clone();
        let mut end = start.clone();
        for (position, (id, number)) in initiators().enumerate() {
            let transfer = &ranks[rank].transfers[id];
            let (peer, partner) = (transfer.peer, links.partners[rank][id]);
            let theirs = ranks[peer].transfers[partner].range;
            let receives = transfer.direction == Direction::Receive;
            let mut clock = start.clone();
            // Through the engine, a receive follows the start of its send; a send implies nothing about its receive.
            if !transfer.is_engine() || receives {
                self.ends[rank][id].incoming.read(number, &mut clock);
            }
            end.join(&clock);
            // Each copy gets the group's start and its own signal as its clock, so that it cannot borrow order from
            // another member's signal.
            self.streams[stream].clock = clock;
            let (own, other) = if receives {
                (AccessMode::Write, AccessMode::Read)
            } else {
                (AccessMode::Read, AccessMode::Write)
            };
            let mut touch = |run: &mut Self, place: (Rank, Range), mode: AccessMode| {
                run.touch((stream, operation), place, mode, violations);
            };
            // A matmul stored directly at the peer does not read the range that the send names; like a copy, it
            // begins after its own signal.
            if let OperationKind::PostMatmul(it) = kind {
                let left = it.a.get(position).into_iter();
                for range in left.chain([&it.b]).chain(&it.bias) {
                    touch(self, (rank, *range), AccessMode::Read);
                }
            } else {
                touch(self, (rank, transfer.range), own);
            }
            // The engine writes the receiver's buffer on the receiver's behalf, whose own post records that access.
            if !transfer.is_engine() {
                touch(self, (peer, theirs), other);
            }
        }
        // Completion signals follow all copies, so they carry the joined clock.
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

    /// Signals completion of this rank's part of a transfer to its other streams.
    fn complete(
        &mut self,
        stream: usize,
        (operation, id, number): (usize, TransferId, usize),
        violations: &mut Violations,
    ) {
        let rank = self.streams[stream].rank;
        let clock: &Clock = &self.streams[stream].clock;
        let word = &mut self.ends[rank][id].completed;
        // The engine signals completion of a whole group at once.
        let in_order = || number <= 1 || word.precedes(number - 1, clock);
        let is_engine = self.ranks[rank].transfers[id].is_engine();
        if self.mode == Mode::Eager && is_engine && !in_order() {
            let before = self.links.posts[rank][id][number - 2];
            violations.unordered_signal(rank, before, operation);
        }
        let woken = word.write(number, stream, clock);
        self.wake_all(woken);
    }

    /// Joins the clocks that a stream learns from a wait.
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
            // Signals arrive in order or were reported, so the last one subsumes the earlier ones.
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
