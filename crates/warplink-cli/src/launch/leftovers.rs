//! Kills processes that ranks started, even if they left their rank's process group or session.
//!
//! They are found in two ways: the launcher, and after it the guard, is their *subreaper*, so orphans become
//! its children; and they inherit an environment variable with the mark of their launch.

use crate::process::entries;
use anyhow::{Result, anyhow};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, getpid, kill_process, pidfd_open, pidfd_send_signal,
    set_child_subreaper, waitpid,
};
use std::fs::DirEntry;
use std::process::Command;
use std::time::Duration;

/// Variable with the marks of this launch and those around it.
const VARIABLE: &str = "WARPLINK_LAUNCH";
/// Maximum number of scans: a process may have started others before it was killed.
const MAX_ROUNDS: usize = 200;
/// Time for killed processes to exit.
const PAUSE: Duration = Duration::from_millis(5);

/// Identifies the processes of one launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ProcessMark(String);

impl ProcessMark {
    /// Creates a mark, and makes this process a subreaper.
    pub(super) fn new() -> Result<Self> {
        let random = getrandom::u64().map_err(|error| anyhow!("make a mark: {error}"))?;
        adopt();
        Ok(Self(format!("{random:016x}")))
    }

    /// Marks the processes that `command` will start, in addition to the marks of outer launches.
    pub(super) fn apply(&self, command: &mut Command) {
        // By environment, which processes keep when they change their group, session or parent.
        let mut value = std::env::var_os(VARIABLE).unwrap_or_default();
        value.push(",");
        value.push(&self.0);
        command.env(VARIABLE, value);
    }

    /// Kills every marked process, and every child of this process.
    pub(super) fn kill_all(&self) {
        kill(|pid| self.is_on(pid));
    }

    /// Whether the process inherited the mark; false for another user's process, which cannot be inspected.
    fn is_on(&self, pid: Pid) -> bool {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|&byte| byte == 0).any(|entry| {
            entry
                .strip_prefix(VARIABLE.as_bytes())
                .and_then(|rest| rest.strip_prefix(b"="))
                .is_some_and(|marks| {
                    marks
                        .split(|&byte| byte == b',')
                        .any(|mark| mark == self.0.as_bytes())
                })
        })
    }
}

/// Makes this process the subreaper of its descendants.
pub(super) fn adopt() {
    // Best effort: without it, only the mark finds them.
    let _ = set_child_subreaper(Some(getpid()));
}

/// Kills every child of this process, including orphans that become its children meanwhile.
pub(super) fn kill_children() {
    kill(|_| false);
}

/// Kills every child of this process, and every process that satisfies `also`.
fn kill(also: impl Fn(Pid) -> bool) {
    // Several rounds, since processes may fork while others are being killed.
    for _ in 0..MAX_ROUNDS {
        let mut found = false;
        for pid in processes().into_iter().filter(|pid| *pid != getpid()) {
            // Hold a pidfd before inspecting the process, so that the pid cannot be reused meanwhile.
            let process = match pidfd_open(pid, PidfdFlags::empty()) {
                Ok(process) => Some(process),
                // Old kernel without pidfd: use the pid.
                Err(Errno::NOSYS) => None,
                Err(_) => continue,
            };
            let is_child = parent(pid) == Some(getpid());
            if is_child || also(pid) {
                found = true;
                let _ = match process {
                    Some(process) => pidfd_send_signal(&process, Signal::KILL),
                    None => kill_process(pid, Signal::KILL),
                };
            }
            if is_child {
                // Otherwise the zombie would be found again in every round.
                let _ = waitpid(Some(pid), WaitOptions::NOHANG);
            }
        }
        if !found {
            return;
        }
        std::thread::sleep(PAUSE);
    }
}

/// All processes of this machine.
fn processes() -> Vec<Pid> {
    let number = |entry: DirEntry| entry.file_name().to_str()?.parse().ok();
    let numbers = entries("/proc").filter_map(number);
    numbers.filter_map(Pid::from_raw).collect()
}

/// Fields of `/proc/PID/stat` after the name: state and parent.
fn stat(pid: Pid) -> Option<(char, Option<Pid>)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may contain anything, including parentheses.
    let (_, rest) = text.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    let state = fields.next()?.chars().next()?;
    let parent = fields.next()?.parse().ok().and_then(Pid::from_raw);
    Some((state, parent))
}

fn parent(pid: Pid) -> Option<Pid> {
    stat(pid)?.1
}

/// Whether a process has exited but was not reaped.
pub(super) fn is_zombie(pid: Pid) -> bool {
    stat(pid).is_some_and(|(state, _)| state == 'Z')
}

/// Whether a process is stopped, by a signal or debugger.
pub(super) fn is_stopped(pid: Pid) -> bool {
    stat(pid).is_some_and(|(state, _)| matches!(state, 'T' | 't'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_neither_stopped_nor_marked() {
        assert!(!is_stopped(getpid()));
        assert!(processes().contains(&getpid()));
        assert!(!ProcessMark("0123456789abcdef".to_owned()).is_on(getpid()));
    }
}
