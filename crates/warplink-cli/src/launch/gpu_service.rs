//! Ranks that share GPUs through CUDA's multi-process service (MPS). Without it, the GPU time-slices
//! processes, so ranks that wait for one another stall.
//!
//! Each launch has its own service in private directories. It carries the mark of the launch, so that it ends
//! even if the launcher is killed.

use super::guard;
use super::leftovers::ProcessMark;
use super::service_control::ServiceControl;
use anyhow::{Context, Result, anyhow, bail, ensure};
use std::env;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use warplink::variables;

/// Selects the GPUs visible to a process.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";
/// Sets a process's number of hardware queues on a GPU.
const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
/// Maximum queues of all processes on a GPU together; beyond it the service runs out of memory.
const MAX_QUEUES: usize = 64;
/// Maximum queues of one process.
const MAX_QUEUES_EACH: usize = 32;
/// Time limits for the service to start answering, and to end.
const MAX_START: Duration = Duration::from_secs(20);
const MAX_END: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Distribution of ranks over GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GpuSharing {
    ranks_per_gpu: usize,
    /// Available GPUs in the form of `CUDA_VISIBLE_DEVICES`, if it restricts them.
    gpus: Option<Vec<String>>,
    queues: usize,
}

impl GpuSharing {
    /// Distribution of `ranks` ranks; neighbours share a GPU.
    ///
    /// # Errors
    /// If `CUDA_VISIBLE_DEVICES` lists too few GPUs.
    pub(super) fn new(ranks: usize, ranks_per_gpu: usize) -> Result<Self> {
        let visible = variables::read(VISIBLE)?;
        let queues = variables::read(CONNECTIONS)?;
        Self::with(ranks, ranks_per_gpu, visible.as_deref(), queues.as_deref())
    }

    fn with(
        ranks: usize,
        ranks_per_gpu: usize,
        visible: Option<&str>,
        queues: Option<&str>,
    ) -> Result<Self> {
        let gpus = visible.map(|list| {
            let names = list
                .split(',')
                .map(str::trim)
                .filter(|name| !name.is_empty());
            names.map(str::to_owned).collect::<Vec<_>>()
        });
        let needed = ranks.div_ceil(ranks_per_gpu);
        let listed = gpus.as_ref().map_or(needed, Vec::len);
        ensure!(
            listed >= needed,
            "{ranks} ranks at {ranks_per_gpu} per GPU need {needed} GPUs; {VISIBLE} lists {listed}"
        );
        let share = queues_of_each(ranks_per_gpu);
        let wanted = queues.and_then(|queues| queues.parse().ok());
        Ok(Self {
            ranks_per_gpu,
            gpus,
            queues: wanted.map_or(share, |wanted: usize| wanted.clamp(1, share)),
        })
    }

    /// Sets the GPU visible to `rank`, and its number of queues.
    pub(super) fn apply(&self, rank: usize, command: &mut Command) {
        let gpu = rank / self.ranks_per_gpu;
        let name = self.gpus.as_ref().and_then(|gpus| gpus.get(gpu)).cloned();
        command
            .env(VISIBLE, name.unwrap_or_else(|| gpu.to_string()))
            .env(CONNECTIONS, self.queues.to_string());
    }
}

/// Maximum queues for each of `processes` processes on a shared GPU.
pub(crate) fn queues_of_each(processes: usize) -> usize {
    (MAX_QUEUES / processes.max(1)).clamp(1, MAX_QUEUES_EACH)
}

/// A running service. Dropping it stops it and removes its directories.
#[derive(Debug)]
pub(super) struct GpuService {
    control: ServiceControl,
    directory: PathBuf,
}

