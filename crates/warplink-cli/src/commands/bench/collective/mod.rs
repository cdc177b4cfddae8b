//! `warplink bench collective`: collectives, compared with the vendor's library.

pub(super) mod data;
mod measure;
mod plot;
mod report;
mod what;

use super::timing::Submission;
use crate::commands::ranks;
use crate::options::{Options, step};
use crate::report::bytes::Bytes;
use crate::report::progress::Progress;
use crate::report::{check_output, print_json, print_text, write_file};
use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use measure::Rig;
use report::{Beside, Report, Row};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use warplink::collective::{Algorithm, CollectiveOptions};
use warplink::device::ReduceOp;
use warplink::{Communicator, DType, DeviceKind};
use what::{Kind, What};

/// Measure a collective
///
/// The size is that of nccl-tests: of the larger of input and output. So are the two bandwidths: 'GB/s' is the
/// size divided by the time, and 'bus GB/s' corrects it for what has to pass each link in any case, so that it
/// can be compared with a link's rate for every number of ranks. Each time is the median of the samples, of the
/// slowest rank; a sample is a number of calls back to back. 'host us' is how long a call takes to return, where
/// calls are given one by one. Warplink and its peers take turns.
///
/// Every way is run once on fresh data, of which each element of every rank's output is compared with the exact
/// result: 'wrong' says how many differ. 'speedup' is the time of the fastest peer divided by Warplink's: below 1,
/// that peer is faster.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    warplink bench collective all-reduce -n 2\n  \
    warplink bench collective all-gather -n 2 --from 1MiB --step 2 --place both --submission captured\n  \
    warplink bench collective all-reduce --device host -n 4 --to 64KiB --dtype i32 --op max --json")]
pub(crate) struct Collective {
    /// Which collective: all-reduce, all-gather, reduce-scatter, all-to-all, broadcast, reduce, gather or scatter;
    /// or send-receive: each rank sends to the next one and receives from the one before
    #[arg(value_parser = what::kind)]
    collective: Kind,
    /// Smallest size
    #[arg(long, value_name = "BYTES", default_value = "1KiB")]
    from: Bytes,
    /// Largest size [default: 1GiB on cuda, 1MiB on host; --from if that is larger]
    #[arg(long, value_name = "BYTES")]
    to: Option<Bytes>,
    /// Factor between sizes
    #[arg(long, value_name = "N", default_value = "4", value_parser = step::<u64>)]
    step: u64,
    /// Element type
    #[arg(long, value_name = "TYPE", default_value = "bf16")]
    dtype: DType,
    /// How elements are reduced: sum, max, min, product, average or scaled_sum(FACTOR)
    #[arg(long, value_name = "OPERATOR", default_value = "sum")]
    op: ReduceOp,
    /// The root, for collectives that have one
    #[arg(long, value_name = "RANK", default_value = "0")]
    root: usize,
    /// Whether input and output are the same memory
    #[arg(long, value_enum, default_value = "out")]
    place: Places,
    /// How calls are given to the device
    #[arg(long, value_enum, default_value = "both")]
    submission: Submissions,
    /// The only algorithm that is allowed [default: chosen by size]
    #[arg(long, value_name = "NAME")]
    algorithm: Option<Algorithm>,
    /// The most multiprocessors that a call of Warplink's takes
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(2..))]
    multiprocessors: Option<u16>,
    /// How many blocks move data in a call of Warplink's [default: chosen by size]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=128))]
    lanes: Option<u16>,
    /// How many threads each block has [default: chosen by size]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Bind Warplink's calls to their memory before they are measured, so that the copy engine may do them
    #[arg(long)]
    bound: bool,
    /// What it is compared with [default: nccl on cuda, substitute on host]
    #[arg(long, value_enum, value_delimiter = ',')]
    peers: Vec<Peer>,
    /// Samples per time
    #[arg(long, value_name = "N", default_value = "9", value_parser = clap::value_parser!(u16).range(1..))]
    samples: u16,
    /// Calls in a sample [default: 4 to 50, by size, and on the host device by the processors of a rank]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    calls: Option<u16>,
    /// Show figures of another program as well, such as scripts/torch_collectives.py
    #[arg(long, value_name = "FILE.json")]
    beside: Option<PathBuf>,
    /// Draw times and bandwidths as SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

