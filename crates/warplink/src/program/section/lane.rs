//! The steps of one lane in one launch, with everything resolved.

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
    /// What is done.
    pub kind: LaneStepKind,
    /// The step, and the indices of the loops around it.
    pub site: Site,
}

/// What a step does.
#[derive(Clone, Debug)]
pub enum LaneStepKind {
    /// Every target gets the sources, combined element by element, or by a function of rows.
    Move {
        /// How more than one source is combined, in order; none where `rows` says that.
        operator: Option<ReduceOp>,
        /// Element type of all; of the first source, where `rows` is given.
        dtype: DType,
        /// The function of rows, if it is one.
        rows: Option<Arc<RowStep>>,
        /// How many elements; maybe none. Of a row, its width: single values are operands, too.
        elements: usize,
        /// What is written.
        targets: Vec<Part>,
        /// What is read.
        sources: Vec<Part>,
    },
    /// Stores words as packets at another rank.
    Announce {
        /// The words.
        values: Vec<u32>,
        /// The tensors whose places are told; indices of the section's.
        tensors: Vec<usize>,
        /// Where they go.
        target: Part,
    },
    /// Waits for the words of another rank, which are the same or fail the launch.
    Agree {
        /// What is expected.
        values: Vec<u32>,
        /// The tensors whose places are told.
        tensors: Vec<usize>,
        /// Whose words they are.
        peer: Rank,
        /// Where they come, in this rank's memory.
        source: Part,
    },
    /// Counts up the word of this rank at a lane of a rank.
    Signal {
        /// Whose lane it is.
        peer: Rank,
        /// Which of its lanes.
        lane: usize,
    },
    /// Waits until a rank has signalled this lane once more than was waited for.
    Wait(Rank),
}

impl LaneStepKind {
    /// The operands that it reads, in order.
    pub fn sources(&self) -> &[Part] {
        match self {
            Self::Move { sources, .. } => sources,
            Self::Agree { source, .. } => slice::from_ref(source),
            Self::Announce { .. } | Self::Signal { .. } | Self::Wait(_) => &[],
        }
    }

    /// The operands that it writes, in order.
    pub fn targets(&self) -> &[Part] {
        match self {
            Self::Move { targets, .. } => targets,
            Self::Announce { target, .. } => slice::from_ref(target),
            Self::Agree { .. } | Self::Signal { .. } | Self::Wait(_) => &[],
        }
    }

    /// Whether it moves no elements, and so does nothing.
    pub const fn is_empty(&self) -> bool {
        matches!(self, Self::Move { elements: 0, .. })
    }

    /// The rank for whose signal or announcement it waits; it waits for packets besides.
    pub const fn awaits(&self) -> Option<Rank> {
        match self {
            Self::Wait(peer) | Self::Agree { peer, .. } => Some(*peer),
            Self::Move { .. } | Self::Announce { .. } | Self::Signal { .. } => None,
        }
    }
}

/// Where an operand of a step starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Part {
    /// Whose memory.
    pub rank: Rank,
    /// Which tensor of the section.
    pub tensor: usize,
    /// From which element of the tensor's memory, as its strides count them; the tensor's own offset is not
    /// in it.
    pub offset: usize,
    /// How many elements.
    pub elements: usize,
}

impl Part {
    /// The elements of it at these positions.
    pub(crate) const fn piece(&self, elements: &Range<usize>) -> Self {
        Self {
            offset: self.offset + elements.start,
            elements: elements.end - elements.start,
            ..*self
        }
    }
}
