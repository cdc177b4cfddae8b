//! Client of CUDA's multi-process service.
//!
//! The control command talks to a daemon, which starts a server when a process first uses a GPU. Killing a
//! process while the server works for it may break the server; the daemon starts another when it is gone.

use super::environment::find_program;
use super::gpu_service::VISIBLE;
use super::leftovers::{ProcessMark, is_zombie};
use crate::process::{end_within, poll};
use anyhow::{Context, Result, anyhow, ensure};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use std::env;
use std::ffi::OsStr;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

/// Control command of the service.
const CONTROL: &str = "nvidia-cuda-mps-control";
/// Directories where drivers install it, if not in `PATH`.
const FOLDERS: [&str; 6] = [
    "/usr/bin",
    "/usr/local/bin",
    "/usr/local/nvidia/bin",
    "/usr/lib/nvidia/bin",
    "/opt/nvidia/bin",
    "/run/nvidia/driver/usr/bin",
];
/// Time limit for an answer of the service.
const MAX_ANSWER: Duration = Duration::from_secs(5);
/// Time limit for a server to end, after a request or kill.
const MAX_END: Duration = Duration::from_secs(5);

/// Control command of one service.
#[derive(Clone, Debug)]
pub(crate) struct ServiceControl {
    program: PathBuf,
    mark: Option<ProcessMark>,
    /// Variables that identify the service.
    variables: Vec<(&'static str, PathBuf)>,
}

impl ServiceControl {
    /// The control command for the service in the environment.
    ///
    /// # Errors
    /// If it is not installed.
    pub(crate) fn find() -> Result<Self> {
        let search = env::var_os("PATH").unwrap_or_default();
        Ok(Self {
            program: find_in(&search, &FOLDERS)?,
            mark: None,
            variables: Vec::new(),
        })
    }

    /// The control command for a launch's service.
    pub(super) fn of(
        mut self,
        mark: &ProcessMark,
        variables: impl IntoIterator<Item = (&'static str, PathBuf)>,
    ) -> Self {
        self.mark = Some(mark.clone());
        self.variables = variables.into_iter().collect();
        self
    }

    pub(super) fn program(&self) -> &Path {
        &self.program
    }

    /// The command in the service's environment.
    pub(super) fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.envs(self.variables.iter().cloned());
        if let Some(mark) = &self.mark {
            mark.apply(&mut command);
        }
        command
            // The service serves all GPUs, so ranks use the usual ordinals.
            .env_remove(VISIBLE)
            // Shielded from the terminal's signals.
            .process_group(0)
            .stderr(Stdio::null());
        command
    }

    /// Sends a command to the service; returns the answer if it was understood.
    pub(super) fn ask(&self, request: &str) -> Option<String> {
        let mut command = self.command();
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().ok()?;
        if let Some(mut input) = child.stdin.take() {
            // Closed at the end of this block, by which the control command notices the end of its input and exits.
            let _ = writeln!(input, "{request}");
        }
        // An answer is a few lines, which fit into a pipe's buffer.
        end_within(&mut child, MAX_ANSWER).filter(ExitStatus::success)?;
        let mut answer = String::new();
        child.stdout.take()?.read_to_string(&mut answer).ok()?;
        Some(answer)
    }

    pub(super) fn answers(&self) -> bool {
        self.ask("get_server_list").is_some()
    }

    /// Ends the servers, by force if necessary, so that new ones serve later processes. Every process that
    /// uses them must have exited. Blocks for a bounded time.
    ///
    /// # Errors
    /// If the service does not answer, or a server does not end.
    pub(crate) fn restart_servers(&self) -> Result<()> {
        let list = self.ask("get_server_list").context(
            "CUDA's multi-process service does not answer; expected the list of its servers",
        )?;
        let servers = list.split_whitespace().filter_map(|word| word.parse().ok());
        for server in servers.filter_map(Pid::from_raw) {
            let _ = self.ask(&format!("shutdown_server {} -f", server.as_raw_nonzero()));
            if !has_ended(server) {
                let _ = kill_process(server, Signal::KILL);
                ensure!(
                    has_ended(server),
                    "server {} of CUDA's multi-process service does not end",
                    server.as_raw_nonzero()
                );
            }
        }
        Ok(())
    }
}

/// Waits for the exit of a process that is not a child; returns whether it exited.
fn has_ended(process: Pid) -> bool {
    // A zombie holds no resources of the GPU any more, though nobody has reaped it.
    let ended = || is_zombie(process) || test_kill_process(process) == Err(Errno::SRCH);
    poll(MAX_END, || ended().then_some(())).is_some()
}

fn find_in(search: &OsStr, folders: &[&str]) -> Result<PathBuf> {
    let folders = folders.iter().map(PathBuf::from);
    let all = env::join_paths(env::split_paths(search).chain(folders)).unwrap_or_default();
    find_program(OsStr::new(CONTROL), &all).map_err(|_| {
        anyhow!(
            "{CONTROL} was not found in PATH or next to the driver; help: install the compute part of \
             the NVIDIA driver (nvidia-compute-utils), or start one rank per GPU"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    /// Imitates the control command: a server is listed until it is shut down.
    const STAND_IN: &str = "#!/bin/sh
read word number force
echo \"$word $number $force\" >> $HERE/words
case $word in
get_server_list) cat $HERE/servers ;;
shutdown_server) [ -e $HERE/stubborn ] || kill -9 $number ;;
*) exit 1 ;;
esac
";

    #[test]
    fn a_missing_service_says_what_to_install() {
        let error = find_in(OsStr::new("/nowhere"), &["/nowhere/either"]).unwrap_err();
        assert!(
            error.to_string().contains("nvidia-compute-utils"),
            "{error}"
        );
    }

    #[test]
    fn servers_end_also_where_they_do_not_when_asked() {
        for stubborn in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let here = folder.path();
            let program = here.join(CONTROL);
            fs::write(
                &program,
                STAND_IN.replace("$HERE", &here.display().to_string()),
            )
            .unwrap();
            fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
            let mut server = Command::new("sleep").arg("600").spawn().unwrap();
            fs::write(here.join("servers"), format!("{}\n", server.id())).unwrap();
            if stubborn {
                fs::write(here.join("stubborn"), "").unwrap();
            }
            let mut control = ServiceControl::find().unwrap_or(ServiceControl {
                program: PathBuf::new(),
                mark: None,
                variables: Vec::new(),
            });
            control.program = program;
            assert!(control.answers() && control.ask("nonsense").is_none());
            control.restart_servers().unwrap();
            assert!(!server.wait().unwrap().success());
            let words = fs::read_to_string(here.join("words")).unwrap();
            assert!(
                words.contains(&format!("shutdown_server {} -f", server.id())),
                "{words}"
            );
        }
    }
}
