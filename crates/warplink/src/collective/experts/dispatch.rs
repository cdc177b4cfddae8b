//! Dispatch as a program, and its kernels.

use super::dispatch_text::{self as text, CELL_ROWS, CELL_WORDS};
use super::launch::{
    DTYPE, MANY, SCRATCH_WORDS, TOP_K, UNIT, Wanted, described_flags, flags, top_k,
};
use super::{ExpertOptions, WORD};
use crate::collective::choice::{Machine, part};
use crate::device::{DeviceSlice, Stream};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::program::execute::{SharedKernel, SharedWorkspace};
use crate::program::section::MAX_LANE_STEPS;
use crate::program::{Parameters, Program};
use crate::sync::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Maximum lanes that move data.
const MAX_LANES: usize = 128;

/// Threads of a lane, and the tokens of a lane that quantises rows from which on it has twice as many; others have from [`MANY`] on.
/// With 1024 threads, registers limit how many loads are in flight (measured, docs/performance.md).
const THREADS: usize = 256;
const MANY_QUANTIZED: usize = 8;

/// Maximum rows that are on their way in half of the scratch of a lane.
const MAX_DEPTH: usize = 64;

/// Steps of a lane for a slot that goes through scratch, at most, apart from those for each rank.
const SLOT_STEPS: usize = 32;

/// Steps of a lane for each expert, at most, apart from those for slots.
const EXPERT_STEPS: usize = 16;

/// Encoded in place of a collective's kind: a dispatch, and one that has more rows for a rank than there is memory for.
pub(in crate::collective) const DISPATCH: u32 = 0xd;
pub(in crate::collective) const EXCEEDED: u32 = DISPATCH - 1;

/// Rows and what describes them; device memory of a call.
pub(super) struct Routed<'a> {
    /// `[tokens, elements]`.
    pub(super) tokens: &'a DeviceSlice,
    pub(super) token_scales: Option<&'a DeviceSlice>,
    /// `[tokens, top_k]`, 32 bits each.
    pub(super) experts: &'a DeviceSlice,
    pub(super) token_weights: Option<&'a DeviceSlice>,
    /// Number of tokens.
    pub(super) count: &'a DeviceSlice,
    /// `[world, max_rows, elements]`.
    pub(super) rows: &'a DeviceSlice,
    pub(super) scales: Option<&'a DeviceSlice>,
    /// `[world, max_rows]`.
    pub(super) locals: &'a DeviceSlice,
    pub(super) weights: Option<&'a DeviceSlice>,
    /// `[world]`.
    pub(super) counts: &'a DeviceSlice,
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
    kept: Mutex<BTreeMap<Key, Arc<SharedKernel>>>,
}

