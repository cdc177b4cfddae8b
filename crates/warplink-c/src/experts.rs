//! Mixture-of-experts layers.

use crate::collectives::{self, CollectivesObject};
use crate::handles::{Collectives, Experts, Handle, Routing, Stream};
use crate::job::JobObject;
use crate::memory::same_job;
use crate::pointer;
use crate::status::{Failure, Outcome, Status, entry};
use crate::types::{numbered, numbered_or_none};
use std::ffi::c_void;
use std::sync::Arc;
use warplink::collective;
use warplink::device::DeviceSlice;

/// Bytes of an expert's number, a count or a weight.
const WORD: u64 = 4;

/// Options of a layer of experts; the same on every rank.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ExpertOptions {
    /// The number of experts, a multiple of the number of ranks. Rank r owns `experts / size` of them, starting at
    /// expert `r * experts / size`.
    pub experts: u64,
    /// The number of experts per token.
    pub top_k: u64,
    /// The most tokens per rank in one call.
    pub max_tokens: u64,
    /// The most rows that one rank sends to one other rank in a call; 0 for the upper bound that follows from the other
    /// options, which every routing fits.
    pub max_rows: u64,
    /// Elements of a row.
    pub elements: u64,
    /// Element type of the experts' results, and of tokens that are not quantised, a `warplink_element_type`: F32, F16 or
    /// BF16.
    pub element_type: i32,
    /// Order of the received rows, a `warplink_row_layout`; 0 is by source rank.
    pub layout: i32,
    /// Treatment of rows beyond `max_rows`, a `warplink_overflow`; 0 drops them.
    pub overflow: i32,
    /// How rows are quantised, a `warplink_quantization`: none (0), PER_TOKEN, PER_BLOCK or PER_BLOCK_POWER_OF_TWO.
    pub quantization: i32,
    /// Not 0 if tokens arrive quantised.
    pub quantized_tokens: i32,
}

/// Tokens that a rank dispatches; device memory, which may be null if `count` is 0.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Tokens {
    /// Their rows: `[count, elements]`.
    pub rows: *const c_void,
    /// The numbers of their experts: `[count, top_k]`. A number that is no expert, such as -1, marks an unused slot.
    pub numbers: *const i32,
    /// If they arrive quantised, their scales: `[count, scales]`, else null.
    pub scales: *const f32,
    /// With the layout ONCE_PER_RANK, the weights of their experts: `[count, top_k]`, else null.
    pub weights: *const f32,
    /// The number of tokens, up to `max_tokens`.
    pub count: u64,
}

/// Device memory for the rows sent to the experts of this rank. Shapes are those of the layouts by source rank; by expert,
/// the first two dimensions are one, in which the rows of one expert follow those of the one before.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Dispatched {
    /// The rows: `[size, max_rows, elements]`. The first `counts[p]` rows of part p come from rank p, in the order of
    /// its tokens. `warplink_experts_max_rows` returns `max_rows`.
    pub rows: *mut c_void,
    /// For each row, the index of its expert among this rank's experts, from 0: `[size, max_rows]`. With the layout
    /// ONCE_PER_RANK of the expert in each slot, -1 for other ranks' and unused slots: `[size, max_rows, top_k]`.
    pub experts: *mut i32,
    /// The number of rows received from each rank: `[size]`. By expert, of each of this rank's experts: `[experts / size]`.
    pub counts: *mut i32,
    /// With a quantisation, the scales of rows: `[size, max_rows, scales]`, one for each row or 128 elements. Else null.
    pub scales: *mut f32,
    /// With the layout ONCE_PER_RANK, the weights of a row's token: `[size, max_rows, top_k]`. Else null.
    pub weights: *mut f32,
    /// With the overflow DROP, how many rows of this rank's tokens were dropped for each of all experts: `[experts]`. May be
    /// null, and is with FAIL.
    pub dropped: *mut i32,
}

/// A layer and the rank that it belongs to.
pub(crate) struct ExpertsObject {
    pub(crate) job: Arc<JobObject>,
    collectives: Arc<CollectivesObject>,
    layer: collective::Experts,
    options: collective::ExpertOptions,
}

/// Where the rows of a dispatch are.
pub(crate) struct RoutingObject {
    pub(crate) job: Arc<JobObject>,
    routing: collective::Routing,
}

/// The memory that a `Dispatched` points to.
struct Rows {
    rows: DeviceSlice,
    experts: DeviceSlice,
    counts: DeviceSlice,
    scales: Option<DeviceSlice>,
    weights: Option<DeviceSlice>,
    dropped: Option<DeviceSlice>,
}

