//! One rank of one cell, as a process.

use super::cell::{Cell, Phase, RankMessage, RankReport, ReportedError, now};
use super::inflict::{Inflicted, inflict, send};
use super::leftovers::HeldResources;
use super::phases::{Player, go_on, is_loss};
use anyhow::Result;
use clap::Args;
use std::process::ExitCode;
use warplink::bootstrap::Bootstrap;
use warplink::{Communicator, Config, Deadline, DeviceKind, device};

/// The hidden subcommand that is a rank of a cell.
pub(crate) const FAULT_RANK_COMMAND: &str = "__fault-rank";

/// Descriptors for connecting to the store, and the maximum for serving one rank.
const SPARE: usize = 2;
const SERVED: usize = 4;

/// The arguments of that subcommand.
#[derive(Debug, Args)]
pub(crate) struct FaultRank {
    #[command(flatten)]
    cell: Cell,
    #[arg(long)]
    victim: usize,
}

impl FaultRank {
    pub(crate) fn run(&self) -> Result<ExitCode> {
        let config = Config::from_env()?;
        let before = HeldResources::now();
        let rank = Rank {
            cell: self.cell,
            is_victim: config.join.rank == self.victim,
            config,
        };
        let (mut report, inflicted) = rank.play();
        // Descriptors that were used up are not leaks.
        drop(inflicted);
        // A GPU's driver keeps threads and descriptors until the process exits.
        if rank.config.device.kind == DeviceKind::Host {
            report.left = before.wait_for_rest();
        }
        let code = u8::from(report.error.is_some());
        send(&RankMessage::Report(report));
        Ok(ExitCode::from(code))
    }
}

struct Rank {
    cell: Cell,
    is_victim: bool,
    config: Config,
}

impl Rank {
    /// The rank's report, and the resources that a victim holds.
    fn play(&self) -> (RankReport, Inflicted) {
        let mut report = RankReport::default();
        let mut inflicted = Inflicted::default();
        if let Err(error) = self.try_play(&mut report, &mut inflicted) {
            report.error_at.get_or_insert_with(now);
            report
                .error
                .get_or_insert_with(|| ReportedError::of(&error));
        }
        (report, inflicted)
    }

    fn try_play(&self, report: &mut RankReport, inflicted: &mut Inflicted) -> warplink::Result<()> {
        let Cell { fault, phase } = self.cell;
        let in_join = phase == Phase::Join;
        let mut _device = None;
        if self.is_victim && in_join {
            if !fault.is_of_resources() {
                return self.fail_in_join();
            }
            // Without its device, the rank would count as not started.
            _device = Some(device::open(&self.config.device)?);
            *inflicted = inflict(fault, |_| {})?;
            // Without a connection, the rank would count as not started, and no other would notice.
            let mut spare = SPARE;
            if self.config.join.rank == 0 {
                // Rank 0 serves the store, with connections from every rank.
                spare += SERVED * self.config.join.world;
            }
            inflicted.spare(spare);
        }
        let comm = Communicator::join(&self.config)?;
        let mut fail = |comm: &Communicator| {
            if self.is_victim && !in_join {
                *inflicted = inflict(fault, |reason| comm.abort(reason))?;
            }
            Ok(())
        };
        if !in_join {
            comm.barrier()?;
        }
        let played = Player {
            comm: comm.clone(),
            fail: &mut fail,
            wrong: &mut report.wrong,
        }
        .play(phase);
        // Ranks that do not depend on the victim in this phase notice its loss here.
        let played = match phase {
            Phase::Close => played,
            _ => played.and_then(|()| comm.barrier()),
        };
        if played.is_err() {
            // Before resources are released, which may take a GPU's driver a while.
            report.error_at = Some(now());
        }
        match played {
            Ok(()) if phase == Phase::Close => Ok(()),
            Ok(()) => comm.close(),
            // The victim is not among the survivors, even if it still runs.
            Err(error) if self.is_victim || !self.cell.can_go_on() || !is_loss(&error) => {
                Err(error)
            }
            Err(error) => {
                report.error = Some(ReportedError::of(&error));
                let left = comm.survivors()?;
                drop(comm);
                go_on(&left, &mut report.wrong)?;
                report.went_on_at = Some(now());
                left.close()
            }
        }
        .inspect_err(|error| {
            // A failure after the first error is a separate problem.
            if report.error.is_some() {
                report
                    .wrong
                    .push(format!("the survivors could not continue: {error}"));
            }
        })
    }

    /// Fails after the store knows this rank, while the others wait for it to finish joining.
    fn fail_in_join(&self) -> warplink::Result<()> {
        let bootstrap = Bootstrap::join(&self.config.join)?;
        inflict(self.cell.fault, |reason| bootstrap.abort(reason))?;
        bootstrap.barrier(Deadline::after(self.config.timeout))
    }
}
