//! Accesses to the bytes of every tensor, and the order that the clocks leave between them.

use super::clock::Clock;
use crate::error::Rank;
use crate::program::area::Area;
use crate::program::grid::Grid;
use crate::program::ir::Role;
use crate::program::rank_program::{Range, RankProgram, TensorId, TensorInstance};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Who accessed: an operation of a rank, or the state before the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Actor {
    /// The caller, or the run before, on the caller's stream of this rank.
    Before,
    /// Operation number of this rank.
    Operation(u32, u32),
}

impl Actor {
    pub(super) fn operation(rank: Rank, operation: usize) -> Self {
        // Both are below the limits of what is verified.
        Self::Operation(rank as u32, operation as u32)
    }
}

/// What an access does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Read,
    Write,
    /// Reads and then writes the same bytes.
    Update,
    /// Ends the tensor's life; conflicts as a write does.
    Deallocate,
}

/// An access, as it is remembered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Access {
    pub(super) actor: Actor,
    pub(super) stream: u32,
    pub(super) time: u32,
    pub(super) mode: Mode,
}

impl Access {
    /// Whether it comes before what has `clock` and belongs to `actor`. Parts of one operation are
    /// not in order.
    fn precedes(&self, clock: &Clock, actor: Actor) -> bool {
        self.actor != actor && self.is_known_to(clock)
    }

    fn is_known_to(&self, clock: &Clock) -> bool {
        clock.get(self.stream as usize) >= self.time
    }
}

/// What is wrong with an access.
#[derive(Clone, Copy, Debug)]
pub(super) enum Violation {
    /// It is unordered with this earlier one, to these bytes.
    Conflict(Access, Range),
    /// It comes after this deallocation.
    Deallocated(Access, TensorId),
    /// It reads bytes that nothing wrote.
    Unwritten(Range),
}

/// Bytes that the same accesses have touched.
#[derive(Clone, Debug)]
struct Segment {
    end: usize,
    written: bool,
    write: Access,
    /// Reads since the write, by stream; the last of each stream stands for those before it.
    reads: Vec<Access>,
    /// How many reads there may be before those that precede another are left out.
    room: usize,
}

/// The bytes of one tensor.
#[derive(Debug)]
struct Bytes {
    /// All of them, until only a part is accessed.
    whole: Option<Segment>,
    /// Segments by where they start, without gaps; empty where the tensor is cut into cells.
    parts: BTreeMap<usize, Segment>,
    cells: Option<Cells>,
}

/// The bytes of a tensor of which parts are accessed that are not contiguous.
#[derive(Debug)]
struct Cells {
    grid: Arc<Grid>,
    segments: Vec<Segment>,
}

/// The bytes of all tensors of all ranks.
pub(super) struct Memory {
    tensors: Vec<Vec<Bytes>>,
}

impl Memory {
    /// Memory before a run; `streams` are the callers' streams, on which time 1 is the start.
    pub(super) fn new(ranks: &[RankProgram], streams: &[usize]) -> Self {
        let fresh = |program: &RankProgram, stream: usize| {
            let bytes = |(id, tensor): (TensorId, &TensorInstance)| {
                let whole = Segment {
                    end: tensor.bytes,
                    written: tensor.role == Role::Input,
                    write: Access {
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
                Bytes {
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

    /// Notes an access to bytes of `rank` and tells what is wrong with it.
    pub(super) fn access(
        &mut self,
        rank: Rank,
        area: &Area,
        access: Access,
        clock: &Clock,
        mut tell: impl FnMut(Violation),
    ) {
        let range = area.span;
        let bytes = &mut self.tensors[rank][range.tensor];
        if let Some(Cells { grid, segments }) = &mut bytes.cells {
            grid.each_cell(area, |cell| {
                let (start, end) = grid.span(cell);
                let part = Range {
                    tensor: range.tensor,
                    offset_bytes: start,
                    bytes: end - start,
                };
                segments[cell].access(part, access, clock, &mut tell);
            });
            return;
        }
        if let Some(segment) = &mut bytes.whole
            && (range.offset_bytes, range.end()) == (0, segment.end)
        {
            return segment.access(range, access, clock, &mut tell);
        }
        let parts = bytes.parts();
        split(parts, range.offset_bytes);
        split(parts, range.end());
        for (&start, segment) in parts.range_mut(range.offset_bytes..range.end()) {
            let part = Range {
                tensor: range.tensor,
                offset_bytes: start,
                bytes: segment.end - start,
            };
            segment.access(part, access, clock, &mut tell);
        }
    }

    /// Accesses to tensors of `rank` that may not be over where `clock` is.
    pub(super) fn unfinished(&self, rank: Rank, clock: &Clock) -> Vec<(Access, usize)> {
        let mut list: Vec<(Access, usize)> = Vec::new();
        for (tensor, bytes) in self.tensors[rank].iter().enumerate() {
            for segment in bytes.segments() {
                let all = std::iter::once(&segment.write).chain(&segment.reads);
                let open = all.filter(|access| !access.is_known_to(clock));
                list.extend(open.map(|access| (*access, tensor)));
            }
        }
        list
    }

    /// The first bytes of a tensor that nothing wrote, if there are any.
    pub(super) fn unwritten(&self, rank: Rank, tensor: usize) -> Option<(usize, usize)> {
        if let Some(Cells { grid, segments }) = &self.tensors[rank][tensor].cells {
            let cell = segments.iter().position(|segment| !segment.written)?;
            return Some(grid.span(cell));
        }
        let mut start = 0;
        for segment in self.tensors[rank][tensor].segments() {
            if !segment.written {
                return Some((start, segment.end));
            }
            start = segment.end;
        }
        None
    }
}

impl Bytes {
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
    /// Notes an access to all of the segment, which is `part`.
    fn access(
        &mut self,
        part: Range,
        access: Access,
        clock: &Clock,
        tell: &mut impl FnMut(Violation),
    ) {
        if !self.write.precedes(clock, access.actor) {
            tell(Violation::Conflict(self.write, part));
        } else if self.write.mode == Mode::Deallocate {
            tell(Violation::Deallocated(self.write, part.tensor));
        }
        if self.write.mode == Mode::Deallocate {
            return;
        }
        if matches!(access.mode, Mode::Read | Mode::Update) && !self.written {
            tell(Violation::Unwritten(part));
        }
        if access.mode == Mode::Read {
            self.read(access, clock);
            return;
        }
        for read in self.reads.drain(..) {
            if !read.precedes(clock, access.actor) {
                tell(Violation::Conflict(read, part));
            }
        }
        self.write = access;
        self.written = true;
    }

    fn read(&mut self, access: Access, clock: &Clock) {
        match self
            .reads
            .binary_search_by_key(&access.stream, |read| read.stream)
        {
            Ok(index) => self.reads[index] = access,
            Err(index) => self.reads.insert(index, access),
        }
        if self.reads.len() > self.room {
            self.reads
                .retain(|read| read.actor == access.actor || !read.is_known_to(clock));
            self.room = 2 * self.reads.len() + 4;
        }
    }
}

/// Makes `at` a boundary between segments.
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
