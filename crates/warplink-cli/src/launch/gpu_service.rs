//! Ranks that share GPUs through CUDA's multi-process service (MPS). Without it, the GPU time-slices
//! processes, so ranks that wait for one another stall.
//!
//! Each launch has its own service in private directories. It carries the mark of the launch, so that it ends
//! even if the launcher is killed.

use super::guard;
use super::leftovers::ProcessMark;
use super::service_control::ServiceControl;
use crate::process::{entries, poll};
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::env;
use std::fs::{DirBuilder, Permissions};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;
use warplink::variables;

/// Selects the GPUs visible to a process.
pub(super) const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";
/// Sets a process's number of hardware queues on a GPU.
const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
/// Maximum queues of all processes on a GPU together; beyond it the service runs out of memory.
const MAX_QUEUES: usize = 64;
/// Maximum queues of one process.
const MAX_QUEUES_EACH: usize = 32;
/// Time limits for the service to start answering, and to end.
const MAX_START: Duration = Duration::from_secs(20);
const MAX_END: Duration = Duration::from_secs(5);

/// Distribution of ranks over GPUs; neighbours share a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GpuAssignment {
    /// `None` if every rank has its own GPU.
    pub(crate) ranks_per_gpu: Option<usize>,
    /// GPUs in the form of `CUDA_VISIBLE_DEVICES`.
    pub(crate) names: Vec<String>,
    /// Upper limit on the queues of a rank, from the environment.
    max_queues: Option<usize>,
}

impl GpuAssignment {
    /// Distribution of `ranks` ranks. `count` is the number of GPUs if it is known.
    ///
    /// # Errors
    /// If there are too few GPUs.
    pub(crate) fn new(
        ranks: usize,
        ranks_per_gpu: Option<usize>,
        count: Option<usize>,
    ) -> Result<Self> {
        let visible = variables::read(VISIBLE)?;
        let queues = variables::read(CONNECTIONS)?;
        Self::with(ranks, ranks_per_gpu, count, [visible, queues])
    }

    fn with(
        ranks: usize,
        ranks_per_gpu: Option<usize>,
        count: Option<usize>,
        [visible, queues]: [Option<String>; 2],
    ) -> Result<Self> {
        let each = ranks_per_gpu.unwrap_or(1);
        let needed = ranks.div_ceil(each);
        let mut names: Vec<String> = match visible {
            Some(list) => {
                let names = list.split(',').map(str::trim);
                names
                    .filter(|name| !name.is_empty())
                    .map(str::to_owned)
                    .collect()
            }
            None => (0..count.unwrap_or(needed))
                .map(|gpu| gpu.to_string())
                .collect(),
        };
        ensure!(
            names.len() >= needed,
            "{ranks} ranks at {each} per GPU need {needed} GPUs; this process sees {}; help: change --ranks, \
             --ranks-per-gpu or {VISIBLE}",
            names.len()
        );
        names.truncate(needed);
        Ok(Self {
            ranks_per_gpu,
            names,
            max_queues: queues.and_then(|queues| queues.parse().ok()),
        })
    }

    /// Sets the GPU visible to `rank`, and if GPUs are shared, its number of queues, for `jobs` concurrent jobs
    /// on the same GPUs.
    pub(crate) fn apply(&self, rank: usize, jobs: usize, command: &mut Command) {
        if let Some(gpu) = self.names.get(rank / self.ranks_per_gpu.unwrap_or(1)) {
            command.env(VISIBLE, gpu);
        }
        if let Some(each) = self.ranks_per_gpu {
            let share = (MAX_QUEUES / (each * jobs).max(1)).clamp(1, MAX_QUEUES_EACH);
            let queues = self.max_queues.map_or(share, |most| most.clamp(1, share));
            command.env(CONNECTIONS, queues.to_string());
        }
    }
}

/// A running service. Dropping it stops it and removes its directories.
#[derive(Debug)]
pub(super) struct GpuService {
    control: ServiceControl,
    directory: TempDir,
}

impl GpuService {
    /// Starts the service, and waits until it answers.
    ///
    /// # Errors
    /// If the command is missing or fails, or the service does not answer.
    pub(super) fn start(mark: &ProcessMark) -> Result<Self> {
        // Private: access to the pipe is access to the GPUs as this user.
        let private = Permissions::from_mode(0o700);
        let directory = tempfile::Builder::new()
            .prefix(&prefix(guard::id()))
            .permissions(private)
            .tempdir();
        let directory = directory.context("make a directory for CUDA's multi-process service")?;
        let control = ServiceControl::find()?.of(mark, variables(directory.path()));
        // Made before the service starts: an error from here on drops it, which stops what has started.
        let service = Self { control, directory };
        for (_, folder) in variables(service.directory.path()) {
            let made = DirBuilder::new().mode(0o700).create(&folder);
            made.with_context(|| format!("make the directory {}", folder.display()))?;
        }
        let status = service
            .control
            .command()
            .arg("-d")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .status()
            .with_context(|| format!("run {}", service.control.program().display()))?;
        if !status.success() {
            bail!(
                "{} -d failed ({status}){}; help: {}",
                service.control.program().display(),
                service.log(),
                "check that the driver works with nvidia-smi, and that this user may use the GPUs"
            );
        }
        if poll(MAX_START, || service.control.answers().then_some(())).is_none() {
            bail!(
                "CUDA's multi-process service did not answer within {MAX_START:?}{}",
                service.log()
            );
        }
        Ok(service)
    }

