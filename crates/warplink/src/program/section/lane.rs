//! Fully resolved steps of one lane in one launch.

use super::function::RowStep;
use crate::device::ReduceOp;
use crate::dtype::DType;
use crate::error::Rank;
use crate::program::site::Site;
use std::ops::Range;
use std::slice;
use std::sync::Arc;

/// One step of a lane.
#[derive(Clone, Debug)]
pub struct LaneStep {
    /// Kind of step and its operands.
    pub kind: LaneStepKind,
    /// The statement and its loop indices.
    pub site: Site,
}

/// Kind of a lane's step.
#[derive(Clone, Debug)]
pub enum LaneStepKind {
    /// Every target receives the elementwise combination of the sources, or the result of a row function.
    Move(LaneMove),
    /// Reads an integer, which later steps depend on.
    Value {
        /// Number of earlier reads of the lane in the launch.
        number: usize,
        /// The word, or the words that are matched.
        source: Part,
        /// The words that are looked for; `None` for the value of the single word.
        matching: Option<Matching>,
        /// Largest value; the least is 0.
        most: i64,
    },
    /// Stores an integer.
    Store {
        /// The integer.
        value: i64,
        /// Destination: one element.
        target: Part,
    },
    /// Stores words as packets on another rank.
    Announce {
        /// The words.
        values: Vec<u32>,
        /// Tensors whose locations are sent, as indices into the section's tensors.
        tensors: Vec<usize>,
        /// Destination.
        target: Part,
    },
    /// Waits for the words of another rank, and fails the launch if they differ.
    Agree {
        /// Expected words.
        values: Vec<u32>,
        /// Tensors whose locations are received.
        tensors: Vec<usize>,
        /// The sending rank.
        peer: Rank,
        /// Where they arrive, in this rank's memory.
        source: Part,
    },
    /// Increments this rank's signal word at a lane of a rank.
    Signal {
        /// The receiving rank.
        peer: Rank,
        /// The receiving lane.
        lane: usize,
    },
    /// Waits until a rank has signalled this lane once more than was waited for.
    Wait(Rank),
}

/// A step that moves or computes elements.
#[derive(Clone, Debug)]
pub struct LaneMove {
    /// Operator that combines several sources in order; `None` if `rows` combines them.
    pub operator: Option<ReduceOp>,
    /// Common element type; the first source's type if `rows` is given.
    pub dtype: DType,
    /// Row function, if it applies one.
    pub rows: Option<Arc<RowStep>>,
    /// Number of elements, possibly zero; the width for a row, since single values can be operands too.
    pub elements: usize,
    /// Destinations.
    pub targets: Vec<Part>,
    /// Sources.
    pub sources: Vec<Part>,
}

impl LaneMove {
    /// The only source of the targets, unless a row function computes them.
    pub(crate) fn only_source(&self) -> Option<&Part> {
        match (&self.rows, &self.sources[..]) {
            (None, [source]) => Some(source),
            _ => None,
        }
    }
}

impl LaneStepKind {
    /// Operands that it reads, in order.
    pub fn sources(&self) -> &[Part] {
        match self {
            Self::Move(it) => &it.sources,
            Self::Value { source, .. } | Self::Agree { source, .. } => slice::from_ref(source),
            Self::Store { .. } | Self::Announce { .. } | Self::Signal { .. } | Self::Wait(_) => &[],
        }
    }

    /// Operands that it writes, in order.
    pub fn targets(&self) -> &[Part] {
        match self {
            Self::Move(it) => &it.targets,
            Self::Store { target, .. } | Self::Announce { target, .. } => slice::from_ref(target),
            Self::Value { .. } | Self::Agree { .. } | Self::Signal { .. } | Self::Wait(_) => &[],
        }
    }

    /// Whether it moves no elements and therefore does nothing.
    pub const fn is_empty(&self) -> bool {
        matches!(self, Self::Move(LaneMove { elements: 0, .. }))
    }

    /// Rank whose signal or announcement it waits for; it may also wait for packets.
    pub const fn awaits(&self) -> Option<Rank> {
        match self {
            Self::Wait(peer) | Self::Agree { peer, .. } => Some(*peer),
            Self::Move(_) | Self::Value { .. } | Self::Store { .. } => None,
            Self::Announce { .. } | Self::Signal { .. } => None,
        }
    }
}

/// Words that a lane looks for among several.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Matching {
    /// Words of a row: it is in the range if any of them is. 1 if single words are looked for.
    pub row: usize,
    /// Whether words of the range are meant, or all others.
    pub inside: bool,
    /// Least value of the range.
    pub from: i64,
    /// Its end, exclusive.
    pub to: i64,
    /// The number of the word or row whose position is the result; `None` if the result is how many there are.
    pub nth: Option<i64>,
}

impl Matching {
    /// Whether a row of words, or a single one, is one of them.
    pub fn holds(&self, row: &[i64]) -> bool {
        row.iter().any(|word| self.has(*word)) == self.inside
    }

    fn has(&self, word: i64) -> bool {
        (self.from..self.to).contains(&word)
    }

    /// The result for these words; -1 if there is no such word or row.
    pub fn of(&self, words: &[i64]) -> i64 {
        let Some(nth) = self.nth else {
            let count = match self.row {
                // Without a slice for each word, as kernels count thousands of them for each row that they move.
                1 => words
                    .iter()
                    .filter(|word| self.has(**word) == self.inside)
                    .count(),
                row => words
                    .chunks(row.max(1))
                    .filter(|row| self.holds(row))
                    .count(),
            };
            return count as i64;
        };
        let rows = words.chunks(self.row.max(1)).enumerate();
        let mut matching = rows.filter(|(_, row)| self.holds(row));
        let found = usize::try_from(nth).ok().and_then(|nth| matching.nth(nth));
        // Below every valid position, so that the bounds check that follows fails in kernels too.
        found.map_or(-1, |(position, _)| position as i64)
    }

    /// The greatest result for this many words.
    pub fn most(&self, words: usize) -> i64 {
        let rows = words / self.row.max(1);
        // A count may equal the number of rows; a position is below it.
        rows.saturating_sub(usize::from(self.nth.is_some())) as i64
    }
}

/// Location of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Part {
    /// Rank that owns the memory.
    pub rank: Rank,
    /// Index of the section's tensor.
    pub tensor: usize,
    /// First element in the tensor's memory, in units of its strides, without the tensor's own offset.
    pub offset: usize,
    /// Number of elements.
    pub elements: usize,
}

impl Part {
    /// Subrange of the part.
    pub(crate) const fn piece(&self, elements: &Range<usize>) -> Self {
        Self {
            offset: self.offset + elements.start,
            elements: elements.end - elements.start,
            ..*self
        }
    }
}
