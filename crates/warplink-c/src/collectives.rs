//! Collectives over all ranks.

use crate::handles::{Collectives, Comm, Handle, Stream};
use crate::job::JobObject;
use crate::memory::same_job;
use crate::pointer::{self, static_text};
use crate::status::{Failure, Outcome, Status, entry};
use crate::types::numbered;
use std::ffi::{c_char, c_void};
use std::ptr::null;
use std::sync::Arc;
use warplink::DType;
use warplink::collective::{self, Call, CollectiveKind, CollectivePath};
use warplink::device::{AllocationKind, DeviceSlice, ReduceOp, VendorCommunicator};

/// Size of the placeholder allocation passed for operands without elements.
const NOTHING: usize = 16;

/// Options of a group of collectives; the same on every rank but for `communicator`. Start from
/// `warplink_collective_options_default`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CollectiveOptions {
    /// Bytes of each rank's workspace.
    pub workspace_bytes: usize,
    /// "direct" for kernels that store into peer memory, "engine" for the vendor's library (NCCL on GPUs); null for the
    /// direct path wherever it is available.
    pub path: *const c_char,
    /// An ncclComm_t of the same ranks in the same order, for calls that go to the vendor's library; null to have one
    /// created. The caller keeps ownership: it is neither destroyed nor aborted here, and the caller must do neither
    /// until `warplink_collectives_free` was called and the streams of its calls are synchronized. No other thread may
    /// use it while a collective is enqueued.
    pub communicator: *mut c_void,
    /// The only algorithm allowed on the direct path, such as "one-shot"; null to select one for each call.
    /// docs/collectives.md lists them.
    pub algorithm: *const c_char,
    /// The most multiprocessors that a call uses on the direct path, at least 2; 0 for the smallest number that reaches
    /// full speed.
    pub multiprocessors: u32,
}

/// How a call is performed; strings are static and never freed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CollectiveChoice {
    /// "direct" for kernels that store into peer memory, "engine" for the vendor's library.
    pub path: *const c_char,
    /// The algorithm, such as "one-shot"; null if the vendor's library performs the call. The other members are 0 then.
    pub algorithm: *const c_char,
    /// Lanes that move data: groups of threads of the kernel.
    pub lanes: u32,
    /// Threads of each lane.
    pub threads: u32,
    /// The number of chunks into which a lane splits its data.
    pub chunks: u64,
}

impl CollectiveChoice {
    /// The C form of a choice; `None` is a call performed by the vendor's library.
    pub(crate) fn of(choice: Option<collective::Choice>) -> Self {
        match choice {
            Some(choice) => Self {
                path: static_text(CollectivePath::Direct.name()),
                algorithm: static_text(choice.algorithm.name()),
                lanes: choice.lanes as u32,
                threads: choice.threads as u32,
                chunks: choice.chunks as u64,
            },
            None => Self {
                path: static_text(CollectivePath::Engine.name()),
                algorithm: null(),
                lanes: 0,
                threads: 0,
                chunks: 0,
            },
        }
    }
}

/// A collective call, the same on every rank.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CollectiveCall {
    /// A `warplink_collective_kind`.
    pub kind: i32,
    /// A `warplink_element_type`.
    pub element_type: i32,
    /// A `warplink_reduce_op`; `WARPLINK_REDUCE_OP_NONE` for collectives without reduction.
    pub op: i32,
    /// The root of broadcast, reduce, gather and scatter; -1 for the others.
    pub root: i32,
    /// Elements of one part. Input and output of all-reduce, broadcast and reduce have one part each. The output of
    /// all-gather and gather, the input of reduce-scatter and scatter, and both of all-to-all have one part per rank.
    pub count: u64,
    /// Factor applied to inputs before they are summed, for `WARPLINK_REDUCE_OP_SCALED_SUM`; ignored for other
    /// operators. Single precision, except for 64-bit types.
    pub factor: f64,
}

/// A group of collectives and the rank that it belongs to.
pub(crate) struct CollectivesObject {
    pub(crate) job: Arc<JobObject>,
    pub(crate) collectives: warplink::Collectives,
    /// Placeholder memory for calls without elements.
    nothing: DeviceSlice,
}

impl CollectivesObject {
    /// Borrows `bytes` bytes at a device address.
    ///
    /// # Safety
    /// They must be device memory that stays allocated until the stream has finished with it.
    unsafe fn memory(&self, address: u64, bytes: usize) -> Outcome<DeviceSlice> {
        if bytes == 0 {
            return Ok(self.nothing.clone());
        }
        let device = self.job.communicator.device();
        // SAFETY: guaranteed by the caller.
        Ok(unsafe { device.borrow_operand(address, bytes) }?)
    }

