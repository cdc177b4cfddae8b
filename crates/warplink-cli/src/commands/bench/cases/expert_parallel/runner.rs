//! Runs dispatch and combine: once for the result, and then for their times.

use super::data::Tokens as Data;
use super::{ExpertPeer, ExpertTimes, Routing};
use crate::commands::bench::clock::{BenchClock, Submission, Work};
use crate::commands::bench::peers::{allocate, download, gather, optional, total, vendor};
use crate::commands::bench::report::{Row, micros};
use crate::names::name_of;
use anyhow::{Context, Result};
use std::cell::RefCell;
use warplink::collective::Routing as Dispatch;
use warplink::collective::{
    CollectiveOptions, Dispatched, ExpertOptions, Experts, Parts, QUANTIZED_BLOCK, RowLayout,
    Tokens,
};
use warplink::device::{DeviceSlice, Priority, Stream};
use warplink::{Collectives, Communicator, DType};

/// Bytes of a count, an expert's number or a weight.
const WORD: usize = 4;

/// The same for every number of tokens.
pub(super) struct ExpertRunner<'a> {
    clock: BenchClock<'a>,
    layer: ExpertOptions,
    routing: Routing,
    experts: Experts,
    /// For the calls: tokens, their experts, the weights of these and of the returned rows, the output, and the dispatched
    /// rows with the weights of all slots.
    tokens: DeviceSlice,
    numbers: DeviceSlice,
    slot_weights: DeviceSlice,
    weights: DeviceSlice,
    output: DeviceSlice,
    rows: DeviceSlice,
    /// The part of `rows` that dispatch stores, which is shorter if it quantises.
    dispatched: DeviceSlice,
    locals: DeviceSlice,
    row_weights: DeviceSlice,
    counts: DeviceSlice,
    quantized: Option<Quantized>,
    /// The last dispatch. Dispatches that are captured into graphs have the same memory as it.
    last: RefCell<Option<Dispatch>>,
    vendor: Option<Vendor>,
}

/// Memory for rows that are quantised on their way.
struct Quantized {
    scales: DeviceSlice,
    /// The dispatched rows in the layer's type.
    results: DeviceSlice,
}

/// The vendor's library, and rows that are packed for it.
struct Vendor {
    name: String,
    collectives: Collectives,
    packed: DeviceSlice,
    sent: DeviceSlice,
    received: DeviceSlice,
}

/// Tokens in the device's memory, the same number on every rank.
pub(super) struct LoadedExperts {
    count: usize,
    /// Wrong elements of all ranks' results.
    wrong: u64,
    /// Rows that this rank sends to each, and receives from each.
    sends: Vec<usize>,
    receives: Vec<usize>,
}

impl<'a> ExpertRunner<'a> {
    /// Every rank makes one at the same time.
    pub(super) fn new(
        comm: &'a Communicator,
        layer: ExpertOptions,
        options: &CollectiveOptions,
        (routing, peer): (Routing, ExpertPeer),
    ) -> Result<Self> {
        let world = comm.world();
        let allocate = |bytes| allocate(comm, bytes);
        let rows = world * layer.rows_per_peer();
        let received = allocate(rows * layer.row_bytes())?;
        let stored = rows * layer.elements * layer.dispatched_dtype().size();
        let slots = layer.max_tokens * layer.top_k;
        let vendor = match peer {
            ExpertPeer::None => None,
            ExpertPeer::Nccl => {
                let made = Vendor::new(comm, slots * layer.row_bytes());
                optional(comm, "nccl", made)?
            }
        };
        Ok(Self {
            clock: BenchClock::new(comm, Priority::Normal)?,
            layer,
            routing,
            experts: comm.collectives_with(options)?.experts(&layer)?,
            tokens: allocate(layer.max_tokens * layer.row_bytes())?,
            numbers: allocate(WORD * slots)?,
            slot_weights: allocate(WORD * slots)?,
            weights: allocate(WORD * layer.max_tokens * layer.rows_per_token(world))?,
            output: allocate(layer.max_tokens * layer.row_bytes())?,
            dispatched: received.slice(0..stored)?,
            rows: received,
            locals: allocate(WORD * rows * layer.experts_per_row())?,
            row_weights: allocate(WORD * rows * layer.experts_per_row())?,
            counts: allocate(WORD * layer.counts(world))?,
            quantized: match layer.quantization {
                None => None,
                Some(_) => Some(Quantized {
                    // For as many rows as could arrive, since only the device knows how many do.
                    scales: allocate(WORD * rows * layer.scales())?,
                    results: allocate(rows * layer.row_bytes())?,
                }),
            },
            last: RefCell::default(),
            vendor,
        })
    }

    /// The peer's name.
    pub(super) fn peer(&self) -> Option<String> {
        self.vendor.as_ref().map(|vendor| vendor.name.clone())
    }

