//! Asynchronous unmapping, as GPU drivers do it, if tests ask for delays.

use crate::device::Delays;
use crate::error::Result;
use crate::threads;
use std::any::Any;
use std::sync::mpsc::{Sender, channel};

/// A mapping to drop or a callback, processed in order.
enum UnmappingTask {
    Unmap(Box<dyn Any + Send>),
    Then(Box<dyn FnOnce() + Send>),
}

/// The unmapping thread. It ends after its last job when all clones are dropped.
#[derive(Clone, Debug)]
pub(in crate::device) struct LateUnmapping(Sender<UnmappingTask>);

impl LateUnmapping {
    pub(super) fn start(delays: Delays) -> Result<Self> {
        let (sender, queue) = channel();
        let run = move || {
            for job in queue {
                match job {
                    UnmappingTask::Unmap(mapping) => {
                        std::thread::sleep(delays.max);
                        drop(mapping);
                    }
                    UnmappingTask::Then(then) => then(),
                }
            }
        };
        threads::spawn("warplink-unmap", "start the thread that unmaps late", run)?;
        Ok(Self(sender))
    }

    /// Drops `mapping` later.
    pub(super) fn unmap(&self, mapping: impl Any + Send) {
        // Cannot fail: the thread lives as long as the sender.
        let _ = self.0.send(UnmappingTask::Unmap(Box::new(mapping)));
    }

    /// Runs `then` after everything submitted so far is unmapped.
    pub(super) fn then(&self, then: Box<dyn FnOnce() + Send>) {
        // In the same queue as the mappings, so that it runs after all those that were dropped before.
        let _ = self.0.send(UnmappingTask::Then(then));
    }
}
