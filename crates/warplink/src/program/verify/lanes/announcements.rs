//! Announcements that ranks have made, and those that they expected.

use super::memory::RankMemory;
use crate::error::Rank;
use crate::program::machine::Actor;
use std::collections::{BTreeMap, HashSet};

/// Location of announced words: owner of the memory, tensor or area, and start byte.
pub(super) type AnnouncedMemory = (Rank, RankMemory, usize);

/// Values that a step announces or expects.
pub(super) type Announced = (Actor, Vec<u32>);

/// Last announcements of each rank, and mismatches with expected ones.
#[derive(Debug, Default)]
pub(super) struct Announcements {
    pub(super) last: BTreeMap<AnnouncedMemory, Announced>,
    /// Expected values with the step that expects them, its peer, and the announcement found instead.
    pub(super) differ: Vec<(Announced, Rank, Option<Announced>)>,
    /// Steps that found what they expect, and the peer, where kernels read words.
    pub(super) agreed: Vec<(Actor, Rank)>,
    /// Lanes that announce tensors, each with its first step that does, and those that agree on them.
    pub(super) located: BTreeMap<OfTensor, Vec<Actor>>,
    pub(super) met: HashSet<(OfTensor, u32)>,
}

/// A tensor in the lanes of one number: launch, lane and tensor.
pub(super) type OfTensor = (u32, u32, usize);

impl Announcements {
    /// Whether any rank expects another announcement than one that it gets. One that another launch has overwritten is
    /// none.
    pub(super) fn differ(&self) -> bool {
        self.differ.iter().any(|(_, _, found)| found.is_some())
    }
}