    /// Loads `count` tokens on every rank, and checks the result of one dispatch and combine.
    pub(super) fn load(&self, count: usize) -> Result<LoadedExperts> {
        let (comm, layer) = (self.clock.comm, &self.layer);
        let place = (comm.rank(), comm.world());
        let tokens = Data::new(layer, self.routing, place, count);
        let device = comm.device();
        let upload = |memory: &DeviceSlice, bytes: &[u8]| {
            device.upload(&memory.slice(0..bytes.len())?, bytes)
        };
        upload(&self.tokens, &tokens.rows)?;
        let numbers = tokens.experts.iter().flat_map(|n| n.to_le_bytes());
        upload(&self.numbers, &numbers.collect::<Vec<_>>())?;
        let returned = tokens.returned_weights(layer, comm.world());
        for (memory, weights) in [
            (&self.slot_weights, &tokens.weights),
            (&self.weights, &returned),
        ] {
            let bytes = weights.iter().flat_map(|weight| weight.to_le_bytes());
            upload(memory, &bytes.collect::<Vec<_>>())?;
        }
        let stream = &self.clock.stream;
        self.dispatch(count, stream)?;
        if let Some(quantized) = &self.quantized {
            comm.synchronize(stream)?;
            self.widen(quantized)?;
        }
        self.combine(count, stream)?;
        comm.synchronize(stream)?;
        let got = download(comm, &self.output.slice(0..tokens.rows.len())?)?;
        let own = tokens.different(layer, comm.world(), &got);
        let sends = tokens.counts(layer, comm.world());
        let counts: Vec<f64> = sends.iter().map(|count| *count as f64).collect();
        let all = gather(comm, &counts)?;
        let receives = all.iter().filter_map(|counts| counts.get(comm.rank()));
        let receives = receives.map(|count| *count as usize).collect();
        let wrong = total(comm, own)?;
        if let Some(vendor) = &self.vendor {
            // Not part of the times, in the peer's favour: an application would have to count the rows on the device.
            let counts = sends.iter().flat_map(|count| (*count as u32).to_le_bytes());
            device.upload(&vendor.sent, &counts.collect::<Vec<_>>())?;
        }
        Ok(LoadedExperts {
            count,
            wrong,
            sends,
            receives,
        })
    }

