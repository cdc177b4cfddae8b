//! `warplink bench p2p`: send and receive, compared with raw copies and the vendor's library.

mod measure;
mod runner;

use crate::commands::bench::case::{Case, Range, Setup};
use crate::commands::bench::clock::{Submission, Times};
use crate::commands::bench::plot::{Drawing, Point};
use crate::commands::bench::report::{Columns, Figures, compared, micros, or_empty};
use crate::memory;
use crate::names::{as_name, name_of};
use crate::report::bytes::Bytes;
use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};
use runner::P2pRunner;
use serde::Serialize;
use warplink::Communicator;
use warplink::p2p::{Path, Protocol};

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

/// A method to move bytes: raw copies, a protocol or the vendor's library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
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
            Self::RawGet | Self::Get | Self::GetMultiprocessors => Self::RawGet,
            _ => Self::Raw,
        }
    }
}

#[derive(Debug, Serialize)]
struct P2pRow {
    bytes: usize,
    #[serde(serialize_with = "as_name")]
    method: Method,
    submission: Submission,
    /// One way, in seconds; not of `raw-get`, nor around the ring.
    latency: Option<Times>,
    /// Of one transfer among many, in seconds.
    transfer: Times,
    /// In 10^9 bytes a second.
    bandwidth: f64,
    /// Bandwidth over that of the method's floor with the same submission.
    of_raw: f64,
}

#[derive(Debug, Serialize)]
pub(crate) struct Transfers {
    pattern: &'static str,
    nccl: Option<String>,
    rows: Vec<P2pRow>,
}

impl Case for P2p {
    const NAME: &'static str = "p2p";
    const SIZES: Option<Range> = Some(Range::of_bytes(4 << 10, [1 << 30, 4 << 20], 4));
    const SUBMISSIONS: bool = true;
    type Figures = Transfers;

    fn check(&self, setup: &Setup) -> Result<()> {
        setup.check_peers("send to")?;
        ensure!(
            !(self.no_nccl && self.methods.contains(&Method::Nccl)),
            "--methods has nccl and --no-nccl leaves it out; expected one of the two"
        );
        setup.check_least(8, "a word")?;
        let largest = setup.largest() as u128;
        memory::check(setup.kind, setup.world, largest, 2 * largest)
    }

    fn measure(&self, comm: &Communicator, setup: &Setup) -> Result<Transfers> {
        let methods = self.measured();
        let nccl = methods.contains(&Method::Nccl);
        let runner = P2pRunner::new(comm, setup.largest(), self.ring, nccl)?;
        let steps = setup.sizes.len() * methods.len() * setup.submissions.len();
        let progress = Setup::progress(comm, steps, "send and receive");
        let mut rows: Vec<P2pRow> = Vec::new();
        for &bytes in &setup.sizes {
            for &method in &methods {
                for &submission in &setup.submissions {
                    let mut row = runner.row(bytes, method, submission, setup.samples)?;
                    // The last such row is of this size, because the floors are measured first.
                    let floor = rows
                        .iter()
                        .rfind(|row| row.method == method.floor() && row.submission == submission);
                    if let Some(floor) = floor.filter(|floor| floor.method != method) {
                        row.of_raw = row.bandwidth / floor.bandwidth;
                    }
                    rows.push(row);
                    progress.step(Bytes(bytes as u64).to_string());
                }
            }
        }
        Ok(Transfers {
            pattern: if self.ring { "ring" } else { "pair" },
            nccl: runner.engine.as_ref().map(|engine| engine.name()),
            rows,
        })
    }
}

impl P2p {
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
}

impl Figures for Transfers {
    fn title(&self, job: &str) -> String {
        format!("{job}, {}{}", self.pattern, compared(self.nccl.as_slice()))
    }

    fn tables(&self) -> String {
        Columns::<P2pRow>::new()
            .number("bytes", |row| Bytes(row.bytes as u64).to_string())
            .words("method", |row| name_of(&row.method))
            .words("submission", |row| name_of(&row.submission))
            .number("latency (us)", |row| {
                or_empty(row.latency, |times| micros(times.median))
            })
            .number("per transfer (us)", |row| micros(row.transfer.median))
            .number("GB/s", |row| format!("{:.2}", row.bandwidth))
            .number("of raw", |row| format!("{:.3}", row.of_raw))
            .table(&self.rows)
    }

    fn drawing(&self) -> Drawing {
        let points = self.rows.iter().flat_map(|row| {
            let submission = name_of(&row.submission);
            let point = |what, value, logarithmic| Point {
                panel: format!("{submission}: {what}"),
                line: name_of(&row.method),
                size: Bytes(row.bytes as u64).to_string(),
                value,
                logarithmic,
            };
            let time = row.latency.unwrap_or(row.transfer).median * 1e6;
            let what = if row.latency.is_some() {
                "latency in us"
            } else {
                "time per transfer in us"
            };
            [
                point(what, time, true),
                point("bandwidth in GB/s", row.bandwidth, false),
            ]
        });
        Drawing::Lines(points.collect())
    }
}
