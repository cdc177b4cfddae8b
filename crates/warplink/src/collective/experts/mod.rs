//! Expert parallelism: rows of tokens to the ranks of their experts, and back as weighted sums.
//!
//! Which rows go where is only known in device memory. A kernel lists them (`kernels/experts.cu`), messages with counts in
//! device memory move them, and another kernel sums what came back. No rank waits for others than those that it
//! exchanges rows with, and no host for any.
//!
//! | module | subject |
//! |---|---|
//! | `kernels` | the kernels on each rank, and what they do where a device takes closures |

mod kernels;

use super::Collectives;
use super::messages::{Count, Entry, check_apart};
use crate::device::{AllocationKind, DeviceSlice, InUse, Stream};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::p2p::Direction;
use crate::sync::lock;
use kernels::{ExpertKernels, Routing, Sum};
use std::fmt;
use std::sync::Mutex;

/// Bytes of an expert's number, a count or a place.
const WORD: usize = 4;

/// A layer of experts; the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertOptions {
    /// How many experts there are: a multiple of the ranks. Rank r has those from `r * experts / world` on.
    pub experts: usize,
    /// To how many experts a token goes.
    pub top_k: usize,
    /// The most tokens of a rank in one call.
    pub max_tokens: usize,
    /// The most rows that one rank sends to one other in a call, which all memory is made for; where there is none,
    /// as many as there may be: each token to `top_k` experts of one rank, or to all of its experts where these are
    /// fewer.
    pub max_rows: Option<usize>,
    /// Elements of a row.
    pub elements: usize,
    /// Their type: `f32`, `f16` or `bf16`.
    pub dtype: DType,
}

/// What [`Experts::dispatch`] gives: the rows for the experts of this rank, by the rank that they come from. All of it
/// is the caller's memory.
#[derive(Clone, Copy, Debug)]
pub struct Dispatched<'a> {
    /// The rows: `[world, max_rows, elements]`, of which those of rank p are the first `counts[p]`, in the order of its
    /// tokens.
    pub rows: &'a DeviceSlice,
    /// For each row, which of this rank's experts it is for, from 0 on: `i32[world, max_rows]`.
    pub experts: &'a DeviceSlice,
    /// How many rows came from each rank: `i32[world]`.
    pub counts: &'a DeviceSlice,
}

/// A layer of experts whose calls follow one another; for calls that are under way at the same time, make several.
/// Clones are the same.
#[derive(Clone)]
pub struct Experts(std::sync::Arc<InUse<Layer>>);

struct Layer {
    collectives: Collectives,
    options: ExpertOptions,
    max_rows: usize,
    kernels: ExpertKernels,
    /// For each rank, how many rows go there, the token of each, and for which of its experts.
    counts: DeviceSlice,
    tokens: DeviceSlice,
    locals: DeviceSlice,
    /// For each slot of each token, where its row comes back.
    places: DeviceSlice,
    /// What comes back: `[world, max_rows, elements]`.
    back: DeviceSlice,
    /// How many tokens the last dispatch had, which `places` are for.
    dispatched: Mutex<Option<usize>>,
}

impl ExpertOptions {
    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.elements * self.dtype.size()
    }

    /// The most rows from one of `world` ranks to another.
    pub fn rows_per_peer(&self, world: usize) -> usize {
        let of_token = self.top_k.min(self.experts / world.max(1));
        self.max_rows.unwrap_or(self.max_tokens * of_token)
    }

    fn check(&self, world: usize) -> Result<()> {
        let refused = |text: String, help: &'static str| Err(Error::invalid(text).with_help(help));
        if self.experts == 0 || !self.experts.is_multiple_of(world) {
            return refused(
                format!(
                    "{} experts on {world} ranks; expected a multiple of the ranks",
                    self.experts
                ),
                "give each rank as many experts",
            );
        }
        if !matches!(self.dtype, DType::F32 | DType::F16 | DType::BF16) {
            return refused(
                format!("rows of {}; expected f32, f16 or bf16", self.dtype),
                "use f32, f16 or bf16",
            );
        }
        let sizes = [self.top_k, self.max_tokens, self.elements];
        if sizes.contains(&0) || self.max_rows == Some(0) {
            return refused(
                "a layer of no tokens, slots, rows or elements; expected at least one of each"
                    .to_owned(),
                "give sizes above 0",
            );
        }
        // Kernels number rows in 32 bits.
        let slots = self.max_tokens.checked_mul(self.top_k);
        let rows = slots.and_then(|_| self.rows_per_peer(world).checked_mul(world));
        let bytes = rows.and_then(|rows| rows.checked_mul(self.elements)?.checked_mul(4));
        if bytes.is_none() || slots.max(rows) >= Some(u32::MAX as usize) {
            return refused(
                format!(
                    "{} tokens for {} experts each are more than can be numbered; expected fewer than 2^32 rows",
                    self.max_tokens, self.top_k
                ),
                "pass fewer tokens at a time",
            );
        }
        Ok(())
    }
}

