//! The state of all ranks' hosts and streams while a program is simulated.

use super::clock::{Clock, Clocks, Snapshot};
use super::link::Links;
use super::memory::{Access, Memory};
use super::numbers::Numbers;
use super::room::Room;
use super::violation::Violations;
use super::word::Word;
use crate::error::Rank;
use crate::program::area::Area;
use crate::program::rank_program::{OperationKind, RankProgram, TransferId};
use std::collections::VecDeque;

/// How the ranks run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Operations are enqueued: posts count.
    Eager,
    /// The run is one graph: a transfer that is posted again waits until it is done the time before.
    /// Nothing but who waits for whom is followed: a graph has every order that an eager run has.
    Captured,
}

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

/// What a stream needs before it can go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// The other end's post of this number, of a transfer of this rank.
    Peer(TransferId, usize),
    /// This rank's own post of this number, on another stream.
    Own(TransferId, usize),
    /// The engine's operation before it on this rank.
    Engine(usize),
    /// Another rank at the same collective, by the number of the meeting.
    Collective(Rank, usize),
    /// A mark on another stream.
    Event(usize),
}

/// A stream of a rank.
pub(super) struct StreamState {
    pub(super) rank: Rank,
    /// What it was given and has not done.
    pub(super) queue: VecDeque<Item>,
    /// Whether the first of these has begun: given its signals, or arrived at its collective.
    pub(super) begun: bool,
    /// How much of what the first of these needs was there.
    pub(super) progress: usize,
    pub(super) clock: Clock,
    pub(super) scheduled: bool,
    /// The operation that it did last.
    pub(super) last: Option<usize>,
    /// Whether that was a post, whose signals say nothing of what comes behind them.
    pub(super) signalled: bool,
}

/// The host of a rank.
pub(super) struct Host {
    /// The operation that comes next.
    pub(super) next: usize,
    /// Exchanges whose handles have been given to the peers.
    pub(super) shared: Vec<bool>,
    /// How many transfers of the exchange that comes next the peers have shared.
    pub(super) progress: usize,
    pub(super) scheduled: bool,
}

/// What has become of one end of a transfer.
pub(super) struct End {
    /// What the peer tells: its signals, or that it started its posts to the engine.
    pub(super) incoming: Word,
    /// What this rank tells itself when its own copy is done.
    pub(super) completed: Word,
    /// In a graph, whether the first post is so far that other streams may wait behind it.
    pub(super) placed: bool,
    /// Waits for its last posts.
    pub(super) waits: Vec<Waited>,
}

/// A wait for a post: its number, and the stream with how far that had come.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waited {
    pub(super) number: usize,
    pub(super) stream: usize,
    pub(super) time: u32,
}

/// A point in a stream that another waits for.
pub(super) struct EventState {
    /// The stream that marks it.
    pub(super) stream: usize,
    pub(super) reached: bool,
    pub(super) clock: Option<Snapshot>,
    pub(super) waiting: Option<usize>,
}

/// An operation of the engine: what follows on the rank waits until it is done.
pub(super) struct Engine {
    /// Operations in the host's order.
    pub(super) order: Vec<usize>,
    /// How many of these are done.
    pub(super) done: usize,
}

/// A collective that ranks come to.
#[derive(Default)]
pub(super) struct Meeting {
    /// Which of its ranks have come, by place, and how many; forgotten when all have.
    pub(super) present: Vec<bool>,
    pub(super) count: usize,
    /// What had happened before any of them came.
    pub(super) all: Option<Clock>,
    /// The same for the root alone.
    pub(super) root: Option<Clock>,
    pub(super) waiting: Vec<usize>,
    pub(super) left: usize,
}

