//! A stream that other work of the process cannot block.

use crate::device::cuda::driver::context::Context;
use crate::device::cuda::driver::status;
use crate::error::Result;
use cudarc::driver::sys::{CUcontext, CUstream};
use std::sync::Arc;

/// A second context on the same GPU, created only when the first one's hardware queues are blocked. Process
/// memory has the same addresses in both.
pub(super) struct SecondContext {
    context: Arc<Context>,
    raw: CUcontext,
    stream: CUstream,
}

// SAFETY: both pointers are handles that the driver accepts on every thread.
unsafe impl Send for SecondContext {}

impl SecondContext {
    pub(super) fn create(context: &Arc<Context>) -> Result<Option<Self>> {
        let driver = context.driver;
        let (Some(create), Some(_)) = (driver.cuCtxCreate_v2, driver.cuCtxDestroy_v2) else {
            return Ok(None);
        };
        // Restores this thread's context, which the creation replaces.
        let _entered = context.enter()?;
        let mut other = Self {
            context: context.clone(),
            raw: std::ptr::null_mut(),
            stream: std::ptr::null_mut(),
        };
        // SAFETY: `raw` is an output parameter for one context, and 0 asks for no special scheduling.
        let code = unsafe { create(&mut other.raw, 0, context.device) };
        driver.check(code, "create a second context")?;
        // SAFETY: `stream` is an output parameter for one stream; the new context is current; 1
        // asks for a stream that is not ordered with the default one; a priority out of range is
        // clamped.
        let code = unsafe { (driver.cuStreamCreateWithPriority)(&mut other.stream, 1, -1) };
        // SAFETY: the primary context is retained for as long as it is held here.
        let back = unsafe { (driver.cuCtxSetCurrent)(context.raw) };
        driver.check(code, "create a stream in a second context")?;
        driver.check(back, "make the GPU's context current")?;
        Ok(Some(other))
    }

    /// Runs `work` with this context current if its stream is idle; returns whether it did.
    pub(super) fn with(&self, work: impl FnOnce(CUstream) -> Result<()>) -> Result<bool> {
        let driver = self.context.driver;
        let _entered = self.context.enter()?;
        // SAFETY: the context lives as long as `self`.
        let code = unsafe { (driver.cuCtxSetCurrent)(self.raw) };
        driver.check(code, "enter a second context")?;
        // As in `RawStream::is_idle`.
        let _relaxed = self.context.relax_capture();
        // SAFETY: the stream lives as long as its context.
        let result = match unsafe { (driver.cuStreamQuery)(self.stream) } {
            status::NOT_READY => Ok(false),
            code => driver
                .check(code, "query a stream")
                .and_then(|()| work(self.stream))
                .map(|()| true),
        };
        // SAFETY: the primary context is retained for as long as it is held here.
        let code = unsafe { (driver.cuCtxSetCurrent)(self.context.raw) };
        driver.check(code, "make the GPU's context current")?;
        result
    }
}

impl Drop for SecondContext {
    fn drop(&mut self) {
        if let Some(destroy) = self.context.driver.cuCtxDestroy_v2
            && !self.raw.is_null()
        {
            // SAFETY: made by `create`, destroyed once; its stream goes with it.
            let code = unsafe { destroy(self.raw) };
            status::warn_unless_gone(code, "a second context was not destroyed");
        }
    }
}
