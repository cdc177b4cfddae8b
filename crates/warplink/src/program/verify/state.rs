//! SimulatedRun state of all ranks' hosts and streams.

use super::clock::{Clock, Clocks, Snapshot};
use super::link::Links;
use super::memory::{Memory, RecordedAccess};
use super::numbers::Numbers;
use super::room::Room;
use super::violation::Violations;
use super::word::WordHistory;
use crate::error::Rank;
use crate::program::area::Area;
use crate::program::rank_program::{OperationKind, RankProgram, TransferId};
use std::collections::VecDeque;

/// Execution mode of the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Operations are enqueued one by one: posts are counted.
    Eager,
    /// The run is one graph: a transfer that is posted again waits for completion of its previous post. Only blocking
    /// is simulated, not ordering, because a graph has every ordering of an eager run.
    Captured,
}

/// Entry of a stream's queue.
#[derive(Clone, Copy, Debug)]
pub(super) enum Item {
    /// An operation of the stream's rank.
    Operation(usize),
    /// Records an event for another stream of the rank.
    Record(usize),
    /// Waits for an event, on behalf of an operation.
    WaitEvent(usize, usize),
}

/// Dependency that a stream needs before it can continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// The peer's post of this number, of a transfer of this rank.
    Peer(TransferId, usize),
    /// This rank's own post of this number, on another stream.
    Own(TransferId, usize),
    /// The previous operation of the engine on this rank.
    Engine(usize),
    /// Arrival of another rank at the same collective, by meeting number.
    Collective(Rank, usize),
    /// An event of another stream.
    Event(usize),
}

/// A stream of a rank.
pub(super) struct StreamState {
    pub(super) rank: Rank,
    /// Enqueued items that have not completed.
    pub(super) queue: VecDeque<Item>,
    /// Whether the first item has begun: sent its signals, or arrived at its collective.
    pub(super) begun: bool,
    /// Number of dependencies of the first item that were satisfied.
    pub(super) progress: usize,
    pub(super) clock: Clock,
    pub(super) scheduled: bool,
    /// Last completed operation.
    pub(super) last: Option<usize>,
    /// Whether that was a post, whose signals do not cover later work.
    pub(super) signalled: bool,
}

/// The host of a rank.
pub(super) struct Host {
    /// Next operation to enqueue.
    pub(super) next: usize,
    /// Exchanges whose handles have been passed to the peers.
    pub(super) shared: Vec<bool>,
    /// Number of transfers of the next exchange that the peers have shared.
    pub(super) progress: usize,
    pub(super) scheduled: bool,
}

/// State of one end of a transfer.
pub(super) struct EndWords {
    /// Word that the peer writes: its signals, or the start of its posts to the engine.
    pub(super) incoming: WordHistory,
    /// Word that signals completion of this rank's own copy.
    pub(super) completed: WordHistory,
    /// In a graph, whether the first post has progressed so far that other streams may follow it.
    pub(super) placed: bool,
    /// Waits for its last posts.
    pub(super) waits: Vec<Waited>,
}

/// A wait for a post: its number, and the stream with its clock at that point.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waited {
    pub(super) number: usize,
    pub(super) stream: usize,
    pub(super) time: u32,
}

/// An event that another stream waits for.
pub(super) struct EventState {
    /// Stream that records it.
    pub(super) stream: usize,
    pub(super) reached: bool,
    pub(super) clock: Option<Snapshot>,
    pub(super) waiting: Option<usize>,
}

/// The engine of a rank, which runs its operations serially.
pub(super) struct Engine {
    /// Operations in the host's order.
    pub(super) order: Vec<usize>,
    /// Number of completed operations.
    pub(super) done: usize,
}

