//! Determines whether a rank's operations can be captured into one graph.
//!
//! Capture begins on the caller's stream. Another stream joins the capture when it first waits for an event of a
//! captured stream. Work enqueued on it earlier is executed once instead of being captured, and is missing from every
//! launch of the graph. At the end, the caller's stream has to follow all captured work through events: the signals
//! of transfers are not dependencies of a graph.
//!
//! The signal values of a graph are fixed. So the signal that permits a peer to read or write a buffer may be sent
//! again only after a wait, and the last one is waited for in the graph. All posts of an end wait for the same
//! values, so events have to order them: if two waited concurrently, either could consume the signal meant for the
//! other, or observe one left by the previous launch.

use super::clock::{Clock, Clocks, Snapshot};
use super::diagnostics::{Diagnostics, place_of};
use super::link::Links;
use super::simulate;
use crate::program::diagnostic::{Diagnostic, DiagnosticKind};
use crate::program::ir::Program;
use crate::program::rank_program::{OperationKind, RankProgram, TransferId};
use std::collections::HashMap;

/// Reason why a rank's operations cannot be captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Obstacle {
    /// The operation is on a stream that is not captured yet.
    NotRecorded(usize),
    /// The operation waits for this stream, which is not captured yet.
    WaitsForOutside(usize, usize),
    /// The operation posts a transfer again without a wait after its previous post.
    PostedAgain(usize, TransferId),
    /// The operation posts a transfer again, and no events order it after the previous post.
    PostedBeside(usize, TransferId),
    /// The operation posts a transfer without a later wait for it.
    NotAwaited(usize, TransferId),
    /// The caller's stream does not follow the operation.
    NotJoined(usize),
}

/// Point in a stream: its index, and a snapshot of everything captured before it.
type Mark = (usize, Snapshot);

struct Recording<'a> {
    program: &'a RankProgram,
    /// Whether each stream is being captured.
    recorded: Vec<bool>,
    clocks: Vec<Clock>,
    /// Last operation of each stream.
    last: Vec<usize>,
    /// For each transfer, the post that other streams can follow: the first post of an end that only signals, the
    /// last of one that copies.
    places: Vec<Option<Mark>>,
    /// For each transfer that is posted and not waited for, the post.
    open: Vec<Option<usize>>,
    /// For each transfer, stream and clock of the post that the next post has to follow: the first of an end that
    /// only signals, the last of one that copies.
    posted: Vec<Option<(usize, u32)>>,
    /// Whether events order the engine's operations.
    orders_engine: bool,
    engine_last: Option<Mark>,
    engine_posts: HashMap<TransferId, Mark>,
}

/// Reason why a program that runs eagerly cannot run as a graph, if there is one.
pub(super) fn eager_only(
    program: &Program,
    ranks: &[RankProgram],
    links: &Links,
) -> Option<Diagnostic> {
    let mut obstacles = ranks
        .iter()
        .filter_map(|rank| Some((rank, obstacle(rank)?)));
    if let Some((rank, obstacle)) = obstacles.next() {
        return Some(obstacle.diagnostic(program, ranks, rank));
    }
    // A graph blocks where an eager run does not only at a signal that is sent again, so other programs need no
    // second simulation.
    let again = |rank: &RankProgram| {
        let mut transfers = rank.transfers.iter().zip(&links.posts[rank.rank]);
        transfers.any(|(transfer, posts)| posts.len() > 1 && !transfer.initiates())
    };
    if !ranks.iter().any(again) {
        return None;
    }
    let stuck = simulate::stuck_as_graph(program, ranks, links)?;
    let message = format!("as a graph, the program would not end: {}", stuck.message);
    Some(Diagnostic::new(
        DiagnosticKind::EagerOnly,
        message,
        stuck.places,
    ))
}

