//! `warplink bench fused`: all-reduce with residual, RMSNorm and quantisation, compared with the two steps.

mod runner;

use crate::commands::bench::case::{Case, Range, Setup};
use crate::commands::bench::clock::{Submission, Times};
use crate::commands::bench::plot::{Drawing, Point};
use crate::commands::bench::report::{Columns, Figures, compared, micros, or_empty};
use crate::memory;
use crate::names::{OneOf, name_of};
use anyhow::Result;
use clap::{Args, ValueEnum};
use runner::FusedRunner;
use serde::Serialize;
use warplink::collective::{Epilogue, Fused as Call, FusedKind, Norm, Quantization, Wire};
use warplink::{Communicator, DType};

/// Measure an all-reduce with residual and RMSNorm
///
/// Every rank has the same rows, of --width elements, one for each token. One kernel adds up all ranks' rows and the residual,
/// stores that, and stores what RMSNorm makes of it, in the input's type or quantised. Each time is the median of the samples,
/// of the slowest rank.
///
/// 'pair' is Warplink's all-reduce, and then a kernel that does the rest. 'nccl' is the vendor's library and then that kernel.
///
/// Warplink's result is compared once for each size with the exact sums, and the norm in double precision: 'wrong' is the
/// number of elements that differ by more than rounding. 'speedup' is the time of the faster of the others divided by that of
/// one kernel: below 1, that one is faster.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    warplink bench fused -n 2\n  \
    warplink bench fused -n 2 --from 128 --to 128 --width 7168 --quantization per_token\n  \
    warplink bench fused --device host -n 2 --to 8 --width 256 --json")]
pub(crate) struct Fused {
    /// Elements of a row
    #[arg(long, value_name = "N", default_value = "8192", value_parser = clap::value_parser!(u32).range(1..))]
    width: u32,
    /// Element type: bf16, f16 or f32
    #[arg(long, value_name = "TYPE", default_value = "bf16", value_parser = OneOf(&DType::MATMUL))]
    dtype: DType,
    /// How what is normalised is quantised: static, per_token, per_block, per_block_power_of_two, mxfp8
    /// or nvfp4 [default: not]
    #[arg(long, value_name = "KIND")]
    quantization: Option<Quantization>,
    /// How Warplink's rows travel: exact, or fp8, whose bound of the error 'wrong' then goes by
    #[arg(long, value_name = "FORMAT", default_value = "exact")]
    wire: Wire,
    /// Implementations to compare with
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["pair", "nccl"])]
    peers: Vec<FusedPeer>,
    /// Calls in a sample
    #[arg(long, value_name = "N", default_value = "20", value_parser = clap::value_parser!(u16).range(1..))]
    calls: u16,
}

/// Two steps that it is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum FusedPeer {
    /// Warplink's all-reduce, then a kernel
    Pair,
    /// The vendor's library (a substitute on the host device), then a kernel
    Nccl,
    /// Nothing
    None,
}

/// The time of one method.
#[derive(Debug, Serialize)]
struct FusedTimes {
    method: String,
    #[serde(flatten)]
    seconds: Times,
}

/// The figures of one number of tokens.
#[derive(Debug, Serialize)]
struct FusedRow {
    tokens: usize,
    submission: Submission,
    /// Elements of Warplink's result that are wrong.
    wrong: u64,
    /// Warplink first.
    methods: Vec<FusedTimes>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Rows {
    dtype: DType,
    width: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    quantization: Option<&'static str>,
    wire: Wire,
    peers: Vec<String>,
    rows: Vec<FusedRow>,
}

impl Case for Fused {
    const NAME: &'static str = "fused";
    const SIZES: Option<Range> = Some(Range {
        noun: "number of tokens",
        bytes: false,
        from: 1,
        to: [8192, 16],
        step: 4,
    });
    const SUBMISSIONS: bool = true;
    type Figures = Rows;

    fn check(&self, setup: &Setup) -> Result<()> {
        let bytes = self.call(setup.largest()).bytes(setup.world)?;
        let host = 2 * bytes.input as u128;
        // The input, the residual, what is stored of both, and the sum of the pair.
        memory::check(setup.kind, setup.world, host, 5 * bytes.input as u128)
    }

    fn measure(&self, comm: &Communicator, setup: &Setup) -> Result<Rows> {
        let runner = FusedRunner::new(comm, self.call(setup.largest()), &self.peers)?;
        let steps = setup.sizes.len() * setup.submissions.len();
        let progress = Setup::progress(comm, steps, "fused");
        let mut rows = Vec::new();
        for &tokens in &setup.sizes {
            for &submission in &setup.submissions {
                rows.push(runner.row(tokens, submission, setup.samples, self.calls.into())?);
                progress.step(format!("{tokens} tokens"));
            }
        }
        Ok(Rows {
            dtype: self.dtype,
            width: self.width as usize,
            quantization: self.quantization.map(Quantization::name),
            wire: self.wire,
            peers: runner.peers,
            rows,
        })
    }
}

impl Fused {
    fn call(&self, tokens: usize) -> Call {
        Call {
            kind: FusedKind::AllReduce,
            tokens,
            width: self.width as usize,
            dtype: self.dtype,
            epilogue: Epilogue {
                norm: Some(Norm::Rms),
                eps: 1e-6,
                weight_bias: false,
                quantization: self.quantization,
            },
            wire: self.wire,
        }
    }
}

impl FusedRow {
    fn of(&self, method: &str) -> Option<f64> {
        let found = self.methods.iter().find(|it| it.method == method);
        found.map(|it| it.seconds.median)
    }

    /// The time of the faster of the others divided by that of one kernel.
    fn speedup(&self) -> Option<f64> {
        let (own, others) = self.methods.split_first()?;
        let others = others.iter().map(|it| it.seconds.median);
        Some(others.reduce(f64::min)? / own.seconds.median)
    }
}

impl Figures for Rows {
    fn is_right(&self) -> bool {
        self.rows.iter().all(|row| row.wrong == 0)
    }

    fn title(&self, job: &str) -> String {
        let quantization = or_empty(self.quantization, |it| format!(", fp8 {it}"));
        format!(
            "all-reduce, residual and RMSNorm of rows of {} {}{quantization}, {job}{}",
            self.width,
            self.dtype,
            compared(&self.peers)
        )
    }

    fn tables(&self) -> String {
        let time = |method: &'static str| move |row: &FusedRow| or_empty(row.of(method), micros);
        let mut columns = Columns::<FusedRow>::new()
            .number("tokens", |row| row.tokens.to_string())
            .words("submission", |row| name_of(&row.submission))
            .number("us", time("warplink"))
            .number("wrong", |row| row.wrong.to_string());
        for method in ["pair", "nccl"] {
            if self.rows.iter().any(|row| row.of(method).is_some()) {
                columns = columns.number(format!("{method} us"), time(method));
            }
        }
        if !self.peers.is_empty() {
            columns = columns.number("speedup", |row| {
                or_empty(row.speedup(), |times| format!("{times:.2}"))
            });
        }
        columns.table(&self.rows)
    }

    fn drawing(&self) -> Drawing {
        let points = self.rows.iter().flat_map(|row| {
            row.methods.iter().map(|of| Point {
                panel: format!("{}: us", name_of(&row.submission)),
                line: of.method.clone(),
                size: row.tokens.to_string(),
                value: of.seconds.median * 1e6,
                logarithmic: true,
            })
        });
        Drawing::Lines(points.collect())
    }
}
