//! Dispatch as a program, and its kernels.

use super::dispatch_text::{self as text, CELL_ROWS, CELL_WORDS};
use super::launch::{DISPATCH, MANY, SCRATCH_WORDS, UNIT, announced, layer_section};
use super::{Dispatched, ExpertOptions, Tokens, WORD};
use crate::collective::choice::{Machine, part};
use crate::collective::launches::{KernelCache, is_aligned};
use crate::collective::text::parsed;
use crate::device::{DeviceSlice, Readying, Stream};
use crate::error::{Error, Rank, Result};
use crate::program::execute::{SharedKernel, SharedWorkspace};
use crate::program::section::MAX_LANE_STEPS;
use crate::program::{Parameters, Program};
use std::sync::Arc;

/// Maximum lanes that move data.
const MAX_LANES: usize = 128;

/// Threads of a lane, and the tokens of a lane that quantises rows from which on it has twice as many; others have from [`MANY`] on.
/// With 1024 threads, registers limit how many loads are in flight (measured, docs/performance.md).
const THREADS: usize = 256;
const MANY_QUANTIZED: usize = 8;

/// Maximum number of cached kernels.
const MAX_KEPT: usize = 1024;

/// Maximum rows that are on their way in half of the scratch of a lane.
const MAX_DEPTH: usize = 64;

/// Steps of a lane for a slot that goes through scratch, at most, apart from those for each rank.
const SLOT_STEPS: usize = 32;

/// Steps of a lane for each expert, at most, apart from those for slots.
const EXPERT_STEPS: usize = 16;

/// Device memory of a call.
pub(super) struct Routed<'a> {
    pub(super) tokens: &'a Tokens<'a>,
    /// Number of tokens.
    pub(super) count: &'a DeviceSlice,
    pub(super) to: &'a Dispatched<'a>,
    /// Counts of dropped rows, if any may be.
    pub(super) dropped: Option<&'a DeviceSlice>,
    /// `[tokens, top_k]`, or `[tokens, world]`.
    pub(super) places: &'a DeviceSlice,
}

/// Launch shape, equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    /// Lanes that move data.
    lanes: usize,
    threads: usize,
    /// Maximum tokens of a launch.
    tokens: usize,
    /// Rows that are on their way in half of the scratch of a lane.
    depth: usize,
}

/// Cache key: the first token of the launch, and whether memory is aligned.
type Key = (usize, bool);

/// The program of a layer, and its kernels.
pub(super) struct Dispatch {
    options: ExpertOptions,
    max_rows: usize,
    rank: Rank,
    program: Program,
    shape: Shape,
    kernels: KernelCache<Key, Key>,
}

impl Dispatch {
    pub(super) fn new(
        options: &ExpertOptions,
        machine: &Machine,
        (rank, shared): (Rank, bool),
    ) -> Result<Self> {
        Ok(Self {
            options: *options,
            max_rows: options.rows_per_peer(),
            rank,
            program: program(options, machine.world)?,
            shape: Shape::new(options, machine, shared)?,
            kernels: KernelCache::new(MAX_KEPT, MAX_KEPT),
        })
    }

    /// Compiles the kernel for aligned memory.
    pub(super) fn prepare(&self, on: (&Machine, &SharedWorkspace)) -> Result<()> {
        self.kernel(on, (0, true)).map(drop)
    }

    /// Enqueues the dispatch of all tokens.
    pub(super) fn enqueue(
        &self,
        on: (&Machine, &SharedWorkspace),
        call: &Routed<'_>,
        on_stream: (&Stream, bool),
    ) -> Result<()> {
        let Routed { tokens, to, .. } = call;
        // In the order of the text's declarations.
        let tensors = [
            Some(tokens.rows),
            Some(tokens.experts),
            Some(call.count),
            tokens.scales,
            tokens.weights,
            Some(to.rows),
            Some(to.experts),
            Some(to.counts),
            Some(call.places),
            to.scales,
            to.weights,
            call.dropped,
        ];
        let tensors: Vec<&DeviceSlice> = tensors.into_iter().flatten().collect();
        // Two kernels and not one for each combination of addresses: the key is the same for all tensors.
        let aligned = tensors.iter().all(|tensor| is_aligned(tensor));
        // As many launches on every rank, however many tokens each has.
        for from in (0..self.options.max_tokens).step_by(self.shape.tokens) {
            let kernel = self.kernel(on, (from, aligned))?;
            kernel.enqueue(on_stream, &tensors, true)?;
        }
        Ok(())
    }

    fn kernel(&self, on: (&Machine, &SharedWorkspace), key: Key) -> Result<Arc<SharedKernel>> {
        if let Some(kept) = self.kernels.get(&key) {
            return Ok(kept);
        }
        let (from, aligned) = key;
        let section = |_| {
            let parameters = self.parameters(on.0, from);
            layer_section(&self.program, self.rank, on.0, &parameters)
        };
        let sizes = (self.options.max_tokens, None);
        let wanted = (aligned, Readying::WithCode);
        // No two launches share code.
        self.kernels
            .create(on.1, (key, key), wanted, sizes, section)
    }

