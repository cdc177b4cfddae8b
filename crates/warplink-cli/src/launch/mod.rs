//! Starts the ranks of a program on this machine and supervises them until the end.
//!
//! Each rank leads its own process group, so that it can be signalled with its descendants. A rank starts as
//! this command (`become_rank`), which ties its life to the launcher's and then execs the program. Leftover
//! processes are killed, whatever group or session they are in (`leftovers`); if the launcher itself is
//! killed, its parent, the guard, does that.

mod environment;
mod exits;
mod gpu_service;
mod guard;
mod leftovers;
mod outcome;
mod output;
mod rank;
mod service_control;
mod supervise;

pub(crate) use environment::Variable;
pub(crate) use gpu_service::GpuAssignment;
pub(crate) use guard::{ending_signals, follow, guard, is_guarded};
pub(crate) use outcome::LaunchOutcome;
pub(crate) use output::Target;
pub(crate) use rank::{RANK_COMMAND, RankArgs, become_rank};
pub(crate) use service_control::ServiceControl;

use crate::report;
use anyhow::Result;
use environment::Environment;
use gpu_service::GpuService;
use leftovers::ProcessMark;
use rank::Ranks;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Stdio;
use std::time::Duration;

/// Ranks to launch, and how.
#[derive(Debug)]
pub(crate) struct LaunchPlan {
    /// Number of ranks.
    pub(crate) ranks: usize,
    /// Path, or name to look up in `PATH`.
    pub(crate) program: OsString,
    /// Arguments, the same for every rank.
    pub(crate) args: Vec<OsString>,
    /// Additional variables.
    pub(crate) env: Vec<Variable>,
    /// Handling of a rank's standard output and standard error.
    pub(crate) output: fn(usize) -> [OutputStream; 2],
    /// Time between SIGTERM and SIGKILL.
    pub(crate) grace: Duration,
    /// Number of ranks on a GPU, if shared.
    pub(crate) ranks_per_gpu: Option<usize>,
    /// Exit code by which a rank reports that it failed because of another; reported as 1.
    pub(crate) consequence: Option<i32>,
}

/// Handling of one stream of one rank.
#[derive(Clone, Copy, Debug)]
pub(crate) enum OutputStream {
    /// Forward it in whole lines, prefixed with the rank.
    Prefixed(Target),
    /// Capture it in the [`LaunchOutcome`].
    Kept,
    /// Let the rank write to the launcher's stream.
    Inherited,
    Dropped,
}

impl OutputStream {
    fn stdio(self) -> Stdio {
        match self {
            Self::Prefixed(_) | Self::Kept => Stdio::piped(),
            Self::Inherited => Stdio::inherit(),
            Self::Dropped => Stdio::null(),
        }
    }
}

/// Runs the plan until every rank has exited and none of its descendants is left.
///
/// Call it from a thread that outlives the call: the kernel kills the ranks when their parent thread exits.
///
/// # Errors
/// Errors of starting processes. Failures of ranks are in the [`LaunchOutcome`].
pub(crate) fn run(plan: &LaunchPlan) -> Result<LaunchOutcome> {
    let search = std::env::var_os("PATH").unwrap_or_default();
    let program = match environment::find_program(&plan.program, &search) {
        Ok(program) => program,
        Err(missing) => {
            report::print_message(&format!("error: {missing}"));
            return Ok(LaunchOutcome::not_started(
                missing.exit_code(),
                missing.to_string(),
            ));
        }
    };
    // Before anything is started, since too few GPUs are an error of the command line.
    let gpus = match plan.ranks_per_gpu {
        Some(_) => Some(GpuAssignment::new(plan.ranks, plan.ranks_per_gpu, None)?),
        None => None,
    };
    // Before any process starts: a signal in between would end the launcher and leave the others behind.
    let supervisor = supervise::Supervisor::new(plan.consequence)?;
    let environment = Environment::new(plan.ranks)?;
    let mark = ProcessMark::new()?;
    // From here on an early return drops it, which kills the ranks started so far.
    let mut ranks = Ranks::new(plan.ranks, mark.clone());
    if gpus.is_some() {
        ranks.share(GpuService::start(&mark)?);
    }
    for rank in 0..plan.ranks {
        let mut command = rank::command(&program, &plan.args);
        environment.apply(rank, &mut command);
        if let Some(gpus) = &gpus {
            gpus.apply(rank, 1, &mut command);
        }
        ranks.apply_service(&mut command);
        // After the launcher's own variables, which the user may override, and before the mark, which nobody may.
        environment.apply_extra(rank, &plan.env, &mut command);
        mark.apply(&mut command);
        let [out, err] = (plan.output)(rank);
        // A group for each rank, so that signals reach what it started, and the terminal's reach only the launcher.
        command.process_group(0).stdin(Stdio::null());
        command.stdout(out.stdio()).stderr(err.stdio());
        let started = ranks.start(&mut command)?;
        match (started.stdout.take(), out) {
            (Some(stream), OutputStream::Prefixed(target)) => {
                supervisor.pump(rank, stream, target)?
            }
            (Some(stream), OutputStream::Kept) => supervisor.keep(rank, stream)?,
            _ => {}
        }
        if let (Some(stream), OutputStream::Prefixed(target)) = (started.stderr.take(), err) {
            supervisor.pump(rank, stream, target)?;
        }
        supervisor.watch(rank, started)?;
    }
    supervisor.see_through(ranks, plan.grace)
}
