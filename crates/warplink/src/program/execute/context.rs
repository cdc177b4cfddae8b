//! What an executor works with on its rank.

use crate::bootstrap::Bootstrap;
use crate::deadline::Deadline;
use crate::device::{CollectiveEngine, Device, InFlight};
use crate::error::{Rank, Result};
use crate::memory::MemoryRegistry;
use crate::p2p::TransferExchange;
use std::sync::Arc;
use std::time::Duration;

/// Gives the collective engine, joining it on the first call.
pub(crate) type EngineSource = Arc<dyn Fn() -> Result<Arc<dyn CollectiveEngine>> + Send + Sync>;

/// The rank, its device and the services that the communicator runs for it.
#[derive(Clone)]
pub(crate) struct RankContext {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) bootstrap: Arc<Bootstrap>,
    pub(crate) memory: Arc<MemoryRegistry>,
    pub(crate) transfers: Arc<TransferExchange>,
    pub(crate) in_flight: Arc<InFlight>,
    pub(crate) engine: EngineSource,
    pub(crate) timeout: Duration,
}

impl RankContext {
    pub(crate) fn rank(&self) -> Rank {
        self.bootstrap.rank()
    }

    pub(crate) fn world(&self) -> usize {
        self.bootstrap.world()
    }

    pub(crate) fn deadline(&self) -> Deadline {
        Deadline::after(self.timeout)
    }
}
