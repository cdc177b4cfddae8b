//! Locations of the tensors that ranks announce to one another.

use super::super::publication::{Published, Tables};
use super::{Lane, internal};
use crate::device::DeviceSlice;
use crate::error::{Rank, Result};
use crate::program::section::{Part, SectionMemory, SectionTensor};

/// Location of an announced tensor.
pub(super) struct Located {
    pub(super) tensor: usize,
    /// Announcement of this rank, once looked up.
    own: Option<u64>,
    /// Start of the tensor on peers whose announcement has arrived.
    at: Vec<(Rank, DeviceSlice)>,
    /// Whether some rank does not reach it on all others.
    missing: bool,
}

impl Located {
    pub(super) const fn new(tensor: usize) -> Self {
        Self {
            tensor,
            own: None,
            at: Vec::new(),
            missing: false,
        }
    }
}

/// Lookup of the tensors that ranks announce.
#[derive(Clone, Copy)]
pub(in super::super) struct Announcing<'a> {
    pub(in super::super) tables: &'a Tables,
    /// For each announced tensor, the number of its allocation and the byte offset in it.
    pub(in super::super) places: &'a [u64],
    /// For a program of two ranks, those of the group.
    pub(in super::super) ranks: Option<[Rank; 2]>,
}

impl Announcing<'_> {
    /// Rank of the tables that a rank of the program is.
    fn rank(&self, rank: Rank) -> Rank {
        self.ranks.map_or(rank, |ranks| ranks[rank])
    }
}

impl Lane<'_> {
    /// Announcement of this rank for a tensor, looked up once per launch.
    pub(super) fn locate(&mut self, tensor: usize) -> Result<u64> {
        let (rank, published) = (self.section.rank, self.input.published);
        let number = self.located.iter().position(|it| it.tensor == tensor);
        let (Some(number), Some(published)) = (number, published) else {
            return Ok(0);
        };
        // The table may change during a launch, and all ranks must be told the same.
        if let Some(own) = self.located[number].own {
            return Ok(own);
        }
        let place = published.places.get(2 * number..2 * number + 2);
        let &[entry, start] =
            place.ok_or_else(|| internal("a launch has no location of a tensor"))?
        else {
            return Err(internal("a launch has no location of a tensor"));
        };
        let SectionTensor { offset, dtype, .. } = &self.section.tensors[tensor];
        let SectionMemory::Tensor(id) = self.section.tensors[tensor].memory else {
            return Err(internal("scratch is announced"));
        };
        let slice = self.input.tensors.get(id);
        let slice = slice.ok_or_else(|| internal("an operand is not mapped"))?;
        let address = slice.address() + (offset * dtype.size()) as u64;
        let at = Published {
            number: entry,
            start,
        };
        let own = published
            .tables
            .announced(published.rank(rank), at, address);
        let located = &mut self.located[number];
        located.own = Some(own);
        located.missing |= own == 0;
        Ok(own)
    }

    /// Records a peer's announcement of a tensor.
    pub(super) fn note(&mut self, tensor: usize, peer: Rank, told: u64) -> Result<()> {
        let located = self.located.iter_mut().find(|it| it.tensor == tensor);
        let (Some(located), Some(published)) = (located, self.input.published) else {
            return Ok(());
        };
        if told == 0 {
            located.missing = true;
            return Ok(());
        }
        let reached = published.tables.reached(published.rank(peer), told);
        let reached =
            // A rank announces only entries that all peers have acknowledged, so a missing one is a broken invariant.
            reached.ok_or_else(|| internal("a peer announced memory that is not mapped"))?;
        located.at.push((peer, reached));
        Ok(())
    }

    /// Announced tensors that are known to be unreachable.
    pub(super) fn missing(&self) -> impl Iterator<Item = usize> {
        let missing = self.located.iter().filter(|it| it.missing);
        let withheld = self.section.withheld.iter().copied();
        withheld.chain(missing.map(|it| it.tensor))
    }

    pub(super) fn is_reachable(&self, tensor: usize) -> bool {
        let mut located = self.located.iter();
        !self.section.withheld.contains(&tensor)
            && located.all(|it| it.tensor != tensor || !it.missing)
    }

    /// A peer's tensor, as announced.
    pub(super) fn heard(&self, part: &Part) -> Option<&DeviceSlice> {
        let located = self.located.iter().find(|it| it.tensor == part.tensor)?;
        let (_, slice) = located.at.iter().find(|(rank, _)| *rank == part.rank)?;
        Some(slice)
    }
}
