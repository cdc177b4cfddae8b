//! Regions: memory that peers may access.

use crate::handles::{Comm, Handle, Region};
use crate::job::JobObject;
use crate::pointer;
use crate::status::{Failure, Outcome, Status, entry};
use crate::stream;
use crate::types::Span;
use std::ffi::c_void;
use std::sync::Arc;
use warplink::device::DeviceSlice;

/// A region and the rank that it belongs to.
pub(crate) struct RegionObject {
    pub(crate) job: Arc<JobObject>,
    pub(crate) region: warplink::memory::Region,
    /// Whether the memory is owned by the caller.
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
        // An offset past the end leaves 0 bytes there, which `part` refuses.
        let bytes = (self.region.bytes() as u64).saturating_sub(offset);
        self.part(offset, bytes)
    }
}

impl Span {
    /// The memory of a region of `job`; the slice keeps it allocated.
    pub(crate) fn memory(self, job: &Arc<JobObject>) -> Outcome<DeviceSlice> {
        let region = self.region.get()?;
        same_job(job, &region.job, "region")?;
        region.part(self.offset, self.bytes)
    }
}

/// Fails if two handles belong to different communicators.
pub(crate) fn same_job(job: &Arc<JobObject>, other: &Arc<JobObject>, what: &str) -> Outcome {
    // Two communicators of a process may use different GPUs, on which the other's addresses and streams mean nothing.
    if Arc::ptr_eq(job, other) {
        return Ok(());
    }
    Err(Failure::invalid(
        format!("the {what} belongs to another communicator; expected the same communicator"),
        format!("pass a {what} of the same communicator"),
    ))
}

/// Allocates `bytes` bytes of device memory that peers may access. The content is undefined. Blocks briefly; if memory
/// is short, waits about two seconds for peers to unmap freed memory, then returns WARPLINK_STATUS_OUT_OF_MEMORY.
/// Returns WARPLINK_STATUS_INVALID_ARGUMENT for 0 bytes.
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
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(region, "region", made) }
    })
}

/// Registers `bytes` bytes at `address` that the caller allocated (by cudaMalloc, for example). They must stay
/// allocated until `warplink_region_free` of the region has succeeded or the communicator is destroyed. On the host
/// device, they must be within memory allocated by `warplink_alloc`. Does not block. Returns
/// WARPLINK_STATUS_INVALID_ARGUMENT if the range passes the end of an allocation, and WARPLINK_STATUS_UNSUPPORTED if
/// the memory cannot be shared.
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
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(region, "region", made) }
    })
}

/// Frees a region. Allocated memory is reused once no stream, connection or peer uses it any more; this does not block.
/// For registered memory, blocks until no peer maps it, after which its owner may free it. Fails for registered memory
/// if a connection of this rank uses it (WARPLINK_STATUS_INVALID_ARGUMENT), a concurrent call uses it
/// (WARPLINK_STATUS_INVALID_USAGE), or a peer does not unmap it in time (WARPLINK_STATUS_TIMEOUT): then it must stay
/// allocated until the communicator is destroyed.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_region_free(region: Region) -> Status {
    entry("free a region", || {
        let object = region.take()?;
        // Memory of the library needs no wait: it is pooled, and released when no peer maps it any more.
        if !object.is_registered {
            return Ok(());
        }
        let deadline = object.job.communicator.deadline();
        let in_use = || {
            Failure::usage(
                "another thread uses the region; expected none to",
                "free the region after all calls that use it have returned",
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
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(address, "address", value as *mut c_void) }
    })
}

/// The region's length in bytes. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_region_bytes(region: Region, bytes: *mut usize) -> Status {
    entry("get a region's length", || {
        let value = region.get()?.region.bytes();
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(bytes, "bytes", value) }
    })
}

/// Copies the bytes of the span from host memory to the region, and returns when the copy is complete. Not ordered
/// after work in any stream. Returns WARPLINK_STATUS_INVALID_ARGUMENT if the span passes the end of the region.
/// `source` may be null if the span is empty.
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

/// Copies the bytes of the span from the region to host memory, and returns when the copy is complete. Otherwise as
/// `warplink_upload`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_download(target: *mut c_void, source: Span) -> Status {
    entry("download", || {
        let region = source.region.get()?;
        let memory = region.part(source.offset, source.bytes)?;
        // SAFETY: the caller passes a buffer as long as the span.
        let target = unsafe { pointer::new_bytes(target, memory.bytes(), "target") }?;
        Ok(region.job.communicator.device().download(&memory, target)?)
    })
}

/// Enqueues a copy between regions of this rank, of the same length. Does not block. Returns
/// WARPLINK_STATUS_INVALID_ARGUMENT if lengths differ or a span passes the end of its region.
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