/// The ranks as they run.
pub(super) struct Run<'a> {
    pub(super) mode: Mode,
    pub(super) ranks: &'a [RankProgram],
    pub(super) links: &'a Links,
    /// For each rank, the number of its first stream.
    pub(super) first_stream: Vec<usize>,
    pub(super) streams: Vec<StreamState>,
    pub(super) hosts: Vec<Host>,
    pub(super) ends: Vec<Vec<End>>,
    pub(super) events: Vec<EventState>,
    pub(super) engines: Vec<Engine>,
    pub(super) collectives: Vec<Meeting>,
    pub(super) memory: Memory,
    pub(super) clocks: Clocks,
    pub(super) stream_work: Vec<usize>,
    pub(super) host_work: VecDeque<Rank>,
    /// For each rank, the kernel that was launched last, and when it was done.
    pub(super) launched: Vec<Option<(usize, Snapshot)>>,
    /// For each rank, what holds room on its device; empty where no kernel waits.
    pub(super) rooms: Vec<Room>,
    /// The operations that are done, in this order, where somebody asks for it.
    pub(super) done: Option<Vec<(Rank, usize)>>,
}

impl<'a> Run<'a> {
    pub(super) fn new(mode: Mode, ranks: &'a [RankProgram], links: &'a Links) -> Self {
        let total = ranks.iter().map(|rank| rank.streams.len()).sum();
        let clocks = Clocks::new(total);
        let (mut first_stream, mut streams) = (Vec::new(), Vec::with_capacity(total));
        for (rank, program) in ranks.iter().enumerate() {
            first_stream.push(streams.len());
            for stream in 0..program.streams.len() {
                let mut clock = clocks.clock();
                if stream == 0 && mode == Mode::Eager {
                    // The state in which the caller hands over.
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

    /// Lets a stream look again at what it waits for.
    pub(super) fn wake(&mut self, stream: usize) {
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

    /// Counts an operation of a stream, where that is followed.
    pub(super) fn tick(&mut self, stream: usize) {
        if self.mode == Mode::Eager {
            self.streams[stream].clock.tick(stream);
            self.streams[stream].signalled = false;
        }
    }

    /// The first transfer of an exchange that the peer has not shared, and its position.
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

    /// The number of the meeting for a collective of a rank.
    pub(super) fn collective_number(&self, rank: Rank, operation: usize) -> Option<usize> {
        self.links.meetings.number(rank, operation)
    }

    /// Notes an access and keeps what is wrong with it.
    pub(super) fn access(
        &mut self,
        rank: Rank,
        area: &Area,
        access: Access,
        violations: &mut Violations,
    ) {
        if self.mode == Mode::Captured || violations.is_full() {
            return;
        }
        let clock = &self.streams[access.stream as usize].clock;
        self.memory.access(rank, area, access, clock, |violation| {
            violations.add(rank, access, violation);
        });
    }
}

/// The ends of all transfers, with how often each value of their words will be read.
fn ends(mode: Mode, ranks: &[RankProgram], links: &Links) -> Vec<Vec<End>> {
    let mut all: Vec<Vec<End>> = Vec::with_capacity(ranks.len());
    for (rank, program) in ranks.iter().enumerate() {
        let transfers = program.transfers.iter().enumerate();
        let mut ends: Vec<End> = transfers
            .map(|(id, transfer)| {
                let theirs = &links.posts[transfer.peer][links.partners[rank][id]];
                let own = if transfer.initiates() {
                    links.posts[rank][id].len()
                } else {
                    0
                };
                End {
                    incoming: Word::new(theirs.len()),
                    completed: Word::new(own),
                    placed: false,
                    waits: Vec::new(),
                }
            })
            .collect();
        if mode == Mode::Eager {
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
    ends: &mut [End],
) {
    for (index, operation) in program.operations.iter().enumerate() {
        let (group, waits) = match &operation.kind {
            OperationKind::Wait(group) => (group, true),
            OperationKind::Post(group) | OperationKind::PostMatmul { group, .. } => (group, false),
            _ => continue,
        };
        for (&id, number) in group.iter().zip(numbers.of(index)) {
            let transfer = &program.transfers[id];
            let mover = transfer.initiates();
            let post = |number: usize| Some(*posts[id].get(number.checked_sub(1)?)?);
            match (waits, mover) {
                (true, false) => ends[id].incoming.expect_reader(number),
                (true, true) => {
                    // A stream knows what it did itself.
                    let stream = post(number).map(|post| program.operations[post].stream);
                    if stream != Some(operation.stream) {
                        ends[id].completed.expect_reader(number);
                    }
                }
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
