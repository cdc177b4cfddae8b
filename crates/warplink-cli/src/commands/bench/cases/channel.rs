//! `warplink bench channel`: puts, signals and packets from inside a kernel, compared with plain kernels
//! and the copy engine.

mod kernels;

use crate::commands::bench::case::{Case, Range, Setup, by_device};
use crate::commands::bench::clock::{Clock, Times, Work};
use crate::commands::bench::plot::{Bar, Bars, Drawing, OWN};
use crate::commands::bench::report::{Columns, Figures, Live, or_empty};
use crate::memory;
use crate::report::bytes::Bytes;
use anyhow::{Context, Result};
use clap::Args;
use kernels::{DATA, Kernels};
use serde::Serialize;
use std::time::Duration;
use warplink::channel::{Connection, ConnectionRequest, Transport};
use warplink::device::{Argument, Kernel, Launch, Priority, Stream};
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
    #[arg(long, value_name = "SECONDS", default_value = "20", value_parser = clap::value_parser!(u16).range(1..))]
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

/// One figure.
#[derive(Debug, Serialize)]
struct ChannelRow {
    what: &'static str,
    transport: Option<Transport>,
    bytes: u64,
    blocks: u32,
    /// One way, of one put, or of one trigger, in seconds.
    time: Times,
    /// Bytes in 10^9, or triggers in 10^6, a second.
    rate: Option<f64>,
    /// To the row that this one is compared with.
    ratio: Option<f64>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Channels {
    rows: Vec<ChannelRow>,
}

/// Two connections between ranks 0 and 1, and the kernels for them; further ranks only keep the barriers.
struct ChannelRunner<'a> {
    clock: Clock<'a>,
    kernels: Kernels,
    connections: Vec<Connection>,
    samples: usize,
    limit: Duration,
    rows: Live<ChannelRow>,
}

impl Case for Channel {
    const NAME: &'static str = "channel";
    const SAMPLES: [u16; 2] = [15, 15];
    const SIZES: Option<Range> = Some(Range::of_bytes(SMALLEST, [256 << 20, 1 << 20], 16384));
    const LIVE: bool = true;
    type Figures = Channels;

    fn check(&self, setup: &Setup) -> Result<()> {
        setup.check_peers("connect to")?;
        setup.check_least(8, "a word")?;
        let bytes = region_bytes(setup.largest() as u64);
        memory::check(setup.kind, 2, bytes, 2 * bytes)
    }

    fn measure(&self, comm: &Communicator, setup: &Setup) -> Result<Channels> {
        let limit = Duration::from_secs(self.limit.into());
        let mut runner = ChannelRunner::new(comm, setup, limit)?;
        self.latencies(&mut runner, by_device(setup.kind, [1000, 100]))?;
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
            for blocks in [1, 8, 132] {
                runner.triggers(blocks, by_device(setup.kind, [20_000, 2_000]))?;
            }
        }
        Ok(Channels {
            rows: runner.rows.rows,
        })
    }
}

impl Channel {
    /// Whether one of these rows is wanted.
    fn wants(&self, names: &[&str]) -> bool {
        let mut asked = self.rows.iter();
        self.rows.is_empty() || asked.any(|row| names.contains(&row.as_str()))
    }

    /// Rows of messages back and forth.
    fn latencies(&self, runner: &mut ChannelRunner<'_>, rounds: u32) -> Result<()> {
        let [direct, proxied] = TRANSPORTS;
        if self.wants(&["words", "signals"]) {
            runner.signals(rounds)?;
            runner.back_and_forth("signals", proxied, 0, 1, rounds)?;
        }
        if self.wants(&["puts"]) {
            for bytes in [8, 4096] {
                runner.back_and_forth("puts", direct, bytes, 256, rounds)?;
                runner.back_and_forth("puts", proxied, bytes, 32, rounds)?;
            }
        }
        if self.wants(&["packets"]) {
            for (bytes, threads) in [(8, 32), (1024, 128), (4096, 512)] {
                runner.back_and_forth("packets", direct, bytes, threads, rounds)?;
            }
        }
        Ok(())
    }
}

/// Bytes of a region with room for sent data, received data, and packets.
fn region_bytes(largest: u64) -> u128 {
    u128::from(DATA) + u128::from(largest.max(4 * SMALLEST))
}

impl<'a> ChannelRunner<'a> {
    fn new(comm: &'a Communicator, setup: &Setup, limit: Duration) -> Result<Self> {
        let bytes = region_bytes(setup.largest() as u64);
        let kernels = Kernels::load(comm)?;
        let bytes = usize::try_from(bytes).context("sizes fit the memory")?;
        let mut requests = Vec::new();
        if let Some(peer) = 1_usize.checked_sub(comm.rank()) {
            for (tag, transport) in TRANSPORTS.into_iter().enumerate() {
                let region = comm.alloc(bytes)?;
                region.upload(&vec![0; bytes])?;
                let request = ConnectionRequest::new(peer, tag as u64, &region);
                requests.push(request.with_transport(transport));
            }
        }
        let connections = match &requests[..] {
            [] => Vec::new(),
            requests => comm.connect(requests)?.all().to_vec(),
        };
        Ok(Self {
            clock: Clock::new(comm, Priority::Normal)?,
            kernels,
            connections,
            samples: setup.samples,
            limit,
            rows: Live::new(
                columns(),
                &WIDTHS,
                &comm.device().name(),
                comm.rank(),
                setup.json,
            )?,
        })
    }