    /// Output and input of a call. For an operand that this rank does not use, the other is returned.
    ///
    /// # Safety
    /// As for [`memory`](Self::memory), for the operands that this rank uses.
    pub(crate) unsafe fn operands(
        &self,
        call: &Call,
        output: *mut c_void,
        input: *const c_void,
    ) -> Outcome<(DeviceSlice, DeviceSlice)> {
        let communicator = &self.job.communicator;
        let (input_rows, output_rows) = call.kind.rows(communicator.world());
        let bytes = |rows: usize| {
            let bytes = call.count.checked_mul(call.dtype.size());
            let bytes = bytes.and_then(|bytes| bytes.checked_mul(rows));
            bytes.ok_or_else(|| {
                Failure::invalid(
                    format!("{} elements are more than memory can hold", call.count),
                    "pass a smaller count",
                )
            })
        };
        let (input_bytes, output_bytes) = (bytes(input_rows)?, bytes(output_rows)?);
        let own = communicator.rank();
        let at_root = call.root.is_none_or(|root| root == own);
        let reads = at_root || matches!(call.kind, CollectiveKind::Reduce | CollectiveKind::Gather);
        let writes =
            at_root || !matches!(call.kind, CollectiveKind::Reduce | CollectiveKind::Gather);
        if reads && input_bytes > 0 {
            pointer::check(input.cast::<u8>(), "input")?;
        }
        if writes && output_bytes > 0 {
            pointer::check(output.cast::<u8>(), "output")?;
        }
        let place = |used: bool, address: u64, bytes: usize| {
            // SAFETY: guaranteed by the caller.
            used.then(|| unsafe { self.memory(address, bytes) })
                .transpose()
        };
        let input = place(reads, input as u64, input_bytes)?;
        let output = place(writes, output as u64, output_bytes)?;
        Ok(match (output, input) {
            (Some(output), Some(input)) => (output, input),
            // A rank that uses one of them still has to pass both; the call does not touch the other.
            (Some(used), None) | (None, Some(used)) => (used.clone(), used),
            (None, None) => (self.nothing.clone(), self.nothing.clone()),
        })
    }

    /// As [`memory`](Self::memory), with `name` for error messages. Fails for null unless `bytes` is 0.
    ///
    /// # Safety
    /// As for [`memory`](Self::memory).
    pub(crate) unsafe fn named(
        &self,
        address: u64,
        bytes: u64,
        name: &str,
    ) -> Outcome<DeviceSlice> {
        if bytes > 0 {
            pointer::check(address as *const u8, name)?;
        }
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        // SAFETY: guaranteed by the caller.
        unsafe { self.memory(address, bytes) }
    }
}

/// Converts a `warplink_element_type`.
pub(crate) fn element_type(number: i32) -> Outcome<DType> {
    numbered(number, "warplink_element_type")
}

impl CollectiveCall {
    /// Converts to the library's type.
    pub(crate) fn call(&self) -> Outcome<Call> {
        let op = match self.op {
            0 => None,
            op => Some(match numbered(op, "warplink_reduce_op")? {
                ReduceOp::ScaledSum(_) => ReduceOp::scaled_sum(self.factor),
                op => op,
            }),
        };
        Ok(Call {
            kind: numbered(self.kind, "warplink_collective_kind")?,
            dtype: element_type(self.element_type)?,
            op,
            root: usize::try_from(self.root).ok(),
            // Larger counts are rejected later, with the sizes in bytes.
            count: usize::try_from(self.count).unwrap_or(usize::MAX),
        })
    }
}

/// The default options. Does not block.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_collective_options_default() -> CollectiveOptions {
    CollectiveOptions {
        workspace_bytes: warplink::collective::DEFAULT_WORKSPACE_BYTES,
        path: null(),
        communicator: std::ptr::null_mut(),
        algorithm: null(),
        multiprocessors: 0,
    }
}

