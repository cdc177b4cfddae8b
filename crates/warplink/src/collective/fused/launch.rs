//! Kernels of fused calls, and the selection of the execution strategy.

use super::memory::Form;
use super::way::Way;
use super::{Described, Fused, FusedMemory};
use crate::collective::algorithm::Algorithm;
use crate::collective::choice::Machine;
use crate::collective::estimate::rounded;
use crate::collective::launches::{KernelCache, is_aligned, section};
use crate::device::{DeviceSlice, Readying, Stream};
use crate::error::{Error, Rank, Result};
use crate::named::alternatives;
use crate::program::execute::{SharedKernel, SharedWorkspace};
use crate::program::section::{MAX_THREADS, SectionInstance};
use crate::program::{OperationKind, Parameters, RankProgram, unroll};
use crate::sync::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Maximum number of cached kernels.
const MAX_KEPT: usize = 1024;

/// Elements of a row that a thread handles at a time.
const UNIT: usize = 8;

/// Minimum threads of each of several blocks of a lane, and maximum blocks of a launch that has such lanes: with more,
/// launches take longer (measured, docs/performance.md).
const MIN_BLOCK_THREADS: usize = 128;
const MAX_CLUSTERED: usize = 66;

/// Loads with a fence after them, which the simulated steps lack: for each further row of a lane in [`Way::Pushed`],
/// which the next one does not hide completely, and for access to peers' tensors. Fitted to measured times
/// (docs/performance.md).
const PUSHED_ROW: f64 = 2.0;
const ACCESS: f64 = 4.0;

/// Reason why a row cannot be sent.
const TOO_LONG: &str = "give the workspace more bytes (CollectiveOptions::workspace_bytes)";

/// Cache key: launches with different keys need different kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct KernelKey {
    words: [u32; 4],
    form: Form,
    aligned: bool,
}

/// Key of kernels that share code, with the bit length of the number of rows in its place: with lanes, threads and blocks, and
/// whether lanes have one row each.
type ModelKey = (KernelKey, [usize; 3], bool);

/// Execution strategy and launch shape of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LaunchShape {
    pub(super) way: Way,
    pub(super) lanes: usize,
    pub(super) threads: usize,
    /// Blocks of a lane, which divide its threads: up to twice as many as one may have.
    pub(super) blocks: usize,
    /// Maximum rows of a launch.
    pub(super) rows: usize,
}

/// Creates kernels, and caches those of recent calls.
pub(in crate::collective) struct FusedLaunches {
    rank: Rank,
    kernels: KernelCache<KernelKey, ModelKey>,
    /// Keyed by the announcement of the call with a rounded number of rows.
    ways: Mutex<BTreeMap<[u32; 4], Way>>,
}

impl FusedLaunches {
    pub(in crate::collective) fn new(rank: Rank) -> Self {
        Self {
            rank,
            kernels: KernelCache::new(MAX_KEPT, MAX_KEPT),
            ways: Mutex::default(),
        }
    }

    /// Launches the kernels of a validated call, each for as many rows as fit into the workspace.
    pub(super) fn enqueue(
        &self,
        (machine, workspace): (&Machine, &SharedWorkspace),
        described: &Described,
        memory: &FusedMemory<'_>,
        (stream, is_recorded): (&Stream, bool),
    ) -> Result<()> {
        let Described { call, form } = described;
        let way = self.way(machine, described)?;
        let shape = described.shape(machine, way)?;
        for from in (0..call.tokens).step_by(shape.rows) {
            let rows = shape.rows.min(call.tokens - from);
            let slices = memory.slices((from, rows), call, *form)?;
            let piece = described.of(rows);
            let tensors: Vec<&DeviceSlice> = slices.iter().collect();
            // A single value is not loaded in vectors.
            let mut rows = form.tensors().zip(&slices);
            let aligned = rows.all(|(tensor, slice)| tensor.is_single() || is_aligned(slice));
            // The last piece may have fewer rows, and then takes fewer lanes.
            let shape = piece.shape(machine, way)?;
            let of = (&piece, &shape);
            let kernel = self.kernel((machine, workspace), of, aligned)?;
            kernel.enqueue((stream, is_recorded), &tensors, true)?;
        }
        Ok(())
    }

