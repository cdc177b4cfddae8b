//! `warplink bench program`: host time per operation of a host program.

use crate::commands::bench::case::{Case, Setup, by_device};
use crate::commands::bench::clock::{Clock, median};
use crate::commands::bench::peers::optional;
use crate::commands::bench::plot::{Bar, Bars, Drawing, OWN};
use crate::commands::bench::report::{Columns, Figures, or_empty};
use crate::gemm::{Gemm, Op, Problem, check_lowerings, common_seed, lowering_name};
use anyhow::{Context, Result};
use clap::Args;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use warplink::device::{Priority, Stream};
use warplink::overlap::{self, Lowering};
use warplink::{Communicator, DType};

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
pub(crate) struct Programs {
    rows: Vec<Row>,
}

impl Case for Program {
    const NAME: &'static str = "program";
    const SAMPLES: [u16; 2] = [200, 200];
    type Figures = Programs;

    fn check(&self, _: &Setup) -> Result<()> {
        check_lowerings(&self.lowerings, &Op::ALL)
    }

    fn measure(&self, comm: &Communicator, setup: &Setup) -> Result<Programs> {
        let clock = Clock::new(comm, Priority::Normal)?;
        let seed = common_seed(comm, None)?;
        let mut rows = Vec::new();
        for op in Op::ALL {
            let problem = Problem {
                op,
                m: 16 * comm.world(),
                k: 16 * comm.world(),
                n: 16,
                dtype: by_device(setup.kind, [DType::BF16, DType::F32]),
                transposed_b: false,
            };
            let gemm = Gemm::new(comm, problem, seed)?;
            for lowering in op.select(&self.lowerings)? {
                let row = row(&clock, &gemm, &lowering, setup.samples);
                rows.extend(optional(comm, lowering.name(), row)?);
            }
        }
        Ok(Programs { rows })
    }
}

fn row(clock: &Clock<'_>, gemm: &Gemm<'_>, lowering: &Lowering, samples: usize) -> Result<Row> {
    let bound = gemm
        .plan(&overlap::Options::only(lowering.clone()))
        .with_context(|| format!("make a plan for {}", lowering.name()))?;
    let plan = bound.plans().first().context("there is no plan")?;
    let operations = plan.operations();
    let run = host_time(clock, samples, &|stream| Ok(plan.run(stream)?))?;

    let mut kinds: BTreeMap<&'static str, (usize, Duration)> = BTreeMap::new();
    for sample in 0..samples {
        plan.run_timed(&clock.stream, &mut |kind, time| {
            let (count, total) = kinds.entry(kind).or_default();
            *count += 1;
            *total += time;
        })?;
        if sample.is_multiple_of(IN_A_ROW) {
            clock.comm.synchronize(&clock.stream)?;
        }
    }
    clock.comm.synchronize(&clock.stream)?;
    let kinds = kinds
        .into_iter()
        .map(|(kind, (count, total))| {
            let each = total.as_nanos() as f64 / count as f64;
            let count = count / samples;
            (kind, Kind { count, each })
        })
        .collect();

    let graph = clock.capture(&|stream| Ok(plan.run(stream)?))?;
    let launch = host_time(clock, samples, &|stream| Ok(graph.launch(stream)?))?;
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
fn host_time(
    clock: &Clock<'_>,
    samples: usize,
    enqueue: &dyn Fn(&Stream) -> Result<()>,
) -> Result<f64> {
    const WARM_UP: usize = 4;
    let stream = &clock.stream;
    let mut times = Vec::with_capacity(samples);
    for sample in 0..samples + WARM_UP {
        if sample.is_multiple_of(IN_A_ROW) {
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
    Ok(clock.slowest(vec![median(&mut times)])?.median)
}

impl Figures for Programs {
    fn title(&self, job: &str) -> String {
        format!("{job}; per kind: count per run x ns each")
    }

    fn tables(&self) -> String {
        let kinds = self.rows.iter().flat_map(|row| row.kinds.keys().copied());
        let kinds: BTreeSet<&str> = kinds.collect();
        let mut columns = Columns::<Row>::new()
            .words("", |row| format!("{}, {}", row.op, row.lowering))
            .number("operations", |row| row.operations.to_string())
            .number("run (us)", |row| format!("{:.1}", row.run / 1e3))
            .number("each (ns)", |row| format!("{:.0}", row.operation))
            .number("graph launch (us)", |row| {
                format!("{:.1}", row.launch / 1e3)
            });
        for kind in kinds {
            columns = columns.number(kind, move |row: &Row| {
                or_empty(row.kinds.get(kind), |kind| {
                    format!("{} x {:.0}", kind.count, kind.each)
                })
            });
        }
        columns.table(&self.rows)
    }

    fn drawing(&self) -> Drawing {
        let panels = Op::ALL.map(|op| {
            let rows = self.rows.iter().filter(|row| row.op == op);
            let bars = rows.map(|row| Bar {
                label: row.lowering.clone(),
                value: row.operation,
                colour: OWN,
            });
            Bars {
                title: format!("{op}: time of the host for each operation"),
                unit: "ns",
                bars: bars.collect(),
                limit: None,
            }
        });
        Drawing::Bars(panels.into())
    }
}
