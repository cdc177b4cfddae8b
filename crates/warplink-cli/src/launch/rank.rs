//! The processes of a launch.

use super::gpu_service::GpuService;
use super::guard;
use super::leftovers::{Mark, is_stopped};
use super::this_command;
use crate::report;
use anyhow::{Context, Result};
use clap::Args;
use rustix::process::{Pid, Signal, getppid, kill_process_group, set_parent_process_death_signal};
use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{self, Child, Command, ExitCode};

/// The hidden subcommand that turns into a rank's program.
pub(crate) const RANK_COMMAND: &str = "__rank";

/// The arguments of the hidden subcommand that becomes a rank.
#[derive(Debug, Args)]
pub(crate) struct RankArgs {
    /// The launcher's process id
    #[arg(long)]
    parent: u32,
    /// The program and its arguments
    #[arg(required = true, last = true)]
    command: Vec<OsString>,
}

/// The command that becomes a rank of `program`.
pub(super) fn command(program: &Path, args: &[OsString]) -> Command {
    let mut command = this_command();
    command
        .arg(RANK_COMMAND)
        .arg("--parent")
        .arg(process::id().to_string());
    command.arg("--").arg(program).args(args);
    guard::hide(&mut command);
    command
}

/// Turns this process into a rank's program, which the kernel ends when the launcher ends. Returns
/// only on failure, with the code to exit with.
pub(crate) fn become_rank(args: &RankArgs) -> ExitCode {
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        report::print_message(&format!(
            "error: set the parent-death signal of a rank: {error}"
        ));
        return ExitCode::FAILURE;
    }
    // A launcher that died before the line above sends no signal; another parent tells.
    if Pid::as_raw(getppid()).cast_unsigned() != args.parent {
        return ExitCode::FAILURE;
    }
    let Some((program, rest)) = args.command.split_first() else {
        return ExitCode::FAILURE;
    };
    let error = Command::new(program).args(rest).exec();
    report::print_message(&format!("error: run '{}': {error}", program.display()));
    ExitCode::from(if error.kind() == io::ErrorKind::NotFound {
        127
    } else {
        126
    })
}

/// The ranks that run. Dropping it kills them and all that they started.
#[derive(Debug)]
pub(super) struct Ranks {
    children: Vec<Child>,
    mark: Mark,
    /// What lets them share GPUs.
    service: Option<GpuService>,
}

impl Ranks {
    /// No ranks yet.
    pub(super) fn new(capacity: usize, mark: Mark) -> Self {
        Self {
            children: Vec::with_capacity(capacity),
            mark,
            service: None,
        }
    }

    /// Keeps `service` as long as a rank runs.
    pub(super) fn share(&mut self, service: GpuService) {
        self.service = Some(service);
    }

    /// Lets `command` find the service, if there is one.
    pub(super) fn apply_service(&self, command: &mut Command) {
        if let Some(service) = &self.service {
            service.apply(command);
        }
    }

    /// Starts one more. Its process group must be its own.
    pub(super) fn start(&mut self, command: &mut Command) -> Result<&mut Child> {
        let child = command.spawn()?;
        self.children.push(child);
        self.children.last_mut().context("no rank was started")
    }

    pub(super) fn len(&self) -> usize {
        self.children.len()
    }

    /// Sends `signal` to every rank and all that it started. A rank is not reaped before this is
    /// dropped, so that its number cannot stand for another process meanwhile.
    pub(super) fn signal(&self, signal: Signal) {
        for group in self.children.iter().filter_map(pid) {
            // It fails for a group of which nothing is left.
            let _ = kill_process_group(group, signal);
        }
    }
}

impl Ranks {
    /// Kills the ranks that are stopped, and what they started: they cannot react to a signal.
    pub(super) fn kill_stopped(&self) {
        for group in self.children.iter().filter_map(pid) {
            if is_stopped(group) {
                let _ = kill_process_group(group, Signal::KILL);
            }
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        for child in &mut self.children {
            // Killed above, so that this ends at once; a failure means that nothing is left.
            let _ = child.wait();
        }
        // After the ranks, which it serves, and before what is left is killed.
        self.service = None;
        self.mark.kill_all();
    }
}

pub(super) fn pid(child: &Child) -> Option<Pid> {
    i32::try_from(child.id()).ok().and_then(Pid::from_raw)
}
