//! Combine as a program: the shipped text with names in braces replaced according to the number of experts of a token,
//! and its kernels.

use super::ExpertOptions;
use super::launch::{DTYPE, MAX_THREADS, SCRATCH_WORDS, TOP_K, UNIT, Wanted};
use crate::collective::choice::{Machine, part};
use crate::collective::recent::Recent;
use crate::device::{DeviceSlice, Stream};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::program::execute::{SharedKernel, SharedWorkspace};
use crate::program::section::MAX_LANE_STEPS;
use crate::program::{Parameters, Program};
use crate::sync::lock;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex};

const TEXT: &str = include_str!("combine.wlp");

/// Maximum rows that a step adds up: more would not fit into registers.
const ADDED_AT_ONCE: usize = 8;

/// Maximum rows of the function that states the result, whose arguments are limited.
const MAX_STATED: usize = 12;

/// Maximum number of cached kernels.
const MAX_KEPT: usize = 1024;

/// Maximum tokens of a lane in a launch where ranks share cores: lanes are interpreted there, from the start of a launch
/// again for what they read from memory.
const SHARED_TOKENS: usize = 16;

/// Encoded in place of a collective's kind.
pub(in crate::collective) const COMBINE: u32 = 0xe;

/// Rows and their description; device memory of a call.
pub(super) struct Rows<'a> {
    /// `[world, max_rows, elements]`.
    pub(super) results: &'a DeviceSlice,
    /// `[tokens, top_k]`, 32 bits each.
    pub(super) places: &'a DeviceSlice,
    pub(super) weights: &'a DeviceSlice,
    /// `[top_k]` places without an expert.
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
}

/// Cache key: the first token of the launch, the number of tokens of the call, and whether memory is aligned.
type Key = (usize, usize, bool);

/// The program of a layer, and its kernels.
pub(super) struct Combine {
    options: ExpertOptions,
    max_rows: usize,
    rank: Rank,
    program: Program,
    shape: Shape,
    kept: Mutex<Recent<Key, Arc<SharedKernel>>>,
    /// Kernels for the maximum number of tokens, whose code others share.
    models: Mutex<BTreeMap<Key, Arc<SharedKernel>>>,
}

impl Combine {
    pub(super) fn new(
        options: &ExpertOptions,
        machine: &Machine,
        (rank, shared): (Rank, bool),
    ) -> Result<Self> {
        Ok(Self {
            options: *options,
            max_rows: options.rows_per_peer(machine.world),
            rank,
            program: program(options.top_k)?,
            shape: Shape::new(options, machine, shared)?,
            kept: Mutex::new(Recent::new(MAX_KEPT)),
            models: Mutex::default(),
        })
    }

    /// Compiles the kernel for aligned memory.
    pub(super) fn prepare(&self, on: (&Machine, &SharedWorkspace)) -> Result<()> {
        self.kernel(on, (0, self.options.max_tokens, true))
            .map(drop)
    }

    /// Enqueues the sums of all tokens.
    pub(super) fn enqueue(
        &self,
        on: (&Machine, &SharedWorkspace),
        rows: &Rows<'_>,
        on_stream: (&Stream, bool),
    ) -> Result<()> {
        let (slots, row) = (4 * self.options.top_k, self.options.row_bytes());
        let tokens = rows.output.bytes() / row;
        // As many launches on every rank, however many tokens each has.
        for from in (0..self.options.max_tokens).step_by(self.shape.tokens) {
            let own = from.min(tokens)..tokens.min(from + self.shape.tokens);
            let cut =
                |memory: &DeviceSlice, each: usize| memory.slice(own.start * each..own.end * each);
            let slices = [
                rows.results.clone(),
                cut(rows.places, slots)?,
                cut(rows.weights, slots)?,
                rows.nothing.clone(),
                rows.count.clone(),
                cut(rows.output, row)?,
            ];
            let mut starts = slices.iter().map(DeviceSlice::address);
            let aligned = starts.all(|start| start.is_multiple_of(16));
            let kernel = self.kernel(on, (from, tokens, aligned))?;
            let tensors: Vec<&DeviceSlice> = slices.iter().collect();
            kernel.enqueue(on_stream, &tensors, true)?;
        }
        Ok(())
    }

