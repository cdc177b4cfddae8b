//! `warplink bench p2p`: send and receive beside the raw copy and the vendor's library.

use super::second_stream::SecondStream;
use super::timing::{Clock, Submission, Times};
use crate::commands::ranks;
use crate::options::Options;
use crate::report;
use crate::report::bytes::Bytes;
use crate::report::progress::Progress;
use crate::report::table::{Align, Table};
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde::Serialize;
use std::cell::Cell;
use std::process::ExitCode;
use std::sync::Arc;
use warplink::Communicator;
use warplink::device::{CollectiveEngine, DeviceSlice, MemoryOp, Priority, Stream, Word};
use warplink::memory::{HANDLE_BYTES, Region, RemoteRegion};
use warplink::p2p::{Batch, Protocol, Transfer, TransferRequest};

/// Measure send and receive between two ranks
///
/// Latency is half of a round trip of two transfers between ranks 0 and 1, bandwidth that of many
/// transfers from rank 0 to rank 1, on two streams in turn; with --ring, of every rank to its right
/// neighbour at once. 'raw' has no protocol: for latency a copy into the peer's memory, a word
/// written behind it and a wait for that word; for bandwidth the copies alone, one behind the other,
/// which is the floor. 'nccl' is the vendor's library (on the host device, a
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

/// Who sends: `raw`, `nccl` or one of the protocols.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Way {
    Raw,
    Put,
    Get,
    Nccl,
}

