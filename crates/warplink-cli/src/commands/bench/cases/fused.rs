//! `warplink bench fused`: all-reduce with residual, RMSNorm and quantisation, compared with the two steps.

mod runner;

use crate::commands::bench::case::{Case, Setup, SizeRange};
use crate::commands::bench::report::{Figures, compared, job, or_empty};
use crate::commands::bench::shape::CallShape;
use crate::memory;
use crate::names::OneOf;
use crate::options::at_least;
use crate::report::Object;
use anyhow::Result;
use clap::{Args, ValueEnum};
use runner::FusedRunner;
use warplink::collective::{Epilogue, Fused as Call, FusedKind, Norm, Quantization, Wire};
use warplink::{Communicator, DType};

/// Measure an all-reduce with residual and RMSNorm
///
/// Every rank has one row of --width elements for each token. One kernel adds the rows of all ranks and the residual,
/// stores the sum, and stores its RMSNorm, in the input's type or quantised. Each time is the median of the samples,
/// of the slowest rank.
///
/// The peers take two steps: 'pair' is Warplink's all-reduce followed by one kernel for the rest, 'nccl' the vendor's
/// library followed by the same kernel.
///
/// Warplink's result is compared once for each size with the exact sums, and the norm in double precision: 'wrong' is the
/// number of elements that differ by more than rounding. 'speedup' is the time of the faster peer divided by that of
/// the fused kernel: below 1, the peer is faster.
///
/// Algorithms: with one-shot, every rank gets all rows as packets and computes them all; with chunks, it gets them through
/// scratch, a few at a time. With direct, one rank computes each row and stores the results on all; with two-shot, it
/// stores only the sum, from which every rank computes the rest.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    warplink bench fused -n 2\n  \
    warplink bench fused -n 2 --from 128 --to 128 --width 7168 --quantization per_token\n  \
    warplink bench fused --device host -n 2 --to 8 --width 256 --json")]
pub(crate) struct Fused {
    /// Elements of a row
    #[arg(long, value_name = "N", default_value = "8192", value_parser = at_least::<u32>(1))]
    width: u32,
    /// Element type
    #[arg(long, value_name = "TYPE", default_value = "bf16", value_parser = OneOf(&DType::MATMUL))]
    dtype: DType,
    /// Quantisation of the normalised rows [default: none]
    #[arg(long, value_name = "KIND", value_parser = OneOf(&Quantization::ALL))]
    quantization: Option<Quantization>,
    /// Format of Warplink's transfers; 'wrong' allows for the rounding of the format
    #[arg(long, value_name = "FORMAT", default_value = "exact", value_parser = OneOf(&Wire::ALL))]
    wire: Wire,
    /// Implementations to compare with
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["pair", "nccl"])]
    peers: Vec<FusedPeer>,
    #[command(flatten)]
    shape: CallShape,
    /// Calls in a sample
    #[arg(long, value_name = "N", default_value = "20", value_parser = at_least::<u16>(1))]
    calls: u16,
}

/// Implementation of two steps for comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum FusedPeer {
    /// Warplink's all-reduce, then a kernel
    Pair,
    /// The vendor's library (a substitute on the host device), then a kernel
    Nccl,
    /// Nothing
    None,
}

impl Case for Fused {
    const NAME: &'static str = "fused";
    const SIZES: Option<SizeRange> = Some(SizeRange {
        noun: "number of tokens",
        bytes: false,
        from: 1,
        to: [8192, 16],
        step: 4,
    });
    const SUBMISSIONS: bool = true;

    fn check(&self, setup: &Setup) -> Result<()> {
        let bytes = self.call(setup.largest()).bytes(setup.world)?;
        let host = 2 * bytes.input as u128;
        // The input, the residual, both outputs, and the sum of the pair.
        memory::check(setup.kind, setup.world, host, 5 * bytes.input as u128)
    }

    fn measure(&self, comm: &Communicator, setup: &Setup) -> Result<Figures> {
        let options = self.shape.options();
        let runner = FusedRunner::new(comm, self.call(setup.largest()), &options, &self.peers)?;
        let steps = setup.sizes.len() * setup.submissions.len();
        let progress = Setup::progress(comm, steps, "fused");
        let mut rows = Vec::new();
        for &tokens in &setup.sizes {
            for &submission in &setup.submissions {
                rows.push(runner.row(tokens, submission, setup.samples, self.calls.into())?);
                progress.step(format!("{tokens} tokens"));
            }
        }
        let (dtype, width) = (self.dtype, self.width);
        let quantization = self.quantization.map(Quantization::name);
        let title = format!(
            "all-reduce, residual and RMSNorm of rows of {width} {dtype}{}, {}{}",
            or_empty(quantization, |kind| format!(", quantised {kind}")),
            job(comm),
            compared(&runner.peers)
        );
        let object = Object::default()
            .key("dtype", dtype)
            .key("width", width)
            .optional("quantization", quantization)
            .key("wire", self.wire)
            .key("peers", &runner.peers);
        Ok(Figures::of_rows(title, object, rows))
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
