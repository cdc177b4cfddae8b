//! How the ranks of a communicator are connected.

use super::Communicator;
use crate::error::Result;
use crate::sync::lock;
use crate::topology::{Topology, rendezvous};
use std::sync::Arc;

impl Communicator {
    /// What connects the ranks' devices, the same on every rank. The first call finds it out: every
    /// rank of the communicator makes it at the same time, and it blocks until all have. Later calls
    /// give the same again at once.
    ///
    /// Ranks that cannot reach one another are no error; see
    /// [`Topology::obstacles`](crate::topology::Topology::obstacles). With the environment variable
    /// `WARPLINK_TOPOLOGY`, the class is what it says.
    ///
    /// # Errors
    /// Those of [`barrier`](Self::barrier).
    pub fn topology(&self) -> Result<Arc<Topology>> {
        // Held meanwhile, so that of two threads of a rank one takes part; the wait has a deadline.
        let mut known = lock(&self.topology);
        if let Some(topology) = &*known {
            return Ok(topology.clone());
        }
        let forced = self.job.topology;
        let gather = |bytes: Vec<u8>| self.all_gather_bytes(&bytes);
        let topology = rendezvous(&*self.job.device, self.rank(), forced, gather);
        let topology = topology.map_err(|error| error.with_rank(self.rank()))?;
        Ok(known.insert(Arc::new(topology)).clone())
    }
}
