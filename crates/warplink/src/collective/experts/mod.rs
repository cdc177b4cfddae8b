//! Expert parallelism: sends rows of tokens to the ranks of their experts, and returns weighted sums.
//!
//! The routing exists only in device memory. Rows are sent by a program (`dispatch.wlp`), which counts and stores them
//! where they are wanted. Results are summed by another one (`combine.wlp`), which reads them where the experts have left
//! them. No host waits.
//!
//! | module | subject |
//! |---|---|
//! | `dispatch` | the program that dispatches, and its kernels |
//! | `combine` | the program that combines, and its kernels |
//! | `launch` | kernels of both programs, and figures that both have |

mod combine;
mod dispatch;
mod launch;

use super::Collectives;
use super::choice::Machine;
use super::messages::check_apart;
use crate::device::{AllocationKind, DeviceSlice, InUse, Stream};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::named::alternatives;
use crate::program::execute::SharedWorkspace;
use crate::sync::lock;
#[doc(hidden)]
pub use combine::expert_programs;
pub(super) use combine::{COMBINE, describe_combine};
use combine::{Combine, Rows};
#[doc(hidden)]
pub use dispatch::dispatch_program;
pub(super) use dispatch::{DISPATCH, EXCEEDED, describe_dispatch, describe_exceeded};
use dispatch::{Dispatch, Routed};
use std::fmt;
use std::sync::Mutex;

/// Bytes of an expert number, count or position.
const WORD: usize = 4;

/// Options of a layer of experts; equal on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertOptions {
    /// Number of experts, a multiple of the ranks. Rank r has those from `r * experts / world` on.
    pub experts: usize,
    /// Experts for each token.
    pub top_k: usize,
    /// Maximum tokens of a rank in one call.
    pub max_tokens: usize,
    /// Maximum rows from one rank to another in a call, which determines the memory. By default the worst
    /// case: every token goes to `top_k` experts of one rank, or to all of its experts if these are fewer.
    pub max_rows: Option<usize>,
    /// Elements of a row.
    pub elements: usize,
    /// Element type: `f32`, `f16` or `bf16`.
    pub dtype: DType,
}

/// Output of [`Experts::dispatch`]: rows for this rank's experts, grouped by source rank. All of it is the
/// caller's memory.
#[derive(Clone, Copy, Debug)]
pub struct Dispatched<'a> {
    /// Rows: `[world, max_rows, elements]`. Those of rank p are the first `counts[p]`, in the order of its
    /// tokens.
    pub rows: &'a DeviceSlice,
    /// Local index of the expert of each row: `i32[world, max_rows]`.
    pub experts: &'a DeviceSlice,
    /// Number of rows from each rank: `i32[world]`.
    pub counts: &'a DeviceSlice,
}

/// A layer of experts. Its calls are serialized; use several layers for concurrent calls. Clones share the
/// layer.
#[derive(Clone)]
pub struct Experts(std::sync::Arc<InUse<Layer>>);

struct Layer {
    collectives: Collectives,
    options: ExpertOptions,
    max_rows: usize,
    dispatch: Dispatch,
    combine: Combine,
    /// The numbers 0 to `max_tokens`: kernels read how many tokens a call has.
    numbers: DeviceSlice,
    /// For each slot of each token, the position of its row among the `max_rows` rows of each rank.
    places: DeviceSlice,
    /// Positions of the slots of a token without experts.
    nothing: DeviceSlice,
    /// Number of tokens of the last dispatch, to which `places` belongs.
    dispatched: Mutex<Option<usize>>,
}

impl ExpertOptions {
    /// Size of a row in bytes.
    pub fn row_bytes(&self) -> usize {
        self.elements * self.dtype.size()
    }

