//! Runs cells concurrently, and keeps the multi-process service of their GPUs working.
//!
//! Killing a process while the service works for it may break the service for every process. So after a wrong
//! cell, the GPUs are tested with no cell running; if they do not work, the servers are restarted and the cell
//! is repeated alone.

use super::cell::Cell;
use super::job::{self, JobSettings};
use super::judge::{Judged, judge};
use super::probe;
use crate::launch::ServiceControl;
use crate::report;
use anyhow::{Context, Result};
use std::sync::{PoisonError, RwLock};

/// Runs cells.
pub(super) struct Runner<'a> {
    settings: &'a JobSettings,
    /// `None` if no GPU is shared.
    service: Option<ServiceControl>,
    /// Number of restarts of its servers. Every running cell holds it for reading.
    restarts: RwLock<usize>,
}

impl<'a> Runner<'a> {
    /// Tests the GPUs.
    ///
    /// # Errors
    /// If one does not work.
    pub(super) fn new(settings: &'a JobSettings) -> Result<Self> {
        let shared = settings.gpus.ranks_per_gpu;
        let service = shared.map(|_| ServiceControl::find()).transpose()?;
        probe::test_all(&settings.gpus, &settings.cache)?;
        Ok(Self {
            settings,
            service,
            restarts: RwLock::new(0),
        })
    }

    /// Runs and judges one cell; repeats it if the service had failed.
    pub(super) fn run(&self, cell: Cell) -> Judged {
        let running = self.restarts.read().unwrap_or_else(PoisonError::into_inner);
        // Tells whether another cell has had the servers restarted while this one ran: it was then disturbed as well.
        let before = *running;
        let judged = self.run_once(cell);
        // A read lock held here would block the write lock below.
        drop(running);
        let Some(service) = &self.service else {
            return judged;
        };
        if judged.problems.is_empty() {
            return judged;
        }
        // No other cell runs while this lock is held.
        let mut restarts = self
            .restarts
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        // Otherwise the servers were restarted since, and the cell only has to be repeated.
        if *restarts == before {
            match self.mend(service, cell) {
                Ok(false) => return judged,
                Ok(true) => *restarts += 1,
                Err(error) => {
                    report::print_message(&format!("{cell}: {error:#}"));
                    return judged;
                }
            }
        }
        let again = self.run_once(cell);
        if !again.problems.is_empty() {
            match self.mend(service, cell) {
                Ok(mended) => *restarts += usize::from(mended),
                Err(error) => report::print_message(&format!("{cell}: {error:#}")),
            }
        }
        Judged {
            spoiled: judged.problems,
            ..again
        }
    }

    /// Number of restarts of the service's servers.
    pub(super) fn restarts(&self) -> usize {
        *self.restarts.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn run_once(&self, cell: Cell) -> Judged {
        judge(cell, self.settings, job::run(cell, self.settings))
    }

    /// Restarts the servers if the GPUs do not work; returns whether it did.
    fn mend(&self, service: &ServiceControl, cell: Cell) -> Result<bool> {
        let test = || probe::test_all(&self.settings.gpus, &self.settings.cache);
        let Err(error) = test() else {
            return Ok(false);
        };
        report::print_message(&format!(
            "{cell}: CUDA's multi-process service has failed ({error:#}); restarting its servers"
        ));
        service
            .restart_servers()
            .and_then(|()| test())
            .context("restart the servers of CUDA's multi-process service")?;
        Ok(true)
    }
}