/// Creates a group of collectives over all ranks, with its own workspace. Collective: blocks until every rank has
/// called it. Null options select the defaults. Returns WARPLINK_STATUS_TIMEOUT if a rank does not call it,
/// WARPLINK_STATUS_MISMATCH if options differ, WARPLINK_STATUS_PEER_FAILED on the other ranks if one cannot join, and
/// WARPLINK_STATUS_LIBRARY_MISSING if NCCL is needed and missing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_collectives_join(
    comm: Comm,
    options: *const CollectiveOptions,
    collectives: *mut Collectives,
) -> Status {
    entry("join the collectives", || {
        let job = comm.get()?;
        pointer::check(collectives, "collectives")?;
        let given = if options.is_null() {
            warplink_collective_options_default()
        } else {
            // SAFETY: the caller passes options.
            unsafe { pointer::load(options, "options") }?
        };
        // SAFETY: the caller passes null or a text.
        let path = unsafe { pointer::optional_text(given.path, "path") }?;
        let communicator = (!given.communicator.is_null()).then(|| {
            // SAFETY: the caller passes a communicator of the library, and keeps it alive as the options document.
            unsafe { VendorCommunicator::from_raw(given.communicator) }
        });
        // SAFETY: as for the path.
        let algorithm = unsafe { pointer::optional_text(given.algorithm, "algorithm") }?;
        let options = warplink::collective::CollectiveOptions {
            workspace_bytes: given.workspace_bytes,
            path: path.map(str::parse).transpose()?,
            communicator,
            algorithm: algorithm.map(str::parse).transpose()?,
            multiprocessors: (given.multiprocessors != 0).then_some(given.multiprocessors as usize),
            ..warplink::collective::CollectiveOptions::default()
        };
        let nothing = job.communicator.device();
        let nothing = nothing.allocate(NOTHING, AllocationKind::Plain)?;
        let made = Collectives::new(CollectivesObject {
            nothing: nothing.slice(0..0)?,
            collectives: job.communicator.collectives_with(&options)?,
            job,
        });
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(collectives, "collectives", made) }
    })
}

/// Frees a group of collectives. Enqueued calls still complete. Does not block.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_collectives_free(collectives: Collectives) -> Status {
    entry("free collectives", || collectives.take().map(drop))
}

/// The communicator of the vendor's library (an ncclComm_t on GPUs) that calls go to; null if they do not use that
/// library. It is valid until `warplink_collectives_free`, unless a rank is lost. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_collectives_communicator(
    collectives: Collectives,
    communicator: *mut *mut c_void,
) -> Status {
    entry("get the vendor library's communicator", || {
        let raw = collectives.get()?.collectives.communicator();
        let raw = raw.unwrap_or(std::ptr::null_mut());
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(communicator, "communicator", raw) }
    })
}

/// How a call would be performed. All ranks get the same answer. Does not block. Returns WARPLINK_STATUS_UNSUPPORTED if
/// the direct path would perform it and the options allow only an algorithm that does not implement this call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_collectives_choice(
    collectives: Collectives,
    call: *const CollectiveCall,
    choice: *mut CollectiveChoice,
) -> Status {
    entry("choose how a collective is done", || {
        let object = collectives.get()?;
        // SAFETY: the caller passes a call.
        let call = unsafe { pointer::load(call, "call") }?.call()?;
        let path = object.collectives.path_of(&call);
        let made = match path {
            CollectivePath::Direct => Some(object.collectives.choice(&call)?),
            CollectivePath::Engine => None,
        };
        let made = CollectiveChoice::of(made);
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(choice, "choice", made) }
    })
}

/// The path of `warplink_send_receive` and `warplink_all_to_all_v`: "direct" or "engine"; null if messages cannot reach
/// the other ranks. The string is static. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_collectives_message_path(
    collectives: Collectives,
    path: *mut *const c_char,
) -> Status {
    entry("get the path of messages", || {
        let found = collectives.get()?.collectives.path_of_messages();
        let text = found.map_or(null(), |path| static_text(path.name()));
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(path, "path", text) }
    })
}

/// Enqueues a collective. `output` and `input` are device addresses, in any memory that stays allocated until the
/// stream is synchronized; their lengths follow from the call's `count`. They may be the same memory; for all-gather
/// and gather the input may be this rank's part of the output, and for reduce-scatter and scatter the output may be
/// this rank's part of the input. Operands that this rank does not use may be null. Does not block. Returns
/// WARPLINK_STATUS_INVALID_ARGUMENT for an unknown kind, type or operator, an operator that the collective does not
/// support, a root that is no rank, and null for a required operand. If ranks make different calls,
/// `warplink_stream_synchronize` returns WARPLINK_STATUS_MISMATCH.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_collective(
    collectives: Collectives,
    call: *const CollectiveCall,
    output: *mut c_void,
    input: *const c_void,
    stream: Stream,
) -> Status {
    entry("enqueue a collective", || {
        let object = collectives.get()?;
        let stream = stream.get()?;
        same_job(&object.job, &stream.job, "stream")?;
        // SAFETY: the caller passes a call.
        let call = unsafe { pointer::load(call, "call") }?.call()?;
        let (collectives, stream) = (&object.collectives, &stream.stream);
        // It has no operands, whose addresses the following checks.
        if call.kind == CollectiveKind::Barrier {
            return Ok(collectives.barrier(stream)?);
        }
        // SAFETY: the caller passes device memory, or null where it is not used, and keeps it.
        let (output, input) = unsafe { object.operands(&call, output, input) }?;
        Ok(collectives.enqueue(&call, &output, &input, stream)?)
    })
}
