//! Aborting a job from another thread, also while it is being joined.

use crate::debug::debug_text;
use crate::error::{Error, Result};
use crate::sync::lock;
use std::sync::{Arc, Mutex};

type Interrupt = Box<dyn FnOnce(&str) + Send>;

/// Aborts a job that this process joins or has joined, from any thread. For one job; clones share their state.
#[derive(Clone, Default)]
pub struct AbortHandle(Arc<Mutex<AbortState>>);

#[derive(Default)]
struct AbortState {
    /// Why it was aborted, if it was.
    reason: Option<String>,
    /// Ends the wait that the joining thread is in, or the job.
    interrupt: Option<Interrupt>,
}

impl AbortHandle {
    /// Ends the join, which fails soon with [`ErrorKind::Closed`](crate::ErrorKind::Closed), or leaves the job as failed,
    /// if it was joined; see [`Communicator::abort`](crate::Communicator::abort). The other ranks learn the `reason`, as far
    /// as this one has reached the store. Only the first call has an effect. Blocks for about two seconds at most.
    pub fn abort(&self, reason: &str) {
        let mut state = lock(&self.0);
        if state.reason.is_some() {
            return;
        }
        state.reason = Some(reason.to_owned());
        let interrupt = state.interrupt.take();
        // It may block.
        drop(state);
        if let Some(interrupt) = interrupt {
            interrupt(reason);
        }
    }

    /// Fails once it was aborted.
    pub(crate) fn check(&self) -> Result<()> {
        match self.reason() {
            Some(reason) => Err(Error::closed(format!("the join was aborted: {reason}"))),
            None => Ok(()),
        }
    }

    /// Why it was aborted, if it was.
    pub(crate) fn reason(&self) -> Option<String> {
        lock(&self.0).reason.clone()
    }

    /// Has `interrupt` called with the reason when it is aborted, instead of an earlier one; at once if it already was.
    pub(crate) fn interrupt_with(&self, interrupt: impl FnOnce(&str) + Send + 'static) {
        let mut state = lock(&self.0);
        match state.reason.clone() {
            None => state.interrupt = Some(Box::new(interrupt)),
            Some(reason) => {
                drop(state);
                interrupt(&reason);
            }
        }
    }
}

debug_text!(AbortHandle, |it| "AbortHandle({:?})", it.reason());
