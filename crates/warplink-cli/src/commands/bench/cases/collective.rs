//! `warplink bench collective`: collectives, compared with the vendor's library.

pub(super) mod data;
mod figures;
mod runner;
mod template;

use crate::commands::bench::case::{Case, Setup, SizeRange};
use crate::commands::bench::report::{Figures, compared, job, or_empty};
use crate::commands::bench::shape::CallShape;
use crate::memory;
use crate::names::{OneOrBoth, name_of, names_of};
use crate::options::{Options, at_least};
use crate::report::Object;
use crate::report::bytes::ByteSize;
use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use figures::External;
use runner::CollectiveRunner;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::process::ExitCode;
use template::{Template, TemplateKind};
use warplink::collective::Algorithm;
use warplink::device::ReduceOp;
use warplink::file::read_regular;
use warplink::named::alternatives;
use warplink::{Communicator, DeviceKind};

/// The largest file of figures that is read.
const MAX_FIGURES_BYTES: usize = 16 << 20;

/// Measure a collective
///
/// Size and bandwidths are defined as in nccl-tests: the size is that of the larger of input and output, 'GB/s' is the
/// size divided by the time, and 'bus GB/s' multiplies it by the share of the data that must cross each link, so that
/// it can be compared with a link's rate for any number of ranks. Each time is the median of the samples, of the
/// slowest rank; a sample is a number of calls back to back. 'host us' is the time until an eager call returns.
/// Samples of Warplink and its peers alternate.
///
/// Every method runs once on fresh data, and each element of every rank's output is compared with the exact
/// result: 'wrong' is the number of elements that differ. 'speedup' is the time of the fastest peer divided by Warplink's: below 1,
/// that peer is faster.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    warplink bench collective all-reduce -n 2\n  \
    warplink bench collective all-gather -n 2 --from 1MiB --step 2 --place both --submission captured\n  \
    warplink bench collective all-reduce --device host -n 4 --to 64KiB --dtype i32 --op max --json")]
pub(crate) struct CollectiveBench {
    #[command(flatten)]
    template: Template,
    /// Where the output goes: out (separate memory), in (the memory of the input) or both
    #[arg(long, value_name = "PLACE", default_value = "out")]
    place: OneOrBoth<Placement>,
    #[command(flatten)]
    shape: CallShape,
    /// Bind Warplink's calls to their memory beforehand, which allows the copy engine
    #[arg(long)]
    bound: bool,
    /// Method to compare with [default: nccl on cuda, substitute on host]
    #[arg(long, value_enum, value_delimiter = ',')]
    peers: Vec<CollectivePeer>,
    /// Calls in a sample [default: 4 to 50, depending on the size, and on the host device on the processors]
    #[arg(long, value_name = "N", value_parser = at_least::<u16>(1))]
    calls: Option<u16>,
    /// Show figures of another program as well, such as scripts/torch_collectives.py
    #[arg(long = "beside", value_name = "FILE.json")]
    file: Option<PathBuf>,
    #[arg(skip)]
    beside: Option<External>,
}

/// The memory of a collective's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
enum Placement {
    /// Separate memory.
    Out,
    /// The memory of the input, possibly a part of it.
    In,
}

/// A library that Warplink is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum CollectivePeer {
    /// The vendor's library
    Nccl,
    /// The vendor's library, with memory registered in advance
    NcclSymmetric,
    /// A substitute for the vendor's library on the host device, over shared memory
    Substitute,
    /// Nothing
    None,
}

impl CollectivePeer {
    /// Those of a device.
    const fn of(kind: DeviceKind) -> &'static [Self] {
        match kind {
            DeviceKind::Cuda => &[Self::Nccl, Self::NcclSymmetric, Self::None],
            DeviceKind::Host => &[Self::Substitute, Self::None],
        }
    }
}

impl Case for CollectiveBench {
    const NAME: &'static str = "collective";
    const SIZES: Option<SizeRange> = Some(SizeRange::of_bytes(1 << 10, [1 << 30, 1 << 20], 4));
    const SUBMISSIONS: bool = true;

    fn prepare(&mut self, _: &Options) -> Result<Option<ExitCode>> {
        if let Some(path) = &self.file {
            // Every rank reads it.
            let text = read_regular(path, MAX_FIGURES_BYTES)?;
            let beside = serde_json::from_str(&text);
            let beside = beside.with_context(|| format!("read the figures in {}", path.display()));
            self.beside = Some(beside?);
        }
        Ok(None)
    }