    fn kernel(&self, on: (&Machine, &SharedWorkspace), key: Key) -> Result<Arc<SharedKernel>> {
        if let Some(kept) = lock(&self.kept).get(&key) {
            return Ok(kept.clone());
        }
        let (from, _, aligned) = key;
        let most = (from, self.options.max_tokens, aligned);
        let mut models = lock(&self.models);
        let model = match models.get(&most) {
            Some(model) => model.clone(),
            None => {
                let made = self.made(on, most, None)?;
                models.insert(most, made.clone());
                made
            }
        };
        let made = if key == most {
            model
        } else {
            self.made(on, key, Some(&model))?
        };
        // Dropped outside the lock.
        let before = lock(&self.kept).insert(key, made.clone());
        drop(before);
        Ok(made)
    }

    fn made(
        &self,
        on: (&Machine, &SharedWorkspace),
        (from, tokens, aligned): Key,
        model: Option<&SharedKernel>,
    ) -> Result<Arc<SharedKernel>> {
        let wanted = Wanted {
            program: &self.program,
            rank: self.rank,
            parameters: &self.parameters(on.0, (from, tokens)),
            aligned,
            model,
        };
        wanted.kernel(on)
    }

    #[cfg(test)]
    pub(super) fn program(&self) -> &Program {
        &self.program
    }

    /// Parameters of a launch from a token on, for a call of so many tokens at most.
    pub(super) fn parameters(
        &self,
        machine: &Machine,
        (from, tokens): (usize, usize),
    ) -> Parameters {
        let (options, shape) = (&self.options, &self.shape);
        let words = |count: usize| count.next_multiple_of(SCRATCH_WORDS);
        let requests = words(shape.lanes * machine.world * options.top_k);
        let sums = words(shape.lanes * sum_words(options)).max(SCRATCH_WORDS);
        let room = (machine.plain_bytes - 4 * (requests + sums)) / options.dtype.size();
        let mut parameters = Parameters::new().with("T", options.dtype);
        let announced = self.words().map(|word| i64::from(word as i32));
        let [what, length, upper, factor] = announced;
        for (name, value) in [
            ("tokens", tokens as i64),
            ("first", from as i64),
            ("most", shape.tokens.min(options.max_tokens - from) as i64),
            ("rows", self.max_rows as i64),
            ("n", options.elements as i64),
            ("requests", requests as i64),
            ("sums", sums as i64),
            ("room", room as i64),
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
            COMBINE | (options.dtype as u32) << DTYPE | (options.top_k as u32) << TOP_K,
            options.max_tokens as u32,
            self.max_rows as u32,
            options.elements as u32,
        ]
    }
}

impl Shape {
    fn new(options: &ExpertOptions, machine: &Machine, shared: bool) -> Result<Self> {
        let (world, experts, row) = (machine.world, options.top_k, part(options.elements, 1));
        let words = world * experts + sum_words(options);
        let of_lane = experts * row * options.dtype.size() + 4 * words;
        // The words of all lanes are rounded up.
        let most = machine.plain_bytes.saturating_sub(8 * SCRATCH_WORDS) / of_lane;
        if most == 0 {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "{experts} rows of {} elements have no room in the workspace",
                    options.elements
                ),
            )
            .with_help("give the workspace more bytes (CollectiveOptions::workspace_bytes)"));
        }
        let mut lanes = machine.lanes(options.max_tokens, most);
        if lanes > most {
            // More are forced than have space.
            let open = Machine {
                forced_lanes: None,
                ..machine.clone()
            };
            lanes = open.lanes(most, most);
        }
        // Steps of a lane for a token, at most.
        let steps = 8 * experts * (world + 1) + 8 * world + 16;
        let of_lane = if shared {
            SHARED_TOKENS
        } else {
            (MAX_LANE_STEPS / steps).max(1)
        };
        Ok(Self {
            lanes,
            threads: machine.threads(MAX_THREADS.min(options.elements.div_ceil(UNIT))),
            tokens: options.max_tokens.min(lanes * of_lane),
        })
    }
}

/// Words of scratch of a lane for the sum of a token whose rows are added up in several steps.
fn sum_words(options: &ExpertOptions) -> usize {
    if options.top_k > ADDED_AT_ONCE {
        part(options.elements, 1)
    } else {
        0
    }
}

fn program(experts: usize) -> Result<Program> {
    Program::parse(&text(experts)).map_err(|error| {
        Error::new(ErrorKind::Internal, error.message().to_owned())
            .with_operation("write the program that combines")
    })
}

