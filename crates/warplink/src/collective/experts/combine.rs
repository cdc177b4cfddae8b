//! Combine as a program: the shipped text with names in braces replaced according to the number of experts of a token,
//! and its kernels.

use super::launch::{COMBINE, MANY, SCRATCH_WORDS, UNIT, UNWEIGHTED, announced, layer_section};
use super::{ExpertOptions, RowLayout};
use crate::collective::choice::{Machine, part};
use crate::collective::launches::{KernelCache, is_aligned};
use crate::collective::text::{filled, parsed};
use crate::device::{DeviceSlice, Readying, Stream};
use crate::error::{Error, Rank, Result};
use crate::program::execute::{SharedKernel, SharedWorkspace};
use crate::program::section::MAX_LANE_STEPS;
use crate::program::section::function::MAX_ROW_ARGUMENTS;
use crate::program::{Parameters, Program};
use std::sync::Arc;

const TEXT: &str = include_str!("combine.wlp");

/// Maximum rows that a step adds up: more would not fit into registers.
const ADDED_AT_ONCE: usize = 8;

/// Threads of a lane, or twice as many for [`MANY`] tokens.
const THREADS: usize = 512;

/// Maximum lanes that add up one token.
const MAX_PARTS: usize = 8;

/// Alignment of parts of a row, in bytes.
const PART_BYTES: usize = 16;

/// Maximum number of cached kernels.
const MAX_KEPT: usize = 1024;

/// Maximum tokens of a lane in a launch where ranks share cores: lanes are interpreted there, from the start of a launch
/// again for what they read from memory.
const SHARED_TOKENS: usize = 16;

/// Rows and their description; device memory of a call.
pub(super) struct Rows<'a> {
    /// `[world, max_rows, elements]`.
    pub(super) results: &'a DeviceSlice,
    /// `[tokens, top_k]`, or `[tokens, world]`, 32 bits each.
    pub(super) places: &'a DeviceSlice,
    pub(super) weights: Option<&'a DeviceSlice>,
    /// Places of a token without an expert.
    pub(super) nothing: &'a DeviceSlice,
    /// Number of tokens.
    pub(super) count: &'a DeviceSlice,
    /// `[tokens, elements]`.
    pub(super) output: &'a DeviceSlice,
}

/// Launch shape, equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    /// Lanes that move data.
    lanes: usize,
    threads: usize,
    /// Maximum tokens of a launch.
    tokens: usize,
    /// Lanes that add up one token, if there are enough.
    parts: usize,
}

/// Cache key: the first token of the launch, the number of tokens of the call, whether memory is aligned, and whether there
/// are weights.
type Key = (usize, usize, bool, bool);

/// The program of a layer, and its kernels.
pub(super) struct Combine {
    options: ExpertOptions,
    max_rows: usize,
    rank: Rank,
    /// Rows of a token.
    columns: usize,
    /// Without weights and with them.
    programs: [Program; 2],
    shape: Shape,
    /// Those for the maximum number of tokens have the code that others share.
    kernels: KernelCache<Key, Key>,
}

impl Combine {
    pub(super) fn new(
        options: &ExpertOptions,
        machine: &Machine,
        (rank, shared): (Rank, bool),
    ) -> Result<Self> {
        Ok(Self {
            options: *options,
            max_rows: options.rows_per_peer(),
            rank,
            columns: options.rows_per_token(machine.world),
            programs: [
                program(options, machine.world, false)?,
                program(options, machine.world, true)?,
            ],
            shape: Shape::new(options, machine, shared)?,
            kernels: KernelCache::new(MAX_KEPT, MAX_KEPT),
        })
    }

    /// Numbers of tokens of calls whose kernels differ.
    pub(super) fn calls(&self) -> Vec<usize> {
        let most = self.options.max_tokens;
        let differs = |tokens: &usize| self.shape.most_tokens(*tokens, most) != most;
        // One token stands for all small calls, whose tokens are divided among lanes.
        [1].into_iter().filter(differs).chain([most]).collect()
    }

    /// Compiles the kernel for aligned memory, for calls of so many tokens.
    pub(super) fn prepare(&self, on: (&Machine, &SharedWorkspace), tokens: usize) -> Result<()> {
        // Experts of a rank that gets a row once have applied the weights themselves.
        let weighted = !self.options.sends_weights();
        self.kernel(on, (0, tokens, true, weighted)).map(drop)
    }