    /// Maximum rows from one of `world` ranks to another.
    pub fn rows_per_peer(&self, world: usize) -> usize {
        // A token has at most as many experts on a rank as the rank has.
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
        if !DType::MATMUL.contains(&self.dtype) {
            return refused(
                format!(
                    "rows of {}; expected {}",
                    self.dtype,
                    alternatives(&DType::MATMUL)
                ),
                "use one of these types",
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
        // Kernels index rows with 32 bits.
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
    /// Creates a layer of experts on these ranks, with memory for `world * max_rows` rows. Not collective;
    /// blocks while kernels are compiled, the first time on a machine.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for inconsistent options; [`ErrorKind::Unsupported`] on the engine
    /// path, and for rows longer than a chunk of the workspace.
    pub fn experts(&self, options: &ExpertOptions) -> Result<Experts> {
        let made = self.layer(options);
        made.map_err(|error| error.with_operation("make a layer of experts"))
    }

    fn layer(&self, options: &ExpertOptions) -> Result<Experts> {
        let inner = &self.0;
        let world = inner.machine.world;
        options.check(world)?;
        let direct = inner.path.direct().ok_or_else(no_direct_path)?;
        let on = (&inner.machine, &direct.workspace);
        let device = &inner.context.device;
        let of = (inner.context.rank(), device.properties().shared);
        let dispatch = Dispatch::new(options, &inner.machine, of)?;
        let combine = Combine::new(options, &inner.machine, of)?;
        dispatch.prepare(on)?;
        combine.prepare(on)?;
        let max_rows = options.rows_per_peer(world);
        let memory = |bytes: usize| device.allocate(bytes, AllocationKind::Plain);
        let nothing = memory(WORD * options.top_k)?;
        let nowhere = ((world * max_rows) as u32).to_le_bytes();
        device.upload(&nothing, &nowhere.repeat(options.top_k))?;
        let all = (0..=options.max_tokens as u32).flat_map(u32::to_le_bytes);
        let numbers = memory(WORD * (options.max_tokens + 1))?;
        device.upload(&numbers, &all.collect::<Vec<u8>>())?;
        let layer = Layer {
            collectives: self.clone(),
            options: *options,
            max_rows,
            dispatch,
            combine,
            numbers,
            places: memory(WORD * options.max_tokens * options.top_k)?,
            nothing,
            dispatched: Mutex::default(),
        };
        let in_flight = &inner.context.in_flight;
        Ok(Experts(std::sync::Arc::new(InUse::new(layer, in_flight))))
    }
}

impl Experts {
    /// Sends each row of `tokens` (`[n, elements]`) to the ranks of its `experts` (`i32[n, top_k]`), once for
    /// each expert. Out-of-range numbers are empty slots. Collective, with up to `max_tokens` tokens on each
    /// rank, possibly none. Does not block; counts stay in device memory.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for memory of wrong length or alignment, or overlapping outputs. More
    /// rows for a rank than `max_rows`, and differing options of two ranks, fail the streams of at least both ranks
    /// ([`ErrorKind::Mismatch`]), and no row of that call arrives. A single rank leaves out its rows that do not fit.
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

    /// Computes for each token of the last dispatch the weighted sum of its returned rows into `output` (`[n,
    /// elements]`), with `weights` (`f32[n, top_k]`): in `f32`, in slot order, rounded once, hence
    /// deterministic. `from` is the dispatch's output with the experts' results in place of the rows. Tokens
    /// without an expert get zeros. Collective. Does not block.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch); [`ErrorKind::InvalidArgument`] if the number of tokens differs from
    /// the last dispatch, or there was none.
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
        // Validate everything before the kernel that routes, which overwrites the state of the last dispatch.
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
        let routed = Routed {
            tokens,
            experts,
            count: &layer.number(count)?,
            rows: to.rows,
            locals: to.experts,
            counts: to.counts,
            places: &layer.places,
        };
        self.enqueue(stream, |is_recorded| {
            // Invalid while the routing is replaced: if it fails, a combine must not use positions of either
            // dispatch.
            *lock(&layer.dispatched) = None;
            let on_stream = (stream, is_recorded);
            layer
                .dispatch
                .enqueue(layer.direct()?, &routed, on_stream)?;
            *lock(&layer.dispatched) = Some(count);
            Ok(())
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
        let rows = Rows {
            results: from.rows,
            places: &layer.places,
            weights,
            nothing: &layer.nothing,
            count: &layer.number(tokens)?,
            output,
        };
        self.enqueue(stream, |is_recorded| {
            // Within the turn, so that no dispatch of another thread comes between the check and the sum.
            layer.check_dispatched(tokens)?;
            let on_stream = (stream, is_recorded);
            layer.combine.enqueue(layer.direct()?, &rows, on_stream)
        })
    }

    /// Enqueues a call's work on `stream`, in order; `work` receives whether it is being captured.
    fn enqueue(&self, stream: &Stream, work: impl FnOnce(bool) -> Result<()>) -> Result<()> {
        let inner = &self.0.collectives.0;
        inner.context.fault.check()?;
        // In turn with the communicator's collectives, which use the same workspace.
        let turn = || inner.turns.take_with(stream, work);
        inner.used_by(stream, || self.0.used_by(stream, turn))
    }
}

impl Layer {
    fn world(&self) -> usize {
        self.collectives.0.machine.world
    }

    /// The machine, and the workspace of the programs.
    fn direct(&self) -> Result<(&Machine, &SharedWorkspace)> {
        let inner = &self.collectives.0;
        let direct = inner.path.direct().ok_or_else(no_direct_path)?;
        Ok((&inner.machine, &direct.workspace))
    }

    /// Memory that holds a number of tokens.
    fn number(&self, tokens: usize) -> Result<DeviceSlice> {
        self.numbers.slice(WORD * tokens..WORD * (tokens + 1))
    }

    /// Number of tokens whose rows fit the memory exactly.
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

    /// Fails if the last dispatch had another number of tokens than `tokens`: the positions of returned rows
    /// would be wrong.
    fn check_dispatched(&self, tokens: usize) -> Result<()> {
        let last = match *lock(&self.dispatched) {
            Some(last) if last == tokens => return Ok(()),
            Some(last) => format!("{last}, as the last dispatch had"),
            None => "a dispatch before it".to_owned(),
        };
        Err(
            Error::invalid(format!("a combine of {tokens} tokens; expected {last}"))
                .with_help("combine each dispatch before the next one"),
        )
    }
}

fn no_direct_path() -> Error {
    Error::new(
        ErrorKind::Unsupported,
        "the vendor's library cannot read counts from device memory",
    )
    .with_help("read the counts on the host, and pass them to all_to_all_v")
}

/// Fails if memory has the wrong length, or is not aligned to `unit` bytes.
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
        .with_help("align it to the element size"));
    }
    Ok(())
}

impl fmt::Debug for Experts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Experts({:?})", self.0.options)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;
