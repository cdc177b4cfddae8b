//! A job: the ranks that joined together.

use crate::bootstrap::AbortHandle;
use crate::communicator::Communicator;
use crate::config::Config;
use crate::device::Device;
use crate::error::{Error, Rank, Result};
use crate::threads;
use std::sync::Arc;
use std::thread::JoinHandle;

/// A job that this process has joined as one of its ranks: one connection to the store, one device, one
/// memory service and a few threads, independent of the number of communicators. Clones share the membership.
///
/// Ranks communicate through communicators: [`Job::world`] contains all ranks, and others are derived from
/// it.
#[derive(Clone, Debug)]
pub struct Job {
    world: Communicator,
}

impl Job {
    /// Joins the other ranks. Blocks until all have joined.
    ///
    /// # Errors
    /// As [`Communicator::join`].
    pub fn join(config: &Config) -> Result<Self> {
        Communicator::join(config).map(|world| Self { world })
    }

    /// Joins the other ranks in the background, so one thread can join several ranks.
    ///
    /// # Errors
    /// Those of starting a thread.
    pub fn begin_join(config: &Config) -> Result<PendingJob> {
        let abort = AbortHandle::default();
        let name = format!("warplink-join-{}", config.join.rank);
        let (config, aborted) = (config.clone(), abort.clone());
        let join = move || {
            let world = Communicator::join_with(&config, &aborted)?;
            Ok(Self { world })
        };
        let thread = threads::spawn(name, "start the thread that joins", join)?;
        Ok(PendingJob { thread, abort })
    }

    /// Joins with the configuration in the environment; see [`Config::from_env`]. Blocks until all ranks have
    /// joined.
    ///
    /// # Errors
    /// As [`Communicator::join`], and invalid variables.
    pub fn from_env() -> Result<Self> {
        Self::join(&Config::from_env()?)
    }

    /// The communicator of all ranks; the same one for every call.
    pub fn world(&self) -> Communicator {
        self.world.clone()
    }

    /// This process's rank.
    pub fn rank(&self) -> Rank {
        self.world.rank()
    }

    /// The device.
    pub fn device(&self) -> &Arc<dyn Device> {
        self.world.device()
    }

    /// Leaves in order, like [`Communicator::close`] of the world. Blocks until every rank has.
    ///
    /// # Errors
    /// As [`Communicator::close`].
    pub fn close(self) -> Result<()> {
        self.world.close()
    }

    /// Leaves as failed; see [`Communicator::abort`].
    pub fn abort(&self, reason: &str) {
        self.world.abort(reason);
    }
}

/// A join in progress. Dropping it does not cancel the join; the rank is then lost to the others as soon as
/// it has joined.
#[derive(Debug)]
pub struct PendingJob {
    thread: JoinHandle<Result<Job>>,
    abort: AbortHandle,
}

impl PendingJob {
    /// Whether it has ended, so that [`wait`](Self::wait) will not block.
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Ends the join, or leaves the job as failed; see [`AbortHandle::abort`].
    pub fn abort(&self, reason: &str) {
        self.abort.abort(reason);
    }

    /// The joined job. Blocks until every rank has joined, or one could not.
    ///
    /// # Errors
    /// As [`Job::join`].
    pub fn wait(self) -> Result<Job> {
        let panicked = || Error::internal("the thread that joins panicked");
        self.thread.join().map_err(|_| panicked())?
    }
}