    /// The fastest applicable strategy by the model.
    fn way(&self, machine: &Machine, described: &Described) -> Result<Way> {
        let mut ways = described.ways();
        ways.retain(|way| machine.carries(*way));
        if let Some(forced) = machine.forced {
            let way = ways.iter().copied().find(|way| way.algorithm() == forced);
            return way.ok_or_else(|| {
                let mut supported: Vec<Algorithm> =
                    ways.iter().map(|way| way.algorithm()).collect();
                // Several ways have the algorithm `chunks`.
                supported.dedup();
                let expected = alternatives(&supported);
                let text =
                    format!("algorithm {forced} cannot execute this call; expected {expected}");
                Error::unsupported(text).with_help("select one of these, or none")
            });
        }
        let [first, rest @ ..] = &ways[..] else {
            return Ok(Way::OneShot);
        };
        if rest.is_empty() {
            return Ok(*first);
        }
        // Calls with a similar number of rows use the same strategy.
        let like = described.of(rounded(described.call.tokens));
        // The announced words describe all of the call that its time depends on; the rest is fixed when joining.
        let key = like.words(*first);
        if let Some(known) = lock(&self.ways).get(&key) {
            return Ok(*known);
        }
        let mut best = (f64::INFINITY, *first);
        for way in ways {
            // A way whose rows do not fit into the workspace has no time, and is passed over.
            if let Ok(seconds) = like.seconds(machine, way)
                && seconds < best.0
            {
                best = (seconds, way);
            }
        }
        lock(&self.ways).insert(key, best.1);
        Ok(best.1)
    }

    fn kernel(
        &self,
        (machine, workspace): (&Machine, &SharedWorkspace),
        (described, shape): (&Described, &LaunchShape),
        aligned: bool,
    ) -> Result<Arc<SharedKernel>> {
        let Described { call, form } = described;
        let key = KernelKey {
            words: described.words(shape.way),
            form: *form,
            aligned,
        };
        if let Some(kept) = self.kernels.get(&key) {
            return Ok(kept);
        }
        let bits = usize::BITS - call.tokens.leading_zeros();
        let like = KernelKey {
            // The bit length in place of the number of rows: as for counts of collectives, the code is that of the
            // largest.
            words: described.of(bits as usize).words(shape.way),
            ..key
        };
        // Part of the key, as such a text has its loop over rows written out.
        let single = call.tokens <= shape.lanes;
        let like = (like, [shape.lanes, shape.threads, shape.blocks], single);
        let section = |tokens: usize| -> Result<SectionInstance> {
            let program = described
                .of(tokens)
                .rank_program(machine, shape, self.rank)?;
            let mut section = section(&program)?;
            section.shared_tensors = form.in_place.iter().any(Option::is_some);
            section.published = matches!(shape.way, Way::Direct | Way::Gathered);
            Ok(section)
        };
        // The largest number of rows of this bit length.
        let most = (1 << bits) - 1;
        let most = if single { shape.lanes.min(most) } else { most };
        let wanted = (aligned, Readying::WithCode);
        let rows = (call.tokens, Some(most));
        self.kernels
            .create(workspace, (key, like), wanted, rows, section)
    }
}

impl Machine {
    /// Whether links support the packets of a strategy.
    fn carries(&self, way: Way) -> bool {
        way != Way::Lined || self.lined_bytes > 0
    }

    /// Data capacity of half a workspace in bytes, for the packets of a strategy.
    const fn room_of_packets(&self, way: Way) -> usize {
        match way {
            Way::Lined => self.lined_bytes,
            _ => self.packet_bytes,
        }
    }
}

impl Described {
    /// The same call with this number of rows.
    pub(super) fn of(&self, tokens: usize) -> Self {
        let call = Fused {
            tokens,
            ..self.call
        };
        Self { call, ..*self }
    }

    /// Lanes, threads and rows of a launch.
    pub(super) fn shape(&self, machine: &Machine, way: Way) -> Result<LaunchShape> {
        let call = &self.call;
        let (_, unit, _) = way.packets();
        let row = call.width.next_multiple_of(unit);
        let too_long = || {
            let text = format!(
                "a row of {} elements does not fit in the workspace",
                call.width
            );
            Error::unsupported(text).with_help(TOO_LONG)
        };
        let world = machine.world;
        let (mut rows, wanted, most) = match way {
            Way::OneShot | Way::Lined => {
                let room = machine.room_of_packets(way) / call.dtype.size();
                let rows = room / ((world - 1).max(1) * row);
                (rows.min(call.tokens), call.tokens, machine.most_lanes)
            }
            Way::Direct | Way::Gathered => {
                let rows = self.staged_rows(world);
                let room = machine.plain_bytes / call.dtype.size() / (rows * row);
                let groups = call.tokens.div_ceil(world);
                let most = room.min(machine.most_lanes).min(self.most_lanes(way));
                (if room == 0 { 0 } else { call.tokens }, groups, most)
            }
            Way::Pushed => {
                let room = machine.plain_bytes / call.dtype.size() / ((world - 1).max(1) * row);
                // A lane has scratch for up to three of its rows.
                let fits = |lanes: &usize| *lanes * call.tokens.div_ceil(*lanes).min(3) <= room;
                let most = (1..=machine.most_lanes).rev().find(fits).unwrap_or(0);
                (if most == 0 { 0 } else { call.tokens }, call.tokens, most)
            }
            Way::Quantized => {
                let lanes = self.quantized_rows(machine) / (2 * world);
                let most = lanes.min(machine.most_lanes);
                let groups = call.tokens.div_ceil(world);
                (if lanes == 0 { 0 } else { call.tokens }, groups, most)
            }
        };
        if rows == 0 {
            return Err(too_long());
        }
        let lanes = machine.lanes_within(wanted.min(rows), most);
        // Launches of a call that needs several have as many rows on each lane.
        if way == Way::Lined && rows < call.tokens && rows > lanes {
            rows -= rows % lanes;
        }
        // With half as many threads, a row's signals and waits take less time.
        let units = if way == Way::Pushed { 2 } else { 1 };
        let threads = machine.threads(call.width.div_ceil(units * UNIT));
        // One block takes long to send and receive a row.
        let blocks = |threads: usize| {
            let each = MIN_BLOCK_THREADS..=MAX_THREADS;
            let fits = |blocks: &usize| {
                matches!(way, Way::OneShot | Way::Lined)
                    && *blocks <= machine.cluster_blocks
                    && each.contains(&(threads / *blocks))
                    && *blocks * (lanes + 1) <= machine.most_blocks.min(MAX_CLUSTERED)
            };
            [8, 4, 2].into_iter().find(fits)
        };
        // With the threads of one block, each would have several units of a long row.
        let is_long = call.width > UNIT * MAX_THREADS && machine.forced_threads.is_none();
        let more = 2 * MAX_THREADS;
        let (threads, blocks) = match blocks(more).filter(|_| is_long) {
            Some(blocks) => (more, blocks),
            None => (threads, blocks(threads).unwrap_or(1)),
        };
        Ok(LaunchShape {
            way,
            lanes,
            threads,
            blocks,
            rows,
        })
    }

