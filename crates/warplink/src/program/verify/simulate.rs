//! Running hosts and streams as far as they get.

use super::clock::Clock;
use super::link::Links;
use super::memory::{Access, Memory, Violation};
use super::violation::{Violations, report_unfinished, report_unwritten_outputs};
use super::{Diagnostics, blocked};
use crate::error::Rank;
use crate::program::diagnostic::DiagnosticKind;
use crate::program::ir::{Backend, Direction, Protocol};
use crate::program::rank_program::{OperationKind, RankProgram, TransferId};
use std::collections::{HashSet, VecDeque};

/// The most numbers that all clocks together may hold; beyond it, verifying would exhaust memory.
const MAX_CLOCK_ENTRIES: usize = 1 << 30;

/// What a stream was given.
#[derive(Clone, Copy, Debug)]
pub(super) enum Item {
    /// An operation of the stream's rank.
    Operation(usize),
    /// Marks this point for another stream of the rank.
    Record(usize),
    /// Waits for a mark, on behalf of an operation.
    WaitEvent(usize, usize),
}

/// A stream of a rank.
pub(super) struct Lane {
    pub(super) rank: Rank,
    /// What it was given and has not done.
    pub(super) queue: VecDeque<Item>,
    /// Whether the first of these has begun: given its signals, or arrived at its collective.
    pub(super) begun: bool,
    pub(super) clock: Clock,
    scheduled: bool,
    /// The operation that it did last.
    pub(super) last: Option<usize>,
}

/// The host of a rank.
pub(super) struct Host {
    /// The operation that comes next.
    pub(super) next: usize,
    /// Exchanges whose handles have been given to the peers.
    pub(super) shared: Vec<bool>,
    scheduled: bool,
}

/// What has become of one end of a transfer.
#[derive(Default)]
pub(super) struct End {
    /// The word that the peer writes: the state at each of its values, from 1.
    pub(super) incoming: Vec<Option<Clock>>,
    /// The word that this rank writes when its own copy is done.
    pub(super) completed: Vec<Option<Clock>>,
    /// Starts of this end's posts to the engine.
    pub(super) arrived: Vec<Option<Clock>>,
}

/// An operation of the engine: what follows on the rank waits until it is done.
#[derive(Default)]
pub(super) struct Engine {
    /// Operations in the host's order.
    pub(super) order: Vec<usize>,
    /// How many of these are done.
    pub(super) done: usize,
}

/// The ranks as they run.
pub(super) struct Run<'a> {
    pub(super) ranks: &'a [RankProgram],
    pub(super) links: &'a Links,
    /// For each rank, the number of its first stream.
    pub(super) first_lane: Vec<usize>,
    pub(super) lanes: Vec<Lane>,
    pub(super) hosts: Vec<Host>,
    pub(super) ends: Vec<Vec<End>>,
    /// For each rank and operation: which of its posts of a transfer a post is, or how many posts
    /// a wait covers; in the order of the group.
    pub(super) counts: Vec<Vec<Vec<usize>>>,
    /// For each event: the state that it marks, and the stream that marks it.
    pub(super) events: Vec<(Option<Clock>, usize)>,
    pub(super) engines: Vec<Engine>,
    /// For each collective, the state in which each rank came to it.
    pub(super) collectives: Vec<Vec<Option<Clock>>>,
    pub(super) memory: Memory,
    lane_work: Vec<usize>,
    host_work: Vec<Rank>,
}

/// Runs the program of all ranks and reports what goes wrong.
pub(super) fn simulate(ranks: &[RankProgram], links: &Links, diagnostics: &mut Diagnostics<'_>) {
    let lanes: usize = ranks.iter().map(|rank| rank.streams.len()).sum();
    if too_large(ranks, lanes) {
        diagnostics.too_large();
        return;
    }
    let mut run = Run::new(ranks, links, lanes);
    let mut violations = Violations::default();
    run.go(&mut violations);
    let stuck = blocked::report(&run, diagnostics);
    if stuck {
        return;
    }
    violations.report(ranks, diagnostics);
    run.lost_signals(diagnostics);
    if diagnostics.list.is_empty() {
        run.ending(diagnostics);
    }
}

fn too_large(ranks: &[RankProgram], lanes: usize) -> bool {
    let operations = ranks.iter().flat_map(|rank| &rank.operations);
    let clocks: usize = operations
        .map(|operation| match &operation.kind {
            OperationKind::Post(group) | OperationKind::PostMatmul { group, .. } => 2 * group.len(),
            OperationKind::Synchronize(_) | OperationKind::Collective { .. } => 1,
            _ => 0,
        })
        .sum();
    clocks
        .saturating_add(lanes)
        .checked_mul(lanes)
        .is_none_or(|entries| entries > MAX_CLOCK_ENTRIES)
}

