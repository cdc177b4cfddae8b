//! Starts the ranks of a program on this machine and sees them through to their end.
//!
//! Each rank leads a process group of its own, so that it can be signalled with what it starts. A rank
//! is first this command itself (`become_rank`), which ties its life to the launcher's and then turns
//! into the program. What ranks leave is killed, whatever group or session it is in (`leftovers`); if
//! the launcher is killed, its parent, the guard, does that.

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
pub(crate) use gpu_service::queues_of_each;
pub(crate) use guard::{ending_signals, follow, guard, is_guarded};
pub(crate) use outcome::Outcome;
pub(crate) use rank::{RANK_COMMAND, RankArgs, become_rank};
pub(crate) use service_control::ServiceControl;

use crate::report;
use anyhow::{Context, Result};
use environment::Environment;
use gpu_service::{GpuService, GpuSharing};
use leftovers::Mark;
use output::{Printer, Target};
use rank::Ranks;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// What to start, and what becomes of its output.
#[derive(Debug)]
pub(crate) struct LaunchPlan {
    /// How many ranks.
    pub(crate) ranks: usize,
    /// A path, or a name to look up in `PATH`.
    pub(crate) program: OsString,
    /// Its arguments, the same for every rank.
    pub(crate) args: Vec<OsString>,
    /// Variables beside those that every rank gets.
    pub(crate) env: Vec<Variable>,
    /// Where the output goes.
    pub(crate) output: Output,
    /// The time between SIGTERM and SIGKILL.
    pub(crate) grace: Duration,
    /// How many ranks share a GPU, where any do.
    pub(crate) ranks_per_gpu: Option<usize>,
    /// The code with which a rank exits that fails because another did; it counts as 1.
    pub(crate) consequence: Option<i32>,
}

/// Where the output of ranks goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Output {
    /// Each stream to the launcher's, in whole lines that name their rank.
    Prefixed,
    /// The same, but all of it to standard error, to leave standard output to a result.
    PrefixedToStderr,
    /// Rank 0 writes to the launcher's streams itself; of the others, only standard error is shown,
    /// prefixed.
    Rank0Only,
    /// The same, but what ranks write to standard output is kept in the [`Outcome`].
    Kept,
    /// Every rank writes to the launcher's streams itself.
    #[expect(dead_code, reason = "for the subcommands that start themselves")]
    Inherit,
}

/// Runs the plan until every rank has ended and nothing that it started is left.
///
/// Call it from a thread that lives on until it returns: the kernel ends the ranks with that thread.
///
/// # Errors
/// A process that cannot be started. What ranks do, failures included, is in the [`Outcome`].
pub(crate) fn run(plan: &LaunchPlan) -> Result<Outcome> {
    let search = std::env::var_os("PATH").unwrap_or_default();
    let program = match environment::find_program(&plan.program, &search) {
        Ok(program) => program,
        Err(missing) => {
            report::print_message(&format!("error: {missing}"));
            return Ok(Outcome::not_started(
                missing.exit_code(),
                missing.to_string(),
            ));
        }
    };
    let sharing = plan.ranks_per_gpu;
    let sharing = sharing
        .map(|each| GpuSharing::new(plan.ranks, each))
        .transpose()?;
    let supervisor = supervise::Supervisor::new(plan.consequence)?;
    let environment = Environment::new(plan.ranks)?;
    let printer = Arc::new(Printer::new());
    let mark = Mark::new()?;
    let mut ranks = Ranks::new(plan.ranks, mark.clone());
    if sharing.is_some() {
        ranks.share(GpuService::start(&mark)?);
    }
    for rank in 0..plan.ranks {
        let mut command = rank::command(&program, &plan.args);
        environment.apply(rank, &mut command);
        if let Some(sharing) = &sharing {
            sharing.apply(rank, &mut command);
        }
        ranks.apply_service(&mut command);
        environment.apply_extra(rank, &plan.env, &mut command);
        mark.apply(&mut command);
        let [out, err] = targets(plan.output, rank);
        command.process_group(0).stdin(Stdio::null());
        command.stdout(out.stdio()).stderr(err.stdio());
        let started = ranks
            .start(&mut command)
            .with_context(|| format!("start rank {rank}"))?;
        match (started.stdout.take(), out) {
            (Some(stream), Stream::Prefixed(target)) => {
                supervisor.pump(rank, stream, target, &printer)?;
            }
            (Some(stream), Stream::Kept) => supervisor.keep(rank, stream)?,
            _ => {}
        }
        if let (Some(stream), Stream::Prefixed(target)) = (started.stderr.take(), err) {
            supervisor.pump(rank, stream, target, &printer)?;
        }
        supervisor.watch(rank, started)?;
    }
    supervisor.see_through(ranks, plan.grace)
}

/// What becomes of one stream of one rank.
#[derive(Clone, Copy, Debug)]
enum Stream {
    Prefixed(Target),
    Kept,
    Inherited,
    Dropped,
}

impl Stream {
    fn stdio(self) -> Stdio {
        match self {
            Self::Prefixed(_) | Self::Kept => Stdio::piped(),
            Self::Inherited => Stdio::inherit(),
            Self::Dropped => Stdio::null(),
        }
    }
}

/// What becomes of a rank's standard output and standard error.
fn targets(output: Output, rank: usize) -> [Stream; 2] {
    use Stream::{Dropped, Inherited, Kept, Prefixed};
    match (output, rank) {
        (Output::Prefixed, _) => [Prefixed(Target::Stdout), Prefixed(Target::Stderr)],
        (Output::PrefixedToStderr, _) => [Prefixed(Target::Stderr), Prefixed(Target::Stderr)],
        (Output::Rank0Only, 0) | (Output::Inherit, _) => [Inherited, Inherited],
        (Output::Kept, 0) => [Kept, Inherited],
        (Output::Kept, _) => [Kept, Prefixed(Target::Stderr)],
        (Output::Rank0Only, _) => [Dropped, Prefixed(Target::Stderr)],
    }
}

/// This command itself, for what it starts of its own. The link leads to the running binary also
/// after its file was replaced.
fn this_command() -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("warplink");
    command
}