/// Where a collective's output goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
enum Place {
    /// To memory of its own.
    Out,
    /// To the memory of the input, of which it may be a part.
    In,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Places {
    /// Out of place
    Out,
    /// In place
    In,
    /// Both
    Both,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Submissions {
    /// Call by call
    Eager,
    /// As a graph
    Captured,
    /// Both
    Both,
}

/// What Warplink is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Peer {
    /// The vendor's library
    Nccl,
    /// The vendor's library, with memory registered in advance
    NcclSymmetric,
    /// What stands for a vendor's library on the host device, over shared memory
    Substitute,
    /// Nothing
    None,
}

impl Peer {
    const fn name(self) -> &'static str {
        match self {
            Self::Nccl => "nccl",
            Self::NcclSymmetric => "nccl-symmetric",
            Self::Substitute => "substitute",
            Self::None => "none",
        }
    }

    /// Those of a device.
    const fn of(kind: DeviceKind) -> &'static [Self] {
        match kind {
            DeviceKind::Cuda => &[Self::Nccl, Self::NcclSymmetric, Self::None],
            DeviceKind::Host => &[Self::Substitute, Self::None],
        }
    }
}

impl Place {
    const fn name(self) -> &'static str {
        match self {
            Self::Out => "out",
            Self::In => "in",
        }
    }
}

impl Places {
    fn list(self) -> &'static [Place] {
        match self {
            Self::Out => &[Place::Out],
            Self::In => &[Place::In],
            Self::Both => &[Place::Out, Place::In],
        }
    }
}

impl Submissions {
    fn list(self) -> &'static [Submission] {
        match self {
            Self::Eager => &[Submission::Eager],
            Self::Captured => &[Submission::Captured],
            Self::Both => &Submission::BOTH,
        }
    }
}

impl Collective {
    pub(crate) fn run(self, options: &Options) -> Result<ExitCode> {
        // Before any rank starts, so that no wrong path costs the measurement.
        if let Some(path) = &self.plot {
            check_output(path)?;
        }
        let beside = self.beside.as_deref().map(read).transpose()?;
        let check = |kind, world| self.check(kind, world, beside.as_ref());
        ranks::run_checked(options, check, |comm| {
            self.check(comm.device().kind(), comm.world(), beside.as_ref())?;
            let mut report = self.measure(comm)?;
            if comm.rank() == 0 {
                if let Some(beside) = &beside {
                    report.add(beside);
                }
                if options.json {
                    print_json(&report)?
                } else {
                    print_text(&report.text())?
                }
                if let Some(path) = &self.plot {
                    let drawing = plot::draw(&report).context("draw the figures")?;
                    write_file(path, drawing.as_bytes())?;
                }
            }
            Ok(if report.is_right() {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            })
        })
    }

    fn what(&self) -> What {
        What {
            kind: self.collective,
            dtype: self.dtype,
            op: self.op,
            root: self.root,
        }
    }

