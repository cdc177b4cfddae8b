//! `warplink bench program`: host time per operation of a host program.

use crate::commands::bench::case::{Case, Setup, by_device};
use crate::commands::bench::clock::{BenchClock, WorkRef, median};
use crate::commands::bench::peers::optional;
use crate::commands::bench::report::{Figures, Row, job};
use crate::gemm::{DistributedGemm, Op, Problem, check_lowerings, common_seed, lowering_name};
use crate::report::Object;
use anyhow::{Context, Result};
use clap::Args;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use warplink::device::Priority;
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
pub(crate) struct ProgramBench {
    /// Lowerings to measure, separated by commas: collective, in-order, push, ring-put, ring-get,
    /// rings, store, or FILE.wlp [default: all but files]
    #[arg(long, value_name = "A,B", value_delimiter = ',', value_parser = lowering_name)]
    lowerings: Vec<String>,
}

/// Runs between two waits for the device, so that its full queues do not block the host.
const IN_A_ROW: usize = 4;

/// Operations of a kind in a run, and nanoseconds of one.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Kind {
    count: usize,
    each: f64,
}

impl Case for ProgramBench {
    const NAME: &'static str = "program";
    const SAMPLES: [u16; 2] = [200, 200];

    fn check(&self, _: &Setup) -> Result<()> {
        check_lowerings(&self.lowerings, &Op::ALL)
    }

    fn measure(&self, comm: &Communicator, setup: &Setup) -> Result<Figures> {
        let clock = BenchClock::new(comm, Priority::Normal)?;
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
            let gemm = DistributedGemm::new(comm, problem, seed)?;
            for lowering in op.select(&self.lowerings)? {
                let row = row(&clock, &gemm, &lowering, setup.samples);
                rows.extend(optional(comm, lowering.name(), row)?);
            }
        }
        let title = format!("{}; per kind: count per run x ns each", job(comm));
        Ok(Figures::of_rows(title, Object::default(), rows))
    }
}

fn row(
    clock: &BenchClock<'_>,
    gemm: &DistributedGemm<'_>,
    lowering: &Lowering,
    samples: usize,
) -> Result<Row> {
    let bound = gemm
        .plan(&overlap::Options::only(lowering.clone()))
        .with_context(|| format!("make a plan for {}", lowering.name()))?;
    let plan = bound.plans().first().context("there is no plan")?;
    let operations = plan.operations();
    let run = host_time(clock, samples, &|stream| Ok(plan.run(stream)?))?;

    // In runs of their own, which reading the clock at every operation makes longer.
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
    let kinds: BTreeMap<&str, Kind> = kinds
        .into_iter()
        .map(|(kind, (count, total))| {
            let each = total.as_nanos() as f64 / count as f64;
            let count = count / samples;
            (kind, Kind { count, each })
        })
        .collect();

    let graph = clock.capture(&|stream| Ok(plan.run(stream)?))?;
    let launch = host_time(clock, samples, &|stream| Ok(graph.launch(stream)?))?;
    let (op, name) = (gemm.problem.op, lowering.name());
    let operation = run / operations as f64;
    let mut row = Row::of("")
        .key("op", op)
        .key("lowering", name)
        .words("", format!("{op}, {name}"))
        .count("operations", operations as u64)
        .key("run", run)
        .number("run (us)", format!("{:.1}", run / 1e3))
        .key("operation", operation)
        .number("each (ns)", format!("{operation:.0}"))
        .key("launch", launch)
        .number("graph launch (us)", format!("{:.1}", launch / 1e3))
        .bar(
            format!("{op}: time of the host for each operation"),
            "ns",
            name,
            operation,
        )
        .key("kinds", &kinds);
    for (kind, Kind { count, each }) in kinds {
        row = row.number(kind, format!("{count} x {each:.0}"));
    }
    Ok(row)
}

/// The median of the host's time for `enqueue`, in nanoseconds, on the slowest rank.
fn host_time(clock: &BenchClock<'_>, samples: usize, enqueue: WorkRef<'_>) -> Result<f64> {
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