    /// The connection of a rank that takes part.
    fn connection(&self, transport: Transport) -> Option<&Connection> {
        let mut all = self.connections.iter();
        all.find(|connection| connection.transport() == transport)
    }

    /// Times launches of `name`, by rank 0 alone where `alone`.
    fn time(
        &self,
        name: &str,
        transport: Transport,
        launch: Launch,
        sizes: (u32, u64),
        alone: bool,
    ) -> Result<Times> {
        let times = self.time_in_turn(&[name], transport, launch, sizes, alone)?;
        times.first().copied().context("nothing was timed")
    }

    /// Times launches of each of `names`, which take turns: so they see the same clocks.
    fn time_in_turn(
        &self,
        names: &[&str],
        transport: Transport,
        launch: Launch,
        (rounds, bytes): (u32, u64),
        alone: bool,
    ) -> Result<Vec<Times>> {
        let rank = self.clock.comm.rank();
        let kernels = names.iter().map(|name| self.kernels.get(name));
        let kernels: Vec<_> = kernels.collect::<Result<_>>()?;
        let arguments = self.connection(transport).map(|connection| {
            [
                connection.channel(),
                Argument::U32(rank as u32),
                Argument::U32(rounds),
                Argument::U64(bytes),
            ]
        });
        let arguments = arguments.filter(|_| rank == 0 || !alone);
        let launch = |kernel: &Kernel, stream: &Stream| -> Result<()> {
            if let Some(arguments) = &arguments {
                kernel.launch(stream, &launch, arguments)?;
            }
            Ok(())
        };
        let works = kernels
            .iter()
            .map(|kernel| |stream: &Stream| launch(kernel, stream));
        let works: Vec<_> = works.collect();
        let works: Vec<Work<'_>> = works.iter().map(|work| work as Work<'_>).collect();
        self.clock
            .measure_until(self.limit, self.samples, &works)
            .with_context(|| {
                let names = names.join("' and '");
                format!("measure '{names}', {transport}, of {bytes} bytes")
            })
    }

    /// Adds the times of plain words and of signals, each one way of many back and forth in one kernel.
    fn signals(&mut self, rounds: u32) -> Result<()> {
        let (names, direct) = (["words", "signals"], Transport::Direct);
        let times = self.time_in_turn(&names, direct, Launch::new(1, 1), (rounds, 0), false)?;
        let mut plain = None;
        for (what, all) in names.into_iter().zip(times) {
            let time = all.divided(2.0 * f64::from(rounds));
            let ratio = plain.map(|plain| time.median / plain);
            plain = Some(time.median);
            let row = ChannelRow::new(what, Some(direct), (0, 1), time);
            self.rows.add(ChannelRow { ratio, ..row })?;
        }
        Ok(())
    }

    /// Adds the time of one way of many back and forth in one kernel of one block.
    fn back_and_forth(
        &mut self,
        what: &'static str,
        transport: Transport,
        bytes: u64,
        threads: u32,
        rounds: u32,
    ) -> Result<()> {
        let launch = Launch::new(1, threads);
        let all = self.time(what, transport, launch, (rounds, bytes), false)?;
        let time = all.divided(2.0 * f64::from(rounds));
        self.rows
            .add(ChannelRow::new(what, Some(transport), (bytes, 1), time))
    }

    /// Adds the time of one put of rank 0 by several blocks, and its rate over the one given. Returns the rate.
    fn once(
        &mut self,
        what: &'static str,
        bytes: u64,
        blocks: u32,
        plain: Option<f64>,
    ) -> Result<f64> {
        let direct = Transport::Direct;
        let time = self.time(what, direct, Launch::new(blocks, 1024), (1, bytes), true)?;
        self.moved(
            ChannelRow::new(what, Some(direct), (bytes, blocks), time),
            plain,
        )
    }

    /// Adds the time of `puts` proxied puts in a row until all are done, and their rate over `plain`.
    fn flushed(&mut self, what: &'static str, bytes: u64, puts: u32, plain: f64) -> Result<f64> {
        let launch = Launch::new(1, 1);
        let proxied = Transport::Proxied;
        let time = self.time("put_and_flush", proxied, launch, (puts, bytes), true)?;
        let time = time.divided(f64::from(puts));
        self.moved(
            ChannelRow::new(what, Some(proxied), (bytes, 1), time),
            Some(plain),
        )
    }

    /// Adds the time of `copies` copies of the copy engine in a row. Returns their rate.
    fn engine(&mut self, what: &'static str, bytes: u64, copies: u32) -> Result<f64> {
        let connection = self.connection(Transport::Proxied);
        let connection = connection.filter(|_| self.clock.comm.rank() == 0);
        let copied = connection.map(|connection| -> Result<_> {
            let source = connection.region(0).context("a connection has a region")?;
            let part = DATA as usize..(DATA + bytes) as usize;
            Ok((connection, source.slice(part)?))
        });
        let copied = copied.transpose()?;
        let work = |stream: &Stream| -> Result<()> {
            for _ in 0..copies {
                if let Some((connection, source)) = &copied {
                    connection.write(stream, DATA, source)?;
                }
            }
            Ok(())
        };
        let time = self
            .clock
            .measure_until(self.limit, self.samples, &[&work])
            .with_context(|| format!("measure '{what}' of {bytes} bytes"))?;
        let time = time.first().context("nothing was timed")?;
        let time = time.divided(f64::from(copies));
        self.moved(ChannelRow::new(what, None, (bytes, 0), time), None)
    }

    /// Adds a row with its rate, and the ratio of that to `plain`. Returns the rate.
    fn moved(&mut self, row: ChannelRow, plain: Option<f64>) -> Result<f64> {
        let rate = row.bytes as f64 / row.time.median / 1e9;
        self.rows.add(ChannelRow {
            rate: Some(rate),
            ratio: plain.map(|plain| rate / plain),
            ..row
        })?;
        Ok(rate)
    }

    /// Adds the time of `all` triggers of rank 0, pushed by `blocks` blocks at once.
    fn triggers(&mut self, blocks: u32, all: u32) -> Result<()> {
        let each = (all / blocks).max(1);
        let (launch, proxied) = (Launch::new(blocks, 1), Transport::Proxied);
        let time = self
            .time("triggers", proxied, launch, (each, 0), true)
            .with_context(|| format!("{blocks} blocks"))?;
        let time = time.divided(f64::from(each * blocks));
        self.rows.add(ChannelRow {
            rate: Some(1e-6 / time.median),
            ..ChannelRow::new("triggers", Some(proxied), (0, blocks), time)
        })
    }
}

