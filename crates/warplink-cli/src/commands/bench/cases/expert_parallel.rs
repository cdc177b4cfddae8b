//! `warplink bench expert-parallel`: rows to the ranks of their experts and back, compared with the vendor's library.

mod data;
mod runner;

use crate::commands::bench::case::{Case, Range, Setup};
use crate::commands::bench::clock::{Submission, Times};
use crate::commands::bench::plot::{Drawing, Point};
use crate::commands::bench::report::{Columns, Figures, compared, micros, or_empty};
use crate::memory;
use crate::names::{OneOf, as_name, name_of};
use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};
use runner::ExpertRunner;
use serde::Serialize;
use warplink::collective::ExpertOptions;
use warplink::{Communicator, DType};

/// Measure dispatch and combine of a layer of experts
///
/// Each rank has the same number of tokens; each token goes to the ranks of its experts, and comes back as a weighted sum. The
/// routing is in device memory alone. Each time is the median of the samples, of the slowest rank.
///
/// The peer is the vendor's library as one would use it: the ranks exchange their counts, the host waits for them, and
/// groups of sends and receives move the rows. It starts from rows that are packed for each rank, and does not sum what
/// comes back, so it does less than Warplink.
///
/// Warplink's result is compared once for each size with the exact sums: 'wrong' is the number of elements that differ.
/// 'speedup' is the peer's time for dispatch and combine divided by Warplink's: below 1, the peer is faster.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    warplink bench expert-parallel -n 2\n  \
    warplink bench expert-parallel -n 2 --from 128 --to 128 --routing one-rank\n  \
    warplink bench expert-parallel --device host -n 4 --to 64 --elements 256 --json")]
pub(crate) struct ExpertParallel {
    /// Elements of a row
    #[arg(long, value_name = "N", default_value = "7168", value_parser = clap::value_parser!(u32).range(1..))]
    elements: u32,
    /// Element type: bf16, f16 or f32
    #[arg(long, alias = "type", value_name = "TYPE", default_value = "bf16", value_parser = OneOf(&DType::MATMUL))]
    dtype: DType,
    /// Experts of all ranks
    #[arg(long, value_name = "N", default_value = "64", value_parser = clap::value_parser!(u32).range(1..))]
    experts: u32,
    /// Experts of a token
    #[arg(long, value_name = "N", default_value = "8", value_parser = clap::value_parser!(u32).range(1..))]
    top_k: u32,
    /// The experts that tokens go to
    #[arg(long, value_enum, default_value = "random")]
    routing: Routing,
    /// Method to compare with
    #[arg(long, value_enum, default_value = "nccl")]
    peer: ExpertPeer,
    /// Calls in a sample
    #[arg(long, value_name = "N", default_value = "10", value_parser = clap::value_parser!(u16).range(1..))]
    calls: u16,
}

/// The experts that tokens go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Routing {
    /// To different ones at random
    Random,
    /// All to those of rank 0
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

impl ExpertTimes {
    fn both(&self) -> f64 {
        self.dispatch.median + self.combine.median
    }
}

/// The figures of one number of tokens.
#[derive(Debug, Serialize)]
struct ExpertRow {
    /// Of each rank.
    tokens: usize,
    /// That the reporting rank receives.
    rows: usize,
    submission: Submission,
    /// Elements of Warplink's result that are wrong.
    wrong: u64,
    /// Warplink first.
    methods: Vec<ExpertTimes>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Experts {
    dtype: DType,
    elements: usize,
    experts: usize,
    top_k: usize,
    #[serde(serialize_with = "as_name")]
    routing: Routing,
    #[serde(skip_serializing_if = "Option::is_none")]
    peer: Option<String>,
    rows: Vec<ExpertRow>,
}

impl Case for ExpertParallel {
    const NAME: &'static str = "expert-parallel";
    const SIZES: Option<Range> = Some(Range {
        noun: "number of tokens of a rank",
        bytes: false,
        from: 1,
        to: [8192, 64],
        step: 8,
    });
    const SUBMISSIONS: bool = true;
    type Figures = Experts;

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
        let rows = (layer.rows_per_peer(world) * world) as u128;
        let tokens = setup.largest() as u128 * row;
        // Rows here and on their way back; tokens, the output, and rows that are packed for the peer.
        let device = 2 * rows * row + (2 + u128::from(self.top_k)) * tokens;
        memory::check(setup.kind, world, 2 * tokens, device)
    }

    fn measure(&self, comm: &Communicator, setup: &Setup) -> Result<Experts> {
        let layer = self.layer(setup);
        let runner = ExpertRunner::new(comm, layer, self.routing, self.peer)?;
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
        Ok(Experts {
            dtype: layer.dtype,
            elements: layer.elements,
            experts: layer.experts,
            top_k: layer.top_k,
            routing: self.routing,
            peer: runner.peer().map(str::to_owned),
            rows,
        })
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
        }
    }
}

impl ExpertRow {
    /// The peer's time divided by Warplink's.
    fn speedup(&self) -> Option<f64> {
        match &self.methods[..] {
            [own, peer, ..] => Some(peer.both() / own.both()),
            _ => None,
        }
    }
}

impl Figures for Experts {
    fn is_right(&self) -> bool {
        self.rows.iter().all(|row| row.wrong == 0)
    }

    fn title(&self, job: &str) -> String {
        format!(
            "rows of {} {}, top {} of {} experts, {job}{}",
            self.elements,
            self.dtype,
            self.top_k,
            self.experts,
            compared(self.peer.as_slice())
        )
    }

    fn tables(&self) -> String {
        let time = |method: usize, time: fn(&ExpertTimes) -> Times| {
            move |row: &ExpertRow| or_empty(row.methods.get(method), |of| micros(time(of).median))
        };
        let mut columns = Columns::<ExpertRow>::new()
            .number("tokens", |row| row.tokens.to_string())
            .number("rows", |row| row.rows.to_string())
            .words("submission", |row| name_of(&row.submission))
            .number("dispatch us", time(0, |of| of.dispatch))
            .number("combine us", time(0, |of| of.combine))
            .number("wrong", |row| row.wrong.to_string());
        if self.peer.is_some() {
            columns = columns
                .number("nccl dispatch us", time(1, |of| of.dispatch))
                .number("nccl combine us", time(1, |of| of.combine))
                .number("speedup", |row| {
                    or_empty(row.speedup(), |times| format!("{times:.2}"))
                });
        }
        columns.table(&self.rows)
    }

    fn drawing(&self) -> Drawing {
        let points = self.rows.iter().flat_map(|row| {
            row.methods.iter().map(|of| Point {
                panel: format!("{}: dispatch and combine in us", name_of(&row.submission)),
                line: of.method.to_owned(),
                size: row.tokens.to_string(),
                value: of.both() * 1e6,
                logarithmic: true,
            })
        });
        Drawing::Lines(points.collect())
    }
}
