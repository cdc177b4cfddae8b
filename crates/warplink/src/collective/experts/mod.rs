//! Expert parallelism: sends rows of tokens to the ranks of their experts, and returns weighted sums.
//!
//! The routing exists only in device memory. Rows are sent by a program (`dispatch.wlp`), which counts and stores them
//! where they are wanted. Results are summed by another one (`combine.wlp`), which reads them where the experts have left
//! them. No host waits.
//!
//! | module | subject |
//! |---|---|
//! | `options` | options, and sizes that follow from them |
//! | `memory` | memory of calls |
//! | `routing` | what combine needs to know of a dispatch |
//! | `dispatch`, `dispatch_text`, `dispatch_steps` | the program that dispatches, its kernels, and its text |
//! | `combine` | the program that combines, and its kernels |
//! | `launch` | sections and announcements of both programs, and figures that both have |

mod combine;
mod dispatch;
mod dispatch_steps;
mod dispatch_text;
mod launch;
mod memory;
mod options;
mod routing;

use super::Collectives;
use super::choice::Machine;
use super::messages::check_apart;
use crate::device::{AllocationKind, DeviceSlice, InUse, Stream};
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Result};
use crate::program::execute::SharedWorkspace;
#[doc(hidden)]
pub use combine::expert_programs;
use combine::{Combine, Rows};
#[doc(hidden)]
pub use dispatch::dispatch_program;
use dispatch::{Dispatch, Routed};
pub(super) use launch::{COMBINE, DISPATCH, EXCEEDED, describe_exceeded, describe_layer};
pub use memory::{Dispatched, Tokens};
use memory::{check_bytes, rows_in};
pub use options::{ExpertOptions, Overflow, RowLayout};
use routing::Places;
pub use routing::Routing;
use std::fmt;
use std::sync::Arc;

/// Bytes of an expert number, count or position.
const WORD: usize = 4;

/// A layer of experts. Its calls are serialized; use several layers for concurrent calls. Clones share the
/// layer.
#[derive(Clone)]
pub struct Experts(Arc<InUse<Layer>>);

struct Layer {
    collectives: Collectives,
    options: ExpertOptions,
    dispatch: Dispatch,
    combine: Combine,
    /// The numbers 0 to `max_tokens`: kernels read how many tokens a call has.
    numbers: DeviceSlice,
    /// For each row of each token, its position among the rows of all ranks.
    places: Places,
    /// Positions of the rows of a token without experts.
    nothing: DeviceSlice,
    /// Counts of dropped rows that no caller looks at; `None` if none may be.
    dropped: Option<DeviceSlice>,
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
        // Each kernel takes seconds to compile.
        std::thread::scope(|scope| {
            let prepare = |tokens| {
                let combine = &combine;
                scope.spawn(move || combine.prepare(on, tokens))
            };
            let others: Vec<_> = combine.calls().into_iter().map(prepare).collect();
            // On this thread, while the others compile the combines. The scope joins them also if this fails.
            dispatch.prepare(on)?;
            let done = others.into_iter().map(|other| {
                other
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            done.collect::<Result<()>>()
        })?;
        let memory = |bytes: usize| device.allocate(bytes, AllocationKind::Plain);
        let columns = options.rows_per_token(world);
        let nothing = memory(WORD * columns)?;
        // One past the last position, which the programs take for no row.
        let nowhere = ((world * options.span(world)) as u32).to_le_bytes();
        device.upload(&nothing, &nowhere.repeat(columns))?;
        // Uploaded once: a call passes the address of its count, so that nothing is copied to the device per call.
        let all = (0..=options.max_tokens as u32).flat_map(u32::to_le_bytes);
        let numbers = memory(WORD * (options.max_tokens + 1))?;
        device.upload(&numbers, &all.collect::<Vec<u8>>())?;
        let drops = options.overflow == Overflow::Drop;
        let dropped = drops.then(|| memory(WORD * options.experts)).transpose()?;
        let layer = Layer {
            collectives: self.clone(),
            options: *options,
            dispatch,
            combine,
            numbers,
            places: Places::new(device, options, world)?,
            nothing,
            dropped,
        };
        let in_flight = &inner.context.in_flight;
        Ok(Experts(Arc::new(InUse::new(layer, in_flight))))
    }
}

impl Experts {
    /// Sends each row of `tokens` to the ranks of its experts, as the layout says. Collective, with up to `max_tokens`
    /// tokens on each rank, possibly none. Does not block; counts stay in device memory. The result is for
    /// [`combine`](Self::combine). Allocates memory if the routing of an earlier dispatch is still there.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for memory of wrong length or alignment, or overlapping outputs. More
    /// rows for a rank than `max_rows`, unless they are dropped, and differing options of two ranks, fail the streams of at
    /// least both ranks ([`ErrorKind::Mismatch`]), and no row of that call arrives.
    pub fn dispatch(
        &self,
        tokens: &Tokens<'_>,
        to: &Dispatched<'_>,
        stream: &Stream,
    ) -> Result<Routing> {
        let done = self.dispatch_rows(tokens, to, stream);
        done.map_err(|error| error.with_operation("dispatch"))
    }