impl ChannelRow {
    fn new(
        what: &'static str,
        transport: Option<Transport>,
        (bytes, blocks): (u64, u32),
        time: Times,
    ) -> Self {
        Self {
            what,
            transport,
            bytes,
            blocks,
            time,
            rate: None,
            ratio: None,
        }
    }
}

const WIDTHS: [usize; 7] = [16, 9, 8, 6, 10, 11, 6];

fn columns() -> Columns<'static, ChannelRow> {
    let digits = |value: Option<f64>| or_empty(value, |value| format!("{value:.3}"));
    Columns::<ChannelRow>::new()
        .words("what", |row| row.what.to_owned())
        .words("transport", |row| {
            or_empty(row.transport, |transport| transport.to_string())
        })
        .number("bytes", |row| Bytes(row.bytes).to_string())
        .number("blocks", |row| row.blocks.to_string())
        .number("us", |row| format!("{:.3}", row.time.median * 1e6))
        .number("GB/s or M/s", move |row| digits(row.rate))
        .number("ratio", move |row| digits(row.ratio))
}

impl Figures for Channels {
    fn title(&self, job: &str) -> String {
        format!("channels, {job}")
    }

    fn tables(&self) -> String {
        columns().table(&self.rows)
    }

    fn drawing(&self) -> Drawing {
        let panel = |title: &str, unit, value: fn(&ChannelRow) -> Option<f64>| {
            let bars = self.rows.iter().filter_map(|row| {
                let transport = or_empty(row.transport, |by| format!("{by}, "));
                let bytes = Bytes(row.bytes);
                Some(Bar {
                    label: format!("{}, {transport}{bytes}, {} blocks", row.what, row.blocks),
                    value: value(row)?,
                    colour: OWN,
                })
            });
            Bars {
                title: title.to_owned(),
                unit,
                bars: bars.collect(),
                limit: None,
            }
        };
        Drawing::Bars(vec![
            panel("one way", "us", |row| match row.rate {
                None => Some(row.time.median * 1e6),
                Some(_) => None,
            }),
            panel("rate in GB/s, of triggers in M/s", "", |row| row.rate),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_below_their_headings() {
        let time = Times {
            median: 1.5e-3,
            least: 1e-3,
            most: 2e-3,
        };
        let proxied = Some(Transport::Proxied);
        let row = ChannelRow {
            rate: Some(44.5),
            ratio: Some(0.98),
            ..ChannelRow::new("put_and_flush", proxied, (64 << 20, 132), time)
        };
        let rows = Live::new(columns(), &WIDTHS, "host", 1, false).unwrap();
        assert_eq!(
            rows.heading(),
            "what              transport     bytes  blocks          us  GB/s or M/s   ratio"
        );
        assert_eq!(
            rows.line(&row),
            "put_and_flush     proxied      64 MiB     132    1500.000       44.500   0.980"
        );
    }
}
