//! The collectives of a communicator.

use super::Communicator;
use crate::collective::{CollectiveOptions, Collectives};
use crate::error::Result;
use crate::sync::lock;

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
        let context = self.rank_context();
        let joined = context.attempt("collectives", |context| {
            Collectives::join(context, options, self.job.topology)
        });
        let joined = self.fault.with_outcome(joined);
        let joined = joined.map_err(|error| error.with_rank(self.rank()))?;
        self.joined_collectives.add(&joined);
        Ok(joined)
    }
}
