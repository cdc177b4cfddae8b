//! Collectives that are bound to their memory.

use crate::collectives::{CollectiveCall, CollectiveChoice};
use crate::handles::{BoundCall, Collectives, Handle, Stream};
use crate::job::JobObject;
use crate::memory::same_job;
use crate::pointer;
use crate::status::{Status, entry};
use std::ffi::c_void;
use std::sync::Arc;

/// A call, with the rank that it belongs to.
pub(crate) struct BoundCallObject {
    pub(crate) job: Arc<JobObject>,
    call: warplink::collective::BoundCall,
}

/// Binds a call to memory, for calls that are made again and again on the same, so that the copy engine can do large
/// all-gathers and all-to-alls. Arguments are those of `warplink_collective`. Peers may have the memory mapped: it stays allocated
/// until all ranks have called `warplink_bound_call_free` and the streams of the calls are done. Every rank binds the same
/// call at the same time; blocks until all have. Ranks that bind different calls are WARPLINK_STATUS_MISMATCH. Where a rank
/// does not bind, or has arguments that are refused, the others get WARPLINK_STATUS_TIMEOUT or WARPLINK_STATUS_PEER_FAILED.
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
        // SAFETY: the caller passes a place for a bound call.
        unsafe { pointer::store(bound, "bound", made) }
    })
}

/// Enqueues a bound call once. It counts as a call of its collectives, which all ranks make in the same order. Does not block.
/// Errors are those of `warplink_collective`.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_bound_call_enqueue(bound: BoundCall, stream: Stream) -> Status {
    entry("enqueue a bound collective", || {
        let (object, stream) = (bound.get()?, stream.get()?);
        same_job(&object.job, &stream.job, "stream")?;
        Ok(object.call.enqueue(&stream.stream)?)
    })
}

/// How a bound call is done; "copy-engine" is the algorithm where the copy engine does it. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_bound_call_choice(
    bound: BoundCall,
    choice: *mut CollectiveChoice,
) -> Status {
    entry("get how a bound collective is done", || {
        let object = bound.get()?;
        let made = CollectiveChoice::of(object.call.choice());
        // SAFETY: the caller passes a place for a choice.
        unsafe { pointer::store(choice, "choice", made) }
    })
}

/// Gives a bound call back. What was enqueued is done all the same. Does not block.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_bound_call_free(bound: BoundCall) -> Status {
    entry("free a bound collective", || bound.take().map(drop))
}
