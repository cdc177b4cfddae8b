//! The state of all ranks' hosts and streams while a program is simulated.

use super::clock::Clock;
use super::link::Links;
use super::memory::{Access, Memory, Violation};
use super::violation::Violations;
use crate::error::Rank;
use crate::program::ir::{Direction, Protocol};
use crate::program::rank_program::{OperationKind, Range, RankProgram, TransferId};
use std::collections::VecDeque;

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
pub(super) struct StreamState {
    pub(super) rank: Rank,
    /// What it was given and has not done.
    pub(super) queue: VecDeque<Item>,
    /// Whether the first of these has begun: given its signals, or arrived at its collective.
    pub(super) begun: bool,
    pub(super) clock: Clock,
    pub(super) scheduled: bool,
    /// The operation that it did last.
    pub(super) last: Option<usize>,
}

/// The host of a rank.
pub(super) struct Host {
    /// The operation that comes next.
    pub(super) next: usize,
    /// Exchanges whose handles have been given to the peers.
    pub(super) shared: Vec<bool>,
    pub(super) scheduled: bool,
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
    pub(super) first_stream: Vec<usize>,
    pub(super) streams: Vec<StreamState>,
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
    pub(super) stream_work: Vec<usize>,
    pub(super) host_work: Vec<Rank>,
}

/// What a stream needs before it can go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// The other end's post of this number, of a transfer of this rank.
    Peer(TransferId, usize),
    /// This rank's own post of this number, which copies on another stream.
    Own(TransferId, usize),
    /// The engine's operation before it on this rank.
    Engine(usize),
    /// Another rank at the same collective.
    Collective(Rank, usize),
    /// A mark on another stream.
    Event(usize),
}

impl<'a> Run<'a> {
    pub(super) fn new(ranks: &'a [RankProgram], links: &'a Links, total: usize) -> Self {
        let (mut first_stream, mut streams) = (Vec::new(), Vec::with_capacity(total));
        for (rank, rank_program) in ranks.iter().enumerate() {
            first_stream.push(streams.len());
            for stream in 0..rank_program.streams.len() {
                let mut clock = Clock::new(total);
                if stream == 0 {
                    // The state in which the caller hands over.
                    clock.set(streams.len(), 1);
                }
                streams.push(StreamState {
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
            memory: Memory::new(ranks, &first_stream),
            first_stream,
            streams,
            hosts: ranks.iter().map(host).collect(),
            ends: ranks.iter().map(ends).collect(),
            counts: ranks.iter().map(counts).collect(),
            events: Vec::new(),
            engines: ranks.iter().map(engine).collect(),
            collectives: (0..collectives).map(|_| vec![None; ranks.len()]).collect(),
            stream_work: Vec::new(),
            host_work: (0..ranks.len()).collect(),
        }
    }

    /// Lets a stream look again at what it waits for.
    pub(super) fn wake(&mut self, stream: usize) {
        if !self.streams[stream].scheduled && !self.streams[stream].queue.is_empty() {
            self.streams[stream].scheduled = true;
            self.stream_work.push(stream);
        }
    }

    /// Lets every stream of a rank look again.
    pub(super) fn wake_rank(&mut self, rank: Rank) {
        let first = self.first_stream[rank];
        for stream in first..first + self.ranks[rank].streams.len() {
            self.wake(stream);
        }
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

    /// Notes an access and keeps what is wrong with it.
    pub(super) fn access(
        &mut self,
        rank: Rank,
        range: Range,
        access: Access,
        violations: &mut Violations,
    ) {
        let clock = &self.streams[access.stream].clock;
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
    let operations = rank_program.operations.iter().enumerate();
    Engine {
        order: operations
            .filter(|(_, operation)| rank_program.is_engine_work(&operation.kind))
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