impl ExpertOptions {
    fn options(&self) -> Outcome<collective::ExpertOptions> {
        // A size that overflows this machine's address space fails later, as too large.
        let size = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
        Ok(collective::ExpertOptions {
            experts: size(self.experts),
            top_k: size(self.top_k),
            max_tokens: size(self.max_tokens),
            max_rows: (self.max_rows > 0).then(|| size(self.max_rows)),
            elements: size(self.elements),
            dtype: collectives::element_type(self.element_type)?,
            layout: numbered(self.layout, "warplink_row_layout")?,
            overflow: numbered(self.overflow, "warplink_overflow")?,
            quantization: numbered_or_none(self.quantization, "warplink_quantization")?,
            quantized_tokens: self.quantized_tokens != 0,
        })
    }
}

impl ExpertsObject {
    /// Borrows memory of `count` tokens with `each` bytes per token at a device address.
    ///
    /// # Safety
    /// As for [`CollectivesObject::named`].
    unsafe fn of_tokens(
        &self,
        address: u64,
        count: u64,
        each: usize,
        name: &str,
    ) -> Outcome<DeviceSlice> {
        if count > self.options.max_tokens as u64 {
            return Err(Failure::invalid(
                format!(
                    "{count} tokens; expected at most {}",
                    self.options.max_tokens
                ),
                "pass no more than max_tokens",
            ));
        }
        // SAFETY: guaranteed by the caller.
        unsafe { self.collectives.named(address, count * each as u64, name) }
    }

    /// As [`named`](CollectivesObject::named) for memory that may be left out.
    ///
    /// # Safety
    /// As for [`CollectivesObject::named`].
    unsafe fn optional(
        &self,
        address: u64,
        words: usize,
        name: &str,
    ) -> Outcome<Option<DeviceSlice>> {
        // SAFETY: guaranteed by the caller.
        let memory = || unsafe { self.collectives.named(address, WORD * words as u64, name) };
        (address != 0).then(memory).transpose()
    }

    /// # Safety
    /// The memory of `dispatched` must have the lengths that follow from the layer's options.
    unsafe fn rows(&self, dispatched: &Dispatched) -> Outcome<Rows> {
        let (world, options) = (self.job.communicator.world(), &self.options);
        let rows = world * options.rows_per_peer();
        pointer::check(dispatched.experts, "experts")?;
        pointer::check(dispatched.counts, "counts")?;
        // SAFETY: guaranteed by the caller.
        let memory = |address: u64, bytes: usize, name: &str| unsafe {
            self.collectives.named(address, bytes as u64, name)
        };
        // SAFETY: guaranteed by the caller.
        let optional =
            |address: u64, words: usize, name: &str| unsafe { self.optional(address, words, name) };
        let row = options.elements * options.dispatched_dtype().size();
        let word = WORD as usize;
        let experts = word * rows * options.experts_per_row();
        Ok(Rows {
            rows: memory(dispatched.rows as u64, row * rows, "rows")?,
            experts: memory(dispatched.experts as u64, experts, "experts")?,
            counts: memory(
                dispatched.counts as u64,
                word * options.counts(world),
                "counts",
            )?,
            scales: optional(dispatched.scales as u64, rows * options.scales(), "scales")?,
            weights: optional(dispatched.weights as u64, rows * options.top_k, "weights")?,
            dropped: optional(dispatched.dropped as u64, options.experts, "dropped")?,
        })
    }
}

impl Rows {
    fn dispatched(&self) -> collective::Dispatched<'_> {
        collective::Dispatched {
            scales: self.scales.as_ref(),
            weights: self.weights.as_ref(),
            dropped: self.dropped.as_ref(),
            ..collective::Dispatched::new(&self.rows, &self.experts, &self.counts)
        }
    }
}

/// Creates a layer of experts, with memory for its calls. Does not communicate; blocks while kernels are compiled, the
/// first time on a machine. Requires the direct path. Calls of one layer execute one after another; for concurrent
/// calls, create several layers. Returns WARPLINK_STATUS_INVALID_ARGUMENT if options are inconsistent, and
/// WARPLINK_STATUS_UNSUPPORTED on the path of the vendor's library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_experts_create(
    collectives: Collectives,
    options: *const ExpertOptions,
    experts: *mut Experts,
) -> Status {
    entry("make a layer of experts", || {
        let object = collectives.get()?;
        pointer::check(experts, "experts")?;
        // SAFETY: the caller passes options.
        let options = unsafe { pointer::load(options, "options") }?.options()?;
        let layer = object.collectives.experts(&options)?;
        let made = Experts::new(ExpertsObject {
            job: object.job.clone(),
            collectives: object,
            layer,
            options,
        });
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(experts, "experts", made) }
    })
}

/// Frees a layer. Enqueued calls still complete. Does not block.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_experts_free(experts: Experts) -> Status {
    entry("free a layer of experts", || experts.take().map(drop))
}

