//! `warplink bench channel`: puts, signals and packets from inside a kernel, compared with plain kernels
//! and the copy engine.

mod kernels;

use crate::commands::bench::case::{Case, Setup, SizeRange, by_device};
use crate::commands::bench::clock::{BenchClock, Submission, Times, Work};
use crate::commands::bench::report::{Figures, Live, Row, job, or_empty};
use crate::memory;
use crate::options::at_least;
use crate::report::bytes::ByteSize;
use crate::report::{Object, counted};
use anyhow::{Context, Result};
use clap::Args;
use kernels::{DATA, Kernels};
use std::time::Duration;
use warplink::channel::{Connection, ConnectionRequest, Transport};
use warplink::device::{Argument, Launch, Priority};
use warplink::{Communicator, DeviceKind};

/// Measure channels between kernels of ranks 0 and 1
///
/// Latencies are one way: half a round trip, of many in one kernel. Times are medians over all samples;
/// the slowest rank counts.
///
/// words          a plain store that the peer's kernel polls for, for comparison
/// signals        signal and wait; the ratio is that to words
/// puts           put_with_signal and wait
/// packets        packets of 16 bytes, of which 8 are data
/// copy_once      a plain copy kernel into the peer's memory, for comparison
/// put_once       one put by all blocks; the ratio is the rate over that of copy_once
/// engine         the copy engine in stream order, for comparison
/// put_and_flush  one proxied put until it is done; the ratio is the rate over that of engine
/// engine x8, put_and_flush x8
///                the same for eight in a row, so that the start of one counts less
/// triggers       signals of several blocks through the proxy, each thread on its own
///
/// Sizes are those of engine and put_and_flush; copy_once and put_once have the largest.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "Examples:\n  \
    warplink bench channel\n  \
    warplink bench channel --device host --to 1MiB --json > channel.json"
)]
pub(crate) struct Channel {
    /// Time limit for one row
    #[arg(long, value_name = "SECONDS", default_value = "20", value_parser = at_least::<u16>(1))]
    limit: u16,
    /// Rows to measure, by the names above; the rows they are compared with are measured too
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = NAMES)]
    rows: Vec<String>,
}

/// Rows that can be measured.
const NAMES: [&str; 9] = [
    "words",
    "signals",
    "puts",
    "packets",
    "copy_once",
    "put_once",
    "engine",
    "put_and_flush",
    "triggers",
];

/// Puts, or copies, in a row.
const ROW: u32 = 8;

/// The smallest put of the rows that have sizes.
const SMALLEST: u64 = 4096;

/// Both kinds of channels.
const TRANSPORTS: [Transport; 2] = [Transport::Direct, Transport::Proxied];

/// Messages back and forth: row, transport, bytes and threads.
const LATENCIES: [(&str, Transport, u64, u32); 8] = [
    ("signals", Transport::Proxied, 0, 1),
    ("puts", Transport::Direct, 8, 256),
    ("puts", Transport::Proxied, 8, 32),
    ("puts", Transport::Direct, 4096, 256),
    ("puts", Transport::Proxied, 4096, 32),
    ("packets", Transport::Direct, 8, 32),
    ("packets", Transport::Direct, 1024, 128),
    ("packets", Transport::Direct, 4096, 512),
];

/// Widths of the columns.
const WIDTHS: [usize; 7] = [16, 9, 8, 6, 10, 11, 6];

/// Two connections between ranks 0 and 1, and the kernels for them; further ranks only join the barriers.
struct ChannelRunner<'a> {
    clock: BenchClock<'a>,
    kernels: Kernels,
    connections: Vec<Connection>,
    samples: usize,
    rows: Live,
}

impl Case for Channel {
    const NAME: &'static str = "channel";
    const SAMPLES: [u16; 2] = [15, 15];
    const SIZES: Option<SizeRange> =
        Some(SizeRange::of_bytes(SMALLEST, [256 << 20, 1 << 20], 16384));
    const LIVE: bool = true;

