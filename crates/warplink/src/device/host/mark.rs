//! Progress of events.

use crate::device::Fault;
use crate::error::Result;
use crate::sync::{lock, wait_for};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

/// Progress of an event.
#[derive(Debug, Default)]
pub(super) struct EventState {
    reached: Mutex<Reached>,
    change: Condvar,
}

/// Last record reached, and when.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Reached {
    pub(super) mark: u64,
    pub(super) at: Option<Instant>,
}

impl EventState {
    pub(super) fn reached(&self) -> Reached {
        *lock(&self.reached)
    }

    pub(super) fn reach(&self, mark: u64) {
        let mut reached = lock(&self.reached);
        if mark > reached.mark {
            *reached = Reached {
                mark,
                at: Some(Instant::now()),
            };
        }
        self.change.notify_all();
    }

    pub(super) fn wait(&self, mark: u64, fault: &Fault) -> Result<()> {
        let mut reached = lock(&self.reached);
        while reached.mark < mark {
            fault.check()?;
            reached = wait_for(&self.change, reached, Duration::from_millis(10));
        }
        Ok(())
    }
}
