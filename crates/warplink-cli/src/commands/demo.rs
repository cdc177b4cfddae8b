//! `warplink demo`: all-gather + matmul with and without overlap, checked and timed.

use super::bench::case::by_device;
use super::bench::clock::{BenchClock, Submission, Times, WorkRef};
use super::bench::peers::{allocate, optional};
use super::bench::report::{Row, job, or_empty, table};
use super::ranks;
use crate::gemm::{
    COLLECTIVE, DistributedGemm, Op, Problem, check_lowerings, common_seed, gather_lowering_name,
};
use crate::names::OneOf;
use crate::options::{Options, at_least};
use crate::report::{self, Object};
use anyhow::{Result, ensure};
use clap::Args;
use serde::Serialize;
use std::process::ExitCode;
use warplink::device::Priority;
use warplink::overlap::{self, Choice};
use warplink::{Communicator, DType, DeviceKind};

/// Run an all-gather + matmul with and without overlap
///
/// Every rank holds some rows of A and all of B, and computes A · B. With overlap, each part of A is
/// multiplied while the next arrives; without, A is gathered first. Inputs are random; results are
/// checked against a GEMM in double precision, and the exit status is 1 if one is wrong. Times are
/// medians over all samples; the slowest rank counts.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    warplink demo\n  \
    warplink demo -n 4 --m 4096 --k 4096 --n 1024 --dtype f16\n  \
    warplink demo --lowering ring-get --json")]
pub(crate) struct Demo {
    /// Rows of A on all ranks together [default: 8192 on cuda, 512 on host, rounded up to a multiple of
    /// the ranks]
    #[arg(long, value_name = "M", value_parser = at_least::<usize>(0))]
    m: Option<usize>,
    /// Columns of A [default: 8192 on cuda, 1024 on host]
    #[arg(long, value_name = "K", value_parser = at_least::<usize>(0))]
    k: Option<usize>,
    /// Columns of B [default: 3584 on cuda, 512 on host]
    #[arg(long = "n", value_name = "N", value_parser = at_least::<usize>(0))]
    columns: Option<usize>,
    /// Element type [default: bf16 on cuda, f32 on host]
    #[arg(long, value_name = "TYPE", value_parser = OneOf(&DType::MATMUL))]
    dtype: Option<DType>,
    /// Store B transposed, N x K, as the weights of a linear layer: [out, in]
    #[arg(long)]
    transposed_b: bool,
    /// Lowering to run: collective, in-order, push, ring-put, ring-get or FILE.wlp [default: the fastest by the
    /// cost model]
    #[arg(long, value_name = "NAME|FILE.wlp", value_parser = gather_lowering_name)]
    lowering: Option<String>,
    /// Seed of the inputs [default: random]
    #[arg(long, value_name = "SEED", value_parser = at_least::<u64>(0))]
    seed: Option<u64>,
    /// Samples per time [default: 20 on cuda, 5 on host]
    #[arg(long, value_name = "N", value_parser = at_least::<u16>(1))]
    samples: Option<u16>,
}

/// Times of one method, eager and captured.
#[derive(Debug, Serialize)]
struct Method {
    name: String,
    eager: Times,
    captured: Times,
    error: f64,
}

impl Demo {
    pub(crate) fn run(self, options: &Options) -> Result<ExitCode> {
        let check = |kind, world| {
            for (option, size) in [("--m", self.m), ("--k", self.k), ("--n", self.columns)] {
                // The parsers admit 0 so that this message names the option, before any rank starts.
                ensure!(size != Some(0), "{option} is 0; expected at least 1");
            }
            let problem = self.problem(kind, world);
            problem.check(world)?;
            problem.check_memory(kind, world)?;
            check_lowerings(self.lowering.as_slice(), &[problem.op])
        };
        ranks::run_checked(options, check, |comm| {
            let (object, text, right) = self.outcome(comm)?;
            if comm.rank() == 0 {
                report::print_result(options.json, &object, || text)?;
            }
            Ok(report::exit_code(right))
        })
    }

    fn problem(&self, kind: DeviceKind, world: usize) -> Problem {
        let gpu = (8192_usize, 8192, 3584, DType::BF16);
        let (m, k, n, dtype) = by_device(kind, [gpu, (512, 1024, 512, DType::F32)]);
        Problem {
            op: Op::AllGatherMatmul,
            // The default must divide among any number of ranks; a given size is rejected instead of changed.
            m: self.m.unwrap_or_else(|| m.next_multiple_of(world)),
            k: self.k.unwrap_or(k),
            n: self.columns.unwrap_or(n),
            dtype: self.dtype.unwrap_or(dtype),
            transposed_b: self.transposed_b,
        }
    }

