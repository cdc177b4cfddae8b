//! Polls NCCL communicators for asynchronous errors of collectives in flight.

use super::NcclComm;
use crate::device::Fault;
use crate::sync::lock;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// Polling interval while waiting for a stream.
pub(in crate::device::cuda) const INTERVAL: Duration = Duration::from_millis(20);

/// The communicators of a GPU, with the fault to raise for each.
#[derive(Default)]
pub(in crate::device::cuda) struct Watched(Mutex<Vec<(Weak<NcclComm>, Weak<Fault>)>>);

impl Watched {
    /// Watches a communicator, which is aborted when `fault` is raised.
    pub(in crate::device::cuda) fn add(&self, comm: &Arc<NcclComm>, fault: &Arc<Fault>) {
        let mut watched = lock(&self.0);
        watched.retain(|(comm, _)| comm.strong_count() > 0);
        watched.push((Arc::downgrade(comm), Arc::downgrade(fault)));
    }

    /// Raises the faults of communicators that have failed, which aborts them.
    pub(in crate::device::cuda) fn look(&self) {
        // Outside the lock: dropping the last reference to a communicator may take long.
        let watched = lock(&self.0).clone();
        for (comm, fault) in watched {
            if let (Some(comm), Some(fault)) = (comm.upgrade(), fault.upgrade())
                && fault.error().is_none()
                && let Err(error) = comm.asynchronous_error()
            {
                tracing::warn!(%error, "an NCCL collective failed");
                fault.fail(error);
            }
        }
    }
}
