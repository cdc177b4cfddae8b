//! The ranks of one cell: started, watched and ended.

use super::cell::{Cell, Fault, RankMessage, RankReport, ReportedError};
use super::rank::FAULT_RANK_COMMAND;
use super::relay::Relay;
use crate::launch::GpuAssignment;
use crate::names::name_of;
use crate::process::{entries, exit_within, pid, poll, read_all, spawn, this_command};
use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use warplink::DeviceKind;
use warplink::bootstrap::UniqueId;

/// Time limit of a cell.
const LIMIT: Duration = Duration::from_secs(60);

/// Time limit for a process to exit after its report, and again after it was killed: a GPU's driver may delay
/// its exit.
const MAX_END: Duration = Duration::from_secs(10);

/// Interval for checking whether a signal ends the command. Ranks that start meanwhile do not receive it.
const ENDING_INTERVAL: Duration = Duration::from_millis(100);

/// Maximum delay between the ranks and this process receiving the same signal.
const SIGNAL_SKEW: Duration = Duration::from_millis(300);

/// Timeout of the ranks, which no wait should reach.
const RANK_TIMEOUT: &str = "40";

/// Duration of a stop: longer than the others wait.
const STOPPED: Duration = Duration::from_millis(6500);

/// Settings that all cells share.
#[derive(Clone, Debug)]
pub(super) struct JobSettings {
    pub(super) ranks: usize,
    pub(super) victim: usize,
    pub(super) device: DeviceKind,
    pub(super) gpus: GpuAssignment,
    /// Number of concurrent jobs.
    pub(super) jobs: usize,
    /// Parent of the cells' temporary directories.
    pub(super) folder: PathBuf,
    /// Compiled kernels, shared by all cells, so that none waits for the compiler.
    pub(super) cache: PathBuf,
    /// Number of the signal that ends the command; 0 for none.
    pub(super) ending: Arc<AtomicUsize>,
}

impl JobSettings {
    /// Whether a signal ends the command.
    pub(super) fn is_ending(&self) -> bool {
        // Set by a signal handler; nothing else is published with it.
        self.ending.load(Ordering::Relaxed) != 0
    }

    /// Whether a signal interrupted a cell, whose result may be wrong for that reason. The signal also ends the
    /// ranks of the cell, and may reach them before this process.
    pub(super) fn was_interrupted(&self, is_wrong: bool) -> bool {
        let limit = if is_wrong {
            SIGNAL_SKEW
        } else {
            Duration::ZERO
        };
        poll(limit, || self.is_ending().then_some(())).is_some()
    }
}

/// Observations of a cell.
#[derive(Debug, Default)]
pub(super) struct JobOutcome {
    /// Time at which the victim failed.
    pub(super) fault_at: Option<f64>,
    /// By rank.
    pub(super) ranks: Vec<RankOutcome>,
    /// Errors of running it, and leaked resources.
    pub(super) problems: Vec<String>,
}

/// Observations of one of its ranks.
#[derive(Debug, Default)]
pub(super) struct RankOutcome {
    pub(super) report: Option<RankReport>,
    pub(super) code: Option<i32>,
    /// Whether it did not exit by itself.
    pub(super) hung: bool,
    /// Its standard error.
    pub(super) output: String,
}

impl RankOutcome {
    /// The error that it reported.
    pub(super) fn error(&self) -> Option<&ReportedError> {
        self.report.as_ref()?.error.as_ref()
    }
}

/// Runs one cell.
pub(super) fn run(cell: Cell, settings: &JobSettings) -> JobOutcome {
    let mut outcome = JobOutcome {
        ranks: (0..settings.ranks)
            .map(|_| RankOutcome::default())
            .collect(),
        ..JobOutcome::default()
    };
    if let Err(error) = try_run(cell, settings, &mut outcome) {
        outcome.problems.push(format!("{error:#}"));
    }
    outcome
}