impl Obstacle {
    fn diagnostic(
        self,
        program: &Program,
        ranks: &[RankProgram],
        rank: &RankProgram,
    ) -> Diagnostic {
        let (Self::NotRecorded(index)
        | Self::WaitsForOutside(index, _)
        | Self::PostedAgain(index, _)
        | Self::PostedBeside(index, _)
        | Self::NotAwaited(index, _)
        | Self::NotJoined(index)) = self;
        let place = place_of(ranks, rank.rank, index);
        let said = Diagnostics::new(program).say(&place);
        let stream = rank.streams[rank.operations[index].stream];
        let why = match self {
            Self::NotRecorded(_) => format!(
                "is on {stream} before that stream synchronizes with the caller's, so a graph would \
                 not contain it"
            ),
            Self::WaitsForOutside(_, other) => format!(
                "waits for {} before that stream synchronizes with the caller's, which a graph cannot",
                rank.streams[other]
            ),
            Self::PostedAgain(_, id) => format!(
                "posts '{}' again without a wait for the post before, and the signals of a graph do \
                 not count",
                rank.transfers[id].name
            ),
            Self::PostedBeside(_, id) => format!(
                "posts '{}' again on {stream}, which does not synchronize with the post before, and the signals \
                 of a graph do not count",
                rank.transfers[id].name
            ),
            Self::NotAwaited(_, id) => format!(
                "posts '{}' without a later wait for it, which a graph requires",
                rank.transfers[id].name
            ),
            Self::NotJoined(_) => format!(
                "is on {stream}, with which the caller's stream does not synchronize afterwards, which a \
                 graph requires"
            ),
        };
        let message = format!("{said} {why}; the program runs eagerly only");
        Diagnostic::new(DiagnosticKind::EagerOnly, message, vec![place])
    }
}

/// Obstacle to capturing `program`, if there is one.
fn obstacle(program: &RankProgram) -> Option<Obstacle> {
    let streams = program.streams.len();
    let clocks = Clocks::new(streams);
    let mut recording = Recording {
        program,
        recorded: (0..streams).map(|stream| stream == 0).collect(),
        clocks: vec![clocks.clock(); streams],
        last: vec![0; streams],
        places: vec![None; program.transfers.len()],
        open: vec![None; program.transfers.len()],
        posted: vec![None; program.transfers.len()],
        orders_engine: program.orders_engine(),
        engine_last: None,
        engine_posts: HashMap::new(),
    };
    let recorded = (0..program.operations.len()).try_for_each(|index| recording.record(index));
    recorded.and_then(|()| recording.end()).err()
}

