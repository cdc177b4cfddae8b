//! Accesses to the bytes of every tensor, and the order that the clocks leave between them.

use super::clock::Clock;
use crate::error::Rank;
use crate::program::ir::Role;
use crate::program::rank_program::{Range, RankProgram};

/// Who accessed: an operation of a rank, or the state before the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Actor {
    /// The caller, or the run before, on the caller's stream of this rank.
    Before(Rank),
    /// Operation number of this rank.
    Operation(Rank, usize),
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
    pub(super) stream: usize,
    pub(super) time: u32,
    pub(super) mode: Mode,
}

impl Access {
    /// Whether it comes before what has `clock` and belongs to `actor`. Parts of one operation are
    /// not in order.
    fn precedes(&self, clock: &Clock, actor: Actor) -> bool {
        self.actor != actor && clock.get(self.stream) >= self.time
    }
}

/// What is wrong with an access.
#[derive(Clone, Copy, Debug)]
pub(super) enum Violation {
    /// It is unordered with this earlier one, to these bytes.
    Conflict(Access, Range),
    /// It comes after this deallocation.
    Deallocated(Access),
    /// It reads bytes that nothing wrote.
    Unwritten(Range),
}

/// Bytes that the same accesses have touched.
#[derive(Clone, Debug)]
struct Segment {
    end: usize,
    written: bool,
    write: Access,
    /// Reads since the write, of which none precedes another.
    reads: Vec<Access>,
}

/// The bytes of all tensors of all ranks.
pub(super) struct Memory {
    /// For each rank and tensor, segments in order, without gaps.
    tensors: Vec<Vec<Vec<Segment>>>,
}

impl Memory {
    /// Memory before a run; `streams` are the callers' streams, on which time 1 is the start.
    pub(super) fn new(ranks: &[RankProgram], streams: &[usize]) -> Self {
        let tensors = ranks
            .iter()
            .zip(streams)
            .enumerate()
            .map(|(rank, (rank_program, &stream))| {
                let fresh = |tensor: &crate::program::TensorInstance| {
                    vec![Segment {
                        end: tensor.bytes,
                        written: tensor.role == Role::Input,
                        write: Access {
                            actor: Actor::Before(rank),
                            stream,
                            time: 1,
                            mode: Mode::Write,
                        },
                        reads: Vec::new(),
                    }]
                };
                rank_program.tensors.iter().map(fresh).collect()
            })
            .collect();
        Self { tensors }
    }

    /// Notes an access to bytes of `rank` and returns what is wrong with it.
    pub(super) fn access(
        &mut self,
        rank: Rank,
        range: Range,
        access: Access,
        clock: &Clock,
    ) -> Vec<Violation> {
        let mut violations: Vec<Violation> = Vec::new();
        let segments = &mut self.tensors[rank][range.tensor];
        let first = split(segments, range.offset_bytes);
        let last = split(segments, range.end());
        for index in first..last {
            let start = match index.checked_sub(1) {
                Some(before) => segments[before].end,
                None => 0,
            };
            let segment = &mut segments[index];
            let part = Range {
                tensor: range.tensor,
                offset_bytes: start,
                bytes: segment.end - start,
            };
            if !segment.write.precedes(clock, access.actor) {
                violations.push(Violation::Conflict(segment.write, part));
            } else if segment.write.mode == Mode::Deallocate {
                violations.push(Violation::Deallocated(segment.write));
            }
            if segment.write.mode == Mode::Deallocate {
                continue;
            }
            if matches!(access.mode, Mode::Read | Mode::Update) && !segment.written {
                violations.push(Violation::Unwritten(part));
            }
            if access.mode == Mode::Read {
                segment
                    .reads
                    .retain(|read| !read.precedes(clock, access.actor));
                segment.reads.push(access);
                continue;
            }
            for read in segment.reads.drain(..) {
                if !read.precedes(clock, access.actor) {
                    violations.push(Violation::Conflict(read, part));
                }
            }
            segment.write = access;
            segment.written = true;
        }
        violations
    }

    /// Accesses to tensors of `rank` that may not be over where `clock` is.
    pub(super) fn unfinished(&self, rank: Rank, clock: &Clock) -> Vec<(Access, usize)> {
        let mut list: Vec<(Access, usize)> = Vec::new();
        for (tensor, segments) in self.tensors[rank].iter().enumerate() {
            for segment in segments {
                let all = std::iter::once(&segment.write).chain(&segment.reads);
                let open = all.filter(|access| clock.get(access.stream) < access.time);
                list.extend(open.map(|access| (*access, tensor)));
            }
        }
        list
    }

    /// The first bytes of a tensor that nothing wrote, if there are any.
    pub(super) fn unwritten(&self, rank: Rank, tensor: usize) -> Option<(usize, usize)> {
        let mut start = 0;
        for segment in &self.tensors[rank][tensor] {
            if !segment.written {
                return Some((start, segment.end));
            }
            start = segment.end;
        }
        None
    }
}

/// Makes `at` a boundary between segments, and returns the index of the one that starts there.
fn split(segments: &mut Vec<Segment>, at: usize) -> usize {
    let index = segments.partition_point(|segment| segment.end <= at);
    let start = match index.checked_sub(1) {
        Some(before) => segments[before].end,
        None => 0,
    };
    if at == start || index == segments.len() {
        return index;
    }
    let mut left = segments[index].clone();
    left.end = at;
    segments.insert(index, left);
    index + 1
}
