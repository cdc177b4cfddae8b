//! Race detection: accesses to the bytes of every tensor, ordered by vector clocks.

use super::clock::Clock;
use crate::error::Rank;
use crate::program::area::Area;
use crate::program::grid::Grid;
use crate::program::ir::Role;
use crate::program::rank_program::{Range, RankProgram, TensorId, TensorInstance};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Origin of an access: an operation of a rank, or the state before the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Actor {
    /// The caller or the previous run, on the caller's stream of this rank.
    Before,
    /// Rank and index of its operation.
    Operation(u32, u32),
}

impl Actor {
    pub(super) fn operation(rank: Rank, operation: usize) -> Self {
        // Both casts are lossless: the verifier's limits are below `u32::MAX`.
        Self::Operation(rank as u32, operation as u32)
    }
}

/// Kind of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Read,
    Write,
    /// Read-modify-write of the same bytes.
    Update,
    /// Accesses that a kernel may make: they depend on values in memory.
    MayRead,
    MayWrite,
    MayUpdate,
    /// Ends the tensor's lifetime; conflicts like a write.
    Deallocate,
}

impl Mode {
    /// The accesses that take place: a read, a write; and whether both of them do in any case.
    const fn parts(self) -> (bool, bool, bool) {
        match self {
            Self::Read => (true, false, true),
            Self::Write | Self::Deallocate => (false, true, true),
            Self::Update => (true, true, true),
            Self::MayRead => (true, false, false),
            Self::MayWrite => (false, true, false),
            Self::MayUpdate => (true, true, false),
        }
    }

    /// Access of an operation that makes either this access or `other`; `None` means no access.
    pub(super) fn or(self, other: Option<Self>) -> Self {
        if other == Some(self) {
            return self;
        }
        let (read, write, _) = self.parts();
        let (also_read, also_write, _) = other.map_or((false, false, false), Self::parts);
        match (read || also_read, write || also_write) {
            (true, true) => Self::MayUpdate,
            (false, true) => Self::MayWrite,
            (_, false) => Self::MayRead,
        }
    }
}

/// A recorded access.
#[derive(Clone, Copy, Debug)]
pub(super) struct RecordedAccess {
    pub(super) actor: Actor,
    pub(super) stream: u32,
    pub(super) time: u32,
    pub(super) mode: Mode,
}

impl RecordedAccess {
    /// Whether it happens before a point with `clock` in `actor`. Parts of one operation are unordered.
    fn precedes(&self, clock: &Clock, actor: Actor) -> bool {
        self.actor != actor && self.is_known_to(clock)
    }

    fn is_known_to(&self, clock: &Clock) -> bool {
        clock.get(self.stream as usize) >= self.time
    }
}

/// Violation caused by an access.
#[derive(Clone, Copy, Debug)]
pub(super) enum Violation {
    /// Unordered with this earlier access to these bytes.
    Conflict(RecordedAccess, Range),
    /// Use after this deallocation.
    Deallocated(RecordedAccess, TensorId),
    /// Read of uninitialized bytes.
    Unwritten(Range),
}

/// A range of bytes with one access history.
#[derive(Clone, Debug)]
struct Segment {
    end: usize,
    written: bool,
    /// Whether a kernel may have written it, depending on values in memory.
    may_be_written: bool,
    write: RecordedAccess,
    /// Reads since the write, by stream; the last read of each stream subsumes its earlier ones.
    reads: Vec<RecordedAccess>,
    /// Capacity of `reads` before those that precede another read are pruned.
    room: usize,
}

/// Access history of one tensor.
#[derive(Debug)]
struct TensorHistory {
    /// History of the whole tensor, until the first access to a part.
    whole: Option<Segment>,
    /// Segments by start offset, without gaps; empty if the tensor is divided into cells.
    parts: BTreeMap<usize, Segment>,
    cells: Option<Cells>,
}

/// Access history of a tensor with non-contiguous accesses.
#[derive(Debug)]
struct Cells {
    grid: Arc<Grid>,
    segments: Vec<Segment>,
}

/// Access history of all tensors of all ranks.
pub(super) struct Memory {
    tensors: Vec<Vec<TensorHistory>>,
}

impl Memory {
    /// Memory before a run; `streams` are the callers' streams, whose time 1 is the start of the run.
    pub(super) fn new(ranks: &[RankProgram], streams: &[usize]) -> Self {
        let fresh = |program: &RankProgram, stream: usize| {
            let bytes = |(id, tensor): (TensorId, &TensorInstance)| {
                let whole = Segment {
                    end: tensor.bytes,
                    written: tensor.role == Role::Input,
                    may_be_written: false,
                    write: RecordedAccess {
                        actor: Actor::Before,
                        stream: stream as u32,
                        time: 1,
                        mode: Mode::Write,
                    },
                    reads: Vec::new(),
                    room: 0,
                };
                let cells = program.grids.get(&id).map(|grid| Cells {
                    grid: grid.clone(),
                    segments: vec![whole.clone(); grid.cells()],
                });
                TensorHistory {
                    whole: cells.is_none().then_some(whole),
                    parts: BTreeMap::new(),
                    cells,
                }
            };
            program.tensors.iter().enumerate().map(bytes).collect()
        };
        let tensors = ranks
            .iter()
            .zip(streams)
            .map(|(program, stream)| fresh(program, *stream));
        Self {
            tensors: tensors.collect(),
        }
    }

