//! The collectives of a communicator.

use super::Communicator;
use crate::collective::{CollectiveOptions, Collectives};
use crate::error::Result;
use crate::program::execute::RankContext;
use crate::sync::lock;
use std::sync::Arc;

impl Communicator {
    /// The communicator's collectives, with default options. The first call joins them: collective, blocks
    /// until all ranks have called it. Later calls return the same object.
    ///
    /// # Errors
    /// Those of [`collectives_with`](Self::collectives_with).
    pub fn collectives(&self) -> Result<Collectives> {
        // Held while joining, so that only one thread of a rank takes part; the wait has a deadline.
        let mut known = lock(&self.collectives);
        if let Some(collectives) = &*known {
            return Ok(collectives.clone());
        }
        let joined = self.collectives_with(&CollectiveOptions::default())?;
        Ok(known.insert(joined).clone())
    }

    /// Joins collectives with a workspace of their own. Collective, with the same options on every rank;
    /// blocks until all have called it.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout), naming a rank that did not call it; that rank must
    /// call it too, and fail, before all retry. [`ErrorKind::Mismatch`](crate::ErrorKind::Mismatch) if
    /// options differ, [`ErrorKind::PeerFailed`](crate::ErrorKind::PeerFailed) if another rank cannot join;
    /// errors of an allocation, and of [`barrier`](Self::barrier).
    pub fn collectives_with(&self, options: &CollectiveOptions) -> Result<Collectives> {
        let joined = self.joining_context();
        let joined =
            joined.and_then(|context| Collectives::join(context, options, self.job.topology));
        let joined = self.fault.with_outcome(joined);
        let joined = joined.map_err(|error| error.with_rank(self.rank()))?;
        self.joined_collectives.add(&joined);
        Ok(joined)
    }

    /// Context of one attempt to join, with a group of its own: if ranks abandon it at different points,
    /// their later gathers still match.
    fn joining_context(&self) -> Result<RankContext> {
        let members = self.group.members();
        let number = self.number("collectives", members);
        let name = self.group.name().child("collectives", members, number);
        let group = self.job.bootstrap.named_group(members, name)?;
        Ok(RankContext {
            group: Arc::new(group.depending_on(&self.group)),
            ..self.rank_context()
        })
    }
}