    fn check(&self, setup: &Setup) -> Result<()> {
        setup.check_peers("connect to")?;
        setup.check_least(8, "a word")?;
        let bytes = region_bytes(setup.largest() as u64);
        memory::check(setup.kind, 2, bytes, 2 * bytes)
    }

    fn measure(&self, comm: &Communicator, setup: &Setup) -> Result<Figures> {
        let limit = Duration::from_secs(self.limit.into());
        let mut runner = ChannelRunner::new(comm, setup, limit)?;
        // So many that launching the kernel hardly counts in one round; threads of the host
        // device are slower, and get fewer.
        let rounds = by_device(setup.kind, [1000, 100]);
        if self.wants(&["words", "signals"]) {
            runner.signals(rounds)?;
        }
        for (what, transport, bytes, threads) in LATENCIES {
            if self.wants(&[what]) || what == "signals" && self.wants(&["words"]) {
                runner.back_and_forth(what, transport, bytes, threads, rounds)?;
            }
        }
        let blocks: &[u32] = match setup.kind {
            DeviceKind::Cuda => &[1, 4, 8, 16, 24, 32, 64],
            DeviceKind::Host => &[1, 4],
        };
        if self.wants(&["copy_once", "put_once"]) {
            let largest = setup.largest() as u64;
            for &blocks in blocks {
                let copy = runner.once("copy_once", largest, blocks, None)?;
                runner.once("put_once", largest, blocks, Some(copy))?;
            }
        }
        if self.wants(&["engine", "put_and_flush"]) {
            for &bytes in &setup.sizes {
                let bytes = bytes as u64;
                let engine = runner.engine("engine", bytes, 1)?;
                runner.flushed("put_and_flush", bytes, 1, engine)?;
                let engine = runner.engine("engine x8", bytes, ROW)?;
                runner.flushed("put_and_flush x8", bytes, ROW, engine)?;
            }
        }
        if self.wants(&["triggers"]) {
            // 132 is the number of multiprocessors of an H100 or H200.
            for blocks in [1, 8, 132] {
                runner.triggers(blocks, by_device(setup.kind, [20_000, 2_000]))?;
            }
        }
        let title = format!("channels, {}", job(comm));
        Ok(Figures::of_rows(title, Object::default(), runner.rows.rows))
    }
}

impl Channel {
    /// Whether one of these rows is requested.
    fn wants(&self, names: &[&str]) -> bool {
        let mut requested = self.rows.iter();
        self.rows.is_empty() || requested.any(|row| names.contains(&row.as_str()))
    }
}

/// Bytes of a region for sent data, received data, and packets.
fn region_bytes(largest: u64) -> u128 {
    // The longest messages of LATENCIES have as many bytes as SMALLEST: once sent, once received, and as packets, which
    // are half flags, twice.
    u128::from(DATA) + u128::from(largest.max(4 * SMALLEST))
}

impl<'a> ChannelRunner<'a> {
    fn new(comm: &'a Communicator, setup: &Setup, limit: Duration) -> Result<Self> {
        let bytes = usize::try_from(region_bytes(setup.largest() as u64));
        let bytes = bytes.context("sizes fit the memory")?;
        let kernels = Kernels::load(comm)?;
        let mut requests = Vec::new();
        // 1 for rank 0, and 0 for rank 1; there is none for further ranks.
        if let Some(peer) = 1_usize.checked_sub(comm.rank()) {
            for (tag, transport) in TRANSPORTS.into_iter().enumerate() {
                let region = comm.alloc(bytes)?;
                // The packets' counter starts from 0, and no leftover of earlier memory passes for a packet.
                region.upload(&vec![0; bytes])?;
                let request = ConnectionRequest::new(peer, tag as u64, &region);
                requests.push(request.with_transport(transport));
            }
        }
        let connections = match &requests[..] {
            [] => Vec::new(),
            requests => comm.connect(requests)?.all().to_vec(),
        };
        let heading = row("", None, (0, 0), Times::default(), [None; 2]);
        let mut clock = BenchClock::new(comm, Priority::Normal)?;
        // The kernel of `words` polls for ever if its peer is missing.
        clock.limit = Some(limit);
        Ok(Self {
            clock,
            kernels,
            connections,
            samples: setup.samples,
            rows: Live::new(comm, &WIDTHS, &heading, setup.json)?,
        })
    }