impl Dispatch {
    pub(super) fn new(
        options: &ExpertOptions,
        machine: &Machine,
        (rank, shared): (Rank, bool),
    ) -> Result<Self> {
        Ok(Self {
            options: *options,
            max_rows: options.rows_per_peer(machine.world),
            rank,
            program: program(options, machine.world)?,
            shape: Shape::new(options, machine, shared)?,
            kept: Mutex::default(),
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
        // In the order of the text's declarations.
        let tensors = [
            Some(call.tokens),
            Some(call.experts),
            Some(call.count),
            call.token_scales,
            call.token_weights,
            Some(call.rows),
            Some(call.locals),
            Some(call.counts),
            Some(call.places),
            call.scales,
            call.weights,
            call.dropped,
        ];
        let tensors: Vec<&DeviceSlice> = tensors.into_iter().flatten().collect();
        let mut starts = tensors.iter().map(|slice| slice.address());
        // Two kernels and not one for each combination of addresses: the key is the same for all tensors.
        let aligned = starts.all(|start| start.is_multiple_of(16));
        // As many launches on every rank, however many tokens each has.
        for from in (0..self.options.max_tokens).step_by(self.shape.tokens) {
            let kernel = self.kernel(on, (from, aligned))?;
            kernel.enqueue(on_stream, &tensors, true)?;
        }
        Ok(())
    }

    fn kernel(&self, on: (&Machine, &SharedWorkspace), key: Key) -> Result<Arc<SharedKernel>> {
        // Held while compiling: launches of one layer are serialized anyway, and a second thread would compile the
        // same kernel.
        let mut kept = lock(&self.kept);
        if let Some(kernel) = kept.get(&key) {
            return Ok(kernel.clone());
        }
        let (from, aligned) = key;
        let wanted = Wanted {
            program: &self.program,
            rank: self.rank,
            parameters: &self.parameters(on.0, from),
            aligned,
            model: None,
        };
        let made = wanted.kernel(on)?;
        kept.insert(key, made.clone());
        Ok(made)
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
        let mut parameters = Parameters::new().with("T", options.token_dtype());
        // As signed words, which is how the scratch of announcements holds them.
        let announced = self.words().map(|word| i64::from(word as i32));
        let [what, length, upper, factor] = announced;
        for (name, value) in [
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
        ] {
            parameters.insert(name, value);
        }
        parameters
    }

    /// Integers that must be equal on all ranks; otherwise the layers differ.
    fn words(&self) -> [u32; 4] {
        let options = &self.options;
        [
            DISPATCH
                | (options.dtype as u32) << DTYPE
                | (options.top_k as u32) << TOP_K
                | flags(options),
            options.max_tokens as u32,
            self.max_rows as u32,
            options.elements as u32,
        ]
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
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "rows of {} bytes for {world} ranks and {} experts have no room in the workspace",
                    options.row_bytes(),
                    options.experts
                ),
            )
            .with_help("give the workspace more bytes (CollectiveOptions::workspace_bytes)"));
        }
        let most = (1..=MAX_LANES).take_while(|lanes| fits(*lanes, 1));
        let most = most.last().unwrap_or(1);
        let wanted = options.max_tokens * text::divided(options);
        let mut lanes = machine.lanes(wanted, most);
        if lanes > most {
            // More are forced than have space.
            let open = Machine {
                forced_lanes: None,
                ..machine.clone()
            };
            lanes = open.lanes(most, most);
        }
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
    Program::parse(&text::text(options, world)).map_err(|error| {
        Error::new(ErrorKind::Internal, error.message().to_owned())
            .with_operation("write the program that dispatches")
    })
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

/// Describes two dispatches, one of which has more rows for a rank than there is memory for. `None` for others.
pub(in crate::collective) fn describe_exceeded(own: &[u32], theirs: &[u32]) -> Option<String> {
    let exceeds = |words: &[u32]| words.first().map(|what| what & 0xf) == Some(EXCEEDED);
    let limit = |words: &[u32]| words.get(2).copied().unwrap_or(0);
    let described = |words, other| {
        format!(
            "{}; expected at most {}",
            describe_dispatch(words),
            limit(other)
        )
    };
    match (exceeds(own), exceeds(theirs)) {
        (true, true) => Some(format!(
            "{}, and {}",
            describe_dispatch(own),
            describe_dispatch(theirs)
        )),
        (true, false) => Some(described(own, theirs)),
        (false, true) => Some(described(theirs, own)),
        (false, false) => None,
    }
}

/// Description of a dispatch from its announcement.
pub(in crate::collective) fn describe_dispatch(words: &[u32]) -> String {
    let [what, tokens, rows, elements] = [0, 1, 2, 3].map(|at| words.get(at).copied().unwrap_or(0));
    if what & 0xf == EXCEEDED {
        let (rank, to) = (rows >> 16, rows & 0xffff);
        return format!("rank {rank} has {tokens} rows for rank {to}");
    }
    let dtype = DType::ALL.get((what >> DTYPE & 0xf) as usize);
    format!(
        "a dispatch of up to {tokens} tokens of {} experts, {rows} rows of a rank, of {elements} {}{}",
        top_k(what),
        dtype.map_or("?", |dtype| dtype.name()),
        described_flags(what)
    )
}

#[cfg(test)]
#[path = "dispatch_tests.rs"]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;
