//! Results of collectives.

use super::Values;
use super::kernel::combined;
use super::value::BoundedValue;
use crate::device::ReduceOp;
use crate::dtype::DType;
use crate::error::Rank;
use crate::program::ir::Collective;
use crate::program::rank_program::{OperationKind, RankProgram};
use crate::program::verify::Meeting;

/// A collective at which all its ranks have arrived.
pub(super) struct Gathering {
    sources: Vec<Vec<BoundedValue>>,
    left: usize,
}

impl Gathering {
    /// Collects the sources of a meeting's ranks.
    pub(super) fn new(ranks: &[RankProgram], memory: &Values, meeting: &Meeting) -> Self {
        let source =
            |(rank, operation): (Rank, usize)| match &ranks[rank].operations[operation].kind {
                OperationKind::Collective(it) => memory.read(rank, &it.source).to_vec(),
                _ => Vec::new(),
            };
        Self {
            // Copied when the first rank leaves: it may overwrite its source, in place, before the others have read
            // it.
            sources: meeting.calls().map(source).collect(),
            left: 0,
        }
    }

    /// Result of a rank, if it has one; called as the rank leaves.
    pub(super) fn leave(
        &mut self,
        collective: &Collective<Rank>,
        dtype: DType,
        meeting: &Meeting,
        rank: Rank,
    ) -> Option<Vec<BoundedValue>> {
        self.left += 1;
        let (count, place) = (self.sources.len(), meeting.place(rank)?);
        let part = |values: &[BoundedValue]| {
            let length = values.len() / count;
            values[place * length..(place + 1) * length].to_vec()
        };
        match collective {
            Collective::AllGather => Some(self.sources.concat()),
            Collective::AllToAll => Some(self.sources.iter().flat_map(|s| part(s)).collect()),
            Collective::Broadcast(root) => self.sources.get(meeting.place(*root)?).cloned(),
            Collective::AllReduce(op) => Some(self.reduce(*op, dtype)),
            Collective::ReduceScatter(op) => Some(part(&self.reduce(*op, dtype))),
            Collective::Reduce(op, root) => (*root == rank).then(|| self.reduce(*op, dtype)),
        }
    }

    pub(super) const fn is_over(&self) -> bool {
        self.left == self.sources.len()
    }

    fn reduce(&self, op: ReduceOp, dtype: DType) -> Vec<BoundedValue> {
        let elements = self.sources.first().map_or(0, Vec::len);
        // Every partial sum may be rounded.
        let at = |element: usize| {
            let mut values = self.sources.iter().map(|source| source[element]);
            combined(op, dtype, self.sources.len(), &mut values)
        };
        let mut all: Vec<BoundedValue> = (0..elements).map(at).collect();
        if matches!(op, ReduceOp::Sum | ReduceOp::Average) {
            self.widen(&mut all, dtype);
        }
        all
    }

    /// Widens the error bounds of sums: partial sums in another order may be larger than those here.
    fn widen(&self, sums: &mut [BoundedValue], dtype: DType) {
        for (index, sum) in sums.iter_mut().enumerate() {
            let sources = self.sources.iter().filter_map(|source| source.get(index));
            // The sum of magnitudes bounds every partial sum, in whatever order the library adds.
            let size: f64 = sources.map(|value| value.value.abs() + value.bound).sum();
            let rounded = BoundedValue::exact(size).stored(dtype).bound;
            sum.bound += self.sources.len() as f64 * rounded;
        }
    }
}
