//! The ranks of one cell: started, watched and ended.

use super::cell::{Cell, Fault, RankReport, Said};
use super::gpus::Gpus;
use super::port::Port;
use super::rank::FAULT_RANK_COMMAND;
use super::relay::Relay;
use crate::names::name_of;
use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};
use warplink::DeviceKind;

/// The longest that a cell takes.
const LIMIT: Duration = Duration::from_secs(60);

/// The longest that a process takes to end once it has said all, and again once it was killed: a GPU's
/// driver may hold it.
const MAX_END: Duration = Duration::from_secs(10);

/// Between two looks at whether a process has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Between two looks at whether the command is to end. Ranks that start while a signal comes do not get it.
const ENDING_INTERVAL: Duration = Duration::from_millis(100);

/// How much later than the ranks this process may receive a signal that was sent to all.
const SIGNAL_SKEW: Duration = Duration::from_millis(300);

/// The timeout of its ranks, which no wait may come to.
const RANK_TIMEOUT: &str = "40";

/// How long a stopped rank stays so: longer than the others wait for it.
const STOPPED: Duration = Duration::from_millis(6500);

/// Settings that all cells share.
#[derive(Clone, Debug)]
pub(super) struct JobSettings {
    pub(super) ranks: usize,
    pub(super) victim: usize,
    pub(super) device: DeviceKind,
    pub(super) gpus: Gpus,
    /// Jobs that run at the same time.
    pub(super) jobs: usize,
    /// Where cells have folders of their own.
    pub(super) folder: PathBuf,
    /// Kernels that were compiled; the same for all cells, so that none waits for the compiler.
    pub(super) cache: PathBuf,
    /// The number of a signal that ends the command.
    pub(super) ending: Arc<AtomicUsize>,
}

impl JobSettings {
    /// Whether the command is to end.
    pub(super) fn is_ending(&self) -> bool {
        // Set by a signal handler; nothing else is published with it.
        self.ending.load(Ordering::Relaxed) != 0
    }

    /// Whether the command was to end while a cell ran whose result is not as expected. A signal ends the ranks of the cell
    /// too, and may reach them before this process.
    pub(super) fn was_interrupted(&self, is_wrong: bool) -> bool {
        let begun = Instant::now();
        while is_wrong && !self.is_ending() && begun.elapsed() < SIGNAL_SKEW {
            thread::sleep(POLL_INTERVAL);
        }
        self.is_ending()
    }
}

/// How a cell went.
#[derive(Debug, Default)]
pub(super) struct JobOutcome {
    /// When the victim failed.
    pub(super) fault_at: Option<f64>,
    /// By rank.
    pub(super) ranks: Vec<RankOutcome>,
    /// Why it could not be run, or what is left of it.
    pub(super) problems: Vec<String>,
}

