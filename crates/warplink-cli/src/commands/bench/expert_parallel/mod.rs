//! `warplink bench expert-parallel`: rows to the ranks of their experts and back, compared with the vendor's library.

mod data;
mod measure;
mod report;

use super::timing::Submission;
use crate::commands::ranks;
use crate::options::{Options, step};
use crate::report::progress::Progress;
use crate::report::{print_json, print_text};
use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};
use measure::Rig;
use report::Report;
use std::process::ExitCode;
use warplink::collective::ExpertOptions;
use warplink::{Communicator, DType, DeviceKind};

/// Measure dispatch and combine of a layer of experts
///
/// Each rank has as many tokens; each token goes to the ranks of its experts, and comes back as a weighted sum. The
/// routing is in device memory alone. Each time is the median of the samples, of the slowest rank.
///
/// The peer is the vendor's library as one would use it: the ranks exchange their counts, the host waits for them, and
/// groups of sends and receives move the rows. It starts from rows that are packed for each rank, and does not sum what
/// comes back, so it does less than Warplink.
///
/// Warplink's result is compared once for each size with the exact sums: 'wrong' says how many elements differ.
/// 'speedup' is the peer's time for dispatch and combine divided by Warplink's: below 1, the peer is faster.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    warplink bench expert-parallel -n 2\n  \
    warplink bench expert-parallel -n 2 --from 128 --to 128 --routing one-rank\n  \
    warplink bench expert-parallel --device host -n 4 --to 64 --elements 256 --json")]
pub(crate) struct ExpertParallel {
    /// Fewest tokens of a rank
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..))]
    from: u32,
    /// Most tokens of a rank [default: 8192 on cuda, 64 on host; --from if that is larger]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    to: Option<u32>,
    /// Factor between numbers of tokens; the largest is measured in any case
    #[arg(long, value_name = "N", default_value = "8", value_parser = step::<u32>)]
    step: u32,
    /// Elements of a row
    #[arg(long, value_name = "N", default_value = "7168", value_parser = clap::value_parser!(u32).range(1..))]
    elements: u32,
    /// Element type: bf16, f16 or f32
    #[arg(long, alias = "type", value_name = "TYPE", default_value = "bf16", value_parser = element_type)]
    dtype: DType,
    /// Experts of all ranks
    #[arg(long, value_name = "N", default_value = "64", value_parser = clap::value_parser!(u32).range(1..))]
    experts: u32,
    /// Experts of a token
    #[arg(long, value_name = "N", default_value = "8", value_parser = clap::value_parser!(u32).range(1..))]
    top_k: u32,
    /// To which experts tokens go
    #[arg(long, value_enum, default_value = "random")]
    routing: Routing,
    /// What it is compared with
    #[arg(long, value_enum, default_value = "nccl")]
    peer: Peer,
    /// Samples per time
    #[arg(long, value_name = "N", default_value = "9", value_parser = clap::value_parser!(u16).range(1..))]
    samples: u16,
    /// Calls in a sample
    #[arg(long, value_name = "N", default_value = "10", value_parser = clap::value_parser!(u16).range(1..))]
    calls: u16,
}

/// To which experts tokens go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
enum Routing {
    /// To different ones at random
    Random,
    /// All to those of rank 0
    OneRank,
}

/// What Warplink is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Peer {
    /// The vendor's library (a substitute on the host device)
    Nccl,
    /// Nothing
    None,
}

/// An element type that rows can have.
fn element_type(text: &str) -> Result<DType, String> {
    match text.parse() {
        Ok(dtype @ (DType::BF16 | DType::F16 | DType::F32)) => Ok(dtype),
        _ => Err("expected bf16, f16 or f32".to_owned()),
    }
}

impl ExpertParallel {
    pub(crate) fn run(self, options: &Options) -> Result<ExitCode> {
        let check = |kind, world| self.check(kind, world);
        ranks::run_checked(options, check, |comm| {
            self.check(comm.device().kind(), comm.world())?;
            let report = self.measure(comm)?;
            if comm.rank() == 0 {
                if options.json {
                    print_json(&report)?
                } else {
                    print_text(&report.text())?
                }
            }
            Ok(if report.is_right() {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            })
        })
    }

    fn check(&self, kind: DeviceKind, world: usize) -> Result<()> {
        let (from, to) = (self.from, self.most(kind));
        ensure!(
            from <= to,
            "--from is {from} and --to is {to}; expected --from to be at most --to"
        );
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
        let layer = self.layer(kind);
        let row = layer.row_bytes() as u128;
        let rows = (layer.rows_per_peer(world) * world) as u128;
        let tokens = u128::from(to) * row;
        // Rows here and on their way back; tokens, the output, and rows that are packed for the peer.
        let device = 2 * rows * row + (2 + u128::from(self.top_k)) * tokens;
        crate::memory::check(kind, world, 2 * tokens, device)
    }

    fn most(&self, kind: DeviceKind) -> u32 {
        self.to.unwrap_or(match kind {
            DeviceKind::Cuda => 8192.max(self.from),
            DeviceKind::Host => 64.max(self.from),
        })
    }

    fn layer(&self, kind: DeviceKind) -> ExpertOptions {
        ExpertOptions {
            experts: self.experts as usize,
            top_k: self.top_k as usize,
            max_tokens: self.most(kind) as usize,
            max_rows: None,
            elements: self.elements as usize,
            dtype: self.dtype,
        }
    }

    fn measure(&self, comm: &Communicator) -> Result<Report> {
        let kind = comm.device().kind();
        let layer = self.layer(kind);
        let most = self.most(kind);
        // The largest as well, whatever the step.
        let sizes: Vec<u32> =
            std::iter::successors(Some(self.from), |size| size.checked_mul(self.step))
                .take_while(|size| *size < most)
                .chain([most])
                .collect();
        let rig = Rig::new(comm, layer, self.routing, self.peer)?;
        let steps = sizes.len() * Submission::BOTH.len();
        let progress = (comm.rank() == 0).then(|| Progress::new(steps as u64, "expert-parallel"));
        let mut rows = Vec::new();
        for tokens in sizes {
            let data = rig.load(tokens as usize)?;
            for submission in Submission::BOTH {
                let (samples, calls) = (self.samples.into(), self.calls.into());
                rows.push(rig.row(&data, submission, samples, calls)?);
                if let Some(progress) = &progress {
                    progress.step(format!("{tokens} tokens"));
                }
            }
        }
        Ok(Report::new(comm, &layer, self.routing, rig.peer(), rows))
    }
}