/// A process that is killed on drop.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Fails if it has exited.
        let _ = self.0.kill();
        let _ = exit_within(&mut self.0, MAX_END);
    }
}

enum RankEvent {
    Message(usize, RankMessage),
    /// Its standard output ended.
    Ended(usize),
}

fn try_run(cell: Cell, settings: &JobSettings, outcome: &mut JobOutcome) -> Result<()> {
    let folder = settings.folder.join(cell.to_string().replace(' ', "-"));
    std::fs::create_dir(&folder).context("make a directory")?;
    // Looked at after all ranks have ended, also if watching failed.
    let watched = watch(cell, settings, outcome, &folder);
    for entry in entries(&folder) {
        let name = entry.file_name();
        let problem = format!("the file {} is left", name.display());
        outcome.problems.push(problem);
    }
    std::fs::remove_dir_all(&folder).context("remove a directory")?;
    watched
}

fn watch(
    cell: Cell,
    settings: &JobSettings,
    outcome: &mut JobOutcome,
    folder: &Path,
) -> Result<()> {
    let id = UniqueId::create(IpAddr::V4(Ipv4Addr::LOCALHOST), 0)?;
    // Reserves the port until rank 0, another process, listens there.
    let (_port, store) = (id.release(), id.address());
    let mut relays = Vec::new();
    let (sender, events) = mpsc::channel();
    let mut ranks = Vec::new();
    for rank in 0..settings.ranks {
        // Rank 0 serves the store itself: cutting off the others disconnects it.
        let cut = if settings.victim == 0 {
            rank != 0
        } else {
            rank == settings.victim
        };
        let mut address = store;
        if cell.fault == Fault::Cut && cut {
            let relay = Relay::start(store).context("start a relay")?;
            address = relay.address();
            relays.push(relay);
        }
        let mut command = command(cell, settings, rank, address);
        command.env("TMPDIR", folder);
        ranks.push(start(command, rank, &sender)?);
    }
    // Only the ranks' threads hold senders now: the channel closes when the last one ends.
    drop(sender);
    let pids = ranks
        .iter()
        .map(|(child, _)| child.0.id())
        .collect::<Vec<_>>();
    let victim = ranks.get(settings.victim);
    let victim = victim.and_then(|(child, _)| pid(&child.0));
    // Relays are dropped after all ranks have ended, or their end would cut connections too.
    follow(cell, settings, &events, victim, &relays, outcome);
    for (number, ((mut child, output), rank)) in
        ranks.into_iter().zip(&mut outcome.ranks).enumerate()
    {
        // Killed before the first wait, so that the limit below is not spent on each hung rank.
        if rank.hung {
            let _ = child.0.kill();
        }
        let mut status = exit_within(&mut child.0, MAX_END);
        if status.is_none() && !rank.hung {
            rank.hung = true;
            let _ = child.0.kill();
            status = exit_within(&mut child.0, MAX_END);
        }
        match status {
            Some(status) => {
                rank.code = status.code();
                rank.output = output.join().unwrap_or_default();
            }
            None => outcome.problems.push(format!(
                "rank {number} did not exit within {MAX_END:?} of SIGKILL"
            )),
        }
    }
    // By process id in the name, since other jobs of the machine use the directory too.
    for entry in entries("/dev/shm") {
        let name = entry.file_name().to_string_lossy().into_owned();
        let mut numbers = name.split(|c: char| !c.is_ascii_digit());
        if numbers.any(|number| pids.iter().any(|pid| number == pid.to_string())) {
            let problem = format!("the shared memory {name} is left");
            outcome.problems.push(problem);
        }
    }
    Ok(())
}