    /// The result as JSON and as text, and whether it is right.
    fn outcome(&self, comm: &Communicator) -> Result<(Object, String, bool)> {
        let kind = comm.device().kind();
        let samples = self.samples.map(usize::from);
        let samples = samples.unwrap_or(by_device(kind, [20, 5]));
        let seed = common_seed(comm, self.seed)?;
        let gemm = DistributedGemm::new(comm, self.problem(kind, comm.world()), seed)?;
        let clock = BenchClock::new(comm, Priority::Normal)?;

        let named = |name: &String| gemm.problem.op.named(name);
        let lowering = self.lowering.as_ref().map(named).transpose()?;
        let requested = lowering.is_some();
        let mut plan = gemm.plan(&overlap::Options {
            lowering,
            ..overlap::Options::default()
        })?;
        let choice: Choice = plan.choice().clone();
        // The demo shows overlap even if the collective is expected to be as fast.
        let with_overlap = choice.estimates.iter().find(|one| !one.needs_engine);
        let mut reason = format!("Estimates of the cost model (not measured):\n{choice}");
        if !requested
            && choice.needs_engine()
            && let Some(fastest) = with_overlap
        {
            plan = gemm.plan(&overlap::Options::only(fastest.lowered.lowering.clone()))?;
            reason = format!(
                "Here, a plan would choose the collective without overlap; the demo ran the fastest lowering with overlap.\n\n{reason}"
            );
        }
        let name = plan.choice().name().to_owned();
        let overlapped = time(&gemm, &clock, samples, name.clone(), &|stream| {
            Ok(plan.run(stream)?)
        })?;
        // Its buffers and registrations would take memory from the run it is compared with.
        drop(plan);

        let plain = without_overlap(&gemm, &clock, samples)?;
        let best = |method: &Method| method.eager.median.min(method.captured.median);
        let right = gemm.is_right(overlapped.error) && gemm.is_right(plain.error);
        let (problem, world) = (gemm.problem, comm.world());
        let methods = [("with overlap", &overlapped), ("without overlap", &plain)];
        let table = table(&methods.map(|(title, method)| {
            let rate = problem.flops(world) / best(method) / 1e12;
            let millis = |times: Times| format!("{:.3}", times.median * 1e3);
            Row::of("")
                .words("", title)
                .number("eager (ms)", millis(method.eager))
                .number("captured (ms)", millis(method.captured))
                .number("TFLOP/s", format!("{rate:.3}"))
                .number("error", format!("{:.1e}", method.error))
                // Not as the first column, which has no heading either.
                .words(" ", &method.name)
        }));
        let Problem { m, k, n, dtype, .. } = problem;
        let (ratio, rows) = (best(&plain) / best(&overlapped), gemm.checked_rows());
        let tolerance = dtype.matmul_tolerance();
        let text = format!(
            "all-gather + matmul of {m} x {k} by {k} x {n}{}, {dtype}, {}\n\n{table}\n\
             Speedup with overlap: {ratio:.3}. The result is {}{}; checked {rows} rows per rank; seed {seed}.\n\n\
             {reason}",
            if problem.transposed_b {
                " (transposed)"
            } else {
                ""
            },
            job(comm),
            if right { "correct" } else { "WRONG" },
            or_empty(tolerance, |most| format!(" (tolerance {most:.0e})")),
        );
        let object = Object::default()
            .key("demo", "all-gather + matmul")
            .key("device", comm.device().name())
            .key("ranks", world);
        let object = problem
            .add_to(object)
            .key("seed", seed)
            .key("lowering", name)
            .key("reason", reason)
            .key("overlapped", overlapped)
            .key("plain", plain)
            .key("ratio", ratio)
            .key("checked_rows", rows)
            .key("tolerance", tolerance)
            .key("right", right);
        Ok((object, text, right))
    }
}

/// Times the collective engine followed by one GEMM; without an engine, the library's own all-gather.
fn without_overlap(
    gemm: &DistributedGemm<'_>,
    clock: &BenchClock<'_>,
    samples: usize,
) -> Result<Method> {
    let (comm, problem) = (gemm.comm, gemm.problem);
    let collective = gemm.plan(&overlap::Options {
        library: true,
        ..overlap::Options::only(problem.op.named(COLLECTIVE)?)
    });
    // On all ranks or none, since planning is collective.
    if let Some(plan) = optional(comm, "NCCL", collective)? {
        let name = format!("{}, then one GEMM", comm.collective_engine()?.name());
        return time(gemm, clock, samples, name, &|stream| Ok(plan.run(stream)?));
    }
    let collectives = comm.collectives()?;
    let gathered = allocate(comm, gemm.a.bytes() * comm.world())?;
    let (a, b, c) = (gemm.a.clone(), gemm.b.clone(), gemm.c.clone());
    let (compute, spec) = (comm.compute()?, problem.spec(problem.m, problem.k));
    // Outside the measurement and capture: selecting an algorithm may allocate and time candidates.
    compute.prepare_matmul(&spec)?;
    let name = "own all-gather (NCCL cannot be used), then one GEMM".to_owned();
    time(gemm, clock, samples, name, &|stream| {
        collectives.all_gather(&gathered, &a, stream)?;
        Ok(compute.matmul(stream, &spec, &gathered, &b, &c, None)?)
    })
}

/// Checks a run of `work` over a poisoned result, times it, and checks the result of the last run. Returns
/// the worse error.
fn time(
    gemm: &DistributedGemm<'_>,
    clock: &BenchClock<'_>,
    samples: usize,
    name: String,
    work: WorkRef<'_>,
) -> Result<Method> {
    // Checked before and after: a race may show only under repetition, or leave a right result of an earlier run.
    let before = gemm.error_of(&clock.stream, work)?;
    let eager = clock.measure(samples, Submission::Eager, 1, work)?;
    let captured = clock.measure(samples, Submission::Captured, 1, work)?;
    let after = gemm.error()?;
    Ok(Method {
        name,
        eager,
        captured,
        // `max` would discard a NaN.
        error: if before >= after || before.is_nan() {
            before
        } else {
            after
        },
    })
}
