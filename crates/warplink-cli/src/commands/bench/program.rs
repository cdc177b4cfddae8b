//! `warplink bench program`: host time per operation of a host program.

use super::timing::Clock;
use crate::commands::ranks;
use crate::gemm::{Gemm, Op, Problem, check_lowerings, common_seed, lowering_name};
use crate::options::Options;
use crate::report::table::{Align, Table};
use crate::report::{counted, print_json, print_text};
use anyhow::{Context, Result};
use clap::Args;
use serde::Serialize;
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use warplink::device::{Priority, Stream};
use warplink::overlap::{self, Lowering};
use warplink::{Communicator, DType, DeviceKind, ErrorKind};

/// Measure the host time to enqueue a program
///
/// Runs every lowering of both overlapped operations on matrices so small that only enqueuing takes
/// time, and divides that time by the number of operations. Then launches the same as a graph. Times
/// are medians over all runs, of the slowest rank; times by kind are means on rank 0.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    warplink bench program\n  \
    warplink bench program --device host -n 4 --samples 50 --json")]
pub(crate) struct Program {
    /// Runs per figure
    #[arg(long, value_name = "N", default_value = "200", value_parser = clap::value_parser!(u16).range(1..))]
    samples: u16,
    /// Lowerings to measure, separated by commas: collective, in-order, push, ring-put, ring-get,
    /// rings, store, or FILE.wlp [default: all but files]
    #[arg(long, value_name = "A,B", value_delimiter = ',', value_parser = lowering_name)]
    lowerings: Vec<String>,
}

/// Runs between two waits for the device, so that its full queues do not block the host.
const IN_A_ROW: usize = 4;

#[derive(Debug, Serialize)]
struct Row {
    op: Op,
    lowering: String,
    /// That a run enqueues.
    operations: usize,
    /// Nanoseconds of the host for a run.
    run: f64,
    /// Nanoseconds for each operation.
    operation: f64,
    /// Nanoseconds of the host to launch the same as a graph.
    launch: f64,
    /// Operations of a run and nanoseconds for one, by kind.
    kinds: BTreeMap<&'static str, Kind>,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Kind {
    count: usize,
    each: f64,
}

#[derive(Debug, Serialize)]
struct Report {
    benchmark: &'static str,
    device: String,
    ranks: usize,
    rows: Vec<Row>,
}

impl Program {
    pub(crate) fn run(self, options: &Options) -> Result<ExitCode> {
        let check = |_, _| check_lowerings(&self.lowerings, &Op::ALL);
        ranks::run_checked(options, check, |comm| {
            let report = self.measure(comm)?;
            if comm.rank() == 0 {
                if options.json {
                    print_json(&report)?;
                } else {
                    print_text(&report.text())?;
                }
            }
            Ok(ExitCode::SUCCESS)
        })
    }

