//! The processes of a launch: ranks, and the guard that ends what ranks leave.

use super::gpu_service::GpuService;
use super::leftovers::{Mark, is_stopped};
use super::this_command;
use crate::report;
use anyhow::{Context, Result};
use clap::Args;
use rustix::process::{Pid, Signal, getppid, kill_process_group, set_parent_process_death_signal};
use std::ffi::OsString;
use std::io::{self, BufRead, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{self, Child, ChildStdin, Command, ExitCode, Stdio};

/// The hidden subcommand that turns into a rank's program.
pub(crate) const RANK_COMMAND: &str = "__rank";
/// The hidden subcommand that waits for the launcher's death.
pub(crate) const GUARD_COMMAND: &str = "__guard";

/// What the guard reads when the launcher has ended everything itself.
const DONE: &str = "done";
/// What the guard reads before the mark of the launch.
const MARKED: &str = "mark ";
/// What the guard reads before a directory that is to be removed.
const DIRECTORY: &str = "directory ";

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

/// Waits until the launcher closes its end of standard input, which it also does by dying. Unless
/// it has said that it is done, kills the process groups that it has named and what carries its mark, and
/// removes the directories that it has named.
pub(crate) fn guard() -> Result<ExitCode> {
    let (mut groups, mut mark, mut directories) = (Vec::new(), None, Vec::new());
    for line in io::stdin().lock().lines() {
        // A line that cannot be read ends the wait as the end of input does.
        let Ok(line) = line else { break };
        if line == DONE {
            return Ok(ExitCode::SUCCESS);
        }
        if let Some(text) = line.strip_prefix(MARKED) {
            mark = Mark::from_text(text);
            continue;
        }
        if let Some(path) = line.strip_prefix(DIRECTORY) {
            directories.push(path.to_owned());
            continue;
        }
        groups.extend(line.parse().ok().and_then(Pid::from_raw));
    }
    for group in groups {
        // It fails for a group of which nothing is left.
        let _ = kill_process_group(group, Signal::KILL);
    }
    if let Some(mark) = mark {
        mark.kill_all(None);
    }
    for directory in directories {
        // It fails for one that was never made.
        let _ = std::fs::remove_dir_all(directory);
    }
    Ok(ExitCode::SUCCESS)
}

/// The ranks that run. Dropping it kills them and all that they started.
#[derive(Debug)]
pub(super) struct Ranks {
    children: Vec<Child>,
    guard: Child,
    guard_input: Option<ChildStdin>,
    mark: Mark,
    /// What lets them share GPUs.
    service: Option<GpuService>,
}

impl Ranks {
    /// No ranks yet, but the guard.
    pub(super) fn new(capacity: usize, mark: Mark) -> Result<Self> {
        let mut guard = this_command()
            .arg(GUARD_COMMAND)
            // In a group of its own, it does not get the signals of the launcher's terminal.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("start the guard of the ranks")?;
        let mut guard_input = guard.stdin.take();
        if let Some(input) = &mut guard_input {
            writeln!(input, "{MARKED}{}", mark.as_text()).context("tell the guard")?;
        }
        Ok(Self {
            children: Vec::with_capacity(capacity),
            guard,
            guard_input,
            mark,
            service: None,
        })
    }

    /// Has `directory` removed also where this process is killed.
    pub(super) fn clean_up(&mut self, directory: &Path) -> Result<()> {
        match &mut self.guard_input {
            Some(input) => {
                writeln!(input, "{DIRECTORY}{}", directory.display()).context("tell the guard")
            }
            None => Ok(()),
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
        if let Some(input) = &mut self.guard_input {
            writeln!(input, "{}", child.id()).context("tell the guard")?;
        }
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
        self.mark.kill_all(pid(&self.guard));
        if let Some(mut input) = self.guard_input.take() {
            // A guard that is gone needs no word.
            let _ = writeln!(input, "{DONE}");
        }
        let _ = self.guard.wait();
    }
}

pub(super) fn pid(child: &Child) -> Option<Pid> {
    i32::try_from(child.id()).ok().and_then(Pid::from_raw)
}