    /// The connection of this rank, if it has one.
    fn connection(&self, transport: Transport) -> Option<&Connection> {
        let mut all = self.connections.iter();
        all.find(|connection| connection.transport() == transport)
    }

    /// Times each of `works`, whose samples alternate.
    fn measure<const N: usize>(&self, works: [Work<'_>; N]) -> Result<[Times; N]> {
        let clock = &self.clock;
        let times = clock.measure_in_turn(self.samples, Submission::Eager, 1, &works)?;
        let times: Vec<Times> = times.into_iter().map(|taken| taken.stream).collect();
        times.try_into().ok().context("not all works were timed")
    }

    /// Times launches of each of the kernels `names`, by rank 0 alone if `alone`.
    fn time<const N: usize>(
        &self,
        names: [&str; N],
        transport: Transport,
        launch: Launch,
        (rounds, bytes): (u32, u64),
        alone: bool,
    ) -> Result<[Times; N]> {
        let rank = self.clock.comm.rank();
        let arguments = self.connection(transport).map(|connection| {
            [
                connection.channel(),
                Argument::U32(rank as u32),
                Argument::U32(rounds),
                Argument::U64(bytes),
            ]
        });
        let arguments = arguments.as_ref().filter(|_| rank == 0 || !alone);
        let works = names.map(|name| -> Work<'_> {
            // Before the measurement, of which a search would be a part.
            let kernel = self.kernels.get(name);
            Box::new(move |stream| {
                if let Some(arguments) = arguments {
                    let kernel = kernel.with_context(|| format!("there is no kernel {name}"))?;
                    kernel.launch(stream, &launch, arguments)?;
                }
                Ok(())
            })
        });
        self.measure(works).with_context(|| {
            let names = names.join("' and '");
            format!("measure '{names}', {transport}, of {bytes} bytes")
        })
    }

    /// Adds the times of plain words and of signals, each one way of many back and forth in one kernel.
    fn signals(&mut self, rounds: u32) -> Result<()> {
        let (names, direct) = (["words", "signals"], Transport::Direct);
        let times = self.time(names, direct, Launch::new(1, 1), (rounds, 0), false)?;
        let [words, signals] = times.map(|all| all.divided(2.0 * f64::from(rounds)));
        let row = |what, time, ratio| row(what, Some(direct), (0, 1), time, [None, ratio]);
        self.rows.add(row("words", words, None))?;
        let ratio = signals.median / words.median;
        self.rows.add(row("signals", signals, Some(ratio)))
    }

    /// Adds the time of one way of many back and forth in one kernel of one block.
    fn back_and_forth(
        &mut self,
        what: &str,
        transport: Transport,
        bytes: u64,
        threads: u32,
        rounds: u32,
    ) -> Result<()> {
        let launch = Launch::new(1, threads);
        let [all] = self.time([what], transport, launch, (rounds, bytes), false)?;
        let time = all.divided(2.0 * f64::from(rounds));
        self.rows
            .add(row(what, Some(transport), (bytes, 1), time, [None; 2]))
    }

    /// Adds the time of one put of rank 0 by several blocks, and its rate, which it returns.
    fn once(&mut self, what: &str, bytes: u64, blocks: u32, plain: Option<f64>) -> Result<f64> {
        let direct = Transport::Direct;
        let [time] = self.time([what], direct, Launch::new(blocks, 1024), (1, bytes), true)?;
        self.moved(what, Some(direct), (bytes, blocks), time, plain)
    }

