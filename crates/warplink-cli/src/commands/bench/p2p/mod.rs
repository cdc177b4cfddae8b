//! `warplink bench p2p`: send and receive, compared with raw copies and the vendor's library.

mod measure;
mod rig;

use super::timing::{Submission, Times};
use crate::commands::ranks;
use crate::memory;
use crate::options::{Options, step};
use crate::report;
use crate::report::bytes::Bytes;
use crate::report::counted;
use crate::report::progress::Progress;
use crate::report::table::{Align, Table};
use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use rig::Rig;
use serde::Serialize;
use std::process::ExitCode;
use warplink::p2p::{Path, Protocol};
use warplink::{Communicator, DeviceKind};

/// Measure send and receive between two ranks
///
/// Latency is half a round trip between ranks 0 and 1. Bandwidth is that of many transfers from rank
/// 0 to rank 1, alternating between two streams; with --ring, every rank sends to its right
/// neighbour at the same time. Times are medians over all samples; the slowest rank counts.
///
/// raw      copies into the peer's memory without a protocol; for latency, each copy is followed by
///          a write of a word that the peer waits for
/// raw-get  the same copies issued by the receiver; bandwidth only
/// put, get send and receive with that protocol, by the path that is the default
/// put-fastest, put-one-block, put-multiprocessors, get-multiprocessors
///          likewise, by that path
/// nccl     the vendor's library (a substitute on the host device)
///
/// The column 'of raw' is the bandwidth divided by that of the raw copies in the same direction:
/// raw-get for get and get-multiprocessors, raw for all others.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "Examples:\n  \
    warplink bench p2p\n  \
    warplink bench p2p -n 8 --ring --from 64MiB --to 1GiB\n  \
    warplink bench p2p --device host -n 2 --to 1MiB --json > p2p.json"
)]
pub(crate) struct P2p {
    /// Smallest size
    #[arg(long, value_name = "BYTES", default_value = "4KiB")]
    from: Bytes,
    /// Largest size [default: 1GiB on cuda, 4MiB on host; --from if that is larger]
    #[arg(long, value_name = "BYTES")]
    to: Option<Bytes>,
    /// Factor between sizes
    #[arg(long, value_name = "N", default_value = "4", value_parser = step::<u64>)]
    step: u64,
    /// Samples per figure
    #[arg(long, value_name = "N", default_value = "9", value_parser = clap::value_parser!(u16).range(1..))]
    samples: u16,
    /// Let every rank send to its right neighbour at once, and measure bandwidth only
    #[arg(long)]
    ring: bool,
    /// Measure these methods alone, and the raw copies that they are compared with [default: all]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    methods: Vec<Method>,
    /// Do not measure the vendor's library
    #[arg(long)]
    no_nccl: bool,
}

/// What moves the bytes: raw copies, a protocol or the vendor's library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
enum Method {
    /// The sender copies into the receiver's memory.
    Raw,
    /// The receiver copies out of the sender's memory.
    RawGet,
    /// A send and receive in which the sender writes, by the path that is the default.
    Put,
    /// The same in which the receiver reads.
    Get,
    /// By the path that the hardware model chooses.
    PutFastest,
    /// By one block of a multiprocessor.
    PutOneBlock,
    /// By many blocks.
    PutMultiprocessors,
    /// By many blocks of the receiver.
    GetMultiprocessors,
    /// The vendor's library.
    Nccl,
}

impl Method {
    /// As in JSON.
    fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::RawGet => "raw-get",
            Self::Put => "put",
            Self::Get => "get",
            Self::PutFastest => "put-fastest",
            Self::PutOneBlock => "put-one-block",
            Self::PutMultiprocessors => "put-multiprocessors",
            Self::GetMultiprocessors => "get-multiprocessors",
            Self::Nccl => "nccl",
        }
    }

    /// The protocol and the path of a send and receive; no path where that is the communicator's.
    fn transfer(self) -> Option<(Protocol, Option<Path>)> {
        match self {
            Self::Put => Some((Protocol::Put, None)),
            Self::Get => Some((Protocol::Get, None)),
            Self::PutFastest => Some((Protocol::Put, Some(Path::Fastest))),
            Self::PutOneBlock => Some((Protocol::Put, Some(Path::OneBlock))),
            Self::PutMultiprocessors => Some((Protocol::Put, Some(Path::Multiprocessors))),
            Self::GetMultiprocessors => Some((Protocol::Get, Some(Path::Multiprocessors))),
            Self::Raw | Self::RawGet | Self::Nccl => None,
        }
    }

    /// The raw copies that this method is compared with. Gets have their own: copy engines are slower
    /// at them than at puts when all ranks get at once.
    fn floor(self) -> Self {
        match self {
            Self::Raw
            | Self::Put
            | Self::PutFastest
            | Self::PutOneBlock
            | Self::PutMultiprocessors
            | Self::Nccl => Self::Raw,
            Self::RawGet | Self::Get | Self::GetMultiprocessors => Self::RawGet,
        }
    }
}

/// One figure.
#[derive(Debug, Serialize)]
struct Row {
    bytes: u64,
    method: Method,
    submission: Submission,
    /// One way, in seconds; not of `raw-get`, nor around the ring.
    latency: Option<Times>,
    /// Of one transfer among many, in seconds.
    transfer: Times,
    /// In 10^9 bytes a second.
    bandwidth: f64,
    /// Bandwidth over that of `raw` with the same submission; of `get`, over that of `raw-get`.
    of_raw: f64,
}

