//! This process among the others of its job.

use crate::communicator::Communicator;
use crate::config::Config;
use crate::device::Device;
use crate::error::{Error, ErrorKind, Rank, Result};
use std::sync::Arc;
use std::thread::JoinHandle;

/// A job that this process has joined as one of its ranks: one connection to the store, one device,
/// one memory service and a handful of threads, however many communicators there are. Clones are the
/// same membership.
///
/// Its ranks communicate by communicators. [`Job::world`] is the one of all ranks; others are made
/// from it.
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

    /// Starts to join the other ranks, and returns at once: so one thread can join several ranks.
    ///
    /// # Errors
    /// Those of starting a thread.
    pub fn begin_join(config: &Config) -> Result<PendingJob> {
        let config = config.clone();
        let thread = std::thread::Builder::new()
            .name(format!("warplink-join-{}", config.join.rank))
            .spawn(move || Self::join(&config))
            .map_err(|error| Error::thread("start the thread that joins", &error))?;
        Ok(PendingJob { thread })
    }

    /// Joins as the environment says; see [`Config::from_env`]. Blocks until all ranks have joined.
    ///
    /// # Errors
    /// As [`Communicator::join`], and what the variables are refused for.
    pub fn from_env() -> Result<Self> {
        Self::join(&Config::from_env()?)
    }

    /// The communicator of all ranks, the same one at every call.
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

    /// Leaves in order, as [`Communicator::close`] of the world. Blocks until every rank has.
    ///
    /// # Errors
    /// As [`Communicator::close`].
    pub fn close(self) -> Result<()> {
        self.world.close()
    }

    /// Leaves as a failure; see [`Communicator::abort`].
    pub fn abort(&self, reason: &str) {
        self.world.abort(reason);
    }
}

/// A join under way. A rank whose pending join is dropped joins all the same, and is lost to the
/// others as soon as it has.
#[derive(Debug)]
pub struct PendingJob {
    thread: JoinHandle<Result<Job>>,
}

impl PendingJob {
    /// Whether it has ended, so that [`wait`](Self::wait) does not block.
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// The job that was joined. Blocks until every rank has joined, or one could not.
    ///
    /// # Errors
    /// As [`Job::join`].
    pub fn wait(self) -> Result<Job> {
        let panicked = || Error::new(ErrorKind::Internal, "the thread that joins panicked");
        self.thread.join().map_err(|_| panicked())?
    }
}
