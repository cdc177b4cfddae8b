//! Mixture-of-experts layers.

use crate::collectives::{self, CollectivesObject};
use crate::handles::{Collectives, Experts, Handle, Stream};
use crate::job::JobObject;
use crate::memory::same_job;
use crate::pointer;
use crate::status::{Failure, Outcome, Status, entry};
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
    /// options.
    pub max_rows: u64,
    /// Elements of a row.
    pub elements: u64,
    /// Element type of the rows, a `warplink_element_type`: F32, F16 or BF16.
    pub element_type: i32,
}

/// Device memory for the rows sent to the experts of this rank, grouped by source rank.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Dispatched {
    /// The rows: `[size, max_rows, elements]`. The first `counts[p]` rows of part p come from rank p, in the order of
    /// its tokens. `warplink_experts_max_rows` returns `max_rows`.
    pub rows: *mut c_void,
    /// For each row, the index of its expert among this rank's experts, from 0: `[size, max_rows]`.
    pub experts: *mut i32,
    /// The number of rows received from each rank: `[size]`.
    pub counts: *mut i32,
}

/// A layer and the rank that it belongs to.
pub(crate) struct ExpertsObject {
    pub(crate) job: Arc<JobObject>,
    collectives: Arc<CollectivesObject>,
    layer: collective::Experts,
    options: collective::ExpertOptions,
}

/// The memory that a `Dispatched` points to.
struct Rows {
    rows: DeviceSlice,
    experts: DeviceSlice,
    counts: DeviceSlice,
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
        })
    }
}

impl ExpertsObject {
    /// Borrows memory of `count` tokens with `each` bytes per token at a device address.
    ///
    /// # Safety As for [`CollectivesObject::named`].
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

    /// # Safety The memory of `dispatched` must have the lengths that follow from the layer's options.
    unsafe fn rows(&self, dispatched: &Dispatched) -> Outcome<Rows> {
        let world = self.job.communicator.world();
        let rows = (world * self.options.rows_per_peer(world)) as u64;
        pointer::check(dispatched.experts, "experts")?;
        pointer::check(dispatched.counts, "counts")?;
        // SAFETY: guaranteed by the caller.
        let memory = |address: u64, bytes: u64, name: &str| unsafe {
            self.collectives.named(address, bytes, name)
        };
        let row = self.options.row_bytes() as u64;
        Ok(Rows {
            rows: memory(dispatched.rows as u64, row * rows, "rows")?,
            experts: memory(dispatched.experts as u64, WORD * rows, "experts")?,
            counts: memory(dispatched.counts as u64, WORD * world as u64, "counts")?,
        })
    }
}

impl Rows {
    fn dispatched(&self) -> collective::Dispatched<'_> {
        collective::Dispatched {
            rows: &self.rows,
            experts: &self.experts,
            counts: &self.counts,
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
        let rows = object
            .options
            .rows_per_peer(object.job.communicator.world());
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(max_rows, "max_rows", rows as u64) }
    })
}

/// Sends each of the `count` rows of `tokens` (`[count, elements]`) to the ranks of its experts, once per expert;
/// `numbers` (`[count, top_k]`) holds the experts' numbers. A number that is no expert, such as -1, marks an unused
/// slot. All memory is device memory and stays allocated until the stream is synchronized. Collective: `count` may
/// differ between ranks and be anything up to `max_tokens`; if it is 0, tokens and numbers may be null. Does not block.
/// If a rank gets more rows than `max_rows`, or options differ, `warplink_stream_synchronize` returns
/// WARPLINK_STATUS_MISMATCH on both ranks, and none of these rows is delivered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_experts_dispatch(
    experts: Experts,
    tokens: *const c_void,
    numbers: *const i32,
    count: u64,
    target: *const Dispatched,
    stream: Stream,
) -> Status {
    entry("dispatch", || {
        let (object, stream) = (experts.get()?, stream.get()?);
        same_job(&object.job, &stream.job, "stream")?;
        // SAFETY: the caller passes a target.
        let target = unsafe { pointer::load(target, "target") }?;
        // SAFETY: its memory has the lengths that the options require.
        let target = unsafe { object.rows(&target) }?;
        let (row, slots) = (object.options.row_bytes(), object.options.top_k);
        let each = WORD as usize * slots;
        // SAFETY: the caller passes device addresses of that many bytes, and keeps them allocated.
        let (tokens, numbers) = unsafe {
            (
                object.of_tokens(tokens as u64, count, row, "tokens")?,
                object.of_tokens(numbers as u64, count, each, "numbers")?,
            )
        };
        let layer = &object.layer;
        Ok(layer.dispatch(&tokens, &numbers, &target.dispatched(), &stream.stream)?)
    })
}

/// Sets `output` (`[count, elements]`), for each token of the last dispatch, to the sum of its rows, each multiplied by
/// its weight in `weights` (`[count, top_k]`): in `float`, in slot order, rounded once. `source` is the target of the
/// dispatch, with its rows replaced by the experts' results. A token without experts gets zeros. Collective. Does not
/// block. Returns WARPLINK_STATUS_INVALID_ARGUMENT if there was no dispatch, or its `count` differs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_experts_combine(
    experts: Experts,
    output: *mut c_void,
    source: *const Dispatched,
    weights: *const f32,
    count: u64,
    stream: Stream,
) -> Status {
    entry("combine", || {
        let (object, stream) = (experts.get()?, stream.get()?);
        same_job(&object.job, &stream.job, "stream")?;
        // SAFETY: the caller passes a source.
        let source = unsafe { pointer::load(source, "source") }?;
        // SAFETY: its memory has the lengths that the options require.
        let source = unsafe { object.rows(&source) }?;
        let (row, slots) = (object.options.row_bytes(), object.options.top_k);
        let each = WORD as usize * slots;
        // SAFETY: the caller passes device addresses of that many bytes, and keeps them allocated.
        let (output, weights) = unsafe {
            (
                object.of_tokens(output as u64, count, row, "output")?,
                object.of_tokens(weights as u64, count, each, "weights")?,
            )
        };
        let layer = &object.layer;
        Ok(layer.combine(&output, &source.dispatched(), &weights, &stream.stream)?)
    })
}
