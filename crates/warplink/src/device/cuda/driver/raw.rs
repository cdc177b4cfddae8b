//! RAII wrappers of the driver's streams, events and pinned host memory.

use super::context::Context;
use super::status;
use crate::debug::debug_text;
use crate::error::Result;
use cudarc::driver::sys::{CUdeviceptr, CUevent, CUevent_flags, CUstream};
use std::ffi::{c_uint, c_void};
use std::sync::Arc;

/// `CU_STREAM_NON_BLOCKING`: not ordered with the default stream, which other libraries use.
const NON_BLOCKING: c_uint = 1;
/// `CU_MEMHOSTALLOC_PORTABLE`: pinned for every context of the process.
const PORTABLE: c_uint = 1;

/// A stream owned by us.
pub(crate) struct RawStream {
    context: Arc<Context>,
    pub(crate) raw: CUstream,
}

// SAFETY: the pointer is a handle that the driver accepts on every thread.
unsafe impl Send for RawStream {}
// SAFETY: as above; the driver serializes what threads enqueue.
unsafe impl Sync for RawStream {}

impl RawStream {
    /// Creates a stream, with the highest available priority if `high`.
    pub(crate) fn create(context: &Arc<Context>, high: bool) -> Result<Self> {
        let _entered = context.enter()?;
        let driver = context.driver;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: both point to writable integers.
        let code = unsafe { (driver.cuCtxGetStreamPriorityRange)(&mut least, &mut greatest) };
        driver.check(code, "ask for stream priorities")?;
        let mut raw = std::ptr::null_mut();
        let priority = if high { greatest } else { least };
        // SAFETY: `raw` is an output parameter for one stream, and the context is current.
        let code = unsafe { (driver.cuStreamCreateWithPriority)(&mut raw, NON_BLOCKING, priority) };
        driver.check(code, "create a stream")?;
        Ok(Self {
            context: context.clone(),
            raw,
        })
    }

    /// Whether all enqueued work is done. The context need not be current.
    pub(crate) fn is_idle(&self) -> Result<bool> {
        let _entered = self.context.enter()?;
        // This thread may be capturing another stream, and a query would invalidate that capture.
        let _relaxed = self.context.relax_capture();
        // SAFETY: the stream lives as long as `self`.
        match unsafe { (self.context.driver.cuStreamQuery)(self.raw) } {
            status::NOT_READY => Ok(false),
            code => self
                .context
                .driver
                .check(code, "query a stream")
                .map(|()| true),
        }
    }
}

impl Drop for RawStream {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // This thread may be capturing another stream.
        let _relaxed = self.context.relax_capture();
        // SAFETY: made by `create` and not destroyed before. The driver lets enqueued work finish
        // and does not wait for it here.
        let code = unsafe { (self.context.driver.cuStreamDestroy_v2)(self.raw) };
        status::warn_unless_gone(code, "a stream was not destroyed");
    }
}

debug_text!(RawStream, |it| "RawStream({:p})", it.raw);

/// An event of the driver's.
pub(crate) struct RawEvent {
    pub(crate) context: Arc<Context>,
    pub(crate) raw: CUevent,
}

// SAFETY: the pointer is a handle that the driver accepts on every thread.
unsafe impl Send for RawEvent {}
// SAFETY: as above; the driver synchronizes its own state.
unsafe impl Sync for RawEvent {}

impl RawEvent {
    pub(crate) fn create(context: &Arc<Context>, timing: bool) -> Result<Self> {
        let _entered = context.enter()?;
        let flags = if timing {
            CUevent_flags::CU_EVENT_DEFAULT
        } else {
            CUevent_flags::CU_EVENT_DISABLE_TIMING
        };
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is an output parameter for one event, and the context is current.
        let code = unsafe { (context.driver.cuEventCreate)(&mut raw, flags as c_uint) };
        context.driver.check(code, "create an event")?;
        Ok(Self {
            context: context.clone(),
            raw,
        })
    }

    /// Records the event at the current end of `stream`.
    ///
    /// # Safety
    /// `stream` must be a valid stream of the event's context, which must be current.
    pub(crate) unsafe fn record(&self, stream: CUstream) -> Result<()> {
        // SAFETY: the event lives as long as `self`; the caller guarantees a valid stream.
        let code = unsafe { (self.context.driver.cuEventRecord)(self.raw, stream) };
        self.context.driver.check(code, "record an event")
    }

    /// Whether the event has completed; true if it was never recorded.
    pub(crate) fn is_reached(&self) -> Result<bool> {
        let _entered = self.context.enter()?;
        // As in `RawStream::is_idle`.
        let _relaxed = self.context.relax_capture();
        // SAFETY: the event lives as long as `self`.
        match unsafe { (self.context.driver.cuEventQuery)(self.raw) } {
            status::NOT_READY => Ok(false),
            code => self
                .context
                .driver
                .check(code, "query an event")
                .map(|()| true),
        }
    }

