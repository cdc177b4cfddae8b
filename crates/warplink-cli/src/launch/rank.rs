//! Rank processes of a launch.

use super::gpu_service::GpuService;
use super::guard;
use super::leftovers::{ProcessMark, is_stopped};
use crate::process::{pid, this_command};
use crate::report;
use anyhow::{Context, Result};
use clap::Args;
use rustix::process::{Pid, Signal, getppid, kill_process_group, set_parent_process_death_signal};
use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{self, Child, Command, ExitCode};

/// The hidden subcommand that execs a rank's program.
pub(crate) const RANK_COMMAND: &str = "__rank";

/// Arguments of the hidden subcommand.
#[derive(Debug, Args)]
pub(crate) struct RankArgs {
    /// The launcher's process id
    #[arg(long)]
    parent: u32,
    /// The program and its arguments
    #[arg(required = true, last = true)]
    command: Vec<OsString>,
}

/// The command that execs `program` as a rank.
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

/// Replaces this process by a rank's program, which the kernel kills when the launcher dies. Returns only on
/// failure, with the exit code.
pub(crate) fn become_rank(args: &RankArgs) -> ExitCode {
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        report::print_message(&format!(
            "error: set the parent-death signal of a rank: {error}"
        ));
        return ExitCode::FAILURE;
    }
    // A launcher that died before the call above sends no signal; detect it by the changed parent.
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

/// Running ranks. Dropping it kills them and everything they started.
#[derive(Debug)]
pub(super) struct Ranks {
    children: Vec<Child>,
    mark: ProcessMark,
    /// The service through which they share GPUs.
    service: Option<GpuService>,
}

impl Ranks {
    /// Creates an empty set.
    pub(super) fn new(capacity: usize, mark: ProcessMark) -> Self {
        Self {
            children: Vec::with_capacity(capacity),
            mark,
            service: None,
        }
    }

    /// Keeps `service` running as long as the ranks.
    pub(super) fn share(&mut self, service: GpuService) {
        self.service = Some(service);
    }

    /// Sets the service's variables for `command`, if there is a service.
    pub(super) fn apply_service(&self, command: &mut Command) {
        if let Some(service) = &self.service {
            service.apply(command);
        }
    }

    /// Starts a rank, which must have its own process group.
    pub(super) fn start(&mut self, command: &mut Command) -> Result<&mut Child> {
        let child = command.spawn().map_err(|error| {
            warplink::Error::thread(format!("start rank {}", self.children.len()), &error)
        })?;
        self.children.push(child);
        self.children.last_mut().context("no rank was started")
    }

    pub(super) fn len(&self) -> usize {
        self.children.len()
    }

    /// Signals every rank and everything it started. Ranks are reaped only on drop, so their pids cannot be
    /// reused meanwhile.
    pub(super) fn signal(&self, signal: Signal) {
        for group in self.children.iter().filter_map(pid) {
            // Fails for a group without processes.
            let _ = kill_process_group(group, signal);
        }
    }

    /// Kills stopped ranks and what they started, since they cannot react to a signal.
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
            // Killed above, so this returns soon; on an error nothing is left to reap.
            let _ = child.wait();
        }
        // After the ranks that use it, and before leftovers are killed.
        self.service = None;
        self.mark.kill_all();
    }
}
