//! The GPUs of the ranks: which rank sees which, and whether they can be used.

use super::probe::PROBE_COMMAND;
use crate::launch;
use anyhow::{Context, Result, bail, ensure};
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use warplink::variables;

/// The longest that a process takes to try a GPU: it may have to start the multi-process service, and to
/// compile the library's kernels.
const MAX_PROBE: Duration = Duration::from_secs(40);

const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The GPUs, as `CUDA_VISIBLE_DEVICES` names them, and how many neighbouring ranks share one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Gpus {
    /// None where each rank has a GPU of its own.
    each: Option<usize>,
    names: Vec<String>,
}

impl Gpus {
    pub(super) fn none() -> Self {
        Self {
            each: None,
            names: Vec::new(),
        }
    }

    /// The `count` that this process sees, for `ranks` ranks.
    ///
    /// # Errors
    /// Where there are too few.
    pub(super) fn new(count: usize, each: Option<usize>, ranks: usize) -> Result<Self> {
        let names: Vec<String> = match variables::read("CUDA_VISIBLE_DEVICES")? {
            Some(list) => list.split(',').map(|name| name.trim().to_owned()).collect(),
            None => (0..count).map(|gpu| gpu.to_string()).collect(),
        };
        let needed = ranks.div_ceil(each.unwrap_or(1));
        ensure!(
            names.len() >= needed,
            "{ranks} ranks at {} per GPU need {needed} GPUs; this process sees {}; help: let ranks share \
             GPUs with --ranks-per-gpu",
            each.unwrap_or(1),
            names.len()
        );
        Ok(Self {
            each,
            names: names.into_iter().take(needed).collect(),
        })
    }

    pub(super) fn as_text(&self) -> String {
        format!("{}:{}", self.each.unwrap_or(0), self.names.join(","))
    }

    pub(super) fn from_text(text: &str) -> Option<Self> {
        let (each, names) = text.split_once(':')?;
        let names = names.split(',').filter(|name| !name.is_empty());
        Some(Self {
            each: Some(each.parse().ok()?).filter(|&each| each > 0),
            names: names.map(str::to_owned).collect(),
        })
    }

    /// How many ranks of one job share a GPU, where that needs the multi-process service.
    pub(super) fn shared_by(&self) -> Option<usize> {
        self.each
    }

    /// Sets which GPU `rank` sees, and where ranks share it, how many of its queues it has beside those of
    /// `jobs` jobs.
    pub(super) fn apply(&self, rank: usize, jobs: usize, command: &mut Command) {
        if let Some(gpu) = self.of(rank) {
            command.env("CUDA_VISIBLE_DEVICES", gpu);
        }
        if let Some(each) = self.each {
            let queues = launch::queues_of_each(each * jobs);
            command.env("CUDA_DEVICE_MAX_CONNECTIONS", queues.to_string());
        }
    }

    /// Tries all GPUs, each from a process of its own, which leaves the library's kernels compiled in
    /// `cache`. Blocks for a limited time.
    ///
    /// # Errors
    /// Where one cannot be used.
    pub(super) fn probe(&self, cache: &Path) -> Result<()> {
        let probes = self.names.iter().map(|name| {
            let child = Command::new("/proc/self/exe")
                .arg(PROBE_COMMAND)
                .env("CUDA_VISIBLE_DEVICES", name)
                .env("WARPLINK_CACHE_DIR", cache)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn();
            (name, child)
        });
        let until = Instant::now() + MAX_PROBE;
        let mut problem = Ok(());
        // All are started before one is waited for.
        for (name, child) in probes.collect::<Vec<_>>() {
            let done = child
                .context("start a process")
                .and_then(|child| finish(child, until))
                .with_context(|| format!("try GPU {name}"));
            problem = problem.and(done);
        }
        problem
    }

    fn of(&self, rank: usize) -> Option<&String> {
        self.names.get(rank / self.each.unwrap_or(1))
    }
}

/// Waits for a process that tries a GPU, and kills it when that takes too long.
fn finish(mut child: Child, until: Instant) -> Result<()> {
    loop {
        match child.try_wait()? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => {
                let mut text = String::new();
                if let Some(mut err) = child.stderr.take() {
                    let _ = err.read_to_string(&mut text);
                }
                bail!("{status}: {}", text.trim());
            }
            None if Instant::now() < until => thread::sleep(POLL_INTERVAL),
            None => {
                // Not waited for: a driver may hold it. It is reaped with all that the command leaves.
                let _ = child.kill();
                bail!("it did not answer within {MAX_PROBE:?}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_survive_as_text_and_are_shared_by_neighbours() {
        let gpus = Gpus {
            each: Some(4),
            names: vec!["0".into(), "GPU-b".into()],
        };
        assert_eq!(Gpus::from_text(&gpus.as_text()), Some(gpus.clone()));
        let of: Vec<_> = [0, 3, 4, 8]
            .map(|rank| gpus.of(rank).map(String::as_str))
            .into();
        assert_eq!(of, [Some("0"), Some("0"), Some("GPU-b"), None]);
        assert_eq!(Gpus::from_text(&Gpus::none().as_text()), Some(Gpus::none()));
        assert_eq!(Gpus::from_text("x"), None);
    }

    #[test]
    fn jobs_that_share_gpus_share_their_queues() {
        let mut gpus = Gpus {
            each: Some(4),
            names: vec!["0".into()],
        };
        let queues = |gpus: &Gpus, jobs| {
            let mut command = Command::new("true");
            gpus.apply(0, jobs, &mut command);
            command
                .get_envs()
                .find(|(name, _)| *name == "CUDA_DEVICE_MAX_CONNECTIONS")
                .and_then(|(_, value)| value.map(|value| value.to_string_lossy().into_owned()))
        };
        assert_eq!(queues(&gpus, 1).as_deref(), Some("16"));
        assert_eq!(queues(&gpus, 3).as_deref(), Some("5"));
        gpus.each = None;
        assert_eq!(queues(&gpus, 3), None);
    }
}