/// Rendezvous of the ranks at a collective.
#[derive(Default)]
pub(super) struct Meeting {
    /// Members that have arrived, by index, and their count; cleared when all have.
    pub(super) present: Vec<bool>,
    pub(super) count: usize,
    /// Joined clock of all members before their arrival.
    pub(super) all: Option<Clock>,
    /// Clock of the root alone before its arrival.
    pub(super) root: Option<Clock>,
    pub(super) waiting: Vec<usize>,
    pub(super) left: usize,
}

/// State of the simulation.
pub(super) struct SimulatedRun<'a> {
    pub(super) mode: Mode,
    pub(super) ranks: &'a [RankProgram],
    pub(super) links: &'a Links,
    /// For each rank, the number of its first stream.
    pub(super) first_stream: Vec<usize>,
    pub(super) streams: Vec<StreamState>,
    pub(super) hosts: Vec<Host>,
    pub(super) ends: Vec<Vec<EndWords>>,
    pub(super) events: Vec<EventState>,
    pub(super) engines: Vec<Engine>,
    pub(super) collectives: Vec<Meeting>,
    pub(super) memory: Memory,
    pub(super) clocks: Clocks,
    pub(super) stream_work: Vec<usize>,
    pub(super) host_work: VecDeque<Rank>,
    /// For each rank, the kernel that was launched last, and the snapshot of its completion.
    pub(super) launched: Vec<Option<(usize, Snapshot)>>,
    /// For each rank, the operations that hold device resources; empty if no kernel waits.
    pub(super) rooms: Vec<Room>,
    /// Completed operations in order, if a caller requested them.
    pub(super) done: Option<Vec<(Rank, usize)>>,
}

impl<'a> SimulatedRun<'a> {
    pub(super) fn new(mode: Mode, ranks: &'a [RankProgram], links: &'a Links) -> Self {
        let total = ranks.iter().map(|rank| rank.streams.len()).sum();
        let clocks = Clocks::new(total);
        let (mut first_stream, mut streams) = (Vec::new(), Vec::with_capacity(total));
        for (rank, program) in ranks.iter().enumerate() {
            first_stream.push(streams.len());
            for stream in 0..program.streams.len() {
                let mut clock = clocks.clock();
                if stream == 0 && mode == Mode::Eager {
                    // The caller's state at hand-over is time 1 of its stream.
                    clock.set(streams.len(), 1);
                }
                streams.push(StreamState {
                    rank,
                    queue: VecDeque::new(),
                    begun: false,
                    progress: 0,
                    clock,
                    scheduled: false,
                    last: None,
                    signalled: false,
                });
            }
        }
        let host = |program: &RankProgram| Host {
            next: 0,
            shared: vec![false; program.exchanges.len()],
            progress: 0,
            scheduled: true,
        };
        let collectives = links.meetings.all.len();
        let rooms = if links.kernels.any_waits() {
            vec![Room::new(clocks.clock()); ranks.len()]
        } else {
            Vec::new()
        };
        Self {
            mode,
            ranks,
            links,
            memory: Memory::new(ranks, &first_stream),
            first_stream,
            streams,
            hosts: ranks.iter().map(host).collect(),
            ends: ends(mode, ranks, links),
            events: Vec::new(),
            engines: ranks.iter().map(engine).collect(),
            collectives: (0..collectives).map(|_| Meeting::default()).collect(),
            clocks,
            stream_work: Vec::new(),
            host_work: (0..ranks.len()).rev().collect(),
            launched: vec![None; ranks.len()],
            rooms,
            done: None,
        }
    }

    /// Schedules a stream to check its dependency again.
    pub(super) fn wake(&mut self, stream: usize) {
        // At most once in the work list: an item that cannot go on is woken by what it waits for.
        if !self.streams[stream].scheduled && !self.streams[stream].queue.is_empty() {
            self.streams[stream].scheduled = true;
            self.stream_work.push(stream);
        }
    }

    pub(super) fn wake_all(&mut self, streams: Vec<usize>) {
        for stream in streams {
            self.wake(stream);
        }
    }