#[derive(Debug, Serialize)]
struct Report {
    benchmark: &'static str,
    device: String,
    ranks: usize,
    pattern: &'static str,
    nccl: Option<String>,
    rows: Vec<Row>,
}

impl P2p {
    pub(crate) fn run(self, options: &Options) -> Result<ExitCode> {
        let check = |kind, world| {
            ensure!(
                world >= 2,
                "a job of one rank has no peer to send to; expected at least two; help: use --ranks 2"
            );
            ensure!(
                !(self.no_nccl && self.methods.contains(&Method::Nccl)),
                "--methods has nccl and --no-nccl leaves it out; expected one of the two"
            );
            let largest = u128::from(self.largest(kind)?);
            memory::check(kind, world, largest, 2 * largest)
        };
        ranks::run_checked(options, check, |comm| {
            check(comm.device().kind(), comm.world())?;
            let report = self.measure(comm)?;
            if comm.rank() == 0 {
                if options.json {
                    report::print_json(&report)?
                } else {
                    report::print_text(&report.table())?
                }
            }
            Ok(ExitCode::SUCCESS)
        })
    }

    /// The largest size, if it goes with the smallest.
    fn largest(&self, kind: DeviceKind) -> Result<u64> {
        let to = self.to.unwrap_or(match kind {
            DeviceKind::Cuda => self.from.max(Bytes(1 << 30)),
            DeviceKind::Host => self.from.max(Bytes(4 << 20)),
        });
        let from = self.from;
        ensure!(
            from.0 >= 8,
            "--from is {from}; expected at least 8 bytes, a word"
        );
        ensure!(
            from <= to,
            "--from is {from} and --to is {to}; expected --from to be at most --to"
        );
        Ok(to.0)
    }

    /// The methods that are measured, floors first.
    fn measured(&self) -> Vec<Method> {
        let is_asked = |method: &Method| {
            let methods = &self.methods;
            let is_compared_with = methods.iter().any(|other| other.floor() == *method);
            methods.is_empty() || methods.contains(method) || is_compared_with
        };
        let all = Method::value_variants().iter().copied();
        all.filter(is_asked)
            .filter(|method| *method != Method::Nccl || !self.no_nccl)
            .collect()
    }

    fn measure(&self, comm: &Communicator) -> Result<Report> {
        let to = self.largest(comm.device().kind())?;
        let sizes: Vec<u64> =
            std::iter::successors(Some(self.from.0), |size| size.checked_mul(self.step))
                .take_while(|size| *size <= to)
                .collect();
        let largest =
            usize::try_from(sizes.last().copied().unwrap_or(to)).context("sizes fit the memory")?;
        let methods = self.measured();
        let rig = Rig::new(comm, largest, self.ring, methods.contains(&Method::Nccl))?;
        let steps = sizes.len() * methods.len();
        let progress = (comm.rank() == 0).then(|| Progress::new(steps as u64, "send and receive"));
        let mut rows: Vec<Row> = Vec::new();
        for bytes in sizes {
            for method in &methods {
                for submission in Submission::BOTH {
                    let mut row =
                        rig.row(bytes as usize, *method, submission, self.samples.into())?;
                    // The last such row is of this size, because the floors are measured first.
                    let floor = rows
                        .iter()
                        .rfind(|row| row.method == method.floor() && row.submission == submission);
                    if let Some(floor) = floor.filter(|floor| floor.method != *method) {
                        row.of_raw = row.bandwidth / floor.bandwidth;
                    }
                    rows.push(row);
                }
                if let Some(progress) = &progress {
                    progress.step(format!("{}", Bytes(bytes)));
                }
            }
        }
        let engine = rig.engine.as_ref().map(|engine| engine.name());
        Ok(Report {
            benchmark: "p2p",
            device: comm.device().name(),
            ranks: comm.world(),
            pattern: if self.ring { "ring" } else { "pair" },
            nccl: engine,
            rows,
        })
    }
}

impl Report {
    fn table(&self) -> String {
        let ranks = counted(self.ranks, "rank");
        let mut text = format!("{ranks} on {}, {}", self.device, self.pattern);
        if let Some(nccl) = &self.nccl {
            text.push_str(&format!(", compared with {nccl}"));
        }
        text.push_str("\n\n");
        let mut table = Table::new([
            ("bytes", Align::Right),
            ("method", Align::Left),
            ("submission", Align::Left),
            ("latency (us)", Align::Right),
            ("per transfer (us)", Align::Right),
            ("GB/s", Align::Right),
            ("of raw", Align::Right),
        ]);
        for row in &self.rows {
            let micros = |times: &Times| format!("{:.2}", times.median * 1e6);
            table.row([
                Bytes(row.bytes).to_string(),
                row.method.name().to_owned(),
                format!("{:?}", row.submission).to_lowercase(),
                row.latency.as_ref().map(micros).unwrap_or_default(),
                micros(&row.transfer),
                format!("{:.2}", row.bandwidth),
                format!("{:.3}", row.of_raw),
            ]);
        }
        text + &table.to_string()
    }
}