impl<'a> Run<'a> {
    fn new(ranks: &'a [RankProgram], links: &'a Links, total: usize) -> Self {
        let (mut first_lane, mut lanes) = (Vec::new(), Vec::with_capacity(total));
        for (rank, rank_program) in ranks.iter().enumerate() {
            first_lane.push(lanes.len());
            for stream in 0..rank_program.streams.len() {
                let mut clock = Clock::new(total);
                if stream == 0 {
                    // The state in which the caller hands over.
                    clock.set(lanes.len(), 1);
                }
                lanes.push(Lane {
                    rank,
                    queue: VecDeque::new(),
                    begun: false,
                    clock,
                    scheduled: false,
                    last: None,
                });
            }
        }
        let host = |rank_program: &RankProgram| Host {
            next: 0,
            shared: vec![false; rank_program.exchanges.len()],
            scheduled: true,
        };
        let ends = |rank_program: &RankProgram| {
            let end = |_| End::default();
            rank_program.transfers.iter().map(end).collect()
        };
        let collectives = links.collectives.first().map_or(0, Vec::len);
        Self {
            ranks,
            links,
            memory: Memory::new(ranks, &first_lane),
            first_lane,
            lanes,
            hosts: ranks.iter().map(host).collect(),
            ends: ranks.iter().map(ends).collect(),
            counts: ranks.iter().map(counts).collect(),
            events: Vec::new(),
            engines: ranks.iter().map(engine).collect(),
            collectives: (0..collectives).map(|_| vec![None; ranks.len()]).collect(),
            lane_work: Vec::new(),
            host_work: (0..ranks.len()).collect(),
        }
    }

    fn go(&mut self, violations: &mut Violations) {
        loop {
            if let Some(rank) = self.host_work.pop() {
                self.hosts[rank].scheduled = false;
                self.run_host(rank);
            } else if let Some(lane) = self.lane_work.pop() {
                self.lanes[lane].scheduled = false;
                while self.advance(lane, violations) {}
            } else {
                return;
            }
        }
    }

    /// Lets a stream look again at what it waits for.
    pub(super) fn wake(&mut self, lane: usize) {
        if !self.lanes[lane].scheduled && !self.lanes[lane].queue.is_empty() {
            self.lanes[lane].scheduled = true;
            self.lane_work.push(lane);
        }
    }

    /// Lets every stream of a rank look again.
    pub(super) fn wake_rank(&mut self, rank: Rank) {
        let first = self.first_lane[rank];
        for lane in first..first + self.ranks[rank].streams.len() {
            self.wake(lane);
        }
    }

    fn run_host(&mut self, rank: Rank) {
        let rank_program = &self.ranks[rank];
        while let Some(operation) = rank_program.operations.get(self.hosts[rank].next) {
            let index = self.hosts[rank].next;
            let lane = self.first_lane[rank] + operation.stream;
            match operation.kind {
                OperationKind::Share(exchange) => {
                    if !self.share(rank, exchange) {
                        return;
                    }
                }
                OperationKind::Synchronize(other) => {
                    let other = self.first_lane[rank] + other;
                    let event = self.events.len();
                    self.events.push((None, other));
                    self.lanes[other].queue.push_back(Item::Record(event));
                    self.lanes[lane]
                        .queue
                        .push_back(Item::WaitEvent(event, index));
                    self.wake(other);
                    self.wake(lane);
                }
                _ => {
                    self.lanes[lane].queue.push_back(Item::Operation(index));
                    self.wake(lane);
                }
            }
            self.hosts[rank].next += 1;
        }
    }

    /// Gives the exchange's handles to the peers; whether all of theirs are there.
    fn share(&mut self, rank: Rank, exchange: usize) -> bool {
        if !self.hosts[rank].shared[exchange] {
            self.hosts[rank].shared[exchange] = true;
            let peers: HashSet<Rank> = self.ranks[rank].exchanges[exchange]
                .iter()
                .map(|&id| self.ranks[rank].transfers[id].peer)
                .collect();
            for peer in peers {
                if !self.hosts[peer].scheduled {
                    self.hosts[peer].scheduled = true;
                    self.host_work.push(peer);
                }
            }
        }
        self.missing_share(rank, exchange).is_none()
    }

    /// The first transfer of an exchange that the peer has not shared.
    pub(super) fn missing_share(&self, rank: Rank, exchange: usize) -> Option<TransferId> {
        let own = &self.ranks[rank];
        own.exchanges[exchange].iter().copied().find(|&id| {
            let peer = own.transfers[id].peer;
            let partner = &self.ranks[peer].transfers[self.links.partners[rank][id]];
            !self.hosts[peer].shared[partner.exchange]
        })
    }