    /// Estimated seconds by the model, if the memory is accessible.
    pub(super) fn seconds(&self, machine: &Machine, way: Way) -> Result<f64> {
        let call = &self.call;
        let shape = self.shape(machine, way)?;
        let piece = self.of(shape.rows);
        let programs = (0..machine.world).map(|rank| piece.rank_program(machine, &shape, rank));
        let programs: Vec<RankProgram> = programs.collect::<Result<_>>()?;
        let pieces = self.call.tokens.div_ceil(shape.rows) as f64;
        let lanes = machine.estimates.lanes();
        let fenced = lanes.load + lanes.fence;
        let missing = match way {
            Way::Pushed => PUSHED_ROW * (shape.rows.div_ceil(shape.lanes) - 1) as f64 * fenced,
            Way::Direct | Way::Gathered => ACCESS * fenced,
            // Data is loaded after flags, unit by unit of a thread.
            Way::Lined => call.width.div_ceil(UNIT * shape.threads) as f64 * lanes.load,
            // Half of a packet is its flag, so links carry as many bytes again as the rows have. With this time, the choice
            // changes to lines where measured times of 4 and 8 rows say so (docs/performance.md).
            Way::OneShot => {
                let row = call.width * call.dtype.size() * (machine.world - 1);
                (shape.rows * row) as f64 / lanes.stored
            }
            Way::Quantized => 0.0,
        };
        Ok((machine.estimates.seconds(&programs)? + missing) * pieces)
    }

    pub(super) fn rank_program(
        &self,
        machine: &Machine,
        shape: &LaunchShape,
        rank: Rank,
    ) -> Result<RankProgram> {
        let parameters = self.parameters(machine, shape);
        let program = self.program(shape.way, machine.world, shape.lanes)?;
        let mut program = unroll(&program, rank, machine.world, 1, &parameters)?;
        for operation in &mut program.operations {
            if let OperationKind::Kernel(section) = &mut operation.kind {
                let section = Arc::make_mut(section);
                // Set here, because the text cannot name blocks, nor more threads than one block has.
                (section.threads, section.blocks) = (shape.threads, shape.blocks);
            }
        }
        Ok(program)
    }

    pub(super) fn parameters(&self, machine: &Machine, shape: &LaunchShape) -> Parameters {
        let room = match shape.way {
            Way::OneShot | Way::Lined => {
                machine.room_of_packets(shape.way) / self.call.dtype.size()
            }
            Way::Pushed | Way::Direct | Way::Gathered => {
                machine.plain_bytes / self.call.dtype.size()
            }
            Way::Quantized => machine.plain_bytes,
        };
        let words = self.words(shape.way).map(|word| i64::from(word as i32));
        let [what, length, upper, factor] = words;
        let mut parameters = Parameters::from([
            ("tokens", self.call.tokens as i64),
            ("n", self.call.width as i64),
            ("room", room as i64),
            ("lanes", shape.lanes as i64 + 1),
            ("threads", shape.threads.min(MAX_THREADS) as i64),
            ("what", what),
            ("form", i64::from(self.form_word(shape.way) as i32)),
            ("length", length),
            ("upper", upper),
            ("factor", factor),
        ])
        .with("T", self.call.dtype);
        if shape.way == Way::Quantized {
            let lanes = shape.lanes * machine.world;
            let rows = self.call.tokens.div_ceil(lanes);
            // As many rows at a time as there is scratch for, but not more than a lane has.
            let deep = (self.quantized_rows(machine) / (2 * lanes)).clamp(1, rows);
            parameters.insert("deep", deep as i64);
        }
        parameters
    }
}