    /// Milliseconds from `earlier` to this one.
    pub(crate) fn elapsed_since(&self, earlier: &Self) -> Result<f32> {
        let _entered = self.context.enter()?;
        let driver = self.context.driver;
        let elapsed = driver
            .cuEventElapsedTime_v2
            .unwrap_or(driver.cuEventElapsedTime);
        let mut milliseconds = 0.0;
        // SAFETY: `milliseconds` is an output parameter for one float; both events live.
        let code = unsafe { elapsed(&mut milliseconds, earlier.raw, self.raw) };
        driver.check(code, "measure the time between two events")?;
        Ok(milliseconds)
    }
}

impl Drop for RawEvent {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: made by `create` and not destroyed before; one that is still to be reached is
        // destroyed by the driver when it is.
        let code = unsafe { (self.context.driver.cuEventDestroy_v2)(self.raw) };
        status::warn_unless_gone(code, "an event was not destroyed");
    }
}

debug_text!(RawEvent, |it| "RawEvent({:p})", it.raw);

/// Page-locked host memory, which the GPU's copy engines can access directly.
#[derive(Debug)]
pub(crate) struct Pinned {
    context: Arc<Context>,
    pointer: *mut u8,
    bytes: usize,
}

// SAFETY: it is plain memory, written and read only through methods that say what they need.
unsafe impl Send for Pinned {}

impl Pinned {
    pub(crate) fn allocate(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let _entered = context.enter_relaxed()?;
        let mut pointer: *mut c_void = std::ptr::null_mut();
        // SAFETY: `pointer` is an output parameter for one pointer, and the context is current.
        let code = unsafe { (context.driver.cuMemHostAlloc)(&mut pointer, bytes, PORTABLE) };
        context.driver.check(code, "allocate pinned host memory")?;
        Ok(Self {
            context: context.clone(),
            pointer: pointer.cast(),
            bytes,
        })
    }

    /// Address at `offset`, for the driver.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset <= self.bytes);
        self.pointer.wrapping_add(offset)
    }

    /// Copies `from` in at `offset`.
    ///
    /// # Safety
    /// No copy that the GPU is still to do may write that part.
    pub(crate) unsafe fn write(&mut self, offset: usize, from: &[u8]) {
        assert!(
            offset + from.len() <= self.bytes,
            "a write passes the pinned buffer's end"
        );
        // SAFETY: the range was checked above; the caller guarantees that there is no other writer.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.at(offset), from.len()) }
    }

    /// Copies to `to` from `offset`.
    ///
    /// # Safety
    /// No copy that the GPU is still to do may write that part, and it must have been written.
    pub(crate) unsafe fn read(&self, offset: usize, to: &mut [u8]) {
        assert!(
            offset + to.len() <= self.bytes,
            "a read passes the pinned buffer's end"
        );
        // SAFETY: the range was checked above; the caller guarantees that there is no concurrent writer.
        unsafe { std::ptr::copy_nonoverlapping(self.at(offset), to.as_mut_ptr(), to.len()) }
    }

    /// Enqueues a copy of `bytes` from `offset` to device memory at `target`.
    ///
    /// # Safety
    /// `target` must be device memory of `bytes`, `stream` a stream of the current context, and
    /// the part of this buffer must stay as it is until the copy is done.
    pub(crate) unsafe fn copy_to(
        &self,
        offset: usize,
        target: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) -> Result<()> {
        assert!(
            offset + bytes <= self.bytes,
            "a copy passes the pinned buffer's end"
        );
        // SAFETY: the source's range was checked above; the caller vouches for the rest.
        let code = unsafe {
            (self.context.driver.cuMemcpyHtoDAsync_v2)(
                target,
                self.at(offset).cast(),
                bytes,
                stream,
            )
        };
        self.context.driver.check(code, "copy to the device")
    }

    /// Enqueues a copy of `bytes` from device memory at `source` to `offset`.
    ///
    /// # Safety
    /// As for [`copy_to`](Self::copy_to), and nobody may read the part until the copy is done.
    pub(crate) unsafe fn copy_from(
        &self,
        offset: usize,
        source: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) -> Result<()> {
        assert!(
            offset + bytes <= self.bytes,
            "a copy passes the pinned buffer's end"
        );
        // SAFETY: the target's range was checked above; the caller vouches for the rest.
        let code = unsafe {
            (self.context.driver.cuMemcpyDtoHAsync_v2)(
                self.at(offset).cast(),
                source,
                bytes,
                stream,
            )
        };
        self.context.driver.check(code, "copy from the device")
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        let _relaxed = self.context.relax_capture();
        // SAFETY: allocated by `allocate` and not freed before.
        let code = unsafe { (self.context.driver.cuMemFreeHost)(self.pointer.cast()) };
        status::warn_unless_gone(code, "pinned host memory was not freed");
    }
}
