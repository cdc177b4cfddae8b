//! Topology of a communicator.

use super::Communicator;
use crate::error::Result;
use crate::sync::lock;
use crate::topology::{Topology, rendezvous};
use std::sync::Arc;

impl Communicator {
    /// Connections between the ranks' devices, identical on every rank. The first call discovers them:
    /// collective, blocks until all ranks have called it. Later calls return the cached result.
    ///
    /// Unreachable ranks are not an error; see [`Topology::obstacles`](crate::topology::Topology::obstacles).
    /// The environment variable `WARPLINK_TOPOLOGY` overrides the class.
    ///
    /// # Errors
    /// Those of [`barrier`](Self::barrier).
    pub fn topology(&self) -> Result<Arc<Topology>> {
        // Held meanwhile, so that only one thread of a rank takes part; the wait has a deadline.
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