/// Receives the messages of the ranks until all have ended. Resumes a stopped victim, or cuts its connection.
fn follow(
    cell: Cell,
    settings: &JobSettings,
    events: &Receiver<RankEvent>,
    victim: Option<Pid>,
    relays: &[Relay],
    outcome: &mut JobOutcome,
) {
    let until = Instant::now() + LIMIT;
    let mut running = settings.ranks;
    let mut resume: Option<Instant> = None;
    // Assumed until a rank's end is seen: after the time limit, the rest are the hung ones.
    outcome.ranks.iter_mut().for_each(|rank| rank.hung = true);
    while running > 0 && !settings.is_ending() {
        let next = resume.map_or(until, |at| at.min(until));
        let left = next.saturating_duration_since(Instant::now());
        // Short waits, since a signal handler cannot wake a channel.
        match events.recv_timeout(left.min(ENDING_INTERVAL)) {
            Ok(RankEvent::Message(_, RankMessage::Fault(at))) => {
                outcome.fault_at = Some(at);
                match cell.fault {
                    Fault::Stop => resume = Some(Instant::now() + STOPPED),
                    Fault::Cut => relays.iter().for_each(Relay::cut),
                    _ => {}
                }
            }
            Ok(RankEvent::Message(rank, RankMessage::Report(report))) => {
                if let Some(rank) = outcome.ranks.get_mut(rank) {
                    rank.report = Some(report);
                }
            }
            Ok(RankEvent::Ended(rank)) => {
                running -= 1;
                if let Some(rank) = outcome.ranks.get_mut(rank) {
                    rank.hung = false;
                }
            }
            Err(_) if resume.is_some_and(|at| Instant::now() >= at) => {
                resume = None;
                if let Some(victim) = victim {
                    let _ = kill_process(victim, Signal::CONT);
                }
            }
            Err(RecvTimeoutError::Timeout) if Instant::now() < until => {}
            Err(_) => break,
        }
    }
}

/// The command of one rank, which connects to the store at `address`.
fn command(cell: Cell, settings: &JobSettings, rank: usize, address: SocketAddr) -> Command {
    let mut command = this_command();
    command
        .arg(FAULT_RANK_COMMAND)
        .args([
            "--fault",
            &name_of(&cell.fault),
            "--phase",
            &name_of(&cell.phase),
        ])
        .args(["--victim", &settings.victim.to_string()])
        // It would take precedence over the address, which for some ranks is a relay's.
        .env_remove("WARPLINK_ID")
        .env("WARPLINK_ADDRESS", address.to_string())
        .env(
            "WARPLINK_SECRET",
            format!("faults of {}", std::process::id()),
        )
        .env("WARPLINK_RANK", rank.to_string())
        .env("WARPLINK_WORLD", settings.ranks.to_string())
        .env("WARPLINK_LOCAL_RANK", rank.to_string())
        .env("WARPLINK_DEVICE", settings.device.to_string())
        .env("WARPLINK_TIMEOUT", RANK_TIMEOUT)
        .env("WARPLINK_LOG", "error")
        .env("WARPLINK_CACHE_DIR", &settings.cache)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    settings.gpus.apply(rank, settings.jobs, &mut command);
    command
}

fn start(
    mut command: Command,
    rank: usize,
    events: &Sender<RankEvent>,
) -> Result<(Running, JoinHandle<String>)> {
    let mut child = command
        .spawn()
        .with_context(|| format!("start rank {rank}"))?;
    let (out, err) = (child.stdout.take(), child.stderr.take());
    let child = Running(child);
    let events = events.clone();
    let report = move || {
        let lines = out.into_iter().flat_map(|out| BufReader::new(out).lines());
        for line in lines.map_while(Result::ok) {
            if let Ok(message) = serde_json::from_str(&line) {
                // The receiver is gone after the time limit.
                let _ = events.send(RankEvent::Message(rank, message));
            }
        }
        // The end of standard output stands for the end of the process, which holds the only writer.
        let _ = events.send(RankEvent::Ended(rank));
    };
    spawn("rank-output", report)?;
    Ok((child, read_all(err)?))
}
