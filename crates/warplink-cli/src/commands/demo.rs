//! `warplink demo`: the main job, checked and timed.

use super::bench::timing::{Clock, Submission, Times};
use super::ranks;
use crate::options::Options;
use crate::product::plain::Plain;
use crate::product::{Op, Problem, Product, common_seed, product_type};
use crate::report;
use crate::report::table::{Align, Table};
use anyhow::Result;
use clap::Args;
use serde::Serialize;
use std::process::ExitCode;
use warplink::device::{Priority, Stream};
use warplink::overlap::{self, Choice, Variant};
use warplink::{Communicator, DType, DeviceKind, ErrorKind};

/// Multiply a matrix that is spread over the ranks, while its parts still arrive
///
/// Every rank has a part of A's rows and all of B, and computes all of A · B: with overlap, each
/// part is multiplied while the next arrives; without, everything is gathered first. Inputs are
/// random, and the result is checked against a product in double precision; the exit status tells
/// whether it is right. Times are those of the slowest rank, the median of all samples.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    warplink demo\n  \
    warplink demo -n 4 --m 4096 --k 4096 --n 1024 --dtype f16\n  \
    warplink demo --variant ring-get --json")]
pub(crate) struct Demo {
    /// Rows of A on all ranks together [default: 8192 on cuda, 512 on host]
    #[arg(long, value_name = "M")]
    m: Option<usize>,
    /// Columns of A [default: 8192 on cuda, 1024 on host]
    #[arg(long, value_name = "K")]
    k: Option<usize>,
    /// Columns of B [default: 3584 on cuda, 512 on host]
    #[arg(long = "n", value_name = "N")]
    columns: Option<usize>,
    /// Element type: bf16, f16 or f32 [default: bf16 on cuda, f32 on host]
    #[arg(long, value_name = "TYPE", value_parser = product_type)]
    dtype: Option<DType>,
    /// How the parts travel: ring-get, ring-put, ring-fine, ring-coarse, pairwise-get,
    /// pairwise-put, push-rotated or collective [default: what a model of the machine finds
    /// fastest]
    #[arg(long, value_name = "VARIANT")]
    variant: Option<Variant>,
    /// Seed of the inputs [default: from the system's randomness]
    #[arg(long, value_name = "SEED")]
    seed: Option<u64>,
    /// Samples of each time [default: 20 on cuda, 5 on host]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    samples: Option<u16>,
}

/// Of one way to compute it, eager and captured.
#[derive(Debug, Serialize)]
struct Way {
    name: String,
    eager: Times,
    captured: Times,
    error: f64,
}

#[derive(Debug, Serialize)]
struct Outcome {
    demo: &'static str,
    device: String,
    ranks: usize,
    #[serde(flatten)]
    problem: Problem,
    seed: u64,
    variant: &'static str,
    reason: String,
    overlapped: Way,
    plain: Way,
    /// Time without overlap over time with it, of the faster submission each.
    ratio: f64,
    checked_rows: usize,
    tolerance: Option<f64>,
    right: bool,
}

impl Demo {
    pub(crate) fn run(self, options: &Options) -> Result<ExitCode> {
        ranks::run(options, |comm| {
            let outcome = self.outcome(comm)?;
            if comm.rank() == 0 {
                if options.json {
                    report::print_json(&outcome)?;
                } else {
                    print!("{}", outcome.text());
                }
            }
            Ok(match outcome.right {
                true => ExitCode::SUCCESS,
                false => ExitCode::FAILURE,
            })
        })
    }

    fn problem(&self, kind: DeviceKind) -> Problem {
        let (m, k, n, dtype) = match kind {
            DeviceKind::Cuda => (8192, 8192, 3584, DType::BF16),
            DeviceKind::Host => (512, 1024, 512, DType::F32),
        };
        Problem {
            op: Op::AllGatherMatmul,
            m: self.m.unwrap_or(m),
            k: self.k.unwrap_or(k),
            n: self.columns.unwrap_or(n),
            dtype: self.dtype.unwrap_or(dtype),
        }
    }

