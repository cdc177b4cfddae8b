//! `warplink bench expert-parallel`: rows to the ranks of their experts and back, compared with the vendor's library.

mod data;
mod runner;

use crate::commands::bench::case::{Case, Setup, SizeRange};
use crate::commands::bench::clock::Times;
use crate::commands::bench::report::{Figures, compared, job, or_empty};
use crate::commands::bench::shape::LaneShape;
use crate::memory;
use crate::names::{OneOf, name_of};
use crate::options::at_least;
use crate::report::Object;
use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};
use runner::ExpertRunner;
use serde::Serialize;
use warplink::collective::{ExpertOptions, Quantization, RowLayout};
use warplink::{Communicator, DType};

/// Measure dispatch and combine of a mixture-of-experts layer
///
/// Each rank has the same number of tokens; each token is sent to the ranks of its experts, and a weighted sum of the
/// results returns. The host does not know the routing, which is in device memory. Each time is the median of the
/// samples, of the slowest rank.
///
/// The peer is the vendor's library, used in the usual way: the ranks exchange their counts, the host waits for them,
/// and groups of sends and receives move the rows. It cannot be captured. It starts from rows that are packed for each
/// rank, and does not add up the results, so it does less work than Warplink. With '--layout once_per_rank' it, too, sends
/// one row of a token to a rank.
///
/// Warplink's result is compared once for each size with the exact sums: 'wrong' is the number of elements that differ; with
/// '--quantization', by more than rows are rounded. The peer sends rows as they are.
/// 'speedup' is the peer's time for dispatch and combine divided by Warplink's: below 1, the peer is faster.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    warplink bench expert-parallel -n 2\n  \
    warplink bench expert-parallel -n 2 --from 128 --to 128 --routing one-rank\n  \
    warplink bench expert-parallel -n 2 --layout once_per_rank --quantization per_block\n  \
    warplink bench expert-parallel --device host -n 4 --to 64 --elements 256 --json")]
pub(crate) struct ExpertParallel {
    /// Elements of a row
    #[arg(long, value_name = "N", default_value = "7168", value_parser = at_least::<u32>(1))]
    elements: u32,
    /// Element type
    #[arg(long, value_name = "TYPE", default_value = "bf16", value_parser = OneOf(&DType::MATMUL))]
    dtype: DType,
    /// Number of experts on all ranks together
    #[arg(long, value_name = "N", default_value = "64", value_parser = at_least::<u32>(1))]
    experts: u32,
    /// Experts for each token
    #[arg(long, value_name = "N", default_value = "8", value_parser = at_least::<u32>(1))]
    top_k: u32,
    /// Distribution of tokens over experts
    #[arg(long, value_enum, default_value = "random")]
    routing: Routing,
    /// Order of the received rows
    #[arg(long, value_name = "LAYOUT", default_value = "by_source", value_parser = OneOf(&RowLayout::ALL))]
    layout: RowLayout,
    /// Quantisation of dispatched rows [default: none]
    #[arg(long, value_name = "KIND", value_parser = OneOf(&ExpertOptions::QUANTIZATIONS))]
    quantization: Option<Quantization>,
    /// Method to compare with
    #[arg(long, value_enum, default_value = "nccl")]
    peer: ExpertPeer,
    /// Calls in a sample
    #[arg(long, value_name = "N", default_value = "10", value_parser = at_least::<u16>(1))]
    calls: u16,
    #[command(flatten)]
    shape: LaneShape,
}

/// Distribution of tokens over experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Routing {
    /// Random distinct experts
    Random,
    /// Experts of rank 0 only
    OneRank,
}

/// A library that Warplink is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ExpertPeer {
    /// The vendor's library (a substitute on the host device)
    Nccl,
    /// Nothing
    None,
}

/// The times of one method.
#[derive(Debug, Serialize)]
struct ExpertTimes {
    method: &'static str,
    /// Of one call.
    dispatch: Times,
    combine: Times,
}

impl Case for ExpertParallel {
    const NAME: &'static str = "expert-parallel";
    const SIZES: Option<SizeRange> = Some(SizeRange {
        noun: "number of tokens of a rank",
        bytes: false,
        from: 1,
        to: [8192, 64],
        step: 8,
    });
    const SUBMISSIONS: bool = true;

    fn check(&self, setup: &Setup) -> Result<()> {
        let world = setup.world;
        let of_rank = self.experts as usize / world;
        ensure!(
            (self.experts as usize).is_multiple_of(world),
            "--experts is {}; expected a multiple of the {world} ranks",
            self.experts
        );
        let reached = match self.routing {
            Routing::Random => self.experts as usize,
            Routing::OneRank => of_rank,
        };
        ensure!(
            self.top_k as usize <= reached,
            "--top-k is {}; expected at most the {reached} experts that tokens go to",
            self.top_k
        );
        let layer = self.layer(setup);
        let row = layer.row_bytes() as u128;
        let rows = (layer.rows_per_peer() * world) as u128;
        let tokens = setup.largest() as u128 * row;
        // Received rows in both directions; tokens, the output, and the peer's packed rows.
        let quantized = u128::from(self.quantization.is_some());
        let device = (2 + quantized) * rows * row + (2 + u128::from(self.top_k)) * tokens;
        memory::check(setup.kind, world, 2 * tokens, device)
    }

    fn measure(&self, comm: &Communicator, setup: &Setup) -> Result<Figures> {
        let layer = self.layer(setup);
        let runner = ExpertRunner::new(
            comm,
            layer,
            &self.shape.options(),
            (self.routing, self.peer),
        )?;
        let steps = setup.sizes.len() * setup.submissions.len();
        let progress = Setup::progress(comm, steps, "expert-parallel");
        let mut rows = Vec::new();
        for &tokens in &setup.sizes {
            let data = runner.load(tokens)?;
            for &submission in &setup.submissions {
                rows.push(runner.row(&data, submission, setup.samples, self.calls.into())?);
                progress.step(format!("{tokens} tokens"));
            }
        }
        let ExpertOptions {
            dtype,
            elements,
            experts,
            top_k,
            ..
        } = layer;
        let quantization = self.quantization.map(Quantization::name);
        let peer = runner.peer();
        let title = format!(
            "rows of {elements} {dtype} {}{}, top {top_k} of {experts} experts, {}{}",
            layer.layout.name().replace('_', " "),
            or_empty(quantization, |kind| format!(", dispatched as fp8 {kind}")),
            job(comm),
            compared(peer.as_slice())
        );
        let object = Object::default()
            .key("dtype", dtype)
            .key("elements", elements)
            .key("experts", experts)
            .key("top_k", top_k)
            .key("layout", layer.layout)
            .key("routing", name_of(&self.routing))
            .optional("quantization", quantization)
            .optional("peer", peer);
        Ok(Figures::of_rows(title, object, rows))
    }
}

impl ExpertParallel {
    fn layer(&self, setup: &Setup) -> ExpertOptions {
        ExpertOptions {
            experts: self.experts as usize,
            top_k: self.top_k as usize,
            max_tokens: setup.largest(),
            max_rows: None,
            elements: self.elements as usize,
            dtype: self.dtype,
            layout: self.layout,
            quantization: self.quantization,
            ..ExpertOptions::default()
        }
    }
}