    /// Enqueues the sums of all tokens.
    pub(super) fn enqueue(
        &self,
        on: (&Machine, &SharedWorkspace),
        rows: &Rows<'_>,
        on_stream: (&Stream, bool),
    ) -> Result<()> {
        let (slots, row) = (4 * self.columns, self.options.row_bytes());
        let tokens = rows.output.bytes() / row;
        // As many launches on every rank, however many tokens each has.
        for from in (0..self.options.max_tokens).step_by(self.shape.tokens) {
            // Empty where this rank has fewer tokens than the launch begins with; it still serves the others' rows.
            let own = from.min(tokens)..tokens.min(from + self.shape.tokens);
            let cut =
                |memory: &DeviceSlice, each: usize| memory.slice(own.start * each..own.end * each);
            let weights = rows.weights.map(|weights| cut(weights, slots));
            let slices = [
                Some(rows.results.clone()),
                Some(cut(rows.places, slots)?),
                weights.transpose()?,
                Some(rows.nothing.clone()),
                Some(rows.count.clone()),
                Some(cut(rows.output, row)?),
            ];
            let slices: Vec<DeviceSlice> = slices.into_iter().flatten().collect();
            let aligned = slices.iter().all(is_aligned);
            let kernel = self.kernel(on, (from, tokens, aligned, rows.weights.is_some()))?;
            let tensors: Vec<&DeviceSlice> = slices.iter().collect();
            kernel.enqueue(on_stream, &tensors, true)?;
        }
        Ok(())
    }

    fn kernel(&self, on: (&Machine, &SharedWorkspace), key: Key) -> Result<Arc<SharedKernel>> {
        if let Some(kept) = self.kernels.get(&key) {
            return Ok(kept);
        }
        let (from, tokens, aligned, weighted) = key;
        // Code for the largest values serves all smaller ones, so one compilation covers all calls with the same
        // division.
        let most = self.shape.most_tokens(tokens, self.options.max_tokens);
        // Everything that changes the code; the number of tokens itself is a parameter.
        let form = (from, most, aligned, weighted);
        if key != form {
            self.kernel(on, form)?;
        }
        let section = |tokens| {
            let parameters = self.parameters(on.0, (from, tokens), weighted);
            layer_section(self.program(weighted), self.rank, on.0, &parameters)
        };
        let sizes = (tokens, None);
        let wanted = (aligned, Readying::WithCode);
        self.kernels
            .create(on.1, (key, form), wanted, sizes, section)
    }

    pub(super) fn program(&self, weighted: bool) -> &Program {
        &self.programs[usize::from(weighted)]
    }

    /// Parameters of a launch from a token on, for a call of so many tokens at most.
    pub(super) fn parameters(
        &self,
        machine: &Machine,
        (from, tokens): (usize, usize),
        weighted: bool,
    ) -> Parameters {
        let (options, shape) = (&self.options, &self.shape);
        let words = |count: usize| count.next_multiple_of(SCRATCH_WORDS);
        let requests = words(shape.lanes * machine.world * self.columns);
        let sums = words(shape.lanes * sum_words(options, self.columns)).max(SCRATCH_WORDS);
        // `Shape` has checked that the requests and sums fit.
        let room = (machine.plain_bytes - 4 * (requests + sums)) / options.dtype.size();
        let kind = if weighted {
            COMBINE
        } else {
            COMBINE | UNWEIGHTED
        };
        let [what, length, upper, factor] = announced(kind, options, self.max_rows);
        Parameters::from([
            ("tokens", tokens as i64),
            ("first", from as i64),
            ("most", shape.tokens.min(options.max_tokens - from) as i64),
            ("rows", self.max_rows as i64),
            ("n", options.elements as i64),
            ("parts", shape.parts_for(tokens) as i64),
            ("requests", requests as i64),
            ("sums", sums as i64),
            ("room", room as i64),
            ("lanes", shape.lanes as i64 + 1),
            ("threads", shape.threads as i64),
            ("what", what),
            ("length", length),
            ("upper", upper),
            ("factor", factor),
        ])
        .with("T", options.dtype)
    }
}