    /// Records an access to bytes of `rank`, and reports its violations.
    pub(super) fn access(
        &mut self,
        rank: Rank,
        area: &Area,
        access: RecordedAccess,
        clock: &Clock,
        mut tell: impl FnMut(Violation),
    ) {
        let range = area.span;
        let bytes = &mut self.tensors[rank][range.tensor];
        if let Some(Cells { grid, segments }) = &mut bytes.cells {
            grid.each_cell(area, |cell| {
                let (start, end) = grid.span(cell);
                let part = Range::of(range.tensor, start..end);
                segments[cell].access(part, access, clock, &mut tell);
            });
            return;
        }
        if let Some(segment) = &mut bytes.whole
            && (range.offset_bytes, range.end()) == (0, segment.end)
        {
            // The fast path: most tensors are only ever accessed as a whole, and a map of one entry costs more.
            return segment.access(range, access, clock, &mut tell);
        }
        let parts = bytes.parts();
        split(parts, range.offset_bytes);
        split(parts, range.end());
        for (&start, segment) in parts.range_mut(range.offset_bytes..range.end()) {
            let part = Range::of(range.tensor, start..segment.end);
            segment.access(part, access, clock, &mut tell);
        }
    }

    /// Accesses to tensors of `rank` that may not have completed at a point with `clock`.
    pub(super) fn unfinished(&self, rank: Rank, clock: &Clock) -> Vec<(RecordedAccess, usize)> {
        let mut list: Vec<(RecordedAccess, usize)> = Vec::new();
        for (tensor, bytes) in self.tensors[rank].iter().enumerate() {
            for segment in bytes.segments() {
                let all = std::iter::once(&segment.write).chain(&segment.reads);
                let open = all.filter(|access| !access.is_known_to(clock));
                list.extend(open.map(|access| (*access, tensor)));
            }
        }
        list
    }

    /// First bytes of a tensor that nothing writes, if there are any.
    pub(super) fn unwritten(&self, rank: Rank, tensor: usize) -> Option<(usize, usize)> {
        if let Some(Cells { grid, segments }) = &self.tensors[rank][tensor].cells {
            let cell = segments.iter().position(Segment::is_unwritten)?;
            return Some(grid.span(cell));
        }
        let mut start = 0;
        for segment in self.tensors[rank][tensor].segments() {
            if segment.is_unwritten() {
                return Some((start, segment.end));
            }
            start = segment.end;
        }
        None
    }
}

impl TensorHistory {
    fn parts(&mut self) -> &mut BTreeMap<usize, Segment> {
        if let Some(segment) = self.whole.take() {
            self.parts.insert(0, segment);
        }
        &mut self.parts
    }

    fn segments(&self) -> impl Iterator<Item = &Segment> {
        let cells = self.cells.iter().flat_map(|cells| &cells.segments);
        self.whole.iter().chain(self.parts.values()).chain(cells)
    }
}

impl Segment {
    /// Records an access to the whole segment, which covers `part`.
    fn access(
        &mut self,
        part: Range,
        access: RecordedAccess,
        clock: &Clock,
        tell: &mut impl FnMut(Violation),
    ) {
        if !self.write.precedes(clock, access.actor) {
            tell(Violation::Conflict(self.write, part));
        } else if self.write.mode == Mode::Deallocate {
            tell(Violation::Deallocated(self.write, part.tensor));
        }
        // No history after the end of the lifetime: each further access is reported once, against the deallocation.
        if self.write.mode == Mode::Deallocate {
            return;
        }
        let (reads, writes, always) = access.mode.parts();
        // Whether a kernel reads only what it or another one wrote depends on values that are not compared.
        let may_be_right = self.may_be_written && !always;
        if reads && !self.written && !may_be_right {
            tell(Violation::Unwritten(part));
        }
        if !writes {
            self.read(access, clock);
            return;
        }
        for read in self.reads.drain(..) {
            if !read.precedes(clock, access.actor) {
                tell(Violation::Conflict(read, part));
            }
        }
        self.write = access;
        // A write that may not take place does not initialize bytes for others to rely on.
        self.written |= always;
        self.may_be_written = true;
    }

    const fn is_unwritten(&self) -> bool {
        !self.written && !self.may_be_written
    }

    fn read(&mut self, access: RecordedAccess, clock: &Clock) {
        match self
            .reads
            .binary_search_by_key(&access.stream, |read| read.stream)
        {
            Ok(index) => self.reads[index] = access,
            Err(index) => self.reads.insert(index, access),
        }
        if self.reads.len() > self.room {
            self.reads
                // A write that follows this read also follows the reads that precede it, so they can go; those of the
                // same operation are unordered with it and stay.
                .retain(|read| read.actor == access.actor || !read.is_known_to(clock));
            // Doubling makes the cost of pruning constant per read, however many reads stay.
            self.room = 2 * self.reads.len() + 4;
        }
    }
}

/// Splits the segment that contains `at`, so that a segment starts there.
fn split(parts: &mut BTreeMap<usize, Segment>, at: usize) {
    let Some((&start, segment)) = parts.range_mut(..=at).next_back() else {
        return;
    };
    if start == at || segment.end <= at {
        return;
    }
    let right = segment.clone();
    segment.end = at;
    parts.insert(at, right);
}
