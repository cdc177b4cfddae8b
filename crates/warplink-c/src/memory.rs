//! Regions: memory that peers may reach.

use crate::handles::{Comm, Handle, Region};
use crate::job::JobObject;
use crate::pointer;
use crate::status::{Failure, Outcome, Status, entry};
use crate::stream;
use crate::types::Span;
use std::ffi::c_void;
use std::sync::Arc;
use warplink::device::DeviceSlice;

/// A region, with the rank that it belongs to.
pub(crate) struct RegionObject {
    pub(crate) job: Arc<JobObject>,
    pub(crate) region: warplink::memory::Region,
    /// Whose memory somebody else frees.
    is_registered: bool,
}

impl RegionObject {
    /// Its bytes from `offset` on.
    pub(crate) fn part(&self, offset: u64, bytes: u64) -> Outcome<DeviceSlice> {
        let memory = self.region.memory();
        let (start, end) = (usize::try_from(offset), offset.checked_add(bytes));
        match (start, end.map(usize::try_from)) {
            (Ok(start), Some(Ok(end))) => Ok(memory.slice(start..end)?),
            _ => Err(Failure::invalid(
                format!(
                    "{bytes} bytes from offset {offset} pass the end; expected a range within {} bytes",
                    memory.bytes()
                ),
                "name a range within the region",
            )),
        }
    }

    /// Its bytes from `offset` to the end.
    pub(crate) fn rest(&self, offset: u64) -> Outcome<DeviceSlice> {
        let bytes = (self.region.bytes() as u64).saturating_sub(offset);
        self.part(offset, bytes)
    }
}

impl Span {
    /// The memory, which keeps itself allocated, of a region of `job`.
    pub(crate) fn memory(self, job: &Arc<JobObject>) -> Outcome<DeviceSlice> {
        let region = self.region.get()?;
        same_job(job, &region.job, "region")?;
        region.part(self.offset, self.bytes)
    }
}

/// Fails where two handles are of different communicators.
pub(crate) fn same_job(job: &Arc<JobObject>, other: &Arc<JobObject>, what: &str) -> Outcome {
    if Arc::ptr_eq(job, other) {
        return Ok(());
    }
    Err(Failure::invalid(
        format!("the {what} belongs to another communicator; expected one of this"),
        format!("pass a {what} that was made with this communicator"),
    ))
}

/// Allocates `bytes` bytes of the device that peers may reach. The content is undefined. Blocks for moments, and where
/// memory is short for some two seconds, in which peers let go of what was freed; then it is
/// WARPLINK_STATUS_OUT_OF_MEMORY. No bytes are WARPLINK_STATUS_INVALID_ARGUMENT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_alloc(comm: Comm, bytes: usize, region: *mut Region) -> Status {
    entry("allocate", || {
        let job = comm.get()?;
        pointer::check(region, "region")?;
        let made = Region::new(RegionObject {
            region: job.communicator.alloc(bytes)?,
            job,
            is_registered: false,
        });
        // SAFETY: the caller passes a place for a region.
        unsafe { pointer::store(region, "region", made) }
    })
}

/// Registers `bytes` bytes at `address` that somebody else allocated (cudaMalloc, say). They must stay allocated until
/// `warplink_region_free` of the region has succeeded, or the communicator is destroyed. On the host device, they must
/// lie in memory that `warplink_alloc` gave. Does not block. A range that passes the end of an allocation is
/// WARPLINK_STATUS_INVALID_ARGUMENT, memory that cannot be shared WARPLINK_STATUS_UNSUPPORTED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_register(
    comm: Comm,
    address: *mut c_void,
    bytes: usize,
    region: *mut Region,
) -> Status {
    entry("register", || {
        let job = comm.get()?;
        pointer::check(address, "address")?;
        pointer::check(region, "region")?;
        let device = job.communicator.device();
        // SAFETY: the caller keeps the memory allocated for as long as it is registered.
        let memory = unsafe { device.borrow(address as u64, bytes, Arc::new(())) }?;
        let made = Region::new(RegionObject {
            region: job.communicator.register(&memory)?,
            job,
            is_registered: true,
        });
        // SAFETY: the caller passes a place for a region.
        unsafe { pointer::store(region, "region", made) }
    })
}

/// Gives a region back. Allocated memory is used again once no stream, connection or peer uses it any more; this does
/// not block. For registered memory, blocks until no peer maps it any more, after which its owner may free it; an
/// error where a connection of this rank has it (WARPLINK_STATUS_INVALID_ARGUMENT), another thread's call uses it
/// (WARPLINK_STATUS_INVALID_USAGE), or a peer does not let go in time (WARPLINK_STATUS_TIMEOUT): then it has to stay
/// allocated until the communicator is destroyed.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_region_free(region: Region) -> Status {
    entry("free a region", || {
        let object = region.take()?;
        if !object.is_registered {
            return Ok(());
        }
        let deadline = object.job.communicator.deadline();
        let in_use = || {
            Failure::usage(
                "another thread uses the region; expected none to",
                "free a region when no call that uses it runs any more",
            )
        };
        let object = Arc::into_inner(object).ok_or_else(in_use)?;
        Ok(object.region.close(deadline)?)
    })
}

/// The address of the region's first byte in this process, on its device. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_region_address(
    region: Region,
    address: *mut *mut c_void,
) -> Status {
    entry("get a region's address", || {
        let value = region.get()?.region.memory().address();
        // SAFETY: the caller passes a place for an address.
        unsafe { pointer::store(address, "address", value as *mut c_void) }
    })
}

/// The region's length in bytes. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_region_bytes(region: Region, bytes: *mut usize) -> Status {
    entry("get a region's length", || {
        let value = region.get()?.region.bytes();
        // SAFETY: the caller passes a place for a length.
        unsafe { pointer::store(bytes, "bytes", value) }
    })
}

/// Copies from host memory to the region's bytes, as many as the span has, and returns when that is done. Ordered
/// after nothing that is in a stream. Bytes past the end of the region are WARPLINK_STATUS_INVALID_ARGUMENT. Null is
/// allowed for no bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_upload(target: Span, source: *const c_void) -> Status {
    entry("upload", || {
        let region = target.region.get()?;
        let memory = region.part(target.offset, target.bytes)?;
        // SAFETY: the caller passes as many bytes as the span has.
        let source = unsafe { pointer::values(source.cast::<u8>(), memory.bytes(), "source") }?;
        Ok(region.job.communicator.device().upload(&memory, source)?)
    })
}

/// Copies from the region's bytes, as many as the span has, to host memory, and returns when that is done. As
/// `warplink_upload` otherwise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_download(target: *mut c_void, source: Span) -> Status {
    entry("download", || {
        let region = source.region.get()?;
        let memory = region.part(source.offset, source.bytes)?;
        // SAFETY: the caller passes room for as many bytes as the span has.
        let target = unsafe { pointer::new_bytes(target, memory.bytes(), "target") }?;
        Ok(region.job.communicator.device().download(&memory, target)?)
    })
}

/// Enqueues a copy between regions of this rank, of the same length. Does not block. Other lengths, and bytes past the
/// end of a region, are WARPLINK_STATUS_INVALID_ARGUMENT.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_copy(
    target: Span,
    source: Span,
    stream: crate::handles::Stream,
) -> Status {
    entry("copy", || {
        let stream: Arc<stream::StreamObject> = stream.get()?;
        let (target, source) = (target.memory(&stream.job)?, source.memory(&stream.job)?);
        Ok(stream.stream.copy(target, source)?)
    })
}