impl Shape {
    fn new(options: &ExpertOptions, machine: &Machine, shared: bool) -> Result<Self> {
        let (world, row) = (machine.world, part(options.elements, 1));
        let experts = options.rows_per_token(world);
        let words = world * experts + sum_words(options, experts);
        let of_lane = experts * row * options.dtype.size() + 4 * words;
        // The words of all lanes are rounded up.
        let most = machine.plain_bytes.saturating_sub(8 * SCRATCH_WORDS) / of_lane;
        if most == 0 {
            return Err(Error::unsupported(format!(
                "{experts} rows of {} elements do not fit in the workspace",
                options.elements
            ))
            .with_help("give the workspace more bytes (CollectiveOptions::workspace_bytes)"));
        }
        let wanted = options.max_tokens * if shared { 1 } else { MAX_PARTS };
        let lanes = machine.lanes_within(wanted, most);
        // Steps of a lane for a token, at most.
        let steps = 8 * experts * (world + 1) + 8 * world + 16;
        let of_lane = if shared {
            SHARED_TOKENS
        } else {
            (MAX_LANE_STEPS / steps).max(1)
        };
        let many = options.max_tokens.div_ceil(lanes) >= MANY;
        let threads = if many { 2 * THREADS } else { THREADS };
        Ok(Self {
            lanes,
            threads: machine.threads(threads.min(options.elements.div_ceil(UNIT))),
            tokens: options.max_tokens.min(lanes * of_lane),
            parts: if shared { 1 } else { parts(options, lanes) },
        })
    }

    /// Lanes that add up one token of a call of so many.
    const fn parts_for(&self, tokens: usize) -> usize {
        if tokens <= self.lanes / self.parts {
            self.parts
        } else {
            1
        }
    }

    /// The most tokens, up to `limit`, that are divided as those of a call of so many.
    fn most_tokens(&self, tokens: usize, limit: usize) -> usize {
        match self.parts_for(tokens) {
            1 => limit,
            parts => limit.min(self.lanes / parts),
        }
    }
}

/// Equal parts of a row of which each has a lane.
fn parts(options: &ExpertOptions, lanes: usize) -> usize {
    let divides = |parts: &usize| {
        lanes.is_multiple_of(*parts)
            && options.elements.is_multiple_of(*parts)
            && (options.row_bytes() / parts).is_multiple_of(PART_BYTES)
    };
    // The most that divide evenly into aligned parts; 1 always does.
    (1..=MAX_PARTS).rev().find(divides).unwrap_or(1)
}

/// Words of scratch of a lane for the sum of a token whose rows are added up in several steps.
fn sum_words(options: &ExpertOptions, rows: usize) -> usize {
    if rows > ADDED_AT_ONCE {
        part(options.elements, 1)
    } else {
        0
    }
}

fn program(options: &ExpertOptions, world: usize, weighted: bool) -> Result<Program> {
    let text = text(options, world, weighted);
    parsed(&text, "write the program that combines")
}

/// The programs of layers with several numbers of experts of a token, and of both other layouts, for tests of their kernels.
///
/// # Errors
/// The first error of a program.
#[doc(hidden)]
pub fn expert_programs() -> Result<Vec<(String, Program)>> {
    let all = [
        (1, RowLayout::BySource),
        (8, RowLayout::ByExpert),
        (ADDED_AT_ONCE + 1, RowLayout::BySource),
        (8, RowLayout::OncePerRank),
    ];
    let named = |(top_k, layout): (usize, RowLayout)| {
        let options = ExpertOptions {
            top_k,
            layout,
            ..ExpertOptions::default()
        };
        let weighted = layout != RowLayout::OncePerRank;
        let program = program(&options, 8, weighted)?;
        Ok((format!("combine, top {top_k}, {layout}"), program))
    };
    all.into_iter().map(named).collect()
}

/// Rows of a token that are added up.
struct Added {
    rows: usize,
    weighted: bool,
}

