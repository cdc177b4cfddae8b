//! The collectives of a communicator.

use super::Communicator;
use crate::collective::{CollectiveOptions, Collectives};
use crate::error::Result;
use crate::program::execute::RankContext;
use crate::sync::lock;
use std::sync::Arc;

impl Communicator {
    /// The communicator's collectives, with the default options. The first call joins them: every rank makes it at
    /// the same time, and it blocks until all have. Later calls give the same again at once.
    ///
    /// # Errors
    /// Those of [`collectives_with`](Self::collectives_with).
    pub fn collectives(&self) -> Result<Collectives> {
        // Held meanwhile, so that of two threads of a rank one takes part; the wait has a deadline.
        let mut known = lock(&self.collectives);
        if let Some(collectives) = &*known {
            return Ok(collectives.clone());
        }
        let joined = self.collectives_with(&CollectiveOptions::default())?;
        Ok(known.insert(joined).clone())
    }

    /// Collectives with a workspace of their own. Every rank makes the call at the same time, with the same options.
    /// Blocks until all have.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout), which names a rank that did not make the call. That one
    /// makes it too, and fails, before all try again.
    /// [`ErrorKind::Mismatch`](crate::ErrorKind::Mismatch) where options differ,
    /// [`ErrorKind::PeerFailed`](crate::ErrorKind::PeerFailed) where another rank cannot join; all of an
    /// allocation, and of [`barrier`](Self::barrier).
    pub fn collectives_with(&self, options: &CollectiveOptions) -> Result<Collectives> {
        let joined = self.joining_context();
        let joined =
            joined.and_then(|context| Collectives::join(context, options, self.job.topology));
        let joined = self.fault.with_outcome(joined);
        let joined = joined.map_err(|error| error.with_rank(self.rank()))?;
        self.known_collectives.add(&joined);
        Ok(joined)
    }

    /// The context of one attempt to join, with a group of its own: where ranks leave it at different points, they
    /// are in step for what they do next.
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