    fn measure(&self, comm: &Communicator) -> Result<Report> {
        let clock = Clock::new(comm, Priority::Normal)?;
        let seed = common_seed(comm, None)?;
        let mut rows = Vec::new();
        for op in [Op::AllGatherMatmul, Op::MatmulReduceScatter] {
            let problem = Problem {
                op,
                m: 16 * comm.world(),
                k: 16 * comm.world(),
                n: 16,
                dtype: match comm.device().kind() {
                    DeviceKind::Cuda => DType::BF16,
                    DeviceKind::Host => DType::F32,
                },
                transposed_b: false,
            };
            let gemm = Gemm::new(comm, problem, seed)?;
            for lowering in op.select(&self.lowerings)? {
                match self.row(&clock, &gemm, &lowering) {
                    Ok(row) => rows.push(row),
                    // Missing on every rank or on none: they join it together.
                    Err(error) if is_missing(&error) => {
                        if comm.rank() == 0 {
                            crate::report::print_message(&format!(
                                "skipped {}: {error:#}",
                                lowering.name()
                            ));
                        }
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(Report {
            benchmark: "program",
            device: comm.device().name(),
            ranks: comm.world(),
            rows,
        })
    }

    fn row(&self, clock: &Clock<'_>, gemm: &Gemm<'_>, lowering: &Lowering) -> Result<Row> {
        let bound = gemm
            .plan(&overlap::Options::only(lowering.clone()))
            .with_context(|| format!("make a plan for {}", lowering.name()))?;
        let plan = bound.plans().first().context("there is no plan")?;
        let operations = plan.operations();
        let run = self.host_time(clock, &|stream| Ok(plan.run(stream)?))?;

        let mut kinds: BTreeMap<&'static str, (usize, Duration)> = BTreeMap::new();
        for sample in 0..self.samples {
            plan.run_timed(&clock.stream, &mut |kind, time| {
                let (count, total) = kinds.entry(kind).or_default();
                *count += 1;
                *total += time;
            })?;
            if usize::from(sample) % IN_A_ROW == 0 {
                clock.comm.synchronize(&clock.stream)?;
            }
        }
        clock.comm.synchronize(&clock.stream)?;
        let kinds = kinds
            .into_iter()
            .map(|(kind, (count, total))| {
                let each = total.as_nanos() as f64 / count as f64;
                let count = count / usize::from(self.samples);
                (kind, Kind { count, each })
            })
            .collect();

        clock.stream.begin_capture()?;
        plan.run(&clock.stream)?;
        let graph = clock.stream.end_capture()?;
        let launch = self.host_time(clock, &|stream| Ok(graph.launch(stream)?))?;
        Ok(Row {
            op: gemm.problem.op,
            lowering: lowering.name().to_owned(),
            operations,
            run,
            operation: run / operations as f64,
            launch,
            kinds,
        })
    }

    /// The median of the host's time for `enqueue`, in nanoseconds, on the slowest rank.
    fn host_time(&self, clock: &Clock<'_>, enqueue: &dyn Fn(&Stream) -> Result<()>) -> Result<f64> {
        const WARM_UP: usize = 4;
        let stream = &clock.stream;
        let mut times = Vec::with_capacity(self.samples.into());
        for sample in 0..usize::from(self.samples) + WARM_UP {
            if sample % IN_A_ROW == 0 {
                clock.comm.synchronize(stream)?;
                clock.comm.barrier()?;
            }
            let start = Instant::now();
            enqueue(stream)?;
            let time = start.elapsed();
            if sample >= WARM_UP {
                times.push(time.as_nanos() as f64);
            }
        }
        clock.comm.synchronize(stream)?;
        times.sort_by(f64::total_cmp);
        let median = times.get(times.len() / 2).copied().unwrap_or(f64::NAN);
        Ok(clock.slowest(vec![median])?.median)
    }
}

/// Whether a library is not installed.
fn is_missing(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<warplink::Error>()
        .is_some_and(|error| error.kind() == ErrorKind::LibraryMissing)
}

impl Report {
    fn text(&self) -> String {
        let mut kinds: Vec<&str> = self
            .rows
            .iter()
            .flat_map(|row| row.kinds.keys().copied())
            .collect();
        kinds.sort_unstable();
        kinds.dedup();
        let columns = [
            ("", Align::Left),
            ("operations", Align::Right),
            ("run (us)", Align::Right),
            ("each (ns)", Align::Right),
            ("graph launch (us)", Align::Right),
        ];
        let by_kind = kinds.iter().map(|kind| (*kind, Align::Right));
        let mut table = Table::new(columns.into_iter().chain(by_kind));
        for row in &self.rows {
            let mut cells = vec![
                format!("{}, {}", row.op, row.lowering),
                row.operations.to_string(),
                format!("{:.1}", row.run / 1e3),
                format!("{:.0}", row.operation),
                format!("{:.1}", row.launch / 1e3),
            ];
            cells.extend(kinds.iter().map(|kind| {
                row.kinds.get(kind).map_or_else(String::new, |kind| {
                    format!("{} x {:.0}", kind.count, kind.each)
                })
            }));
            table.row(cells);
        }
        format!(
            "{} on {}; per kind: count per run x ns each\n\n{table}",
            counted(self.ranks, "rank"),
            self.device
        )
    }
}