    /// Adds up for each token of a dispatch its returned rows in `output` (`[n, elements]`): in `f32`, in the order of its
    /// slots, rounded once, hence deterministic. `results` are the experts' results in place of the dispatched rows, of the
    /// layer's type. `weights` multiply them: `f32[n, top_k]`, or with [`RowLayout::OncePerRank`] `f32[n, world]`, one for the
    /// row of each rank; without them, rows are added up as they are. Rows that were dropped are left out, and other weights
    /// stay as they are. Tokens without a row get zeros. Collective. Does not block.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch); [`ErrorKind::InvalidArgument`] if the routing is another layer's, or the number of
    /// tokens differs.
    pub fn combine(
        &self,
        output: &DeviceSlice,
        results: &DeviceSlice,
        routing: &Routing,
        weights: Option<&DeviceSlice>,
        stream: &Stream,
    ) -> Result<()> {
        let done = self.combine_rows(output, results, routing, weights, stream);
        done.map_err(|error| error.with_operation("combine"))
    }

    fn dispatch_rows(
        &self,
        tokens: &Tokens<'_>,
        to: &Dispatched<'_>,
        stream: &Stream,
    ) -> Result<Routing> {
        let layer = &**self.0;
        let count = tokens.check(&layer.options)?;
        to.check(&layer.options, layer.world())?;
        check_apart(&to.named(), &tokens.named())?;
        let routing = Routing {
            layer: self.clone(),
            places: layer.places.take()?,
            tokens: count,
        };
        let routed = Routed {
            tokens,
            count: &layer.number(count)?,
            to,
            dropped: to.dropped.or(layer.dropped.as_ref()),
            places: &routing.places,
        };
        self.enqueue(stream, |is_recorded| {
            let on_stream = (stream, is_recorded);
            layer.dispatch.enqueue(layer.direct()?, &routed, on_stream)
        })?;
        Ok(routing)
    }

    fn combine_rows(
        &self,
        output: &DeviceSlice,
        results: &DeviceSlice,
        routing: &Routing,
        weights: Option<&DeviceSlice>,
        stream: &Stream,
    ) -> Result<()> {
        let layer = &**self.0;
        let (options, world) = (&layer.options, layer.world());
        let tokens = rows_in("the output", output, options.row_bytes(), options)?;
        routing.check(self, tokens)?;
        let rows = world * options.rows_per_peer();
        let element = options.dtype.size();
        check_bytes("the results", results, rows * options.row_bytes(), element)?;
        let mut read = vec![("results", results)];
        if let Some(weights) = weights {
            let columns = options.rows_per_token(world);
            check_bytes("the weights", weights, WORD * tokens * columns, WORD)?;
            read.push(("weights", weights));
        }
        check_apart(&[("output", output)], &read)?;
        let rows = Rows {
            results,
            places: &routing.places,
            weights,
            nothing: &layer.nothing,
            count: &layer.number(tokens)?,
            output,
        };
        self.enqueue(stream, |is_recorded| {
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
        // Both are kept while the stream uses them: the layer's memory, and the workspace of the collectives.
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
}

fn no_direct_path() -> Error {
    Error::unsupported("the vendor's library cannot read counts from device memory")
        .with_help("read the counts on the host, and pass them to all_to_all_v")
}

impl fmt::Debug for Experts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Experts({:?})", self.0.options)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod overwritten_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;