    fn check(&self, setup: &Setup) -> Result<()> {
        let (kind, world) = (setup.kind, setup.world);
        let Template {
            kind: collective,
            dtype,
            op,
            root,
        } = self.template;
        ensure!(
            root < world,
            "--root is {root}; expected a rank below {world}"
        );
        ensure!(
            op == ReduceOp::Sum || collective.reduces(),
            "--op is {op}; expected none, since {} reduces nothing",
            template::name(collective)
        );
        let (least, element) = (self.template.unit(world), dtype.size());
        let each = match least / element {
            1 => format!("which is one element of {dtype}"),
            parts => format!("which is {parts} elements of {dtype}, one for each rank"),
        };
        setup.check_least(least, &each)?;
        ensure!(
            !self.place.0.contains(&Placement::In) || collective.has_in_place(),
            "NCCL has no in-place {} for comparison; help: use --place out",
            template::name(collective)
        );
        if let Some(algorithm) = self.shape.algorithm {
            let TemplateKind::Collective(kind) = collective else {
                bail!("--algorithm is {algorithm}; expected none, since messages have only one");
            };
            let fitting = Algorithm::ALL.into_iter();
            let fitting: Vec<Algorithm> = fitting.filter(|other| other.supports(kind)).collect();
            ensure!(
                algorithm.supports(kind),
                "--algorithm is {algorithm}, which does not implement {}; expected {}",
                template::name(collective),
                alternatives(&fitting)
            );
            ensure!(
                self.bound || algorithm != Algorithm::CopyEngine,
                "--algorithm is {algorithm}, which needs bound calls; help: pass --bound"
            );
        }
        ensure!(
            !self.bound || matches!(collective, TemplateKind::Collective(_)),
            "--bound is for collectives; expected none, since messages are not bound"
        );
        if let Some(factor) = op.factor() {
            // Such products of small integers are exact in every type.
            let size = factor.value().abs();
            ensure!(
                (0.0625..=16.0).contains(&size) && size.log2().fract() == 0.0,
                "--op is {op}; expected a power of two from 0.0625 to 16 as its factor, so that results are exact"
            );
            ensure!(
                dtype.is_float(),
                "--op is {op} and --dtype is {dtype}; expected a floating-point type"
            );
        }
        let peers = CollectivePeer::of(kind);
        if let Some(other) = self.peers.iter().find(|peer| !peers.contains(peer)) {
            bail!(
                "--peers has {}; expected {} on {kind}",
                name_of(other),
                names_of(peers)
            );
        }
        if let Some(beside) = &self.beside {
            beside.check(self.template, world)?;
        }
        let largest = setup.largest() as u128;
        memory::check(kind, world, 3 * data::PIECE as u128, 2 * largest)
    }

    fn measure(&self, comm: &Communicator, setup: &Setup) -> Result<Figures> {
        let template = self.template;
        let options = self.shape.options();
        let peers = match &self.peers[..] {
            // The first one is the default that the help documents.
            [] => CollectivePeer::of(setup.kind).get(..1).unwrap_or_default(),
            peers => peers,
        };
        let runner = CollectiveRunner::new(
            comm,
            template,
            setup.largest(),
            (&options, self.bound),
            peers,
        )?;
        let places = &self.place.0;
        let steps = setup.sizes.len() * places.len() * setup.submissions.len();
        let progress = Setup::progress(comm, steps, "collective");
        let mut rows = Vec::new();
        for &bytes in &setup.sizes {
            let calls = self.calls.map(usize::from);
            let calls = calls.unwrap_or_else(|| default_calls(comm, bytes));
            for &place in places {
                for &submission in &setup.submissions {
                    let samples = (setup.samples, calls);
                    let beside = self.beside.as_ref();
                    rows.push(runner.row(bytes, place, submission, samples, beside)?);
                    progress.step(ByteSize(bytes as u64).to_string());
                }
            }
        }
        let (collective, dtype) = (template::name(template.kind), template.dtype.to_string());
        let op = template.kind.reduces().then(|| template.op.to_string());
        let beside = self.beside.iter().flat_map(|beside| &beside.peers);
        let peers: Vec<String> = runner.peers.iter().chain(beside).cloned().collect();
        let title = format!(
            "{collective} of {dtype}{}{}, {}{}",
            or_empty(op.as_ref(), |op| format!(", {op}")),
            if self.bound { ", bound" } else { "" },
            job(comm),
            compared(&peers)
        );
        let object = Object::default()
            .key("collective", collective)
            .key("dtype", dtype)
            .optional("op", op)
            .key("bound", self.bound)
            .key("peers", peers);
        Ok(Figures::of_rows(title, object, rows))
    }
}

/// Calls in a sample: enough that its start and end do not count. Ranks that share a processor take
/// longer for each call, so they make fewer.
fn default_calls(comm: &Communicator, bytes: usize) -> usize {
    let calls = match bytes {
        ..=0x10_0000 => 50,
        0x10_0001..=0x100_0000 => 20,
        0x100_0001..=0x1000_0000 => 8,
        _ => 4,
    };
    let device = comm.device().properties();
    if !device.shared {
        return calls;
    }
    (calls * device.multiprocessors / comm.world()).clamp(4, calls)
}