impl Recording<'_> {
    fn record(&mut self, index: usize) -> Result<(), Obstacle> {
        let operation = &self.program.operations[index];
        let stream = operation.stream;
        match &operation.kind {
            OperationKind::Allocate(_) | OperationKind::Deallocate(_) | OperationKind::Share(_) => {
                Ok(())
            }
            OperationKind::Synchronize(other) => {
                if !self.recorded[*other] {
                    // Neither stream is captured: nothing would fail during capture, but the graph would miss this
                    // dependency.
                    return Err(if self.recorded[stream] {
                        Obstacle::WaitsForOutside(index, *other)
                    } else {
                        Obstacle::NotRecorded(index)
                    });
                }
                let mark = (*other, self.clocks[*other].snapshot(*other));
                self.follow(index, stream, &mark);
                Ok(())
            }
            OperationKind::Wait(group) => self.wait(index, stream, group),
            OperationKind::Post(group) => self.post(index, stream, group),
            OperationKind::PostMatmul(it) => {
                self.check_order(index, stream, &it.group)?;
                self.add(index, stream)?;
                it.group.iter().for_each(|id| self.note_post(stream, *id));
                self.place(stream, &it.group);
                Ok(())
            }
            OperationKind::Collective(_) => self.engine(index, stream, &[]),
            OperationKind::Zero(_)
            | OperationKind::Copy { .. }
            | OperationKind::Matmul(_)
            | OperationKind::Elementwise(_)
            | OperationKind::Kernel(_) => self.add(index, stream),
        }
    }

    /// Appends an operation to a stream.
    fn add(&mut self, index: usize, stream: usize) -> Result<(), Obstacle> {
        if !self.recorded[stream] {
            return Err(Obstacle::NotRecorded(index));
        }
        self.clocks[stream].tick(stream);
        self.last[stream] = index;
        Ok(())
    }

    /// Makes a stream wait for a mark of another, so that it is captured from there on.
    fn follow(&mut self, index: usize, stream: usize, (other, mark): &Mark) {
        // Program order covers a stream's own marks, and a mark of its own does not make a stream captured.
        if *other != stream {
            self.recorded[stream] = true;
            self.clocks[stream].learn(mark);
            self.clocks[stream].tick(stream);
            self.last[stream] = index;
        }
    }

    /// Fails if a transfer of a group was posted before and no events order that post before `stream`.
    fn check_order(
        &self,
        index: usize,
        stream: usize,
        group: &[TransferId],
    ) -> Result<(), Obstacle> {
        let clock = &self.clocks[stream];
        let beside = |id: &&TransferId| {
            let before = self.posted[**id];
            before.is_some_and(|(other, time)| clock.get(other) < time)
        };
        match group.iter().find(beside) {
            Some(id) => Err(Obstacle::PostedBeside(index, *id)),
            None => Ok(()),
        }
    }

    /// Records that `stream` has reached a post of a transfer.
    fn note_post(&mut self, stream: usize, id: TransferId) {
        // An end that only signals keeps its first post: all its later posts are ordered after that one.
        if self.posted[id].is_none() || self.program.transfers[id].initiates() {
            self.posted[id] = Some((stream, self.clocks[stream].get(stream)));
        }
    }

    fn place(&mut self, stream: usize, group: &[TransferId]) {
        let mark = (stream, self.clocks[stream].snapshot(stream));
        for &id in group {
            self.places[id] = Some(mark.clone());
        }
    }

    fn engine(
        &mut self,
        index: usize,
        stream: usize,
        group: &[TransferId],
    ) -> Result<(), Obstacle> {
        // The executor orders the engine's calls by events, because the engine must be called in one order on all
        // ranks and a graph runs independent branches in any.
        if let Some(last) = self.engine_last.clone() {
            self.follow(index, stream, &last);
        }
        self.add(index, stream)?;
        // With all engine work on one stream, program order suffices, and marks serve waits for its transfers only.
        if self.orders_engine || !group.is_empty() {
            let mark = (stream, self.clocks[stream].snapshot(stream));
            self.engine_posts
                .extend(group.iter().map(|id| (*id, mark.clone())));
            self.engine_last = Some(mark);
        }
        Ok(())
    }

    fn is_engine(&self, id: TransferId) -> bool {
        self.program.transfers[id].is_engine()
    }

    /// A group contains either engine transfers or other transfers, never both.
    fn post(&mut self, index: usize, stream: usize, group: &[TransferId]) -> Result<(), Obstacle> {
        let program = self.program;
        if group.iter().any(|id| self.is_engine(*id)) {
            return self.engine(index, stream, group);
        }
        self.check_order(index, stream, group)?;
        // Signals and copies of a group are separate steps of the stream: what follows a signal alone is not ordered
        // after the copies.
        let signals = |id: &&TransferId| !program.transfers[**id].initiates();
        if group.iter().any(|id| signals(&id)) {
            self.add(index, stream)?;
            for &id in group.iter().filter(signals) {
                self.note_post(stream, id);
                if self.open[id].replace(index).is_some() {
                    return Err(Obstacle::PostedAgain(index, id));
                }
                // Waits follow the first post only: later ones already wait for the completion of the one before.
                if self.places[id].is_none() {
                    self.place(stream, &[id]);
                }
            }
        }
        if group.iter().any(|id| !signals(&id)) {
            self.add(index, stream)?;
            for &id in group.iter().filter(|id| !signals(id)) {
                self.note_post(stream, id);
                self.place(stream, &[id]);
            }
        }
        Ok(())
    }

    fn wait(&mut self, index: usize, stream: usize, group: &[TransferId]) -> Result<(), Obstacle> {
        if group.iter().any(|id| !self.is_engine(*id)) {
            self.add(index, stream)?;
        }
        for &id in group {
            let mark = if self.is_engine(id) {
                self.engine_posts.get(&id).cloned()
            } else {
                // The wait consumes the signal, so that the word can be set to the same value again.
                self.open[id] = None;
                self.places[id].clone()
            };
            if let Some(mark) = mark {
                self.follow(index, stream, &mark);
            }
        }
        Ok(())
    }

    fn end(&self) -> Result<(), Obstacle> {
        for (stream, clock) in self.clocks.iter().enumerate() {
            // CUDA refuses to end a capture whose forked streams have not been joined into the origin stream.
            if self.clocks[0].get(stream) < clock.get(stream) {
                return Err(Obstacle::NotJoined(self.last[stream]));
            }
        }
        let open = self.open.iter().enumerate();
        match open.filter_map(|(id, post)| Some((id, (*post)?))).next() {
            Some((id, post)) => Err(Obstacle::NotAwaited(post, id)),
            None => Ok(()),
        }
    }
}