    #[cfg(test)]
    pub(super) fn program(&self) -> &Program {
        &self.program
    }

    /// Parameters of a launch from a token on.
    pub(super) fn parameters(&self, machine: &Machine, from: usize) -> Parameters {
        let (options, shape) = (&self.options, &self.shape);
        let (words, floats) = scratch(options, machine.world, (shape.lanes, shape.depth));
        // The rest of the workspace is for rows; `Shape` has checked that at least one fits.
        let room = machine.plain_bytes - WORD * (words + floats);
        let room = room / options.dispatched_dtype().size();
        let [what, length, upper, factor] = announced(DISPATCH, options, self.max_rows);
        Parameters::from([
            ("tokens", options.max_tokens as i64),
            ("first", from as i64),
            ("most", shape.tokens.min(options.max_tokens - from) as i64),
            ("rows", self.max_rows as i64),
            ("n", options.elements as i64),
            ("experts", options.experts as i64),
            ("slots", options.top_k as i64),
            ("words", words as i64),
            ("floats", floats as i64),
            ("room", room as i64),
            ("cells", cells(machine) as i64),
            ("scales", options.scales() as i64),
            ("depth", shape.depth as i64),
            ("lanes", shape.lanes as i64 + 1),
            ("threads", shape.threads as i64),
            ("what", what),
            ("length", length),
            ("upper", upper),
            ("factor", factor),
        ])
        .with("T", options.token_dtype())
    }
}

impl Shape {
    fn new(options: &ExpertOptions, machine: &Machine, shared: bool) -> Result<Self> {
        let (world, slots) = (machine.world, options.top_k);
        let row = part(options.elements, 1) * options.dispatched_dtype().size();
        let fits = |lanes: usize, depth: usize| {
            let (words, floats) = scratch(options, world, (lanes, depth));
            let bytes = WORD * (words + floats) + 2 * lanes * depth * row;
            bytes <= machine.plain_bytes && text::cells(options, world, lanes) <= cells(machine)
        };
        // Checked when the layer is created, rather than at a dispatch in the middle of a model.
        if !fits(1, 1) {
            return Err(Error::unsupported(format!(
                "rows of {} bytes for {world} ranks and {} experts do not fit in the workspace",
                options.row_bytes(),
                options.experts
            ))
            .with_help("give the workspace more bytes (CollectiveOptions::workspace_bytes)"));
        }
        let most = (1..=MAX_LANES).take_while(|lanes| fits(*lanes, 1));
        let most = most.last().unwrap_or(1);
        let wanted = options.max_tokens * text::divided(options);
        let lanes = machine.lanes_within(wanted, most);
        // Lanes first: they move data concurrently, where depth only saves barriers between rows that go through
        // scratch.
        let depth = (1..=MAX_DEPTH).take_while(|depth| fits(lanes, *depth));
        let depth = depth.last().unwrap_or(1);
        let of_token = options.rows_per_token(world) * (SLOT_STEPS + 4 * text::words(options));
        let of_token = of_token.max(SLOT_STEPS * slots) * (1 + world.div_ceil(depth));
        let others = SLOT_STEPS * world + EXPERT_STEPS * options.experts;
        // Where kernels run on the host, lanes are resolved to steps, whose number is limited.
        let of_lane = if shared {
            (MAX_LANE_STEPS.saturating_sub(others) / of_token).max(1)
        } else {
            options.max_tokens
        };
        let many = if text::quantizes(options) {
            MANY_QUANTIZED
        } else {
            MANY
        };
        let threads = if options.max_tokens.div_ceil(lanes) < many {
            THREADS
        } else {
            2 * THREADS
        };
        Ok(Self {
            lanes,
            // No more threads than a row has units: the others would be idle.
            threads: machine.threads(threads.min(options.elements.div_ceil(UNIT))),
            tokens: options.max_tokens.min(lanes.saturating_mul(of_lane)),
            depth,
        })
    }
}

/// Words of scratch, and floats: the numbers of rows of ranks; for each lane and rank the number of rows, and two
/// lists of what belongs to rows.
fn scratch(
    options: &ExpertOptions,
    world: usize,
    (lanes, depth): (usize, usize),
) -> (usize, usize) {
    let rows = 2 * lanes * depth;
    let words = world + lanes * world + rows * text::words(options);
    let floats = rows * text::floats(options);
    let up = |words: usize| words.next_multiple_of(SCRATCH_WORDS);
    (up(words), up(floats))
}

/// Cells of packets in half a workspace.
const fn cells(machine: &Machine) -> usize {
    machine.packet_bytes / (WORD * CELL_ROWS * CELL_WORDS)
}

fn program(options: &ExpertOptions, world: usize) -> Result<Program> {
    let text = text::text(options, world);
    parsed(&text, "write the program that dispatches")
}

/// The program of dispatch for these options and this many ranks, for tests of its kernel.
///
/// # Errors
/// An error of the program.
#[doc(hidden)]
pub fn dispatch_program(options: &ExpertOptions, world: usize) -> Result<(String, Program)> {
    let named = format!("dispatch, {}", options.layout);
    Ok((named, program(options, world)?))
}

#[cfg(test)]
#[path = "dispatch_tests.rs"]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;
