//! Runs cells beside one another, and keeps the multi-process service of their GPUs working.
//!
//! A process that is killed while the service works for it may leave the service unable to serve anybody.
//! So when a cell is wrong, the GPUs are tried with no cell running; where they do not work, the servers
//! are started again and the cell runs once more, alone. A cell that is right only then was spoiled by
//! another, which has been told.

use super::cell::Cell;
use super::job::{self, JobSettings};
use super::judge::{Judged, judge};
use crate::launch::ServiceControl;
use crate::report;
use anyhow::{Context, Result};
use std::sync::{PoisonError, RwLock};

/// Runs cells.
pub(super) struct Runner<'a> {
    settings: &'a JobSettings,
    /// None where no GPU is shared.
    service: Option<ServiceControl>,
    /// How often its servers were started again. Held by every cell that runs.
    restarts: RwLock<usize>,
}

impl<'a> Runner<'a> {
    /// Tries the GPUs.
    ///
    /// # Errors
    /// Where one cannot be used.
    pub(super) fn new(settings: &'a JobSettings) -> Result<Self> {
        let service = match settings.gpus.shared_by() {
            Some(_) => Some(ServiceControl::find()?),
            None => None,
        };
        settings.gpus.probe(&settings.cache)?;
        Ok(Self {
            settings,
            service,
            restarts: RwLock::new(0),
        })
    }

    /// Runs and judges one cell, and once more where the service had failed.
    pub(super) fn run(&self, cell: Cell) -> Judged {
        let running = self.restarts.read().unwrap_or_else(PoisonError::into_inner);
        let before = *running;
        let judged = self.run_once(cell);
        drop(running);
        let Some(service) = &self.service else {
            return judged;
        };
        if judged.problems.is_empty() {
            return judged;
        }
        // Alone from here on.
        let mut restarts = self
            .restarts
            .write()
            .unwrap_or_else(PoisonError::into_inner);
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

    /// How often the servers of the service were started again.
    pub(super) fn restarts(&self) -> usize {
        *self.restarts.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn run_once(&self, cell: Cell) -> Judged {
        judge(cell, self.settings, job::run(cell, self.settings))
    }

    /// Starts the servers again where the GPUs cannot be used; whether that was so.
    fn mend(&self, service: &ServiceControl, cell: Cell) -> Result<bool> {
        let Err(error) = self.settings.gpus.probe(&self.settings.cache) else {
            return Ok(false);
        };
        report::print_message(&format!(
            "{cell}: CUDA's multi-process service has failed ({error:#}); its servers are started again"
        ));
        service
            .restart_servers()
            .and_then(|()| self.settings.gpus.probe(&self.settings.cache))
            .context("start the servers of CUDA's multi-process service again")?;
        Ok(true)
    }
}