    /// Advances the clock of a stream, if clocks are tracked.
    pub(super) fn tick(&mut self, stream: usize) {
        if self.mode == Mode::Eager {
            self.streams[stream].clock.tick(stream);
            self.streams[stream].signalled = false;
        }
    }

    /// First transfer of an exchange that the peer has not shared, and its index.
    pub(super) fn missing_share(&self, rank: Rank, exchange: usize) -> Option<(usize, TransferId)> {
        let own = &self.ranks[rank];
        let from = self.hosts[rank].progress;
        let rest = own.exchanges[exchange].iter().copied().enumerate();
        rest.skip(from).find(|&(_, id)| {
            let peer = own.transfers[id].peer;
            let partner = &self.ranks[peer].transfers[self.links.partners[rank][id]];
            !self.hosts[peer].shared[partner.exchange]
        })
    }

    /// Meeting number of a collective of a rank.
    pub(super) fn collective_number(&self, rank: Rank, operation: usize) -> Option<usize> {
        self.links.meetings.number(rank, operation)
    }

    /// Records an access and its violation.
    pub(super) fn access(
        &mut self,
        rank: Rank,
        area: &Area,
        access: RecordedAccess,
        violations: &mut Violations,
    ) {
        // A captured run has no clocks to compare; the eager run checks the same accesses.
        if self.mode == Mode::Captured || violations.is_full() {
            return;
        }
        let clock = &self.streams[access.stream as usize].clock;
        self.memory.access(rank, area, access, clock, |violation| {
            violations.add(rank, access, violation);
        });
    }
}

/// Ends of all transfers, with the number of readers of each value of their words.
fn ends(mode: Mode, ranks: &[RankProgram], links: &Links) -> Vec<Vec<EndWords>> {
    let mut all: Vec<Vec<EndWords>> = Vec::with_capacity(ranks.len());
    for (rank, program) in ranks.iter().enumerate() {
        let transfers = program.transfers.iter().enumerate();
        let mut ends: Vec<EndWords> = transfers
            .map(|(id, transfer)| {
                let theirs = &links.posts[transfer.peer][links.partners[rank][id]];
                let own = if transfer.initiates() {
                    links.posts[rank][id].len()
                } else {
                    0
                };
                EndWords {
                    incoming: WordHistory::new(theirs.len()),
                    completed: WordHistory::new(own),
                    placed: false,
                    waits: Vec::new(),
                }
            })
            .collect();
        if mode == Mode::Eager {
            // Snapshots are kept for values with readers only; without clocks, as in a graph, there is nothing to
            // keep.
            expect_readers(program, &links.posts[rank], &links.numbers[rank], &mut ends);
        }
        all.push(ends);
    }
    all
}

fn expect_readers(
    program: &RankProgram,
    posts: &[Vec<usize>],
    numbers: &Numbers,
    ends: &mut [EndWords],
) {
    for (index, operation) in program.operations.iter().enumerate() {
        let (group, waits) = match &operation.kind {
            OperationKind::Wait(group) => (&group[..], true),
            kind => (kind.posted(), false),
        };
        for (&id, number) in group.iter().zip(numbers.of(index)) {
            let transfer = &program.transfers[id];
            let mover = transfer.initiates();
            let post = |number: usize| Some(*posts[id].get(number.checked_sub(1)?)?);
            match (waits, mover) {
                (true, false) => ends[id].incoming.expect_reader(number),
                (true, true) => {
                    // A stream needs no word for its own work: program order covers it.
                    let stream = post(number).map(|post| program.operations[post].stream);
                    if stream != Some(operation.stream) {
                        ends[id].completed.expect_reader(number);
                    }
                }
                // The mover's post waits for the peer's signal.
                (false, true) => ends[id].incoming.expect_reader(number),
                (false, false) => {}
            }
        }
    }
}

fn engine(program: &RankProgram) -> Engine {
    Engine {
        order: program.engine_work().map(|(index, _)| index).collect(),
        done: 0,
    }
}