    fn outcome(&self, comm: &Communicator) -> Result<Outcome> {
        let kind = comm.device().kind();
        let samples = match (self.samples, kind) {
            (Some(samples), _) => samples.into(),
            (None, DeviceKind::Cuda) => 20,
            (None, DeviceKind::Host) => 5,
        };
        let seed = common_seed(comm, self.seed)?;
        let mut product = Product::new(comm, self.problem(kind), seed)?;
        let clock = Clock::new(comm, Priority::Normal)?;

        let plan = product.plan(&overlap::Options {
            variant: self.variant,
            ..overlap::Options::default()
        })?;
        let choice: Choice = plan.choice().clone();
        let overlapped = time(
            &mut product,
            &clock,
            samples,
            choice.variant.name().to_owned(),
            &|stream| plan.run(stream),
        )?;
        drop(plan);

        // The engine is joined by all ranks together, so all find it missing or none does.
        let plain = match product.plan(&overlap::Options::of(Variant::Collective)) {
            Ok(plan) => {
                let engine = comm.collective_engine()?.describe();
                let name = format!("{engine}, then one product");
                time(&mut product, &clock, samples, name, &|stream| {
                    plan.run(stream)
                })?
            }
            Err(error) if error.kind() == ErrorKind::LibraryMissing => {
                let plain = Plain::new(&product)?;
                let name = "own transfers (NCCL is not installed), then one product".to_owned();
                time(&mut product, &clock, samples, name, &|stream| {
                    plain.run(stream)
                })?
            }
            Err(error) => return Err(error.into()),
        };
        let best = |way: &Way| way.eager.median.min(way.captured.median);
        let right = product.is_right(overlapped.error) && product.is_right(plain.error);
        Ok(Outcome {
            demo: "all-gather + matmul",
            device: comm.device().describe(),
            ranks: comm.world(),
            problem: product.problem,
            seed,
            variant: choice.variant.name(),
            reason: choice.to_string(),
            ratio: best(&plain) / best(&overlapped),
            overlapped,
            plain,
            checked_rows: product.checked_rows(),
            tolerance: product.problem.dtype.matmul_tolerance(),
            right,
        })
    }
}

/// Checks a run of `work` over a poisoned result, times it, and checks what the last run left. The
/// worse error counts.
fn time(
    product: &mut Product<'_>,
    clock: &Clock<'_>,
    samples: usize,
    name: String,
    work: &dyn Fn(&Stream) -> Result<()>,
) -> Result<Way> {
    let before = product.error_of(&clock.stream, work)?;
    let eager = clock.measure(samples, Submission::Eager, work)?;
    let captured = clock.measure(samples, Submission::Captured, work)?;
    let after = product.error()?;
    Ok(Way {
        name,
        eager,
        captured,
        // `max` would lose a NaN.
        error: if before >= after || before.is_nan() {
            before
        } else {
            after
        },
    })
}

impl Outcome {
    fn text(&self) -> String {
        let Problem { m, k, n, dtype, .. } = self.problem;
        let mut table = Table::new([
            ("", Align::Left),
            ("eager (ms)", Align::Right),
            ("captured (ms)", Align::Right),
            ("TFLOP/s", Align::Right),
            ("error", Align::Right),
            ("", Align::Left),
        ]);
        for (title, way) in [("with overlap", &self.overlapped), ("without", &self.plain)] {
            let best = way.eager.median.min(way.captured.median);
            table.row([
                title.to_owned(),
                format!("{:.3}", way.eager.median * 1e3),
                format!("{:.3}", way.captured.median * 1e3),
                format!("{:.3}", self.problem.flops(self.ranks) / best / 1e12),
                format!("{:.1e}", way.error),
                way.name.clone(),
            ]);
        }
        let verdict = match self.right {
            true => "right",
            false => "WRONG",
        };
        let tolerance = self.tolerance.map_or_else(String::new, |most| {
            format!(", at most {most:.0e} is accepted")
        });
        format!(
            "all-gather + matmul of {m} x {k} by {k} x {n}, {dtype}, {} ranks on {}\n\n{table}\n\
             {:.3} times as fast with overlap. The result is {verdict}: relative error over {} rows \
             of each rank{tolerance}; seed {}.\n\n{}",
            self.ranks, self.device, self.ratio, self.checked_rows, self.seed, self.reason
        )
    }
}
