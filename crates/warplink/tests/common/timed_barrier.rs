//! A barrier that fails a test where not all ranks come to it.

// Each test binary uses a part of this.
#![allow(dead_code, unreachable_pub)]

use super::LIMIT;
use std::sync::{Condvar, Mutex, PoisonError};

/// As the standard library's barrier, but a rank that has waited for [`LIMIT`] panics: another rank's check failed
/// before it came, and its message is what the test should end with.
#[derive(Debug)]
pub struct TimedBarrier {
    ranks: usize,
    /// How often all have come, and how many have come since.
    state: Mutex<(usize, usize)>,
    all_came: Condvar,
}

impl TimedBarrier {
    pub fn new(ranks: usize) -> Self {
        Self {
            ranks,
            state: Mutex::new((0, 0)),
            all_came: Condvar::new(),
        }
    }

    /// Blocks until all ranks have come.
    pub fn wait(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (turn, came) = (state.0, state.1 + 1);
        if came == self.ranks {
            *state = (turn + 1, 0);
            self.all_came.notify_all();
            return;
        }
        state.1 = came;
        let waiting = self
            .all_came
            .wait_timeout_while(state, LIMIT, |state| state.0 == turn);
        let (state, waited) = waiting.unwrap_or_else(PoisonError::into_inner);
        let came = state.1;
        drop(state);
        assert!(
            !waited.timed_out(),
            "{came} of {} ranks came to a barrier in {LIMIT:?}",
            self.ranks
        );
    }
}