    /// Sets the variables by which a rank finds the service.
    pub(super) fn apply(&self, command: &mut Command) {
        command.envs(variables(self.directory.path()));
    }

    /// End of the service's log, for an error.
    fn log(&self) -> String {
        let text = std::fs::read_to_string(self.directory.path().join("log/control.log"));
        let text = text.unwrap_or_default();
        match text.lines().last() {
            Some(line) => format!(": {line}"),
            None => String::new(),
        }
    }
}

impl Drop for GpuService {
    fn drop(&mut self) {
        // The command returns before the daemon has ended, and its directory must outlive it.
        if self.control.ask("quit").is_some() {
            let _ = poll(MAX_END, || (!self.control.answers()).then_some(()));
        }
        // Remaining processes are killed by their mark, which does not need the directory.
    }
}

/// Prefix of the directory names of launches guarded by this process.
fn prefix(guard: u32) -> String {
    format!("warplink-mps-{guard}-")
}

/// Removes directories of services whose launcher was killed. This process was its guard.
pub(super) fn remove_directories() {
    let prefix = prefix(std::process::id());
    for entry in entries(env::temp_dir()) {
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// Variables by which service and clients find each other.
fn variables(directory: &Path) -> [(&'static str, PathBuf); 2] {
    [
        ("CUDA_MPS_PIPE_DIRECTORY", directory.join("pipe")),
        ("CUDA_MPS_LOG_DIRECTORY", directory.join("log")),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;

    fn assigned(ranks: usize, each: usize, variables: [Option<&str>; 2]) -> Result<GpuAssignment> {
        let variables = variables.map(|value| value.map(str::to_owned));
        GpuAssignment::with(ranks, Some(each), None, variables)
    }

    fn set_for(gpus: &GpuAssignment, rank: usize, jobs: usize) -> Vec<(String, String)> {
        let mut command = Command::new("true");
        gpus.apply(rank, jobs, &mut command);
        let text = |part: &OsStr| part.to_string_lossy().into_owned();
        let set = command.get_envs();
        set.map(|(name, value)| (text(name), value.map(text).unwrap_or_default()))
            .collect()
    }

    #[test]
    fn neighbours_share_a_gpu_and_its_queues() {
        for ((ranks, each), variables, (rank, jobs), gpu, queues) in [
            ((8, 4), [None; 2], (0, 1), "0", "16"),
            ((8, 4), [None; 2], (3, 3), "0", "5"),
            ((8, 4), [None; 2], (4, 1), "1", "16"),
            (
                (8, 8),
                [Some("GPU-a, GPU-b"), Some("32")],
                (7, 1),
                "GPU-a",
                "8",
            ),
            // An explicitly lower number of queues is kept.
            ((4, 2), [Some("5,3"), Some("4")], (2, 1), "3", "4"),
            ((2, 1), [None; 2], (1, 1), "1", "32"),
            ((100, 100), [None; 2], (99, 1), "0", "1"),
        ] {
            let gpus = assigned(ranks, each, variables).unwrap();
            let expected = [(CONNECTIONS, queues), (VISIBLE, gpu)];
            let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
            assert_eq!(set_for(&gpus, rank, jobs), expected, "rank {rank}");
        }
    }

    #[test]
    fn ranks_with_gpus_of_their_own_keep_their_queues() {
        let gpus = GpuAssignment::with(2, None, Some(4), [None, None]).unwrap();
        let text = serde_json::to_string(&gpus).unwrap();
        let gpus: GpuAssignment = serde_json::from_str(&text).unwrap();
        assert_eq!(set_for(&gpus, 1, 3), [(VISIBLE.to_owned(), "1".to_owned())]);
        assert!(set_for(&GpuAssignment::default(), 0, 3).is_empty());
    }

    #[test]
    fn too_few_gpus_are_reported() {
        let error = assigned(8, 2, [Some("0,1"), None]).unwrap_err().to_string();
        let expected = "8 ranks at 2 per GPU need 4 GPUs; this process sees 2";
        assert!(error.contains(expected), "{error}");
    }
}
