//! The guard: the initial process, which starts the launcher as a child and cleans up after it.
//!
//! Guard and launcher each clean up when the other dies. Both are *subreapers*, which adopt orphans: those of
//! a killed launcher become the guard's children, and those of a killed guard stay the launcher's, which gets
//! a signal when the guard dies.

use super::leftovers::kill_children;
use super::{gpu_service, outcome};
use crate::process::{pid, spawn, this_command};
use crate::report::{self, JsonError};
use anyhow::{Context, Result};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, getppid, pidfd_open, pidfd_send_signal,
    set_parent_process_death_signal, waitid,
};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;
use std::os::unix::process::CommandExt;
use std::process::{self, Command, ExitCode};

/// Process id of the guard, which is the launcher's parent.
const VARIABLE: &str = "WARPLINK_GUARD";

/// Signals that end a launch, except those ignored when this process was started (`nohup`, a shell's `&`),
/// which stay ignored, also by the ranks.
pub(crate) fn ending_signals() -> impl Iterator<Item = i32> {
    // A signal that the caller ignores stays ignored, as under nohup.
    let signals = [SIGINT, SIGTERM, SIGQUIT, SIGHUP];
    signals.into_iter().filter(|signal| !is_ignored(*signal))
}

/// Whether this process is the child of a guard.
pub(crate) fn is_guarded() -> bool {
    let guard = std::env::var_os(VARIABLE);
    guard.is_some_and(|guard| guard == *Pid::as_raw(getppid()).to_string())
}

/// In a guard's child: requests SIGCONT when the guard dies, which is delivered even while stopped.
pub(crate) fn follow() {
    // Best effort: without it, the guard's death goes unnoticed.
    let _ = set_parent_process_death_signal(Some(Signal::CONT));
}

/// The process that outlives the launcher: its guard, or itself.
pub(super) fn id() -> u32 {
    if is_guarded() {
        Pid::as_raw(getppid()).cast_unsigned()
    } else {
        process::id()
    }
}

/// Whether this process has lost its guard.
pub(super) fn is_lost() -> bool {
    std::env::var_os(VARIABLE).is_some() && !is_guarded()
}

/// Prevents `command` from treating this process as a guard.
pub(super) fn hide(command: &mut Command) {
    command.env_remove(VARIABLE);
}

/// Runs this command again as a child and forwards signals to it. Kills its leftovers if it is killed.
pub(crate) fn guard(json: bool) -> Result<ExitCode> {
    // Before the launcher starts, so that its orphans become children of this process.
    super::leftovers::adopt();
    // Likewise, so that no signal ends this process and leaves the launcher.
    let mut signals = Signals::new(ending_signals())
        .map_err(|error| warplink::Error::io("handle signals", &error))?;
    let child = this_command()
        .args(std::env::args_os().skip(1))
        .env(VARIABLE, process::id().to_string())
        // In its own group, it gets a terminal's signals only through this process, and so only once.
        .process_group(0)
        .spawn()
        .map_err(|error| warplink::Error::thread("start the launcher", &error))?;
    let pid = pid(&child).context("the launcher has no process id")?;
    // It is reaped only at the end, so its pid cannot be reused.
    let pass_on = move |signal| match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(launcher) => pidfd_send_signal(&launcher, signal),
        Err(_) => rustix::process::kill_process(pid, signal),
    };
    spawn("signals", move || {
        for signal in signals.forever() {
            if let Some(signal) = Signal::from_named_raw(signal) {
                let _ = pass_on(signal);
            }
        }
    })?;
    let events = WaitIdOptions::EXITED | WaitIdOptions::STOPPED;
    let killed = loop {
        let status = match waitid(WaitId::Pid(pid), events) {
            Ok(Some(status)) => status,
            Ok(None) | Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error).context("wait for the launcher"),
        };
        if let Some(code) = status.exit_status() {
            return Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)));
        }
        if let Some(signal) = status.terminating_signal() {
            break signal;
        }
        // A stopped launcher could not end the ranks.
        let _ = pass_on(Signal::CONT);
    };
    // The ranks of a dead launcher are children of this process, a subreaper.
    kill_children();
    gpu_service::remove_directories();
    let text = format!("the launcher was ended by {}", outcome::name(killed));
    report::print_message(&format!("error: {text} ({killed}); its ranks were killed"));
    if json {
        JsonError::new("interrupted", &text).print();
    }
    Ok(ExitCode::from(u8::try_from(128 + killed).unwrap_or(1)))
}

/// Whether a signal was ignored when this process was started.
fn is_ignored(signal: i32) -> bool {
    // From /proc, since sigaction would need unsafe code.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & (1 << (signal - 1)) != 0)
}
