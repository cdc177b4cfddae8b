//! Services that an executor uses on its rank.

use super::kernel_notes::KernelNotes;
use crate::bootstrap::Group;
use crate::deadline::Deadline;
use crate::device::{CollectiveEngine, CollectiveRequest, Device, Fault, InFlight, Stream};
use crate::error::{Rank, Result};
use crate::exchange::GroupExchange;
use crate::memory::MemoryRegistry;
use crate::p2p::{Path, StreamBarrier, TransferExchange};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Collectives of all ranks of a communicator by its own kernels, for programs. Every rank enqueues the same ones in the
/// same order, and each rank decides by itself which of them it enqueues as graphs.
pub(crate) trait DirectCollectives: Send + Sync + fmt::Debug {
    /// Compiles and loads the kernel of `request`, so that enqueueing it does not block.
    fn prepare(&self, request: &CollectiveRequest) -> Result<()>;

    /// Enqueues `request`, which is a collective, on `stream`, which may be capturing.
    fn enqueue(&self, stream: &Stream, request: &CollectiveRequest) -> Result<()>;

    /// Calls `launch`, which launches a graph of requests on `stream`, in order with the requests of other streams.
    fn launch(&self, stream: &Stream, launch: &mut dyn FnMut() -> Result<()>) -> Result<()>;
}

/// Source of collectives and engines; joins each on the first call, which all its ranks make at the same time.
pub(crate) trait EngineSource: Send + Sync {
    /// Collectives of all ranks, for an executor with `context`; `None`, on all ranks alike, if they cannot map one
    /// another's memory. Joins others in every call.
    fn direct(&self, context: &RankContext) -> Result<Option<Arc<dyn DirectCollectives>>>;

    /// Engine of all ranks.
    fn of_all(&self) -> Result<Arc<dyn CollectiveEngine>>;

    /// Engine of `ranks`, in their order; this rank must be one of them. Engines of several lists must be joined in
    /// the same order on all ranks, to avoid a deadlock.
    fn of_part(&self, ranks: &[Rank]) -> Result<Arc<dyn CollectiveEngine>>;
}

/// Collectives of an executor's programs, joined with the first program that has any; `None` if the engine executes them.
#[derive(Debug, Default)]
pub(super) struct ProgramCollectives(OnceLock<Option<Arc<dyn DirectCollectives>>>);

impl ProgramCollectives {
    /// Joins them on the first call, which all ranks make at the same time.
    pub(super) fn join(&self, context: &RankContext) -> Result<Option<Arc<dyn DirectCollectives>>> {
        if let Some(joined) = self.0.get() {
            return Ok(joined.clone());
        }
        // Not within `get_or_init`: joining blocks for other ranks and may fail, and then the next program tries
        // again.
        let joined = context.engines.direct(context)?;
        Ok(self.0.get_or_init(|| joined).clone())
    }
}

/// A rank in its communicator, with its device and the services of its job.
#[derive(Clone)]
pub(crate) struct RankContext {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) group: Arc<Group>,
    pub(crate) memory: Arc<MemoryRegistry>,
    pub(crate) transfers: Arc<TransferExchange>,
    pub(crate) in_flight: Arc<InFlight>,
    pub(crate) engines: Arc<dyn EngineSource>,
    /// Aborts waits on the communicator's signals.
    pub(crate) fault: Arc<Fault>,
    /// What kernels of its plans have noted.
    pub(crate) kernel_notes: Arc<KernelNotes>,
    pub(crate) timeout: Duration,
    /// Transfer path that the communicator prescribes, if it does.
    pub(crate) path: Option<Path>,
}

impl RankContext {
    pub(crate) fn rank(&self) -> Rank {
        self.group.rank()
    }

    pub(crate) fn world(&self) -> usize {
        self.group.world()
    }

    /// Path of a program's transfers: the communicator's, or the fastest one. The program's own kernels terminate by
    /// themselves, so they permit transfer kernels; a program not suited to kernels at both ends uses one block.
    pub(crate) fn path(&self, suits_kernels: bool) -> Path {
        match self.path {
            Some(path @ (Path::CopyEngine | Path::OneBlock)) => path,
            _ if !suits_kernels => Path::OneBlock,
            None => Path::Fastest,
            Some(path) => path,
        }
    }

    /// Every rank's bytes, in rank order; see [`GroupExchange::gather_in_step`].
    pub(crate) fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.exchange().gather_in_step(bytes)
    }

    /// Calls `attempt` with a context for one attempt at a joint step; see [`Group::attempt`].
    pub(crate) fn attempt<T>(
        &self,
        operation: &'static str,
        attempt: impl FnOnce(Self) -> Result<T>,
    ) -> Result<T> {
        self.group.attempt(operation, |group| {
            attempt(Self {
                group,
                ..self.clone()
            })
        })
    }

    /// An exchange among all ranks, limited by this rank's timeout.
    pub(crate) fn exchange(&self) -> GroupExchange<'_> {
        GroupExchange {
            group: &self.group,
            deadline: self.deadline(),
            operation: "bind",
        }
    }

    /// Largest number of ranks of this communicator that share one device; equal on every rank. Each rank should have
    /// its own.
    pub(crate) fn ranks_per_device(&self) -> Result<usize> {
        let ranks = (0..self.world()).map(|rank| self.group.job_rank(rank));
        self.memory
            .ranks_per_device(&ranks.collect::<Result<Vec<_>>>()?)
    }

    /// Whether stores of 128 bytes arrive whole at all ranks. Collective.
    pub(crate) fn carries_lines(&self) -> Result<bool> {
        let device = self.device.properties();
        let access = |peer| self.memory.access(self.group.job_rank(peer)?);
        let mut mapped = (0..self.world()).map(|peer| access(peer).is_ok_and(|it| it.mapped));
        // Host ranks have no link. If a peer cannot be mapped, workspaces are host memory, behind the bus.
        let whole = device.shared || device.linked && mapped.all(|mapped| mapped);
        // One rank without it decides for all, since both ends have to use the same packets.
        self.all_have(whole)
    }

    /// Every rank's value, in rank order. Blocks until every rank has called it.
    pub(super) fn gather<T: Serialize + DeserializeOwned>(&self, own: &T) -> Result<Vec<T>> {
        self.exchange().gather("gather", Ok(own))
    }

    /// Whether it is so on every rank. Blocks until every rank has called it.
    pub(super) fn all_have(&self, own: bool) -> Result<bool> {
        Ok(self.gather(&own)?.into_iter().all(|has| has))
    }

    /// Blocks until every rank has called it.
    pub(crate) fn barrier(&self) -> Result<()> {
        self.all_gather(&[]).map(drop)
    }

    /// A barrier of streams during which no other kernel runs. Every rank creates one at the same time.
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