/// How one of its ranks went.
#[derive(Debug, Default)]
pub(super) struct RankOutcome {
    pub(super) report: Option<RankReport>,
    pub(super) code: Option<i32>,
    /// Whether it was killed at the limit.
    pub(super) hung: bool,
    /// Its standard error.
    pub(super) output: String,
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

/// A process that is killed when this is dropped.
struct Running(Child);

impl Running {
    /// How it ended, where it does so in time.
    fn wait(&mut self) -> Option<ExitStatus> {
        let until = Instant::now() + MAX_END;
        loop {
            match self.0.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if Instant::now() < until => thread::sleep(POLL_INTERVAL),
                _ => return None,
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It fails for one that has ended.
        let _ = self.0.kill();
        let _ = self.wait();
    }
}

enum RankEvent {
    Said(usize, Said),
    /// Its standard output ended.
    Ended(usize),
}

fn try_run(cell: Cell, settings: &JobSettings, outcome: &mut JobOutcome) -> Result<()> {
    let folder = settings.folder.join(cell.to_string().replace(' ', "-"));
    std::fs::create_dir(&folder).context("make a directory")?;
    let watched = watch(cell, settings, outcome, &folder);
    let left = std::fs::read_dir(&folder).into_iter().flatten().flatten();
    for entry in left {
        let name = entry.file_name();
        outcome
            .problems
            .push(format!("the file {} is left", name.display()));
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
    let port = Port::choose()?;
    let store = port.address();
    let mut relays = Vec::new();
    let (sender, events) = mpsc::channel();
    let mut ranks = Vec::new();
    for rank in 0..settings.ranks {
        // Rank 0 serves the store itself: it is cut off by cutting off the others.
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
        command
            .env("TMPDIR", folder)
            .env("WARPLINK_CACHE_DIR", &settings.cache);
        ranks.push(start(command, rank, &sender)?);
    }
    drop(sender);
    let pids = ranks
        .iter()
        .map(|(child, _)| child.0.id())
        .collect::<Vec<_>>();
    let victim = pids
        .get(settings.victim)
        .and_then(|&id| Pid::from_raw(id.cast_signed()));
    follow(cell, settings, &events, victim, &relays, outcome);
    for (number, ((mut child, output), rank)) in
        ranks.into_iter().zip(&mut outcome.ranks).enumerate()
    {
        let mut status = if rank.hung { None } else { child.wait() };
        if status.is_none() {
            rank.hung = true;
            let _ = child.0.kill();
            status = child.wait();
        }
        match status {
            Some(status) => {
                rank.code = status.code();
                rank.output = output.join().unwrap_or_default();
            }
            None => outcome.problems.push(format!(
                "rank {number} did not end within {MAX_END:?} of SIGKILL"
            )),
        }
    }
    for entry in std::fs::read_dir("/dev/shm")
        .into_iter()
        .flatten()
        .flatten()
    {
        let name = entry.file_name().to_string_lossy().into_owned();
        let numbers = || name.split(|c: char| !c.is_ascii_digit());
        if pids
            .iter()
            .any(|pid| numbers().any(|number| number == pid.to_string()))
        {
            outcome
                .problems
                .push(format!("the shared memory {name} is left"));
        }
    }
    Ok(())
}

/// Takes in what ranks say until all have ended; continues a stopped victim, and cuts its connection.
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
    let mut ended = vec![false; settings.ranks];
    while running > 0 && !settings.is_ending() {
        let next = resume.map_or(until, |at| at.min(until));
        let left = next.saturating_duration_since(Instant::now());
        match events.recv_timeout(left.min(ENDING_INTERVAL)) {
            Ok(RankEvent::Said(_, Said::Fault(at))) => {
                outcome.fault_at = Some(at);
                match cell.fault {
                    Fault::Stop => resume = Some(Instant::now() + STOPPED),
                    Fault::Cut => relays.iter().for_each(Relay::cut),
                    _ => {}
                }
            }
            Ok(RankEvent::Said(rank, Said::Report(report))) => {
                if let Some(rank) = outcome.ranks.get_mut(rank) {
                    rank.report = Some(report);
                }
            }
            Ok(RankEvent::Ended(rank)) => {
                running -= 1;
                if let Some(ended) = ended.get_mut(rank) {
                    *ended = true;
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
    for (rank, ended) in outcome.ranks.iter_mut().zip(ended) {
        rank.hung = !ended;
    }
}

/// The command of one rank, which reaches the store at `address`.
fn command(cell: Cell, settings: &JobSettings, rank: usize, address: SocketAddr) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command
        .arg(FAULT_RANK_COMMAND)
        .args([
            "--fault",
            &name_of(&cell.fault),
            "--phase",
            &name_of(&cell.phase),
        ])
        .args(["--victim", &settings.victim.to_string()])
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
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    settings.gpus.apply(rank, settings.jobs, &mut command);
    command
}

type Output = thread::JoinHandle<String>;

fn start(
    mut command: Command,
    rank: usize,
    events: &Sender<RankEvent>,
) -> Result<(Running, Output)> {
    let mut child = command
        .spawn()
        .with_context(|| format!("start rank {rank}"))?;
    let (out, err) = (child.stdout.take(), child.stderr.take());
    let child = Running(child);
    let events = events.clone();
    thread::Builder::new()
        .name("rank-output".into())
        .spawn(move || {
            for line in out
                .into_iter()
                .flat_map(|out| BufReader::new(out).lines())
                .map_while(Result::ok)
            {
                if let Ok(said) = serde_json::from_str(&line) {
                    // The receiver is gone only at the limit.
                    let _ = events.send(RankEvent::Said(rank, said));
                }
            }
            let _ = events.send(RankEvent::Ended(rank));
        })?;
    let errors = thread::Builder::new()
        .name("rank-errors".into())
        .spawn(move || {
            let mut text = Vec::new();
            if let Some(mut err) = err {
                let _ = err.read_to_end(&mut text);
            }
            String::from_utf8_lossy(&text).into_owned()
        })?;
    Ok((child, errors))
}