impl Collectives {
    /// A layer of experts on these ranks, with memory for its calls: `world * max_rows` rows. Asks no other rank; blocks
    /// while kernels are compiled, the first time on a machine.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for options that do not fit together; [`ErrorKind::Unsupported`] on the path by
    /// the vendor's library, and for rows that are longer than a chunk of the workspace.
    pub fn experts(&self, options: &ExpertOptions) -> Result<Experts> {
        let made = self.layer(options);
        made.map_err(|error| error.with_operation("make a layer of experts"))
    }

    fn layer(&self, options: &ExpertOptions) -> Result<Experts> {
        let inner = &self.0;
        let world = inner.machine.world;
        options.check(world)?;
        let Some(lines) = &inner.lines else {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "the vendor's library takes no counts from device memory",
            )
            .with_help("read the counts on the host, and pass them to all_to_all_v"));
        };
        lines.check_unit(options.row_bytes())?;
        let device = &inner.context.device;
        let max_rows = options.rows_per_peer(world);
        let memory = |bytes: usize| device.allocate(bytes, AllocationKind::Plain);
        let layer = Layer {
            collectives: self.clone(),
            options: *options,
            max_rows,
            kernels: ExpertKernels::load(&**device)?,
            counts: memory(WORD * world)?,
            tokens: memory(WORD * world * max_rows)?,
            locals: memory(WORD * world * max_rows)?,
            places: memory(WORD * options.max_tokens * options.top_k)?,
            back: memory(options.row_bytes() * world * max_rows)?,
            dispatched: Mutex::default(),
        };
        let in_flight = &inner.context.in_flight;
        Ok(Experts(std::sync::Arc::new(InUse::new(layer, in_flight))))
    }
}

impl Experts {
    /// Sends each row of `tokens` (`[n, elements]`) to the ranks of its `experts` (`i32[n, top_k]`), once for each
    /// expert. A number that is no expert's is a slot without one. Every rank calls it, with any number of tokens up to
    /// `max_tokens`, also none. Does not block; the counts are in device memory alone.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for memory of other lengths, that is not aligned to its elements, or that overlaps
    /// where it is written. More rows for a rank than `max_rows`, and ranks with
    /// other options, are errors of the streams on both ranks ([`ErrorKind::Mismatch`]), and no row of that call
    /// arrives there.
    pub fn dispatch(
        &self,
        tokens: &DeviceSlice,
        experts: &DeviceSlice,
        to: &Dispatched<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let done = self.dispatch_rows(tokens, experts, to, stream);
        done.map_err(|error| error.with_operation("dispatch"))
    }

    /// `output` (`[n, elements]`) becomes for each token of the last dispatch the sum of its rows, each times its weight
    /// in `weights` (`f32[n, top_k]`): in `f32`, in the order of the slots, rounded once, so that it is the same from
    /// run to run. `from` is what the dispatch gave, with the experts' results in the place of the rows. A token without
    /// an expert gets zeros. Every rank calls it. Does not block.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch); [`ErrorKind::InvalidArgument`] for another number of tokens than the last
    /// dispatch had, or without one.
    pub fn combine(
        &self,
        output: &DeviceSlice,
        from: &Dispatched<'_>,
        weights: &DeviceSlice,
        stream: &Stream,
    ) -> Result<()> {
        let done = self.combine_rows(output, from, weights, stream);
        done.map_err(|error| error.with_operation("combine"))
    }