/// The programs of layers with several numbers of experts of a token, for tests of their kernels.
///
/// # Errors
/// The first error of a program.
#[doc(hidden)]
pub fn expert_programs() -> Result<Vec<(String, Program)>> {
    let all = [1, 8, ADDED_AT_ONCE + 1];
    let named = |experts| Ok((format!("combine, top {experts}"), program(experts)?));
    all.into_iter().map(named).collect()
}

/// The program text for tokens of this many experts.
pub(super) fn text(experts: usize) -> String {
    let each = |with: &dyn Fn(usize) -> String| {
        let all: Vec<String> = (0..experts).map(with).collect();
        all.join("\n")
    };
    let staged =
        |k: usize| format!("B[slot][(i * {experts} + {k}) * row..(i * {experts} + {k}) * row + n]");
    let direct = |k: usize| format!("X[rank][p{k} % rows] on p{k} / rows");
    let expected = if experts <= MAX_STATED {
        format!("expect Y[t] = stated({})", arguments(0..experts, &direct))
    } else {
        String::new()
    };
    let put_in = [
        ("functions", functions(experts)),
        (
            "places",
            each(&|k| format!("let p{k} = P[t][{k}] at most none")),
        ),
        ("direct", added(experts, &direct)),
        (
            "asked",
            each(&|k| format!("let a{k} = R[slot][asked + {k}] at most none"))
                + "\n"
                + &each(&|k| {
                    let to = staged(k);
                    format!("if a{k} / rows == rank {{ put X[p][a{k} % rows] to {to} on p }}")
                }),
        ),
        ("staged", added(experts, &staged)),
        ("expected", expected),
        ("experts", experts.to_string()),
    ];
    let mut made = String::new();
    for line in TEXT.lines() {
        let margin = " ".repeat(line.len() - line.trim_start().len());
        let mut line = line.to_owned();
        for (name, value) in &put_in {
            let value = value.replace('\n', &format!("\n{margin}"));
            line = line.replace(&format!("{{{name}}}"), &value);
        }
        let _ = writeln!(made, "{line}");
    }
    made
}

/// The functions of each step, and the one that states the result.
fn functions(experts: usize) -> String {
    let function = |name: &str, first: &str, experts: std::ops::Range<usize>| {
        let pairs: Vec<String> = experts.clone().map(|k| format!("x{k}, w{k}")).collect();
        let terms: String = experts.map(|k| format!(" + x{k} * w{k}")).collect();
        let before = if first == "0" { "" } else { "before, " };
        format!(
            "function {name}({before}{}) {{ return {first}{terms} }}",
            pairs.join(", ")
        )
    };
    let mut all = Vec::new();
    for (number, from) in (0..experts).step_by(ADDED_AT_ONCE).enumerate() {
        let first = if number == 0 { "0" } else { "before" };
        let these = from..experts.min(from + ADDED_AT_ONCE);
        all.push(function(&format!("added{number}"), first, these));
    }
    if experts <= MAX_STATED {
        all.push(function("stated", "0", 0..experts));
    }
    all.join("\n")
}

/// Steps that add up the rows of a token.
fn added(experts: usize, row: &dyn Fn(usize) -> String) -> String {
    let sum = "S[slot][i * row..i * row + n]";
    let mut steps = Vec::new();
    for (number, from) in (0..experts).step_by(ADDED_AT_ONCE).enumerate() {
        let to = experts.min(from + ADDED_AT_ONCE);
        let target = if to == experts { "Y[t]" } else { sum };
        let before = if number == 0 {
            String::new()
        } else {
            format!("{sum}, ")
        };
        steps.push(format!(
            "{target} = added{number}({before}{})",
            arguments(from..to, row)
        ));
    }
    steps.join("\n")
}

/// Rows and weights of experts, zeros without one.
fn arguments(experts: std::ops::Range<usize>, row: &dyn Fn(usize) -> String) -> String {
    let pairs = experts.map(|k| {
        format!(
            "{} if p{k} < none else 0, W[t][{k}] if p{k} < none else 0",
            row(k)
        )
    });
    pairs.collect::<Vec<_>>().join(", ")
}

/// Description of a combine from its announcement.
pub(in crate::collective) fn describe_combine(words: &[u32]) -> String {
    let [what, tokens, rows, elements] = [0, 1, 2, 3].map(|at| words.get(at).copied().unwrap_or(0));
    let dtype = DType::ALL.get((what >> DTYPE & 0xf) as usize);
    format!(
        "a combine of up to {tokens} tokens of {} experts, {rows} rows of a rank, of {elements} {}",
        what >> TOP_K,
        dtype.map_or("?", |dtype| dtype.name())
    )
}
