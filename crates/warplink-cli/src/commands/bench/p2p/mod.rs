//! `warplink bench p2p`: send and receive beside the raw copy and the vendor's library.

mod measure;
mod rig;

use super::timing::{Submission, Times};
use crate::commands::ranks;
use crate::options::Options;
use crate::report;
use crate::report::bytes::Bytes;
use crate::report::progress::Progress;
use crate::report::table::{Align, Table};
use anyhow::{Context, Result, ensure};
use clap::Args;
use rig::Rig;
use serde::Serialize;
use std::process::ExitCode;
use warplink::Communicator;

/// Measure send and receive between two ranks
///
/// Latency is half of a round trip of two transfers between ranks 0 and 1, bandwidth that of many
/// transfers from rank 0 to rank 1, on two streams in turn; with --ring, of every rank to its right
/// neighbour at once. 'raw' has no protocol: for latency a copy into the peer's memory, a word
/// written behind it and a wait for that word; for bandwidth the copies alone, one behind the other.
/// 'raw-get' is the same copies made by the receiver, out of the peer's memory; it has no latency.
/// The floor of 'get' is 'raw-get', that of 'put' and 'nccl' is 'raw', and the column 'of raw' is
/// the bandwidth over that of the floor. 'nccl' is the vendor's library (on the host device, a
/// stand-in for it). Every time is that of the slowest rank, the median of all samples.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    warplink bench p2p\n  \
    warplink bench p2p -n 8 --ring --from 64MiB --to 1GiB\n  \
    warplink bench p2p --device host -n 2 --to 1MiB --json > p2p.json")]
pub(crate) struct P2p {
    /// The smallest size
    #[arg(long, value_name = "BYTES", default_value = "4KiB")]
    from: Bytes,
    /// The largest size [default: 1GiB on cuda, 4MiB on host]
    #[arg(long, value_name = "BYTES")]
    to: Option<Bytes>,
    /// Each size is so many times the one before
    #[arg(long, value_name = "N", default_value = "4", value_parser = clap::value_parser!(u64).range(2..))]
    step: u64,
    /// Samples of each figure
    #[arg(long, value_name = "N", default_value = "9", value_parser = clap::value_parser!(u16).range(1..))]
    samples: u16,
    /// Every rank sends to its right neighbour at once, and only bandwidth is measured
    #[arg(long)]
    ring: bool,
    /// Leave the vendor's library out
    #[arg(long)]
    no_nccl: bool,
}

/// Who moves the bytes: raw copies, one of the protocols or the vendor's library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Way {
    /// The sender copies into the receiver's memory.
    Raw,
    /// The receiver copies out of the sender's memory.
    RawGet,
    Put,
    Get,
    Nccl,
}

impl Way {
    /// As in JSON.
    fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::RawGet => "raw-get",
            Self::Put => "put",
            Self::Get => "get",
            Self::Nccl => "nccl",
        }
    }

    /// The raw copies that this way is compared with. Gets have their own: copy engines are slower
    /// at them than at puts when all ranks get at once.
    fn floor(self) -> Self {
        match self {
            Self::Raw | Self::Put | Self::Nccl => Self::Raw,
            Self::RawGet | Self::Get => Self::RawGet,
        }
    }
}

/// One figure.
#[derive(Debug, Serialize)]
struct Row {
    bytes: u64,
    way: Way,
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
        ranks::run(options, |comm| {
            ensure!(
                comm.world() >= 2,
                "a transfer needs two ranks; give --ranks 2 or more"
            );
            let report = self.measure(comm)?;
            if comm.rank() == 0 {
                if options.json {
                    report::print_json(&report)?
                } else {
                    print!("{}", report.table())
                }
            }
            Ok(ExitCode::SUCCESS)
        })
    }

    fn measure(&self, comm: &Communicator) -> Result<Report> {
        let cuda = comm.device().kind() == warplink::DeviceKind::Cuda;
        let to = self
            .to
            .unwrap_or(Bytes(if cuda { 1 << 30 } else { 4 << 20 }))
            .0;
        ensure!(
            self.from.0 >= 8 && self.from.0 <= to,
            "sizes go from at least 8 bytes up"
        );
        let sizes: Vec<u64> =
            std::iter::successors(Some(self.from.0), |size| size.checked_mul(self.step))
                .take_while(|size| *size <= to)
                .collect();
        let largest =
            usize::try_from(sizes.last().copied().unwrap_or(to)).context("sizes fit the memory")?;
        let rig = Rig::new(comm, largest, self.ring, !self.no_nccl)?;
        let mut ways = vec![Way::Raw, Way::RawGet, Way::Put, Way::Get];
        ways.extend(rig.engine.as_ref().map(|_| Way::Nccl));
        let steps = sizes.len() * ways.len();
        let progress = (comm.rank() == 0).then(|| Progress::new(steps as u64, "send and receive"));
        let mut rows: Vec<Row> = Vec::new();
        for bytes in sizes {
            for way in &ways {
                for submission in Submission::BOTH {
                    let mut row = rig.row(bytes as usize, *way, submission, self.samples.into())?;
                    // The last such row is of this size, because the floors are measured first.
                    let floor = rows
                        .iter()
                        .rfind(|row| row.way == way.floor() && row.submission == submission);
                    if let Some(floor) = floor.filter(|floor| floor.way != *way) {
                        row.of_raw = row.bandwidth / floor.bandwidth;
                    }
                    rows.push(row);
                }
                if let Some(progress) = &progress {
                    progress.step(format!("{}", Bytes(bytes)));
                }
            }
        }
        let engine = rig.engine.as_ref().map(|engine| engine.describe());
        Ok(Report {
            benchmark: "p2p",
            device: comm.device().describe(),
            ranks: comm.world(),
            pattern: if self.ring { "ring" } else { "pair" },
            nccl: engine,
            rows,
        })
    }
}

impl Report {
    fn table(&self) -> String {
        let mut text = format!("{} ranks on {}, {}", self.ranks, self.device, self.pattern);
        if let Some(nccl) = &self.nccl {
            text.push_str(&format!(", beside {nccl}"));
        }
        text.push_str("\n\n");
        let mut table = Table::new([
            ("bytes", Align::Right),
            ("way", Align::Left),
            ("submitted", Align::Left),
            ("one way (us)", Align::Right),
            ("each of many (us)", Align::Right),
            ("GB/s", Align::Right),
            ("of raw", Align::Right),
        ]);
        for row in &self.rows {
            let micros = |times: &Times| format!("{:.2}", times.median * 1e6);
            table.row([
                Bytes(row.bytes).to_string(),
                row.way.name().to_owned(),
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