/// The program text for this many ranks.
pub(super) fn text(options: &ExpertOptions, world: usize, weighted: bool) -> String {
    let rows = options.rows_per_token(world);
    let by_expert = options.layout == RowLayout::ByExpert;
    let it = Added { rows, weighted };
    let each = |with: &dyn Fn(usize) -> String| {
        let all: Vec<String> = (0..rows).map(with).collect();
        all.join("\n")
    };
    // Position p among those of all ranks: the rank, and its row there among the rows for rank `of`.
    let owner = |p: &str| format!("{p} / span");
    let row = |p: &str, of: &str| {
        let source = if by_expert {
            format!("{p} % span / rows")
        } else {
            of.to_owned()
        };
        format!("X[{source}][{p} % rows]")
    };
    let room = |k: usize, from: &str, length: &str| {
        let start = format!("(i * {rows} + {k}) * row{from}");
        format!("B[slot][{start}..{start} + {length}]")
    };
    let staged = |k: usize| room(k, " + piece * width", "width");
    let direct = |k: usize| {
        let p = format!("p{k}");
        format!("{}[piece] on {}", row(&p, "rank"), owner(&p))
    };
    let expected = if it.can_be_stated() {
        let stated = it.arguments(0..rows, &direct);
        format!("for piece in 0..parts {{ expect Y[t][piece] = stated({stated}) }}")
    } else {
        String::new()
    };
    let asked = |k: usize| {
        let (a, to) = (format!("a{k}"), room(k, "", "n"));
        let (owner, row) = (owner(&a), row(&a, "p"));
        format!("if {owner} == rank {{ put {row} to {to} on p }}")
    };
    let weights = format!("input W: f32[most, {rows}]");
    let put_in = [
        ("weights", if weighted { weights } else { String::new() }),
        (
            "span",
            if by_expert { "world * rows" } else { "rows" }.to_owned(),
        ),
        ("functions", it.functions()),
        (
            "places",
            each(&|k| format!("let p{k} = P[t][{k}] at most none")),
        ),
        ("direct", it.steps(&direct)),
        (
            "asked",
            each(&|k| format!("let a{k} = R[slot][asked + {k}] at most none"))
                + "\n"
                + &each(&asked),
        ),
        ("staged", it.steps(&staged)),
        ("expected", expected),
        ("columns", rows.to_string()),
    ];
    filled(TEXT, &put_in)
}

impl Added {
    /// Whether one function has few enough arguments to state the result.
    const fn can_be_stated(&self) -> bool {
        let of_row = if self.weighted { 2 } else { 1 };
        of_row * self.rows <= MAX_ROW_ARGUMENTS
    }

    /// The functions of each step, and the one that states the result.
    fn functions(&self) -> String {
        let function = |name: &str, first: &str, rows: std::ops::Range<usize>| {
            let of_row = |k: usize| {
                if self.weighted {
                    (format!("x{k}, w{k}"), format!(" + x{k} * w{k}"))
                } else {
                    (format!("x{k}"), format!(" + x{k}"))
                }
            };
            let (arguments, terms): (Vec<String>, String) = rows.map(of_row).unzip();
            let before = if first == "0" { "" } else { "before, " };
            format!(
                "function {name}({before}{}) {{ return {first}{terms} }}",
                arguments.join(", ")
            )
        };
        let mut all = Vec::new();
        for (number, from) in (0..self.rows).step_by(ADDED_AT_ONCE).enumerate() {
            // Sums continue in slot order through the steps, so that the result does not depend on how many rows a
            // step has.
            let first = if number == 0 { "0" } else { "before" };
            let these = from..self.rows.min(from + ADDED_AT_ONCE);
            all.push(function(&format!("added{number}"), first, these));
        }
        if self.can_be_stated() {
            all.push(function("stated", "0", 0..self.rows));
        }
        all.join("\n")
    }

    /// Steps that add up the rows of a token.
    fn steps(&self, row: &dyn Fn(usize) -> String) -> String {
        let sum = "S[slot][i * row..i * row + width]";
        let mut steps = Vec::new();
        for (number, from) in (0..self.rows).step_by(ADDED_AT_ONCE).enumerate() {
            let to = self.rows.min(from + ADDED_AT_ONCE);
            let target = if to == self.rows { "Y[t][piece]" } else { sum };
            let before = if number == 0 {
                String::new()
            } else {
                format!("{sum}, ")
            };
            steps.push(format!(
                "{target} = added{number}({before}{})",
                self.arguments(from..to, row)
            ));
        }
        steps.join("\n")
    }

    /// Rows and weights, zeros where there is no row.
    fn arguments(&self, rows: std::ops::Range<usize>, row: &dyn Fn(usize) -> String) -> String {
        let each = rows.map(|k| {
            // `none` is behind all places: a slot without a row contributes 0 and loads nothing.
            let row = format!("{} if p{k} < none else 0", row(k));
            if self.weighted {
                format!("{row}, W[t][{k}] if p{k} < none else 0")
            } else {
                row
            }
        });
        each.collect::<Vec<_>>().join(", ")
    }
}
