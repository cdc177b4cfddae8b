//! What an executor works with on its rank.

use crate::bootstrap::Group;
use crate::deadline::Deadline;
use crate::device::{CollectiveEngine, Device, Fault, InFlight};
use crate::error::{Rank, Result};
use crate::exchange::GroupExchange;
use crate::memory::MemoryRegistry;
use crate::p2p::{Path, StreamBarrier, TransferExchange};
use std::sync::Arc;
use std::time::Duration;

/// Gives collective engines, joining each on the first call, on all its ranks at the same time.
pub(crate) trait EngineSource: Send + Sync {
    /// The engine of all ranks.
    fn of_all(&self) -> Result<Arc<dyn CollectiveEngine>>;

    /// The engine of `ranks`, in their order, this one among them. A rank joins those of several lists in
    /// an order that is the same on all ranks.
    fn of_part(&self, ranks: &[Rank]) -> Result<Arc<dyn CollectiveEngine>>;
}

/// The rank in its communicator, its device, and the services of its job.
#[derive(Clone)]
pub(crate) struct RankContext {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) group: Arc<Group>,
    pub(crate) memory: Arc<MemoryRegistry>,
    pub(crate) transfers: Arc<TransferExchange>,
    pub(crate) in_flight: Arc<InFlight>,
    pub(crate) engines: Arc<dyn EngineSource>,
    /// Ends the waits of the communicator's signals.
    pub(crate) fault: Arc<Fault>,
    pub(crate) timeout: Duration,
    /// The path that the communicator chooses for transfers, if it does.
    pub(crate) path: Option<Path>,
}

impl RankContext {
    pub(crate) fn rank(&self) -> Rank {
        self.group.rank()
    }

    pub(crate) fn world(&self) -> usize {
        self.group.world()
    }

    /// The path of a program's transfers. Its own kernels end by themselves, but not every program suits
    /// kernels at both ends.
    pub(crate) fn path(&self, suits_kernels: bool) -> Path {
        match self.path {
            Some(path @ (Path::CopyEngine | Path::OneBlock)) => path,
            _ if !suits_kernels => Path::OneBlock,
            None => Path::Fastest,
            Some(path) => path,
        }
    }

    /// Every rank's bytes, in rank order. Blocks until every rank has called it.
    pub(crate) fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let gathered = self.group.all_gather(bytes, self.deadline());
        gathered.map_err(|error| self.group.in_own_ranks(error))
    }

    /// An exchange among all ranks, which ends at this rank's timeout.
    pub(crate) fn exchange(&self) -> GroupExchange<'_> {
        GroupExchange {
            group: &self.group,
            deadline: self.deadline(),
            operation: "bind",
        }
    }

    /// The most ranks of this communicator that share one device, of which each should have its own; the same on
    /// every rank.
    pub(crate) fn ranks_per_device(&self) -> Result<usize> {
        let ranks = (0..self.world()).map(|rank| self.group.job_rank(rank));
        self.memory
            .ranks_per_device(&ranks.collect::<Result<Vec<_>>>()?)
    }

    /// Blocks until every rank has called it.
    pub(crate) fn barrier(&self) -> Result<()> {
        let barrier = self.group.barrier(self.deadline());
        barrier.map_err(|error| self.group.in_own_ranks(error))
    }

    /// A barrier of streams in which no other kernel runs. Every rank makes one at the same time.
    pub(crate) fn stream_barrier(&self) -> Result<StreamBarrier> {
        let place = (self.rank(), self.world());
        StreamBarrier::new(
            &self.memory,
            &self.transfers,
            place,
            self.path(false),
            self.deadline(),
        )
    }

    pub(crate) fn deadline(&self) -> Deadline {
        Deadline::after(self.timeout)
    }
}