    /// Adds the time of `puts` consecutive proxied puts until all are done, and their rate.
    fn flushed(&mut self, what: &str, bytes: u64, puts: u32, plain: f64) -> Result<f64> {
        let (launch, proxied) = (Launch::new(1, 1), Transport::Proxied);
        let [time] = self.time(["put_and_flush"], proxied, launch, (puts, bytes), true)?;
        let time = time.divided(f64::from(puts));
        self.moved(what, Some(proxied), (bytes, 1), time, Some(plain))
    }

    /// Adds the time of `copies` consecutive copies of the copy engine, and their rate, which it returns.
    fn engine(&mut self, what: &str, bytes: u64, copies: u32) -> Result<f64> {
        let connection = self.connection(Transport::Proxied);
        let connection = connection.filter(|_| self.clock.comm.rank() == 0);
        let copied = connection.map(|connection| -> Result<_> {
            let source = connection.region(0).context("a connection has a region")?;
            let part = DATA as usize..(DATA + bytes) as usize;
            Ok((connection, source.slice(part)?))
        });
        let copied = copied.transpose()?;
        let work: Work<'_> = Box::new(|stream| {
            for _ in 0..copies {
                if let Some((connection, source)) = &copied {
                    connection.write(stream, DATA, source)?;
                }
            }
            Ok(())
        });
        let [time] = self
            .measure([work])
            .with_context(|| format!("measure '{what}' of {bytes} bytes"))?;
        let time = time.divided(f64::from(copies));
        self.moved(what, None, (bytes, 0), time, None)
    }

    /// Adds a row with its rate, which it returns, and the ratio of that to `plain`.
    fn moved(
        &mut self,
        what: &str,
        transport: Option<Transport>,
        (bytes, blocks): (u64, u32),
        time: Times,
        plain: Option<f64>,
    ) -> Result<f64> {
        let rate = bytes as f64 / time.median / 1e9;
        let ratio = plain.map(|plain| rate / plain);
        let row = row(what, transport, (bytes, blocks), time, [Some(rate), ratio]);
        self.rows.add(row)?;
        Ok(rate)
    }

    /// Adds the time of `all` triggers of rank 0, pushed by `blocks` blocks concurrently.
    fn triggers(&mut self, blocks: u32, all: u32) -> Result<()> {
        let each = (all / blocks).max(1);
        let (launch, proxied) = (Launch::new(blocks, 1), Transport::Proxied);
        let [time] = self
            .time(["triggers"], proxied, launch, (each, 0), true)
            .with_context(|| format!("{blocks} blocks"))?;
        let time = time.divided(f64::from(each * blocks));
        let rate = Some(1e-6 / time.median);
        self.rows.add(row(
            "triggers",
            Some(proxied),
            (0, blocks),
            time,
            [rate, None],
        ))
    }
}

/// `time` is that of one way, one put or one trigger. The rate is in 10^9 bytes or 10^6 triggers a second, and
/// the ratio to the row that this one is compared with.
fn row(
    what: &str,
    transport: Option<Transport>,
    (bytes, blocks): (u64, u32),
    time: Times,
    [rate, ratio]: [Option<f64>; 2],
) -> Row {
    let by = or_empty(transport, |transport| transport.to_string());
    let size = ByteSize(bytes);
    let parts = [
        Some(what.to_owned()),
        transport.map(|transport| transport.to_string()),
        (bytes > 0).then(|| size.to_string()),
        (blocks > 0).then(|| counted(blocks as usize, "block")),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    let label = parts.join(", ");
    let digits = |value: f64| format!("{value:.3}");
    let micros = time.median * 1e6;
    let row = Row::of("")
        .name("what", what)
        .key("transport", transport)
        .words("transport", by)
        .key("bytes", bytes)
        .number("size", size)
        .count("blocks", blocks.into())
        .key("time", time)
        .number("us", digits(micros))
        .key("rate", rate)
        .number_or_empty("GB/s or M/s", rate, digits)
        .key("ratio", ratio)
        .number_or_empty("ratio", ratio, digits);
    match rate {
        None => row.bar("one way", "us", label, micros),
        Some(rate) => row.bar("rate in GB/s, of triggers in M/s", "", label, rate),
    }
}
