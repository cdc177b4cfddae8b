//! Ends the processes that ranks started, also those that left their rank's process group or session.
//!
//! Two things find them. The launcher is their *subreaper*, and its guard after it: a process whose parent has
//! ended becomes its child. And all of them inherit a variable with a mark of their launch.

use anyhow::{Result, anyhow};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, getpid, kill_process, pidfd_open, pidfd_send_signal,
    set_child_subreaper, waitpid,
};
use std::os::unix::ffi::OsStrExt;
use std::process::Command;
use std::time::Duration;

/// The variable with the marks of a launch and of those around it.
const VARIABLE: &str = "WARPLINK_LAUNCH";
/// How often processes are looked for: what is killed may have started others meanwhile.
const MAX_ROUNDS: usize = 200;
/// Time for killed processes to end.
const PAUSE: Duration = Duration::from_millis(5);

/// Tells the processes of one launch from all others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mark(String);

impl Mark {
    /// A new mark. Makes this process the parent of what its ranks leave.
    pub(super) fn new() -> Result<Self> {
        let random = getrandom::u64().map_err(|error| anyhow!("make a mark: {error}"))?;
        adopt();
        Ok(Self(format!("{random:016x}")))
    }

    /// Marks what `command` will start, beside the marks of the launches around this one.
    pub(super) fn apply(&self, command: &mut Command) {
        let mut value = std::env::var_os(VARIABLE).unwrap_or_default();
        value.push(",");
        value.push(&self.0);
        command.env(VARIABLE, value);
    }

    /// Kills every marked process, and every child of this process.
    pub(super) fn kill_all(&self) {
        kill(|pid| self.is_on(pid));
    }

    /// Whether the process inherited the mark. One of another user cannot be asked.
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

/// Makes this process the parent of processes below it whose own parent ends.
pub(super) fn adopt() {
    // Without it, the mark alone finds them.
    let _ = set_child_subreaper(Some(getpid()));
}

/// Kills every child of this process, those that become its children by that as well.
pub(super) fn kill_children() {
    kill(|_| false);
}

/// Kills every child of this process and every process that `also` holds for.
fn kill(also: impl Fn(Pid) -> bool) {
    for _ in 0..MAX_ROUNDS {
        let mut found = false;
        for pid in processes().into_iter().filter(|pid| *pid != getpid()) {
            // Held before it is looked at, so that the number cannot stand for another process.
            let process = match pidfd_open(pid, PidfdFlags::empty()) {
                Ok(process) => Some(process),
                // An old kernel; the number has to do.
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
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name();
            let number = std::str::from_utf8(name.as_bytes()).ok()?.parse().ok()?;
            Pid::from_raw(number)
        })
        .collect()
}

/// The fields of `/proc/PID/stat` behind the name: the state, then the parent.
fn stat(pid: Pid) -> Option<(char, Option<Pid>)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may contain anything, a parenthesis too.
    let (_, rest) = text.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    let state = fields.next()?.chars().next()?;
    let parent = fields.next()?.parse().ok().and_then(Pid::from_raw);
    Some((state, parent))
}

fn parent(pid: Pid) -> Option<Pid> {
    stat(pid)?.1
}

/// Whether a process is stopped, by a signal or a debugger.
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
        assert!(!Mark("0123456789abcdef".to_owned()).is_on(getpid()));
    }
}
