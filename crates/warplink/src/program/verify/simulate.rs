//! Runs hosts and streams as far as they get.

use super::blocked;
use super::diagnostics::{Diagnostics, place_of, place_of_transfer};
use super::link::Links;
use super::state::{EventState, Item, Mode, Need, SimulatedRun};
use super::violation::{Violations, report_unfinished, report_unwritten_outputs};
use crate::error::Rank;
use crate::program::diagnostic::{Diagnostic, DiagnosticKind};
use crate::program::ir::Program;
use crate::program::rank_program::{OperationKind, RankProgram};
use std::collections::HashSet;

/// Limit on the nodes of all clocks together, which bounds their memory.
// About 300 MiB: a node takes some 160 bytes.
const MAX_CLOCK_NODES: usize = 2 << 20;

/// Operations that a host enqueues before other hosts run. Streams keep up with the hosts, so the access histories
/// they touch are still recent.
const HOST_TURN: usize = 64;

/// Simulates the program of all ranks and reports violations.
pub(super) fn simulate(ranks: &[RankProgram], links: &Links, diagnostics: &mut Diagnostics<'_>) {
    let mut run = SimulatedRun::new(Mode::Eager, ranks, links);
    let mut violations = Violations::default();
    if !run.ends(&mut violations, diagnostics) {
        return;
    }
    violations.report(ranks, diagnostics);
    run.lost_signals(diagnostics);
    if diagnostics.list.is_empty() {
        run.ending(diagnostics);
    }
}

/// A valid serial order of the operations of all ranks; `None` if there is none, which is reported.
pub(super) fn order(
    ranks: &[RankProgram],
    links: &Links,
    diagnostics: &mut Diagnostics<'_>,
) -> Vec<(Rank, usize)> {
    let mut run = SimulatedRun::new(Mode::Eager, ranks, links);
    run.done = Some(Vec::new());
    if !run.ends(&mut Violations::default(), diagnostics) {
        return Vec::new();
    }
    run.done.unwrap_or_default()
}

/// Diagnostic of a deadlock when the programs of all ranks run as graphs, if there is one.
pub(super) fn stuck_as_graph(
    program: &Program,
    ranks: &[RankProgram],
    links: &Links,
) -> Option<Diagnostic> {
    let mut diagnostics = Diagnostics::new(program);
    let mut run = SimulatedRun::new(Mode::Captured, ranks, links);
    // Clocks do not advance in this mode, so neither violations nor the limit on clocks can occur.
    run.go(&mut Violations::default());
    blocked::report(&run, &mut diagnostics);
    diagnostics.list.into_iter().next()
}

