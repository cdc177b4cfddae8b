//! Collectives bound to fixed memory.

use crate::collectives::{CollectiveCall, CollectiveChoice};
use crate::handles::{BoundCall, Collectives, Handle, Stream};
use crate::job::JobObject;
use crate::memory::same_job;
use crate::pointer;
use crate::status::{Status, entry};
use std::ffi::c_void;
use std::sync::Arc;

/// A bound call and the rank that it belongs to.
pub(crate) struct BoundCallObject {
    pub(crate) job: Arc<JobObject>,
    call: warplink::collective::BoundCall,
}

/// Binds a collective to memory, for calls repeated on the same buffers, so that the copy engine can perform large
/// all-gathers and all-to-alls. Arguments are those of `warplink_collective`. Peers may map the memory: it must stay
/// allocated until all ranks have called `warplink_bound_call_free` and the streams of the calls are synchronized. All
/// ranks bind the same call collectively; blocks until all have. Returns WARPLINK_STATUS_MISMATCH if ranks bind
/// different calls. If a rank does not bind, or its arguments are rejected, the other ranks get WARPLINK_STATUS_TIMEOUT
/// or WARPLINK_STATUS_PEER_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_bind_collective(
    collectives: Collectives,
    call: *const CollectiveCall,
    output: *mut c_void,
    input: *const c_void,
    bound: *mut BoundCall,
) -> Status {
    entry("bind a collective", || {
        let object = collectives.get()?;
        pointer::check(bound, "bound")?;
        // SAFETY: the caller passes a call.
        let call = unsafe { pointer::load(call, "call") }?.call()?;
        // SAFETY: the caller passes device memory, or null where it is not used, and keeps it.
        let (output, input) = unsafe { object.operands(&call, output, input) }?;
        let made = BoundCall::new(BoundCallObject {
            job: object.job.clone(),
            call: object.collectives.bind(&call, &output, &input)?,
        });
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(bound, "bound", made) }
    })
}

/// Enqueues a bound call once. It counts as a collective call: all ranks make their calls in the same order. Does not
/// block. Errors are those of `warplink_collective`.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_bound_call_enqueue(bound: BoundCall, stream: Stream) -> Status {
    entry("enqueue a bound collective", || {
        let (object, stream) = (bound.get()?, stream.get()?);
        same_job(&object.job, &stream.job, "stream")?;
        Ok(object.call.enqueue(&stream.stream)?)
    })
}

/// How a bound call is performed; the algorithm is "copy-engine" if the copy engine performs it. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_bound_call_choice(
    bound: BoundCall,
    choice: *mut CollectiveChoice,
) -> Status {
    entry("get how a bound collective is done", || {
        let object = bound.get()?;
        let made = CollectiveChoice::of(object.call.choice());
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(choice, "choice", made) }
    })
}

/// Frees a bound call. Enqueued calls still complete. Does not block.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_bound_call_free(bound: BoundCall) -> Status {
    entry("free a bound collective", || bound.take().map(drop))
}