    /// Fails where the arguments do not go together.
    fn check(&self, kind: DeviceKind, world: usize, beside: Option<&Beside>) -> Result<()> {
        ensure!(
            self.root < world,
            "--root is {}; expected a rank below {world}",
            self.root
        );
        let (from, to) = (self.from, Bytes(self.largest(kind)));
        ensure!(
            from <= to,
            "--from is {from} and --to is {to}; expected --from to be at most --to"
        );
        let (least, element) = (self.what().unit(world), self.dtype.size());
        let dtype = self.dtype;
        let each = match least / element {
            1 => format!("which is one element of {dtype}"),
            parts => format!("which is {parts} elements of {dtype}, one for each rank"),
        };
        ensure!(
            from.0 >= least as u64,
            "--from is {from}; expected at least {least} bytes, {each}"
        );
        ensure!(
            !self.places().contains(&Place::In) || self.collective.has_in_place(),
            "{} in place is not compared, since NCCL has none; help: use --place out",
            what::name(self.collective)
        );
        if let Some(algorithm) = self.algorithm {
            let Kind::Collective(kind) = self.collective else {
                bail!("--algorithm is {algorithm}; expected none, since messages have but one");
            };
            let fitting = Algorithm::ALL.into_iter();
            let fitting: Vec<&str> = fitting
                .filter(|other| other.supports(kind))
                .map(Algorithm::name)
                .collect();
            ensure!(
                algorithm.supports(kind),
                "--algorithm is {algorithm}, which has no {}; expected {}",
                what::name(self.collective),
                fitting.join(", ")
            );
            ensure!(
                self.bound || algorithm != Algorithm::CopyEngine,
                "--algorithm is {algorithm}, which does calls that are bound; help: pass --bound"
            );
        }
        ensure!(
            !self.bound || matches!(self.collective, Kind::Collective(_)),
            "--bound is for collectives; expected none, since messages are not bound"
        );
        if let Some(factor) = self.op.factor() {
            // Such products of small integers are exact in every type.
            let size = factor.value().abs();
            ensure!(
                (0.0625..=16.0).contains(&size) && size.log2().fract() == 0.0,
                "--op is {}; expected a power of two from 0.0625 to 16 as its factor, so that results are exact",
                self.op
            );
            ensure!(
                self.dtype.is_float(),
                "--op is {} and --dtype is {}; expected floats",
                self.op,
                self.dtype
            );
        }
        let peers = Peer::of(kind);
        if let Some(other) = self.peers.iter().find(|peer| !peers.contains(peer)) {
            let names: Vec<&str> = peers.iter().map(|peer| peer.name()).collect();
            bail!(
                "--peers has {}; expected {} on {kind}",
                other.name(),
                names.join(" or ")
            );
        }
        if let Some(beside) = beside {
            beside.check(self.what(), world)?;
        }
        crate::memory::check(kind, world, u128::from(to.0), 2 * u128::from(to.0))
    }

    fn places(&self) -> &'static [Place] {
        self.place.list()
    }

    fn peers(&self, kind: DeviceKind) -> Vec<Peer> {
        match (self.peers.as_slice(), Peer::of(kind)) {
            ([], peers) => peers.iter().copied().take(1).collect(),
            (peers, _) => peers.to_vec(),
        }
    }

    fn largest(&self, kind: DeviceKind) -> u64 {
        self.to.map_or(
            match kind {
                DeviceKind::Cuda => self.from.0.max(1 << 30),
                DeviceKind::Host => self.from.0.max(1 << 20),
            },
            |to| to.0,
        )
    }

    fn measure(&self, comm: &Communicator) -> Result<Report> {
        let what = self.what();
        let sizes: Vec<usize> =
            std::iter::successors(Some(self.from.0), |size| size.checked_mul(self.step))
                .take_while(|size| *size <= self.largest(comm.device().kind()))
                .map(|size| usize::try_from(size).context("sizes fit the memory"))
                .collect::<Result<_>>()?;
        let largest = sizes.last().copied().unwrap_or(0);
        let options = CollectiveOptions {
            algorithm: self.algorithm,
            multiprocessors: self.multiprocessors.map(usize::from),
            lanes: self.lanes.map(usize::from),
            threads: self.threads.map(usize::from),
            ..CollectiveOptions::default()
        };
        let peers = self.peers(comm.device().kind());
        let rig = Rig::new(comm, what, largest, (&options, self.bound), &peers)?;
        let steps = sizes.len() * self.places().len() * self.submission.list().len();
        let progress = (comm.rank() == 0).then(|| Progress::new(steps as u64, "collective"));
        let mut rows: Vec<Row> = Vec::new();
        for bytes in sizes {
            for &place in self.places() {
                for &submission in self.submission.list() {
                    let calls = self
                        .calls
                        .map_or_else(|| default_calls(comm, bytes), usize::from);
                    rows.push(rig.row(bytes, place, submission, self.samples.into(), calls)?);
                    if let Some(progress) = &progress {
                        progress.step(format!("{}", Bytes(bytes as u64)));
                    }
                }
            }
        }
        Ok(Report::new(comm, what, self.bound, rig.peers, rows))
    }
}

/// What another program measured.
fn read(path: &Path) -> Result<Beside> {
    // Every rank reads it.
    let text = warplink::file::read_regular(path, 16 << 20)?;
    serde_json::from_str(&text).with_context(|| format!("read the figures in {}", path.display()))
}

/// Calls in a sample: enough that starting and ending it do not count. Ranks that share a processor take as much longer for
/// each.
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
