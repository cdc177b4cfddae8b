//! `warplink faults`: a table of the effects of a failing rank on the others.
//!
//! Every cell is a separate job: its ranks are processes, one of them (the victim) fails in one way while all
//! are in one phase, and the others report their error, its delay, whether their data was right, and leaked
//! resources.

mod cell;
mod inflict;
mod job;
mod judge;
mod leftovers;
mod phases;
mod probe;
mod rank;
mod relay;
mod runner;
mod table;

pub(crate) use probe::{PROBE_COMMAND, run as probe_gpu};
pub(crate) use rank::{FAULT_RANK_COMMAND, FaultRank};

use crate::commands::ranks::launch_self;
use crate::launch::{self, GpuAssignment, Variable};
use crate::options::{Options, at_least};
use crate::report;
use anyhow::{Context, Result, ensure};
use cell::{Cell, Fault, Phase};
use clap::{Args, ValueEnum};
use job::JobSettings;
use judge::Judged;
use runner::Runner;
use serde::{Deserialize, Serialize};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;
use warplink::variables;
use warplink::{DeviceKind, device};

/// Variable with the [`InnerOptions`], set in the process that starts the ranks.
const INNER: &str = "WARPLINK_FAULTS";

/// Concurrent cells on the host device.
const JOBS: usize = 3;

/// Make a rank fail in each way and in each phase, and check how the other ranks react
///
/// Each cell of the table is a separate job. Its ranks are in one phase (joining, exchanging, posted transfers,
/// a running graph, collectives, binding a program, splitting, closing) when one of them, the victim, fails in one
/// way. The others must get an error that names the victim within 5 seconds, never see wrong data, continue without
/// it, and leak no resources. A fault that cannot affect a phase must leave it unaffected.
///
/// If ranks share GPUs, killing one may break CUDA's multi-process service for all processes; it is then
/// restarted, and affected cells are repeated. Each finished cell is reported on standard error; on SIGINT
/// (Ctrl-C), SIGTERM, SIGHUP or SIGQUIT, the table of finished cells is printed.
///
/// The exit code is 1 if a cell is wrong, else 128 plus the number of the signal, such as 130 after SIGINT.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    warplink faults -n 4 --device host\n  \
    warplink faults -n 8 --ranks-per-gpu 4\n  \
    warplink faults -n 2 --fault kill,stop --phase exchange,graph")]
pub(crate) struct Faults {
    /// Fault of the victim [default: every fault]
    #[arg(long, value_name = "FAULT", value_delimiter = ',')]
    fault: Vec<Fault>,

    /// Phase in which it fails [default: every phase]
    #[arg(long, value_name = "PHASE", value_delimiter = ',')]
    phase: Vec<Phase>,

    /// The rank that fails [default: the last]
    #[arg(long, value_name = "RANK", value_parser = at_least::<usize>(0))]
    victim: Option<usize>,

    /// Number of concurrent cells [default: 3 on the host device, 1 on GPUs]
    #[arg(long, value_name = "N", value_parser = at_least::<usize>(1))]
    jobs: Option<usize>,
}

impl Faults {
    pub(crate) fn run(self, options: &Options) -> Result<ExitCode> {
        let inner = variables::read(INNER)?;
        let inner = inner
            .map(|text| serde_json::from_str::<InnerOptions>(&text))
            .transpose()
            .with_context(|| format!("{INNER} is set; expected it to be unset"))?;
        let ranks = match &inner {
            Some(inner) => inner.ranks,
            None => options.ranks()?,
        };
        ensure!(
            ranks >= 2,
            "{ranks} rank has no peers; expected at least 2 ranks"
        );
        let victim = self.victim.unwrap_or(ranks - 1);
        ensure!(
            victim < ranks,
            "--victim is {victim}; expected a rank below {ranks}"
        );
        match inner {
            Some(inner) => self.run_cells(options, victim, inner),
            None => start(options, ranks),
        }
    }