impl SimulatedRun<'_> {
    /// Runs to the end; reports the reason if that is impossible.
    fn ends(&mut self, violations: &mut Violations, diagnostics: &mut Diagnostics<'_>) -> bool {
        if !self.go(violations) {
            diagnostics.too_large("fewer streams, or fewer transfers between waits");
            return false;
        }
        // Signals are "at least n": a later post's signal may release a wait early, so being blocked here is not what
        // every run does.
        if self.is_overtaken() {
            // The outcome is a race: the run could continue from here in several ways.
            violations.report_signals(self.ranks, diagnostics);
            if !diagnostics.list.is_empty() {
                return false;
            }
        }
        !blocked::report(self, diagnostics)
    }

    /// Whether a stream that waits for a post could be released early by the signal of a later post of the same
    /// transfer.
    fn is_overtaken(&self) -> bool {
        let heads = self.streams.iter().enumerate();
        let mut heads = heads.filter_map(|(stream, state)| match state.queue.front() {
            Some(&Item::Operation(operation)) => Some((state.rank, self.need(stream, operation)?)),
            _ => None,
        });
        heads.any(|(rank, need)| match need {
            Need::Peer(id, number) => self.ends[rank][id].incoming.is_above(number),
            Need::Own(id, number) => self.ends[rank][id].completed.is_above(number),
            Need::Engine(_) | Need::Collective(..) | Need::Event(_) => false,
        })
    }

    /// Runs as far as possible; `false` if the clocks exceed their memory limit.
    fn go(&mut self, violations: &mut Violations) -> bool {
        loop {
            // Streams before hosts, so that queues and the histories of memory stay short.
            if let Some(stream) = self.stream_work.pop() {
                self.streams[stream].scheduled = false;
                while self.advance(stream, violations) {
                    if self.clocks.nodes() > MAX_CLOCK_NODES {
                        return false;
                    }
                }
            } else if let Some(rank) = self.host_work.pop_front() {
                self.hosts[rank].scheduled = false;
                self.run_host(rank);
            } else {
                return true;
            }
        }
    }

    fn run_host(&mut self, rank: Rank) {
        let rank_program = &self.ranks[rank];
        let end = self.hosts[rank].next + HOST_TURN;
        while let Some(operation) = rank_program.operations.get(self.hosts[rank].next) {
            let index = self.hosts[rank].next;
            if index == end {
                return self.schedule_host(rank);
            }
            let stream = self.first_stream[rank] + operation.stream;
            match operation.kind {
                OperationKind::Share(exchange) => {
                    if !self.share(rank, exchange) {
                        return;
                    }
                }
                OperationKind::Synchronize(other) => {
                    let other = self.first_stream[rank] + other;
                    let event = self.events.len();
                    self.events.push(EventState {
                        stream: other,
                        reached: false,
                        clock: None,
                        waiting: None,
                    });
                    self.streams[other].queue.push_back(Item::Record(event));
                    self.streams[stream]
                        .queue
                        .push_back(Item::WaitEvent(event, index));
                    self.wake(other);
                    self.wake(stream);
                }
                _ => {
                    self.streams[stream].queue.push_back(Item::Operation(index));
                    self.wake(stream);
                }
            }
            self.hosts[rank].next += 1;
        }
    }

    fn schedule_host(&mut self, rank: Rank) {
        if !self.hosts[rank].scheduled {
            self.hosts[rank].scheduled = true;
            self.host_work.push_back(rank);
        }
    }

    /// Passes the exchange's handles to the peers; returns whether all of theirs have arrived.
    fn share(&mut self, rank: Rank, exchange: usize) -> bool {
        if !self.hosts[rank].shared[exchange] {
            self.hosts[rank].shared[exchange] = true;
            let peers: HashSet<Rank> = self.ranks[rank].exchanges[exchange]
                .iter()
                .map(|&id| self.ranks[rank].transfers[id].peer)
                .collect();
            for peer in peers {
                self.schedule_host(peer);
            }
        }
        let missing = self.missing_share(rank, exchange);
        self.hosts[rank].progress = missing.map_or(0, |(position, _)| position);
        missing.is_none()
    }

    /// Reports unmatched posts of one end: each leaves a signal behind that the next run would mistake for its own.
    fn lost_signals(&self, diagnostics: &mut Diagnostics<'_>) {
        for (rank, rank_program) in self.ranks.iter().enumerate() {
            for (id, transfer) in rank_program.transfers.iter().enumerate() {
                let partner = self.links.partners[rank][id];
                let own = &self.links.posts[rank][id];
                let theirs = self.links.posts[transfer.peer][partner].len();
                if own.len() <= theirs {
                    continue;
                }
                let peer = transfer.peer;
                let places = [
                    place_of(self.ranks, rank, own[theirs]),
                    place_of_transfer(self.ranks, peer, partner),
                ];
                diagnostics.add(DiagnosticKind::LostSignal, places, |[post, other]| {
                    format!(
                        "{post} signals rank {peer}, which posts the other end, {other}, only {theirs} times; \
                         nothing waits for the signal, and the next run would take it for its own"
                    )
                });
            }
        }
    }

    /// Reports transfers whose last post may not have completed when the run ends, unless streams order the next
    /// run's first post after it or after a wait for it. `loose` are streams that are reported already.
    fn unfinished_signals(
        &self,
        rank: Rank,
        loose: &HashSet<usize>,
        diagnostics: &mut Diagnostics<'_>,
    ) {
        let first_stream = self.first_stream[rank];
        let program = &self.ranks[rank];
        // The caller's next work follows everything on its stream.
        let mut end = self.streams[first_stream].clock.clone();
        end.tick(first_stream);
        let stream_of = |operation: usize| program.operations[operation].stream;
        for (id, transfer) in program.transfers.iter().enumerate() {
            let posts = &self.links.posts[rank][id];
            let (Some(&first), Some(&last)) = (posts.first(), posts.last()) else {
                continue;
            };
            let before = streams_before(program, first);
            let is_over = |clock| self.is_over((rank, id), posts.len(), clock);
            let mut ends = before
                .iter()
                .map(|stream| &self.streams[first_stream + stream].clock);
            if transfer.is_engine()
                || before.contains(&stream_of(last))
                || loose.contains(&(first_stream + stream_of(last)))
                || is_over(&end)
                || ends.any(is_over)
            {
                continue;
            }
            let places = [last, first].map(|post| place_of(self.ranks, rank, post));
            diagnostics.add(DiagnosticKind::LostSignal, places, |[last, first]| {
                format!(
                    "{last} may not be over when the run ends, and its signal may overwrite that of the \
                     next run's {first}: wait for that transfer itself, or synchronize with the stream of \
                     its post"
                )
            });
        }
    }

    /// Checks the end state: all work joined, all outputs written.
    fn ending(&self, diagnostics: &mut Diagnostics<'_>) {
        for (rank, rank_program) in self.ranks.iter().enumerate() {
            let end = &self.streams[self.first_stream[rank]].clock;
            let mut loose: HashSet<usize> = HashSet::new();
            for (index, kind) in rank_program.streams.iter().enumerate().skip(1) {
                let number = self.first_stream[rank] + index;
                let stream = &self.streams[number];
                if let Some(last) = stream.last
                    && end.get(number) < stream.clock.get(number)
                {
                    loose.insert(number);
                    let place = place_of(self.ranks, rank, last);
                    diagnostics.add(DiagnosticKind::Unjoined, [place], |[last]| {
                        format!(
                            "{last} is enqueued on {kind}, which the caller's stream does not synchronize \
                             with afterwards; the run may end before it"
                        )
                    });
                }
            }
            for (access, tensor) in self.memory.unfinished(rank, end) {
                if !loose.contains(&(access.stream as usize)) {
                    report_unfinished(self.ranks, rank, tensor, &access, diagnostics);
                }
            }
            self.beside_the_run_before(rank, diagnostics);
            self.unfinished_signals(rank, &loose, diagnostics);
            report_unwritten_outputs(rank_program, &self.memory, diagnostics);
        }
    }
}

/// Streams whose work of the previous run has completed before an operation begins: its own, and those that it
/// synchronizes with.
fn streams_before(program: &RankProgram, operation: usize) -> HashSet<usize> {
    let mut before: Vec<HashSet<usize>> = (0..program.streams.len())
        .map(|stream| HashSet::from([stream]))
        .collect();
    for earlier in &program.operations[..operation] {
        if let OperationKind::Synchronize(other) = earlier.kind {
            let others = before[other].clone();
            before[earlier.stream].extend(others);
        }
    }
    before.swap_remove(program.operations[operation].stream)
}
