//! This process among the others of its job.

use crate::communicator::Communicator;
use crate::config::Config;
use crate::device::Device;
use crate::error::{Rank, Result};
use std::sync::Arc;

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