    fn dispatch_rows(
        &self,
        tokens: &DeviceSlice,
        experts: &DeviceSlice,
        to: &Dispatched<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let layer = &**self.0;
        let count = layer.tokens_in("the tokens", tokens)?;
        let slots = count * layer.options.top_k;
        check_bytes("the numbers of experts", experts, WORD * slots, WORD)?;
        layer.check(to)?;
        check_apart(
            &[
                ("rows", to.rows),
                ("experts of rows", to.experts),
                ("counts", to.counts),
            ],
            &[("tokens", tokens), ("numbers of experts", experts)],
        )?;
        let world = layer.world();
        let parts = |memory: &DeviceSlice, unit| layer.parts(memory, unit);
        let (row, rows) = (layer.options.row_bytes(), layer.max_rows);
        let (sent, numbers, locals) = (
            parts(&layer.counts, WORD)?,
            parts(&layer.tokens, WORD * rows)?,
            parts(&layer.locals, WORD * rows)?,
        );
        let received = (
            parts(to.rows, row * rows)?,
            parts(to.experts, WORD * rows)?,
            parts(to.counts, WORD)?,
        );
        let mut entries = Vec::with_capacity(4 * world);
        for peer in layer.peers() {
            let message = |direction, data, unit, count, index| Entry {
                peer,
                direction,
                data,
                bytes: unit * rows,
                unit,
                count,
                index,
            };
            let given = Count::Given(&sent[peer]);
            let told = Count::Told(&received.2[peer]);
            let numbers = Some(&numbers[peer]);
            entries.push(message(Direction::Send, tokens, row, given, numbers));
            entries.push(message(Direction::Send, &locals[peer], WORD, given, None));
            let receives = Direction::Receive;
            entries.push(message(receives, &received.0[peer], row, told, None));
            entries.push(message(receives, &received.1[peer], WORD, told, None));
        }
        let routing = Routing {
            experts: experts.clone(),
            tokens: count,
            slots: layer.options.top_k,
            all: layer.options.experts,
            each: layer.options.experts / world,
            limit: rows,
            counts: layer.counts.clone(),
            rows: layer.tokens.clone(),
            locals: layer.locals.clone(),
            places: layer.places.clone(),
        };
        self.enqueue(stream, |is_recorded| {
            *lock(&layer.dispatched) = None;
            layer.kernels.route(&routing, world, stream)?;
            *lock(&layer.dispatched) = Some(count);
            layer.enqueue(&entries, (stream, is_recorded))
        })
    }

    fn combine_rows(
        &self,
        output: &DeviceSlice,
        from: &Dispatched<'_>,
        weights: &DeviceSlice,
        stream: &Stream,
    ) -> Result<()> {
        let layer = &**self.0;
        let tokens = layer.tokens_in("the output", output)?;
        let slots = layer.options.top_k;
        check_bytes("the weights", weights, WORD * tokens * slots, WORD)?;
        layer.check(from)?;
        check_apart(
            &[("output", output)],
            &[
                ("rows", from.rows),
                ("counts", from.counts),
                ("weights", weights),
            ],
        )?;
        let (row, rows) = (layer.options.row_bytes(), layer.max_rows);
        let (results, back) = (
            layer.parts(from.rows, row * rows)?,
            layer.parts(&layer.back, row * rows)?,
        );
        let counts = (
            layer.parts(from.counts, WORD)?,
            layer.parts(&layer.counts, WORD)?,
        );
        let mut entries = Vec::with_capacity(2 * layer.world());
        for peer in layer.peers() {
            let message = |direction, data, count| Entry {
                peer,
                direction,
                data,
                bytes: row * rows,
                unit: row,
                count: Count::Given(count),
                index: None,
            };
            entries.push(message(Direction::Send, &results[peer], &counts.0[peer]));
            entries.push(message(Direction::Receive, &back[peer], &counts.1[peer]));
        }
        let sum = Sum {
            rows: layer.back.clone(),
            places: layer.places.clone(),
            weights: weights.clone(),
            output: output.clone(),
            tokens,
            slots,
            elements: layer.options.elements,
        };
        self.enqueue(stream, |is_recorded| {
            layer.check_dispatched(tokens)?;
            layer.enqueue(&entries, (stream, is_recorded))?;
            layer.kernels.sum(&sum, layer.options.dtype, stream)
        })
    }