/// The most rows that one rank sends to one other rank in a call. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_experts_max_rows(experts: Experts, max_rows: *mut u64) -> Status {
    entry("get the rows of a layer", || {
        let object = experts.get()?;
        let rows = object.options.rows_per_peer();
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(max_rows, "max_rows", rows as u64) }
    })
}

/// Sends each token to the ranks of its experts, in the layer's layout. `target` receives the rows, their counts and the
/// other arrays that describe them; `routing` is a handle for `warplink_experts_combine`, which `warplink_routing_free`
/// frees. All memory is device memory and stays allocated until the stream is synchronized. Collective: the number of
/// tokens may differ between ranks. Does not block. If a rank gets more rows than `max_rows`, unless they are dropped, or
/// options differ, `warplink_stream_synchronize` returns WARPLINK_STATUS_MISMATCH on both ranks, and none of these rows is
/// delivered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_experts_dispatch(
    experts: Experts,
    tokens: *const Tokens,
    target: *const Dispatched,
    routing: *mut Routing,
    stream: Stream,
) -> Status {
    entry("dispatch", || {
        let (object, stream) = (experts.get()?, stream.get()?);
        same_job(&object.job, &stream.job, "stream")?;
        pointer::check(routing, "routing")?;
        // SAFETY: the caller passes tokens.
        let tokens = unsafe { pointer::load(tokens, "tokens") }?;
        // SAFETY: the caller passes a target.
        let target = unsafe { pointer::load(target, "target") }?;
        // SAFETY: its memory has the lengths that the options require.
        let target = unsafe { object.rows(&target) }?;
        let (options, count) = (&object.options, tokens.count);
        let row = options.elements * options.token_dtype().size();
        let each = WORD as usize * options.top_k;
        // SAFETY: the caller passes device addresses of that many bytes, and keeps them allocated.
        let (rows, numbers) = unsafe {
            (
                object.of_tokens(tokens.rows as u64, count, row, "tokens")?,
                object.of_tokens(tokens.numbers as u64, count, each, "numbers")?,
            )
        };
        // At most `max_tokens`, as checked above, so that the products below do not overflow.
        let words = count as usize;
        // SAFETY: as above.
        let (scales, weights) = unsafe {
            (
                object.optional(tokens.scales as u64, words * options.scales(), "scales")?,
                object.optional(tokens.weights as u64, words * options.top_k, "weights")?,
            )
        };
        let sent = collective::Tokens {
            scales: scales.as_ref(),
            weights: weights.as_ref(),
            ..collective::Tokens::new(&rows, &numbers)
        };
        let dispatched = target.dispatched();
        let made = object.layer.dispatch(&sent, &dispatched, &stream.stream)?;
        let made = Routing::new(RoutingObject {
            job: object.job.clone(),
            routing: made,
        });
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(routing, "routing", made) }
    })
}

/// Sets `output` (`[count, elements]`), for each of the `count` tokens of the dispatch that `routing` is of, to the sum of its
/// rows, each multiplied by its weight in `weights` (`[count, top_k]`, or `[count, size]` with the layout ONCE_PER_RANK; null
/// adds rows up as they are): in `float`, in slot order, rounded once. `results` are the experts' results in place of the
/// dispatched rows, of the layer's element type. Dropped rows are left out, and other weights stay as they are. A token
/// without rows gets zeros. Collective. Does not block. Returns WARPLINK_STATUS_INVALID_ARGUMENT if the routing is of
/// another layer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_experts_combine(
    experts: Experts,
    output: *mut c_void,
    results: *const c_void,
    weights: *const f32,
    routing: Routing,
    stream: Stream,
) -> Status {
    entry("combine", || {
        let (object, stream) = (experts.get()?, stream.get()?);
        let routing = routing.get()?;
        same_job(&object.job, &stream.job, "stream")?;
        same_job(&object.job, &routing.job, "routing")?;
        let (world, options) = (object.job.communicator.world(), &object.options);
        let tokens = routing.routing.tokens();
        let rows = (world * options.rows_per_peer() * options.row_bytes()) as u64;
        let columns = options.rows_per_token(world);
        // SAFETY: the caller passes device addresses of that many bytes, and keeps them allocated.
        let (output, results, weights) = unsafe {
            (
                object.of_tokens(output as u64, tokens as u64, options.row_bytes(), "output")?,
                object.collectives.named(results as u64, rows, "results")?,
                object.optional(weights as u64, tokens * columns, "weights")?,
            )
        };
        let (layer, routing) = (&object.layer, &routing.routing);
        Ok(layer.combine(&output, &results, routing, weights.as_ref(), &stream.stream)?)
    })
}

/// Frees the routing of a dispatch, whose memory a later dispatch uses again. Enqueued calls still complete. Keep it as long as
/// a graph of that dispatch or of its combine may be launched. Does not block.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_routing_free(routing: Routing) -> Status {
    entry("free a routing", || routing.take().map(drop))
}