    /// Times dispatch and combine of every method. The vendor's cannot be captured, since its host waits.
    pub(super) fn row(
        &self,
        data: &LoadedExperts,
        submission: Submission,
        samples: usize,
        calls: usize,
    ) -> Result<Row> {
        let count = data.count;
        // In this order: a combine uses the routing of the dispatch before it.
        let mut works: Vec<Work<'_>> = vec![
            Box::new(|stream| self.dispatch(count, stream)),
            Box::new(|stream| self.combine(count, stream)),
        ];
        if let (Some(vendor), Submission::Eager) = (&self.vendor, submission) {
            works.push(Box::new(|stream| {
                self.vendor_dispatch(vendor, data, stream)
            }));
            works.push(Box::new(|stream| self.vendor_combine(vendor, data, stream)));
        }
        let clock = &self.clock;
        let times = clock.measure_in_turn(samples, submission, calls, &works)?;
        let methods = times.chunks_exact(2).zip(["warplink", "nccl"]);
        let methods: Vec<ExpertTimes> = methods
            .map(|(times, method)| ExpertTimes {
                method,
                dispatch: times[0].stream,
                combine: times[1].stream,
            })
            .collect();
        let (rows, submission) = (data.receives.iter().sum::<usize>(), name_of(&submission));
        let mut row = Row::of(count.to_string())
            .count("tokens", count as u64)
            .count("rows", rows as u64)
            .name("submission", &submission)
            .key("methods", &methods);
        let mut sums = Vec::new();
        for of in &methods {
            let own = of.method == "warplink";
            let prefix = if own { "" } else { "nccl " };
            let (dispatch, combine) = (of.dispatch.median, of.combine.median);
            sums.push(dispatch + combine);
            row = row
                .number(format!("{prefix}dispatch us"), micros(dispatch))
                .number(format!("{prefix}combine us"), micros(combine))
                .point(
                    format!("{submission}: dispatch and combine in us"),
                    of.method,
                    (dispatch + combine) * 1e6,
                    true,
                );
            if own {
                row = row.wrong(data.wrong);
            }
        }
        Ok(row.speedup(&sums))
    }

    /// Stores the dispatched rows in the layer's type, as experts that return them unchanged.
    fn widen(&self, quantized: &Quantized) -> Result<()> {
        let (comm, layer) = (self.clock.comm, &self.layer);
        let dtype = layer.dispatched_dtype();
        let bytes = download(comm, &self.dispatched)?;
        let scales = download(comm, &quantized.scales)?;
        let scales: Vec<f64> = DType::F32.decode(&scales).collect();
        let block = match layer.scales() {
            1 => layer.elements,
            _ => QUANTIZED_BLOCK,
        };
        let rows = bytes.chunks_exact(layer.elements * dtype.size());
        for (number, (row, scales)) in rows.zip(scales.chunks_exact(layer.scales())).enumerate() {
            let values = dtype.decode(row).enumerate();
            let values = values.map(|(at, value)| value * scales[at / block]);
            let start = number * layer.row_bytes();
            let result = quantized.results.slice(start..start + layer.row_bytes())?;
            comm.device().upload(&result, &layer.dtype.encode(values))?;
        }
        Ok(())
    }

    fn dispatch(&self, count: usize, stream: &Stream) -> Result<()> {
        let tokens = self.tokens.slice(0..count * self.layer.row_bytes())?;
        let numbers = self.numbers.slice(0..WORD * count * self.layer.top_k)?;
        // The memory of the routing is used again.
        self.last.take();
        let weights = self
            .slot_weights
            .slice(0..WORD * count * self.layer.top_k)?;
        let mut tokens = Tokens::new(&tokens, &numbers);
        let mut dispatched = Dispatched::new(&self.dispatched, &self.locals, &self.counts);
        dispatched.scales = self.quantized.as_ref().map(|it| &it.scales);
        if self.layer.layout == RowLayout::OncePerRank {
            tokens.weights = Some(&weights);
            dispatched.weights = Some(&self.row_weights);
        }
        let routing = self.experts.dispatch(&tokens, &dispatched, stream)?;
        self.last.replace(Some(routing));
        Ok(())
    }

    /// For experts that return the rows unchanged.
    fn combine(&self, count: usize, stream: &Stream) -> Result<()> {
        let output = self.output.slice(0..count * self.layer.row_bytes())?;
        let columns = self.layer.rows_per_token(self.clock.comm.world());
        let weights = self.weights.slice(0..WORD * count * columns)?;
        let last = self.last.borrow();
        let routing = last.as_ref().context("a combine before any dispatch")?;
        let weights = Some(&weights);
        let results = self.quantized.as_ref().map_or(&self.rows, |it| &it.results);
        Ok(self
            .experts
            .combine(&output, results, routing, weights, stream)?)
    }

    /// The counts to the other ranks and to the host, and then the packed rows and their experts.
    fn vendor_dispatch(
        &self,
        vendor: &Vendor,
        data: &LoadedExperts,
        stream: &Stream,
    ) -> Result<()> {
        let comm = self.clock.comm;
        vendor
            .collectives
            .all_to_all(&vendor.received, &vendor.sent, stream)?;
        comm.synchronize(stream)?;
        let counts = download(comm, &vendor.received)?;
        let counts = DType::I32.decode(&counts).map(|count| count as usize);
        let received: Vec<usize> = counts.collect();
        let (to, from) = (
            (&self.rows, &received[..]),
            (&vendor.packed, &data.sends[..]),
        );
        vendor.exchange(to, from, self.row_type(), stream)?;
        let (to, from) = (
            (&self.locals, &received[..]),
            (&self.numbers, &data.sends[..]),
        );
        vendor.exchange(to, from, (DType::I32, 1), stream)
    }

    fn vendor_combine(&self, vendor: &Vendor, data: &LoadedExperts, stream: &Stream) -> Result<()> {
        let (to, from) = (
            (&vendor.packed, &data.sends[..]),
            (&self.rows, &data.receives[..]),
        );
        vendor.exchange(to, from, self.row_type(), stream)
    }

    /// Element type and elements of a row.
    fn row_type(&self) -> (DType, usize) {
        (self.layer.dtype, self.layer.elements)
    }
}

impl Vendor {
    fn new(comm: &Communicator, bytes: usize) -> warplink::Result<Self> {
        let (collectives, name) = vendor(comm)?;
        let allocate = |bytes| allocate(comm, bytes);
        Ok(Self {
            name,
            collectives,
            packed: allocate(bytes)?,
            sent: allocate(WORD * comm.world())?,
            received: allocate(WORD * comm.world())?,
        })
    }

    /// Exchanges rows of `each` elements, which are packed by rank: memory, and the number of rows for each rank.
    fn exchange(
        &self,
        (target, received): (&DeviceSlice, &[usize]),
        (source, sent): (&DeviceSlice, &[usize]),
        (dtype, each): (DType, usize),
        stream: &Stream,
    ) -> Result<()> {
        let [received, sent] = [received, sent].map(|rows| {
            let mut end = 0;
            let parts = rows.iter().map(|rows| {
                let start = end;
                end += rows * each;
                (rows * each, start)
            });
            parts.unzip::<usize, usize, Vec<_>, Vec<_>>()
        });
        let [received, sent] = [&received, &sent].map(|(counts, displacements)| Parts {
            counts,
            displacements,
        });
        let (to, from) = ((target, received), (source, sent));
        Ok(self.collectives.all_to_all_v(to, from, dtype, stream)?)
    }
}