/// One figure.
#[derive(Debug, Serialize)]
struct Row {
    bytes: u64,
    way: Way,
    submission: Submission,
    /// One way, in seconds.
    latency: Option<Times>,
    /// Of one transfer among many, in seconds.
    transfer: Times,
    /// In 10^9 bytes a second.
    bandwidth: f64,
    /// Bandwidth over that of `raw` with the same submission.
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

/// What every size is measured with.
struct Rig<'a> {
    clock: Clock<'a>,
    second: SecondStream,
    ring: bool,
    engine: Option<Arc<dyn CollectiveEngine>>,
    // Whom this rank sends to and receives from.
    right: usize,
    left: usize,
    own: Region,
    into: Region,
    // For the raw sequence: the buffer and the words of the rank to send to, and the own words.
    remote: RemoteRegion,
    remote_words: [Word; 2],
    words: [Word; 2],
    // How often the raw sequence signalled and was signalled outside of graphs.
    sent: Cell<u64>,
    received: Cell<u64>,
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
        let mut ways = vec![Way::Raw, Way::Put, Way::Get];
        ways.extend(rig.engine.as_ref().map(|_| Way::Nccl));
        let steps = sizes.len() * ways.len();
        let progress = (comm.rank() == 0).then(|| Progress::new(steps as u64, "send and receive"));
        let mut rows = Vec::new();
        for bytes in sizes {
            let mut raw = [f64::NAN; 2];
            for way in &ways {
                for (index, submission) in Submission::BOTH.into_iter().enumerate() {
                    let mut row = rig.row(bytes as usize, *way, submission, self.samples.into())?;
                    if *way == Way::Raw {
                        raw[index] = row.bandwidth;
                    }
                    row.of_raw = row.bandwidth / raw[index];
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

/// Transfers of one protocol that are under way at once, so that handing a buffer over is hidden
/// behind the transfers before.
const DEPTH: usize = 8;

/// How many transfers of `bytes` are posted together: the copies of a group follow one another
/// without a signal between, which large ones gain by; small ones are one kernel each anyway. Each
/// of the two streams has a second group announced while it copies the first.
fn group_size(bytes: usize) -> usize {
    if bytes >= 16 << 20 { DEPTH / 4 } else { 1 }
}

impl<'a> Rig<'a> {
    fn new(comm: &'a Communicator, largest: usize, ring: bool, nccl: bool) -> Result<Self> {
        let clock = Clock::new(comm, Priority::High)?;
        let (own, into) = (comm.alloc(largest)?, comm.alloc(largest)?);
        let sent: Vec<u8> = (0..largest).map(|at| pattern(comm.rank(), at)).collect();
        comm.device().upload(own.slice(), &sent)?;
        let words = comm.register(&comm.device().allocate_signals(4096)?)?;
        let (right, left) = Self::peers(comm, ring);
        let remote = share(comm, &into, right)?;
        let remote_words = share(comm, &words, right)?;
        let pair =
            |slice: &DeviceSlice| -> Result<[Word; 2]> { Ok([slice.word(0)?, slice.word(64)?]) };
        let engine = match nccl {
            true => Some(
                comm.collective_engine()
                    .context("load the vendor's library (or give --no-nccl)")?,
            ),
            false => None,
        };
        Ok(Self {
            second: SecondStream::new(comm)?,
            clock,
            ring,
            engine,
            right,
            left,
            own,
            into,
            remote,
            remote_words: pair(remote_words.slice())?,
            words: pair(words.slice())?,
            sent: Cell::new(0),
            received: Cell::new(0),
        })
    }

    /// The neighbours in the ring, or the other of the pair; further ranks only keep the barriers.
    fn peers(comm: &Communicator, ring: bool) -> (usize, usize) {
        let (rank, world) = (comm.rank(), comm.world());
        match (ring, rank) {
            (false, 0) => (1, 1),
            (false, 1) => (0, 0),
            _ => ((rank + 1) % world, (rank + world - 1) % world),
        }
    }

    fn row(&self, bytes: usize, way: Way, submission: Submission, samples: usize) -> Result<Row> {
        let transfers = match way {
            Way::Put => self.transfers(bytes, Protocol::Put)?,
            Way::Get => self.transfers(bytes, Protocol::Get)?,
            Way::Raw | Way::Nccl => Vec::new(),
        };
        let latency = (!self.ring)
            .then(|| self.latency(bytes, way, &transfers, submission, samples))
            .transpose()?;
        let transfer = self.many(bytes, way, &transfers, submission, samples)?;
        self.check(bytes, way)?;
        let bandwidth = bytes as f64 / transfer.median / 1e9;
        Ok(Row {
            bytes: bytes as u64,
            way,
            submission,
            latency,
            transfer,
            bandwidth,
            of_raw: 1.0,
        })
    }

    /// A send to the right and a receive from the left, [`DEPTH`] times.
    fn transfers(&self, bytes: usize, protocol: Protocol) -> Result<Vec<[Transfer; 2]>> {
        let (own, into) = (self.own.range(0..bytes)?, self.into.range(0..bytes)?);
        let mut requests = Vec::new();
        if self.takes_part() {
            for tag in 0..DEPTH as u64 {
                requests.push(TransferRequest::send(&own, self.right, tag).protocol(protocol));
                requests.push(TransferRequest::receive(&into, self.left, tag).protocol(protocol));
            }
        }
        let mut transfers = self.clock.comm.exchange(&requests)?.into_iter();
        let mut pairs = Vec::new();
        while let (Some(send), Some(receive)) = (transfers.next(), transfers.next()) {
            pairs.push([send, receive]);
        }
        Ok(pairs)
    }

    fn takes_part(&self) -> bool {
        self.ring || self.clock.comm.rank() < 2
    }

    /// Half a round trip between ranks 0 and 1.
    fn latency(
        &self,
        bytes: usize,
        way: Way,
        transfers: &[[Transfer; 2]],
        submission: Submission,
        samples: usize,
    ) -> Result<Times> {
        // Enough that the time at the two ends does not count.
        let round_trips = ((512usize << 20) / bytes).clamp(2, 50);
        let (own, into) = (
            self.own.slice().slice(0..bytes)?,
            self.into.slice().slice(0..bytes)?,
        );
        let remote = self.remote.slice().slice(0..bytes)?;
        let rank = self.clock.comm.rank();
        let send = |stream: &dyn Stream| -> Result<()> {
            if let (Way::Nccl, Some(engine)) = (way, &self.engine) {
                return Ok(engine.exchange(stream, &[(self.right, own.clone())], &[])?);
            }
            stream.copy(&remote, &own)?;
            self.signal(stream, submission)
        };
        let receive = |stream: &dyn Stream| -> Result<()> {
            if let (Way::Nccl, Some(engine)) = (way, &self.engine) {
                return Ok(engine.exchange(stream, &[], &[(self.left, into.clone())])?);
            }
            self.await_signal(stream, submission)
        };
        let times = self.clock.measure(samples, submission, &|stream| {
            for _ in 0..round_trips {
                match (rank, transfers) {
                    // The rank that begins says at once that it will receive.
                    (0, [[send, receive], ..]) => {
                        Batch::new()
                            .post([send, receive])
                            .wait([receive, send])
                            .enqueue(stream)?;
                    }
                    (1, [[send, receive], ..]) => {
                        Batch::new()
                            .post([receive])
                            .wait([receive])
                            .post([send])
                            .wait([send])
                            .enqueue(stream)?;
                    }
                    (0, _) => {
                        send(stream)?;
                        receive(stream)?;
                    }
                    (1, _) => {
                        receive(stream)?;
                        send(stream)?;
                    }
                    _ => {}
                }
            }
            Ok(())
        })?;
        let each = |time: f64| time / (2 * round_trips) as f64;
        Ok(Times {
            median: each(times.median),
            least: each(times.least),
            most: each(times.most),
        })
    }

    /// One of many transfers in a row: from rank 0 to rank 1, or around the ring.
    fn many(
        &self,
        bytes: usize,
        way: Way,
        transfers: &[[Transfer; 2]],
        submission: Submission,
        samples: usize,
    ) -> Result<Times> {
        // Enough that the time at the two ends does not count.
        let repeat = ((4usize << 30) / bytes).clamp(8, 96);
        let repeat = if self.clock.comm.device().kind() == warplink::DeviceKind::Host {
            repeat.min(16)
        } else {
            repeat
        };
        let (own, into) = (
            self.own.slice().slice(0..bytes)?,
            self.into.slice().slice(0..bytes)?,
        );
        let remote = self.remote.slice().slice(0..bytes)?;
        let rank = self.clock.comm.rank();
        let (sends, receives) = (self.ring || rank == 0, self.ring || rank == 1);
        let times = self.clock.measure(samples, submission, &|stream| {
            match (way, &self.engine) {
                (Way::Raw, _) => {
                    if sends {
                        self.second.fork(stream)?;
                        for turn in 0..repeat {
                            self.second.lane(turn, stream).copy(&remote, &own)?;
                        }
                        self.second.join(stream)?;
                        self.signal(stream, submission)?;
                    }
                    if receives {
                        self.await_signal(stream, submission)?;
                    }
                }
                (Way::Nccl, Some(engine)) if sends || receives => {
                    let to: Vec<_> = sends
                        .then(|| (self.right, own.clone()))
                        .into_iter()
                        .collect();
                    let from: Vec<_> = receives
                        .then(|| (self.left, into.clone()))
                        .into_iter()
                        .collect();
                    for _ in 0..repeat {
                        engine.exchange(stream, &to, &from)?;
                    }
                }
                (Way::Nccl, _) => {}
                (Way::Put | Way::Get, _) if transfers.is_empty() => {}
                (Way::Put | Way::Get, _) => {
                    self.second.fork(stream)?;
                    let size = group_size(bytes);
                    let (turns, ahead) = (repeat / size, DEPTH / size);
                    for turn in 0..turns + ahead {
                        let first = turn * size % DEPTH;
                        let group = &transfers[first..first + size];
                        let ends = || {
                            let both = group.iter().flat_map(|[send, receive]| {
                                [sends.then_some(send), receives.then_some(receive)]
                            });
                            both.flatten()
                        };
                        let mut batch = Batch::new();
                        if turn >= ahead {
                            batch = batch.wait(ends());
                        }
                        if turn < turns {
                            batch = batch.post(ends());
                        }
                        batch.enqueue(self.second.lane(turn, stream))?;
                    }
                    self.second.join(stream)?;
                }
            }
            Ok(())
        })?;
        let each = |time: f64| time / repeat as f64;
        Ok(Times {
            median: each(times.median),
            least: each(times.least),
            most: each(times.most),
        })
    }

    /// Sets the word of the rank to the right: outside of a graph to the count of such signals, in
    /// one to 1, which the receiver resets.
    fn signal(&self, stream: &dyn Stream, submission: Submission) -> Result<()> {
        let [counted, toggled] = &self.remote_words;
        let operation = match submission {
            Submission::Eager => MemoryOp::Write {
                word: counted,
                value: next(&self.sent),
            },
            Submission::Captured => MemoryOp::Write {
                word: toggled,
                value: 1,
            },
        };
        Ok(stream.memory_ops(&[operation])?)
    }

    fn await_signal(&self, stream: &dyn Stream, submission: Submission) -> Result<()> {
        let [counted, toggled] = &self.words;
        match submission {
            Submission::Eager => stream.memory_ops(&[MemoryOp::Wait {
                word: counted,
                value: next(&self.received),
            }])?,
            Submission::Captured => stream.memory_ops(&[
                MemoryOp::Wait {
                    word: toggled,
                    value: 1,
                },
                MemoryOp::Reset { word: toggled },
            ])?,
        }
        Ok(())
    }

    /// Fails unless what was received is what the rank to the left sent, at both ends of it; and
    /// wipes it for the next.
    fn check(&self, bytes: usize, way: Way) -> Result<()> {
        let rank = self.clock.comm.rank();
        if self.ring || rank == 1 {
            let part = bytes.min(64 << 10);
            for start in [0, bytes - part] {
                let mut got = vec![0; part];
                self.clock
                    .comm
                    .device()
                    .download(&self.into.slice().slice(start..start + part)?, &mut got)?;
                let wrong = got
                    .iter()
                    .zip(start..)
                    .position(|(byte, at)| *byte != pattern(self.left, at));
                if let Some(at) = wrong {
                    bail!(
                        "rank {rank}: byte {} of {bytes} received by {way:?} is wrong",
                        start + at
                    );
                }
            }
        }
        // A peer's last copy may still be under way until it has passed the barrier.
        self.clock.comm.barrier()?;
        self.clock.stream.fill(self.into.slice(), 0xff)?;
        self.clock.comm.synchronize(&*self.clock.stream)?;
        Ok(self.clock.comm.barrier()?)
    }
}

fn next(count: &Cell<u64>) -> u64 {
    count.set(count.get() + 1);
    count.get()
}

/// Byte `at` of what `rank` sends; it differs from rank to rank and from byte to byte.
fn pattern(rank: usize, at: usize) -> u8 {
    (at * 31 + rank * 7 + (at >> 9)) as u8
}

/// Maps the rank `from`'s `region`; every rank gives its own to the rank to its left.
fn share(comm: &Communicator, region: &Region, from: usize) -> Result<RemoteRegion> {
    // A handle for every rank, so that who opens whose need not be known here.
    let mut handles = Vec::new();
    for peer in 0..comm.world() {
        match peer == comm.rank() {
            true => handles.extend_from_slice(&[0; HANDLE_BYTES]),
            false => handles.extend_from_slice(&comm.describe(region, peer)?),
        }
    }
    let all = comm.all_gather_bytes(&handles)?;
    let mut opened = None;
    for (peer, handles) in all
        .iter()
        .enumerate()
        .filter(|(peer, _)| *peer != comm.rank())
    {
        let own = &handles[comm.rank() * HANDLE_BYTES..(comm.rank() + 1) * HANDLE_BYTES];
        let region = comm.open(peer, own)?;
        if peer == from {
            opened = Some(region);
        }
    }
    opened.context("the rank to send to has no region")
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
                format!("{:?}", row.way).to_lowercase(),
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
