//! `warplink bench p2p`: send and receive, compared with raw copies and the vendor's library.

mod measure;
mod runner;

use crate::commands::bench::case::{Case, Setup, SizeRange};
use crate::commands::bench::clock::{Submission, Times};
use crate::commands::bench::report::{Figures, Row, compared, job, micros};
use crate::memory;
use crate::names::name_of;
use crate::report::Object;
use crate::report::bytes::ByteSize;
use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};
use runner::P2pRunner;
use std::collections::HashMap;
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
/// put, get send and receive with that protocol, on the default path (the copy engine)
/// put-fastest, put-one-block, put-multiprocessors, get-multiprocessors
///          the same on the path of that name
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
    /// Measure only these methods, and the raw copies they are compared with [default: all]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    methods: Vec<Method>,
    /// Do not measure the vendor's library
    #[arg(long)]
    no_nccl: bool,
}

/// A method to move bytes: raw copies, a protocol or the vendor's library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
enum Method {
    /// The sender copies into the receiver's memory.
    Raw,
    /// The receiver copies out of the sender's memory.
    RawGet,
    /// A send and receive in which the sender writes, on the default path.
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
    /// The protocol and the path of a send and receive; no path for the communicator's default.
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

/// Times of a method at one size.
struct P2pTimes {
    bytes: usize,
    method: Method,
    submission: Submission,
    /// One way, in seconds; not of `raw-get`, nor around the ring.
    latency: Option<Times>,
    /// Of one transfer among many, in seconds.
    transfer: Times,
}

impl P2pTimes {
    /// In 10^9 bytes a second.
    fn bandwidth(&self) -> f64 {
        self.bytes as f64 / self.transfer.median / 1e9
    }

    fn row(&self, of_raw: f64) -> Row {
        let (size, bandwidth) = (ByteSize(self.bytes as u64).to_string(), self.bandwidth());
        let (method, submission) = (name_of(&self.method), name_of(&self.submission));
        let what = match self.latency {
            Some(_) => "latency in us",
            None => "time per transfer in us",
        };
        let time = self.latency.unwrap_or(self.transfer).median * 1e6;
        let row = Row::of(&size)
            .key("bytes", self.bytes)
            .number("size", &size)
            .name("method", &method)
            .name("submission", &submission)
            .key("latency", self.latency)
            .number_or_empty("latency (us)", self.latency, |times| micros(times.median))
            .key("transfer", self.transfer)
            .number("per transfer (us)", micros(self.transfer.median))
            .key("bandwidth", bandwidth)
            .number("GB/s", format!("{bandwidth:.2}"))
            .key("of_raw", of_raw)
            .number("of raw", format!("{of_raw:.3}"));
        let row = match self.method {
            // It has no latency, so its times would need a panel of their own.
            Method::RawGet => row,
            _ => row.point(format!("{submission}: {what}"), &method, time, true),
        };
        row.point(
            format!("{submission}: bandwidth in GB/s"),
            &method,
            bandwidth,
            false,
        )
    }
}

impl Case for P2p {
    const NAME: &'static str = "p2p";
    const SIZES: Option<SizeRange> = Some(SizeRange::of_bytes(4 << 10, [1 << 30, 4 << 20], 4));
    const SUBMISSIONS: bool = true;

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

    fn measure(&self, comm: &Communicator, setup: &Setup) -> Result<Figures> {
        let methods = self.measured();
        let nccl = methods.contains(&Method::Nccl);
        let runner = P2pRunner::new(comm, setup.largest(), self.ring, nccl)?;
        let steps = setup.sizes.len() * methods.len() * setup.submissions.len();
        let progress = Setup::progress(comm, steps, "send and receive");
        let mut rows = Vec::new();
        for &bytes in &setup.sizes {
            let mut bandwidths = HashMap::new();
            for &method in &methods {
                for &submission in &setup.submissions {
                    let times = runner.times(bytes, method, submission, setup.samples)?;
                    bandwidths.insert((method, submission), times.bandwidth());
                    // The floors are measured first.
                    let floor = bandwidths.get(&(method.floor(), submission));
                    rows.push(times.row(floor.map_or(1.0, |floor| times.bandwidth() / floor)));
                    progress.step(ByteSize(bytes as u64).to_string());
                }
            }
        }
        let pattern = if self.ring { "ring" } else { "pair" };
        let nccl = runner.engine.as_ref().map(|engine| engine.name());
        let title = format!("{}, {pattern}{}", job(comm), compared(nccl.as_slice()));
        let object = Object::default().key("pattern", pattern).key("nccl", nccl);
        Ok(Figures::of_rows(title, object, rows))
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
        // In the order of the enum, in which the raw copies come first.
        let all = Method::value_variants().iter().copied();
        all.filter(is_asked)
            .filter(|method| *method != Method::Nccl || !self.no_nccl)
            .collect()
    }
}
