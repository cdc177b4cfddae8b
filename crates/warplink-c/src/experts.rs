//! Layers of experts.

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

/// A layer of experts; the same on every rank.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ExpertOptions {
    /// How many experts there are: a multiple of the ranks. Rank r has those from `r * experts / size` on.
    pub experts: u64,
    /// To how many experts a token goes.
    pub top_k: u64,
    /// The most tokens of a rank in one call.
    pub max_tokens: u64,
    /// The most rows that one rank sends to one other in a call; 0 for the most that there may be.
    pub max_rows: u64,
    /// Elements of a row.
    pub elements: u64,
    /// Their type, a `warplink_element_type`: F32, F16 or BF16.
    pub element_type: i32,
}

/// Memory of the device for the rows that go to the experts of this rank, by the rank that they come from.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Dispatched {
    /// The rows: `[size, max_rows, elements]`, of which those of rank p are the first `counts[p]`, in the order of its
    /// tokens. `warplink_experts_max_rows` gives `max_rows`.
    pub rows: *mut c_void,
    /// For each row, which of this rank's experts it is for, from 0 on: `[size, max_rows]`.
    pub experts: *mut i32,
    /// How many rows came from each rank: `[size]`.
    pub counts: *mut i32,
}

/// A layer, with the rank that it belongs to.
pub(crate) struct ExpertsObject {
    pub(crate) job: Arc<JobObject>,
    collectives: Arc<CollectivesObject>,
    layer: collective::Experts,
    options: collective::ExpertOptions,
}

/// The object that a `Dispatched` points to.
struct Rows {
    rows: DeviceSlice,
    experts: DeviceSlice,
    counts: DeviceSlice,
}

impl ExpertOptions {
    fn options(&self) -> Outcome<collective::ExpertOptions> {
        // A size that is too large for this machine is refused as too large.
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
    /// `count` tokens' worth of `each` bytes at an address of the device.
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
        // SAFETY: the caller vouches for it.
        unsafe { self.collectives.named(address, count * each as u64, name) }
    }

    /// # Safety
    /// The memory of `dispatched` must be as long as the layer's options say.
    unsafe fn rows(&self, dispatched: &Dispatched) -> Outcome<Rows> {
        let world = self.job.communicator.world();
        let rows = (world * self.options.rows_per_peer(world)) as u64;
        pointer::check(dispatched.experts, "experts")?;
        pointer::check(dispatched.counts, "counts")?;
        // SAFETY: the caller vouches for the lengths.
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

/// Makes a layer of experts, with memory for its calls. Asks no other rank; blocks while kernels are compiled, the first
/// time on a machine. It needs the direct path. Calls of one layer follow one another; for those that are under way at
/// the same time, make several. Options that do not fit together are WARPLINK_STATUS_INVALID_ARGUMENT, and
/// WARPLINK_STATUS_UNSUPPORTED is the path by the vendor's library.
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
        // SAFETY: the caller passes a place for a layer.
        unsafe { pointer::store(experts, "experts", made) }
    })
}

/// Gives a layer back. What was enqueued is done all the same. Does not block.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_experts_free(experts: Experts) -> Status {
    entry("free a layer of experts", || experts.take().map(drop))
}

/// The most rows that one rank sends to one other in a call. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_experts_max_rows(experts: Experts, max_rows: *mut u64) -> Status {
    entry("get the rows of a layer", || {
        let object = experts.get()?;
        let rows = object
            .options
            .rows_per_peer(object.job.communicator.world());
        // SAFETY: the caller passes a place for a number.
        unsafe { pointer::store(max_rows, "max_rows", rows as u64) }
    })
}

/// Sends each of `count` rows of `tokens` (`[count, elements]`) to the ranks of its experts, whose numbers are in
/// `numbers` (`[count, top_k]`), once for each expert. A number that is no expert's, such as -1, is a slot without one.
/// All memory is of the device, and stays allocated until the stream is done. Every rank calls it, with any count up to
/// `max_tokens`, also 0, for which tokens and numbers may be null. Does not block. More rows for a rank than `max_rows`,
/// and ranks with other options, are WARPLINK_STATUS_MISMATCH of `warplink_stream_synchronize` on both ranks, and
/// none of these rows arrive.
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
        // SAFETY: its memory is as long as the options say.
        let target = unsafe { object.rows(&target) }?;
        let (row, slots) = (object.options.row_bytes(), object.options.top_k);
        let each = WORD as usize * slots;
        // SAFETY: the caller passes addresses of that many bytes of the device, and keeps them.
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

/// `output` (`[count, elements]`) becomes for each token of the last dispatch the sum of its rows, each times its weight
/// in `weights` (`[count, top_k]`): in `float`, in the order of the slots, rounded once. `source` is what the dispatch
/// gave, with the experts' results in the place of the rows. A token without an expert gets zeros. Every rank calls it.
/// Does not block. Another `count` than the last dispatch had, or no dispatch before, is WARPLINK_STATUS_INVALID_ARGUMENT.
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
        // SAFETY: its memory is as long as the options say.
        let source = unsafe { object.rows(&source) }?;
        let (row, slots) = (object.options.row_bytes(), object.options.top_k);
        let each = WORD as usize * slots;
        // SAFETY: the caller passes addresses of that many bytes of the device, and keeps them.
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
