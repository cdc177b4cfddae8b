//! A barrier that fails a test where not all ranks come to it.

// Each test binary uses a part of this.
#![allow(dead_code, unreachable_pub)]

use super::{LIMIT, MEETING, hosts, is_rank};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// As the standard library's barrier, but a rank that has waited for [`LIMIT`] panics: another rank's check failed
/// before it came, and its message is what the test should end with. Ranks that are processes meet by files.
#[derive(Debug)]
pub struct TimedBarrier {
    ranks: usize,
    /// Which of a rank's barriers this is; all ranks make them in the same order.
    number: usize,
    /// How often all have come, and how many have come since.
    state: Mutex<(usize, usize)>,
    all_came: Condvar,
}

impl TimedBarrier {
    pub fn new(ranks: usize) -> Self {
        static BARRIERS: AtomicUsize = AtomicUsize::new(0);
        Self {
            ranks,
            number: BARRIERS.fetch_add(1, Ordering::Relaxed),
            state: Mutex::new((0, 0)),
            all_came: Condvar::new(),
        }
    }

    /// Blocks until all ranks have come.
    pub fn wait(&self) {
        if is_rank() {
            return self.wait_for_processes();
        }
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

    fn wait_for_processes(&self) {
        let turn = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.0 += 1;
            state.0
        };
        let meeting = PathBuf::from(std::env::var_os(MEETING).unwrap());
        let name = |rank| format!("barrier {} {turn} {rank}", self.number);
        let own: usize = std::env::var("WARPLINK_RANK").unwrap().parse().unwrap();
        hosts::leave(&meeting, &name(own), &[]);
        let started = Instant::now();
        for rank in 0..self.ranks {
            while !meeting.join(name(rank)).exists() {
                assert!(
                    started.elapsed() < LIMIT,
                    "rank {rank} did not come to a barrier in {LIMIT:?}"
                );
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}