    /// Gives `stream` the work of a call, when it is its turn; `work` is passed whether a graph records it.
    fn enqueue(&self, stream: &Stream, work: impl FnOnce(bool) -> Result<()>) -> Result<()> {
        let inner = &self.0.collectives.0;
        inner.context.fault.check()?;
        let turn = || inner.turns.take_with(stream, work);
        inner.used_by(stream, || self.0.used_by(stream, turn))
    }
}

impl Layer {
    fn world(&self) -> usize {
        self.collectives.0.machine.world
    }

    /// All ranks, from this one on.
    fn peers(&self) -> impl Iterator<Item = Rank> {
        let (rank, world) = (self.collectives.0.context.rank(), self.world());
        (0..world).map(move |step| (rank + step) % world)
    }

    /// How many tokens' rows the memory has.
    fn tokens_in(&self, what: &str, memory: &DeviceSlice) -> Result<usize> {
        let (row, most) = (self.options.row_bytes(), self.options.max_tokens);
        if memory.bytes().is_multiple_of(row) && memory.bytes() / row <= most {
            check_bytes(what, memory, memory.bytes(), self.options.dtype.size())?;
            return Ok(memory.bytes() / row);
        }
        Err(Error::invalid(format!(
            "{what} have {} bytes; expected rows of {row}, at most {most} of them",
            memory.bytes()
        ))
        .with_help("pass whole rows, and no more than max_tokens"))
    }

    fn check(&self, all: &Dispatched<'_>) -> Result<()> {
        let rows = self.world() * self.max_rows;
        let (row, element) = (self.options.row_bytes(), self.options.dtype.size());
        check_bytes("the dispatched rows", all.rows, row * rows, element)?;
        check_bytes("the experts of rows", all.experts, WORD * rows, WORD)?;
        check_bytes("the counts of rows", all.counts, WORD * self.world(), WORD)
    }

    /// Fails where the last dispatch was of other tokens than `tokens` that are combined: where their rows come back is
    /// not known.
    fn check_dispatched(&self, tokens: usize) -> Result<()> {
        let last = match *lock(&self.dispatched) {
            Some(last) if last == tokens => return Ok(()),
            Some(last) => format!("{last}, as the last dispatch had"),
            None => "a dispatch before it".to_owned(),
        };
        Err(
            Error::invalid(format!("a combine of {tokens} tokens; expected {last}"))
                .with_help("combine what was dispatched, before more is dispatched"),
        )
    }

    /// The part of each rank, of `bytes` bytes.
    fn parts(&self, memory: &DeviceSlice, bytes: usize) -> Result<Vec<DeviceSlice>> {
        let ranks = 0..self.world();
        ranks
            .map(|rank| memory.slice(rank * bytes..(rank + 1) * bytes))
            .collect()
    }

    fn enqueue(&self, entries: &[Entry<'_>], stream: (&Stream, bool)) -> Result<()> {
        match &self.collectives.0.lines {
            Some(lines) => lines.enqueue(entries, stream),
            None => Ok(()),
        }
    }
}

/// Fails for memory of another length, or whose elements of `unit` bytes do not begin at multiples of that.
fn check_bytes(what: &str, memory: &DeviceSlice, expected: usize, unit: usize) -> Result<()> {
    if memory.bytes() != expected {
        return Err(Error::invalid(format!(
            "{what} have {} bytes; expected {expected}",
            memory.bytes()
        ))
        .with_help("see ExpertOptions and Dispatched for the shapes"));
    }
    if memory.bytes() > 0 && !memory.address().is_multiple_of(unit as u64) {
        return Err(Error::invalid(format!(
            "{what} begin at {:#x}; expected a multiple of {unit}",
            memory.address()
        ))
        .with_help("begin at a whole element"));
    }
    Ok(())
}

impl fmt::Debug for Experts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Experts({:?})", self.0.options)
    }
}
