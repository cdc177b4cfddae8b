//! Collectives of all ranks, or of those in a list.

use super::scope::Bound;
use super::shapes::shape_of;
use super::view::View;
use super::{MAX_PARTS, Unroller};
use crate::error::Rank;
use crate::named::comma;
use crate::program::diagnostic::{Diagnostic, DiagnosticKind};
use crate::program::ir::Collective;
use crate::program::rank_program::{CollectiveOperation, OperationKind, place_among};
use std::collections::HashSet;
use std::sync::Arc;

impl Unroller<'_> {
    /// The ranks in the list `name`, this one among them; `None` where they are all ranks in order.
    pub(super) fn members(&mut self, name: &str) -> Result<Option<Arc<[Rank]>>, Diagnostic> {
        let Some(Bound::List(list)) = self.lookup(name) else {
            let message =
                format!("'{name}' is not a list; expected one of the ranks that take part");
            return Err(self.malformed(message));
        };
        let (list, world, own) = (list.clone(), self.made.world, self.made.rank);
        self.work.set(self.work.get() + list.len());
        let mut members = Vec::with_capacity(list.len());
        for &value in list.iter() {
            let Some(rank) = usize::try_from(value).ok().filter(|rank| *rank < world) else {
                let message = format!(
                    "'{name}' contains {value}; expected ranks, 0 to {}",
                    world.saturating_sub(1)
                );
                return Err(self.diagnostic(DiagnosticKind::OutOfBounds, message));
            };
            members.push(rank);
        }
        // All ranks in order: the communicator that exists anyway serves them.
        if members.iter().copied().eq(0..world) {
            return Ok(None);
        }
        if let Some(known) = self.parts.get(&members[..]) {
            return Ok(Some(known.clone()));
        }
        let mut seen = HashSet::new();
        if let Some(rank) = members.iter().find(|rank| !seen.insert(**rank)) {
            let message = format!("'{name}' contains rank {rank} twice; expected each rank once");
            return Err(self.malformed(message));
        }
        if !seen.contains(&own) {
            let message = format!(
                "rank {own} is not in '{name}', which has {}; expected the call on these only",
                ranks_of(&members)
            );
            return Err(self.malformed(message));
        }
        if self.parts.len() >= MAX_PARTS {
            let message = format!(
                "the collectives of one rank are among too many different lists of ranks; expected at \
                 most {MAX_PARTS}"
            );
            return Err(self.malformed(message));
        }
        let members: Arc<[Rank]> = members.into();
        self.parts.insert(members.clone());
        Ok(Some(members))
    }

    pub(super) fn collective(
        &self,
        target: &View,
        source: &View,
        collective: Collective<Rank>,
        members: Option<Arc<[Rank]>>,
    ) -> Result<OperationKind, Diagnostic> {
        let writes = !matches!(collective, Collective::Reduce(_, root) if root != self.made.rank);
        if writes {
            self.writable(target)?;
        }
        if let Collective::Broadcast(root) | Collective::Reduce(_, root) = collective
            && let Some(members) = &members
            && place_among(Some(members), root).is_none()
        {
            let message = format!(
                "the root is rank {root}, which does not take part; expected one of {}",
                ranks_of(members)
            );
            return Err(self.diagnostic(DiagnosticKind::OutOfBounds, message));
        }
        let count = members
            .as_ref()
            .map_or(self.made.world, |members| members.len());
        let (to, from) = (target.elements(), source.elements());
        let (fits, rule) = match collective {
            Collective::AllGather => (
                from.checked_mul(count) == Some(to),
                "a target as long as the sources of all ranks",
            ),
            Collective::ReduceScatter(_) => (
                to.checked_mul(count) == Some(from),
                "a source as long as the targets of all ranks",
            ),
            Collective::AllToAll => (
                to == from && from.is_multiple_of(count),
                "two of one length that divides by the number of ranks",
            ),
            Collective::AllReduce(_) | Collective::Broadcast(_) | Collective::Reduce(..) => {
                (to == from, "two of one length")
            }
        };
        if !fits || target.dtype != source.dtype {
            return Err(self.mismatch(format!(
                "{} of {} into {} on {count} ranks; expected {rule}, of one type",
                collective.name(),
                shape_of(source),
                shape_of(target)
            )));
        }
        Ok(OperationKind::Collective(CollectiveOperation {
            collective,
            members,
            dtype: target.dtype,
            target: self.range(target, "written")?,
            source: self.range(source, "read")?,
        }))
    }
}

/// `ranks 0, 2 and 5 others`.
pub(in crate::program) fn ranks_of(members: &[Rank]) -> String {
    const SAID: usize = 8;
    let lead = if members.len() == 1 { "rank" } else { "ranks" };
    let mut text = format!("{lead} {}", comma(members.iter().take(SAID)));
    if members.len() > SAID {
        text += &format!(" and {} others", members.len() - SAID);
    }
    text
}