    fn run_cells(&self, options: &Options, victim: usize, inner: InnerOptions) -> Result<ExitCode> {
        let InnerOptions { ranks, gpus } = inner;
        let device = options.device();
        let jobs = self.jobs.unwrap_or(match device {
            DeviceKind::Host => JOBS,
            // Cells on GPUs are sensitive to one another's faults: a killed process may disturb others on the same
            // GPU.
            DeviceKind::Cuda => 1,
        });
        let faults = chosen(&self.fault);
        let phases = chosen(&self.phase);
        // The slowest first, so that none runs alone at the end.
        let mut cells: Vec<Cell> = faults
            .iter()
            .flat_map(|&fault| phases.iter().map(move |&phase| Cell { fault, phase }))
            .collect();
        cells.sort_by_key(|cell| cell.fault != Fault::Stop);
        let jobs = jobs.clamp(1, cells.len());
        let folder = tempfile::Builder::new()
            .prefix("warplink-faults-")
            .tempdir();
        let folder = folder.context("make a directory")?;
        let settings = JobSettings {
            ranks,
            victim,
            device,
            gpus,
            jobs,
            folder: folder.path().to_owned(),
            cache: folder.path().join("cache"),
            ending: Arc::default(),
        };
        // A signal ends the command early, with the table of finished cells.
        let ending = &settings.ending;
        for signal in launch::ending_signals() {
            signal_hook::flag::register_usize(signal, ending.clone(), signal as usize)
                .context("handle signals")?;
        }
        let started = Instant::now();
        let runner = Runner::new(&settings)?;
        let next = AtomicUsize::new(0);
        let results = Mutex::new(Vec::new());
        thread::scope(|scope| {
            for _ in 0..jobs {
                scope.spawn(|| {
                    // Relaxed: the counter hands out each index once, and the mutex publishes results.
                    while !settings.is_ending()
                        && let Some(&cell) = cells.get(next.fetch_add(1, Ordering::Relaxed))
                    {
                        let judged = runner.run(cell);
                        // The terminal sends Ctrl-C to the ranks as well: a cell that ends by it looks wrong and is
                        // left out.
                        if settings.was_interrupted(!judged.problems.is_empty()) {
                            return;
                        }
                        if let Ok(mut results) = results.lock() {
                            print_progress(results.len() + 1, cells.len(), &judged);
                            results.push(judged);
                        }
                    }
                });
            }
        });
        let mut results = results.into_inner().unwrap_or_default();
        // Cells finish in any order; the output is the same for every run.
        results.sort_by_key(|judged| (judged.cell.fault as u8, judged.cell.phase as u8));
        let wrong = results.iter().filter(|judged| !judged.problems.is_empty());
        let report = Report {
            device,
            ranks,
            victim,
            seconds: started.elapsed().as_secs_f64(),
            wrong: wrong.count(),
            not_run: cells.len().saturating_sub(results.len()),
            service_restarts: runner.restarts(),
            cells: results,
        };
        let table = || table::text(&report, &faults, &phases);
        report::print_result(options.json, &report, table)?;
        // Relaxed: a number set by the signal handler, which publishes no other memory.
        Ok(match (report.wrong, ending.load(Ordering::Relaxed)) {
            (0, 0) => ExitCode::from(u8::from(report.not_run > 0)),
            (0, signal) => ExitCode::from(u8::try_from(128 + signal).unwrap_or(1)),
            _ => ExitCode::FAILURE,
        })
    }
}

/// Options passed to the process that starts the ranks.
#[derive(Debug, Serialize, Deserialize)]
struct InnerOptions {
    ranks: usize,
    gpus: GpuAssignment,
}

/// Output of `--json`, and the source of the table.
#[derive(Debug, Serialize)]
struct Report {
    device: DeviceKind,
    ranks: usize,
    victim: usize,
    seconds: f64,
    wrong: usize,
    /// Cells that a signal prevented or interrupted.
    not_run: usize,
    /// Number of failures of the GPUs' multi-process service.
    service_restarts: usize,
    cells: Vec<Judged>,
}

/// Starts this command again as the single rank of a launch, which kills leftover processes and runs the
/// multi-process service if ranks share GPUs.
fn start(options: &Options, ranks: usize) -> Result<ExitCode> {
    let gpus = match options.device() {
        DeviceKind::Host => GpuAssignment::default(),
        DeviceKind::Cuda => {
            let count = device::count(DeviceKind::Cuda).context("count the GPUs")?;
            GpuAssignment::new(ranks, options.ranks_per_gpu()?, Some(count))?
        }
    };
    let inner = serde_json::to_string(&InnerOptions { ranks, gpus })?;
    let inner = Variable::new(INNER, inner);
    // As one rank of a launch, which starts the multi-process service where ranks share GPUs.
    launch_self(options, 1, inner)
}

/// The chosen values; all of them if none is chosen.
fn chosen<T: ValueEnum + Clone>(some: &[T]) -> Vec<T> {
    match some {
        [] => T::value_variants().to_vec(),
        some => some.to_vec(),
    }
}

/// Reports a finished cell on standard error at once, so that it is known however the command ends.
fn print_progress(done: usize, of: usize, judged: &Judged) {
    let outcome = match judged.seconds {
        Some(seconds) => format!("{} {seconds:.2} s", judged.summary),
        None => judged.summary.clone(),
    };
    report::print_message(&format!("[{done}/{of}] {}: {outcome}", judged.cell));
    for problem in &judged.problems {
        report::print_message(&format!("{}: {problem}", judged.cell));
    }
}