    /// The number of a collective among those of its rank.
    pub(super) fn collective_number(&self, rank: Rank, operation: usize) -> Option<usize> {
        self.links.collectives[rank]
            .binary_search(&operation)
            .ok()
            .filter(|number| *number < self.collectives.len())
    }

    /// Posts of one end without a counterpart leave a signal behind that the next run would take
    /// for its own.
    fn lost_signals(&self, diagnostics: &mut Diagnostics<'_>) {
        for (rank, rank_program) in self.ranks.iter().enumerate() {
            for (id, transfer) in rank_program.transfers.iter().enumerate() {
                let partner = self.links.partners[rank][id];
                let own = &self.links.posts[rank][id];
                let theirs = self.links.posts[transfer.peer][partner].len();
                if own.len() <= theirs {
                    continue;
                }
                let places = vec![
                    super::place_of(self.ranks, rank, own[theirs]),
                    super::place_of_transfer(self.ranks, transfer.peer, partner),
                ];
                diagnostics.add(DiagnosticKind::LostSignal, places.clone(), |said| {
                    format!(
                        "{} signals rank {}, which posts the other end, {}, only {theirs} times: \
                         nothing waits for the signal, and the next run would take it for its own",
                        said.say(&places[0]),
                        transfer.peer,
                        said.say(&places[1])
                    )
                });
            }
        }
    }

    /// What must hold at the end: all work joined, all outputs written.
    fn ending(&self, diagnostics: &mut Diagnostics<'_>) {
        for (rank, rank_program) in self.ranks.iter().enumerate() {
            let end = &self.lanes[self.first_lane[rank]].clock;
            let mut loose: HashSet<usize> = HashSet::new();
            for stream in 1..rank_program.streams.len() {
                let number = self.first_lane[rank] + stream;
                let lane = &self.lanes[number];
                if let Some(last) = lane.last
                    && end.get(number) < lane.clock.get(number)
                {
                    loose.insert(number);
                    let places = vec![super::place_of(self.ranks, rank, last)];
                    diagnostics.add(DiagnosticKind::Unjoined, places.clone(), |said| {
                        format!(
                            "{} is enqueued on {}, which the caller's stream does not synchronize \
                             with afterwards: the run may end before it",
                            said.say(&places[0]),
                            rank_program.streams[stream]
                        )
                    });
                }
            }
            for (access, tensor) in self.memory.unfinished(rank, end) {
                if !loose.contains(&access.lane) {
                    report_unfinished(self.ranks, rank, tensor, &access, diagnostics);
                }
            }
            report_unwritten_outputs(rank_program, &self.memory, diagnostics);
        }
    }

    /// Notes an access and keeps what is wrong with it.
    pub(super) fn access(
        &mut self,
        rank: Rank,
        range: crate::program::Range,
        access: Access,
        violations: &mut Violations,
    ) {
        let clock = &self.lanes[access.lane].clock;
        let found: Vec<Violation> = self.memory.access(rank, range, access, clock);
        for violation in found {
            violations.add(rank, access, range, violation);
        }
    }
}

/// Numbers the posts of each transfer, and counts the posts before each wait.
fn counts(rank_program: &RankProgram) -> Vec<Vec<usize>> {
    let mut posted = vec![0; rank_program.transfers.len()];
    let count = |kind: &OperationKind| match kind {
        OperationKind::Post(group) | OperationKind::PostMatmul { group, .. } => {
            let number = |&id: &TransferId| {
                posted[id] += 1;
                posted[id]
            };
            group.iter().map(number).collect()
        }
        OperationKind::Wait(group) => group.iter().map(|&id| posted[id]).collect(),
        _ => Vec::new(),
    };
    rank_program
        .operations
        .iter()
        .map(|operation| &operation.kind)
        .map(count)
        .collect()
}

fn engine(rank_program: &RankProgram) -> Engine {
    let uses = |kind: &OperationKind| match kind {
        OperationKind::Collective { .. } => true,
        kind => kind
            .posted()
            .iter()
            .any(|&id| rank_program.transfers[id].backend == Backend::Nccl),
    };
    let operations = rank_program.operations.iter().enumerate();
    Engine {
        order: operations
            .filter(|(_, operation)| uses(&operation.kind))
            .map(|(index, _)| index)
            .collect(),
        done: 0,
    }
}

/// Whether this end of a direct transfer copies.
pub(super) fn copies(direction: Direction, protocol: Protocol) -> bool {
    matches!(
        (direction, protocol),
        (Direction::Receive, Protocol::Get) | (Direction::Send, Protocol::Put)
    )
}
