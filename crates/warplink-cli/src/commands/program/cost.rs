//! `warplink program cost`: estimates the time of a program on a hardware model.

use super::ProgramSource;
use super::show::describe;
use crate::options::{Options, Unused, without_ranks};
use crate::report::table::{Align, Table};
use crate::report::{Object, counted, print_result};
use anyhow::{Context, Result, bail};
use clap::Args;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use warplink::device::{self, DeviceConfig};
use warplink::program::cost::find::{shipped, shipped_names};
use warplink::program::cost::{
    Bound, Cost as Estimate, DeviceDescription, HardwareModel, SimulateOptions, Span, Submission,
    simulate_with,
};
use warplink::program::{OperationKind, RankProgram, unroll};

/// Estimate the time of a program, and its bounds
///
/// Simulates all ranks on a model of the hardware: the one that `warplink tune` measured on this
/// machine, else an included one of the same device, else an estimate from the device's specifications. Prints the
/// time, the use of resources, and the start, end and bound of each operation of the busiest rank.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  \
    warplink program cost examples/programs/ring_pass.wlp --ranks 8 --param n=1048576\n  \
    warplink program cost examples/programs/ring_pass.wlp --param n=1024 --model h200-8 --captured",
    args = without_ranks("Number of ranks [default: 2]", &UNUSED)
)]
pub(super) struct Cost {
    #[command(flatten)]
    source: ProgramSource,
    /// Hardware model: a file, or the name of one that is included [default: this machine's]
    #[arg(long, value_name = "FILE|NAME")]
    model: Option<PathBuf>,
    /// Estimate a run as one graph instead of operation by operation
    #[arg(long)]
    captured: bool,
}

/// Options that it does not use.
pub(super) const UNUSED: [Unused; 1] = [Unused::RanksPerGpu];

impl Cost {
    pub(super) fn run(self, options: &Options) -> Result<ExitCode> {
        let read = self.source.read()?;
        let program = &read.program;
        let world = options.ranks.unwrap_or(2);
        let streams = self.source.streams.into();
        // The simulation assumes that ranks match and nothing deadlocks.
        let report = read.verify(world, streams)?;
        if let (true, Some(diagnostic)) = (self.captured, &report.eager_only) {
            anyhow::bail!("{diagnostic}; leave out --captured");
        }
        let model = self.model(options, world)?;
        let ranks = (0..world)
            .map(|rank| unroll(program, rank, world, streams, &read.parameters))
            .collect::<warplink::Result<Vec<RankProgram>>>()?;
        let simulate = SimulateOptions {
            submission: if self.captured {
                Submission::Captured
            } else {
                Submission::Eager
            },
            timeline: true,
        };
        let cost = simulate_with(&ranks, &model, simulate)?;
        let name = &program.name;
        let chain = Bound::ALL
            .into_iter()
            .fold(Object::default(), |chain, bound| {
                chain.key(bound.name(), cost.critical.of_bound(bound))
            });
        let object = Object::default()
            .key("program", name)
            .key("model", &cost.model)
            .key("ranks", world)
            .key("seconds", cost.seconds)
            .key("bound", cost.bound)
            .object("chain", chain)
            .key("symmetric", cost.symmetric)
            .key("busy", &cost.busy)
            .key("timeline", &cost.timeline);
        print_result(options.json, &object, || {
            let timeline = timeline(&cost, &ranks);
            let ranks = counted(world, "rank");
            format!("{name} on {ranks}: {cost}\n{timeline}")
        })?;
        Ok(ExitCode::SUCCESS)
    }

    fn model(&self, options: &Options, world: usize) -> Result<Arc<HardwareModel>> {
        if let Some(path) = &self.model {
            return named_model(path);
        }
        let device = device::open(&DeviceConfig::new(options.device(), 0))
            .context("open the device whose model is wanted; or give --model")?;
        let (model, _) = HardwareModel::find(&DeviceDescription::of(&*device), world)?;
        Ok(model)
    }
}

/// The hardware model in a file, or the included one of that name.
pub(crate) fn named_model(path: &Path) -> Result<Arc<HardwareModel>> {
    match shipped(&path.to_string_lossy()) {
        Some(model) => Ok(model),
        None if path.exists() => Ok(Arc::new(HardwareModel::read(path)?)),
        None => bail!(
            "unknown hardware model '{}'; expected a file, or one of {}",
            path.display(),
            shipped_names().collect::<Vec<_>>().join(", ")
        ),
    }
}

/// When each operation of the busiest rank started and ended.
fn timeline(cost: &Estimate, ranks: &[RankProgram]) -> Table {
    let mut table = Table::new([
        ("start (us)", Align::Right),
        ("end (us)", Align::Right),
        ("stream", Align::Left),
        ("at", Align::Left),
        ("operation", Align::Left),
        ("bound by", Align::Left),
    ]);
    // One rank: the timelines of all would be too long, and most programs are symmetric.
    let busiest = cost.busiest().map_or(0, |busy| busy.rank);
    for span in cost.timeline.iter().filter(|span| span.rank == busiest) {
        let Some(program) = ranks.get(span.rank) else {
            continue;
        };
        let Some(operation) = program.operations.get(span.operation) else {
            continue;
        };
        let stream = program.streams.get(operation.stream);
        table.row([
            format!("{:.1}", span.start * 1e6),
            format!("{:.1}", span.end * 1e6),
            stream.map(ToString::to_string).unwrap_or_default(),
            operation.site.to_string(),
            describe(program, &operation.kind),
            bounds(&operation.kind, span),
        ]);
    }
    table
}

/// The bound of an operation's time, and for a kernel its share.
fn bounds(kind: &OperationKind, span: &Span) -> String {
    if !matches!(kind, OperationKind::Kernel(_)) {
        return span.bound.to_string();
    }
    let parts = span.parts.parts().into_iter();
    let parts: Vec<String> = parts
        .map(|(bound, seconds)| format!("{bound} {:.1} us", seconds * 1e6))
        .collect();
    parts.join(", ")
}