impl GpuService {
    /// Starts the service, and waits until it answers.
    ///
    /// # Errors
    /// If the command is missing or fails, or the service does not answer.
    pub(super) fn start(mark: &ProcessMark) -> Result<Self> {
        // The temporary directory is shared, so the name must be unpredictable.
        let random = getrandom::u64().map_err(|error| anyhow!("name a directory: {error}"))?;
        let name = format!("{}{random:016x}", prefix(guard::id()));
        let directory = env::temp_dir().join(name);
        let control = ServiceControl::find()?.of(mark, variables(&directory));
        let service = Self { control, directory };
        // Private: access to the pipe is access to the GPUs as this user.
        for folder in [&service.directory, &service.pipes(), &service.logs()] {
            let made = DirBuilder::new().mode(0o700).create(folder);
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
        let started = Instant::now();
        while !service.control.answers() {
            if started.elapsed() > MAX_START {
                bail!(
                    "CUDA's multi-process service did not answer within {MAX_START:?}{}",
                    service.log()
                );
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(service)
    }

    /// Sets the variables by which a rank finds the service.
    pub(super) fn apply(&self, command: &mut Command) {
        command.envs(variables(&self.directory));
    }

    fn pipes(&self) -> PathBuf {
        pipes(&self.directory)
    }

    fn logs(&self) -> PathBuf {
        logs(&self.directory)
    }

    /// End of the service's log, for an error.
    fn log(&self) -> String {
        let text = std::fs::read_to_string(self.logs().join("control.log")).unwrap_or_default();
        match text.lines().last() {
            Some(line) => format!(": {line}"),
            None => String::new(),
        }
    }
}

impl Drop for GpuService {
    fn drop(&mut self) {
        if self.control.ask("quit").is_some() {
            let until = Instant::now() + MAX_END;
            while Instant::now() < until && self.control.answers() {
                thread::sleep(POLL_INTERVAL);
            }
        }
        // Remaining processes are killed by their mark when this is dropped, which does not need the
        // directories.
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Prefix of the directory names of launches guarded by this process.
fn prefix(guard: u32) -> String {
    format!("warplink-mps-{guard}-")
}

/// Removes directories of services whose launcher was killed. This process was its guard.
pub(super) fn remove_directories() {
    let prefix = prefix(std::process::id());
    for entry in std::fs::read_dir(env::temp_dir())
        .into_iter()
        .flatten()
        .flatten()
    {
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// Variables by which service and clients find each other.
fn variables(directory: &Path) -> [(&'static str, PathBuf); 2] {
    [
        ("CUDA_MPS_PIPE_DIRECTORY", pipes(directory)),
        ("CUDA_MPS_LOG_DIRECTORY", logs(directory)),
    ]
}

fn pipes(directory: &Path) -> PathBuf {
    directory.join("pipe")
}

fn logs(directory: &Path) -> PathBuf {
    directory.join("log")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;

    fn set_for(sharing: &GpuSharing, rank: usize) -> Vec<(String, String)> {
        let mut command = Command::new("true");
        sharing.apply(rank, &mut command);
        let text = |part: &OsStr| part.to_string_lossy().into_owned();
        let set = command.get_envs();
        set.map(|(name, value)| (text(name), value.map(text).unwrap_or_default()))
            .collect()
    }

    fn expected(gpu: &str, queues: &str) -> Vec<(String, String)> {
        vec![
            (CONNECTIONS.to_owned(), queues.to_owned()),
            (VISIBLE.to_owned(), gpu.to_owned()),
        ]
    }

    #[test]
    fn neighbours_share_a_gpu_and_its_queues() {
        let sharing = GpuSharing::with(8, 4, None, None).unwrap();
        for rank in 0..8 {
            let gpu = (rank / 4).to_string();
            assert_eq!(set_for(&sharing, rank), expected(&gpu, "16"));
        }
        let sharing = GpuSharing::with(8, 8, Some("GPU-a, GPU-b"), Some("32")).unwrap();
        assert_eq!(set_for(&sharing, 7), expected("GPU-a", "8"));
        // An explicitly lower number of queues is kept.
        let sharing = GpuSharing::with(4, 2, Some("5,3"), Some("4")).unwrap();
        assert_eq!(set_for(&sharing, 2), expected("3", "4"));
        let one = GpuSharing::with(2, 1, None, None).unwrap();
        assert_eq!(set_for(&one, 1), expected("1", "32"));
        let many = GpuSharing::with(100, 100, None, None).unwrap();
        assert_eq!(set_for(&many, 99), expected("0", "1"));
    }

    #[test]
    fn gpus_that_are_not_there_are_told() {
        let error = GpuSharing::with(8, 2, Some("0,1"), None)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("8 ranks at 2 per GPU need 4 GPUs"),
            "{error}"
        );
        assert!(error.contains("lists 2"), "{error}");
    }
}
