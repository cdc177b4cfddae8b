//! A GPU's primary context, and making it current on a thread.

use super::{Driver, status};
use crate::debug::debug_text;
use crate::error::Result;
use cudarc::driver::sys::{
    CUcontext, CUdevice, CUflushGPUDirectRDMAWritesScope, CUflushGPUDirectRDMAWritesTarget,
    CUstreamCaptureMode,
};
use std::ffi::c_int;
use std::marker::PhantomData;
use std::sync::Arc;

/// The primary context of a GPU, which the CUDA runtime and PyTorch use too, so that memory and streams can
/// be shared. Everything created in it holds a reference.
pub(crate) struct Context {
    pub(crate) driver: &'static Driver,
    pub(crate) device: CUdevice,
    pub(crate) ordinal: usize,
    pub(crate) raw: CUcontext,
}

// SAFETY: the pointer is a handle that the driver accepts on every thread.
unsafe impl Send for Context {}
// SAFETY: as above; the driver synchronizes its own state.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the primary context of GPU `ordinal`.
    pub(crate) fn retain(ordinal: usize) -> Result<Arc<Self>> {
        let driver = Driver::get()?;
        let device = driver.device(ordinal)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is an output parameter for one context and `device` came from the driver.
        let code = unsafe { (driver.cuDevicePrimaryCtxRetain)(&mut raw, device) };
        driver.check(code, "retain the GPU's context")?;
        Ok(Arc::new(Self {
            driver,
            device,
            ordinal,
            raw,
        }))
    }

    /// Makes this context current on the calling thread until the guard is dropped. One query if it already
    /// is; the state is not cached, since other libraries change it.
    #[inline]
    pub(crate) fn enter(&self) -> Result<Entered<'_>> {
        let mut current = std::ptr::null_mut();
        // SAFETY: `current` is an output parameter for one context.
        let answer = unsafe { (self.driver.cuCtxGetCurrent)(&mut current) };
        if answer == status::SUCCESS && current == self.raw {
            return Ok(Entered {
                context: self,
                restore: std::ptr::null_mut(),
                thread: PhantomData,
            });
        }
        self.switch(current)
    }

    #[cold]
    fn switch(&self, previous: CUcontext) -> Result<Entered<'_>> {
        // SAFETY: the context is retained for as long as `self` lives.
        let code = unsafe { (self.driver.cuCtxSetCurrent)(self.raw) };
        self.driver.check(code, "make the GPU's context current")?;
        Ok(Entered {
            context: self,
            restore: previous,
            thread: PhantomData,
        })
    }

    /// Makes this context current on the calling thread permanently, and relaxes the thread's capture mode.
    /// The caller must keep the context alive as long as the thread uses it.
    pub(crate) fn attach(&self) -> Result<()> {
        // SAFETY: the context is retained for as long as `self` lives.
        let code = unsafe { (self.driver.cuCtxSetCurrent)(self.raw) };
        self.driver.check(code, "make the GPU's context current")?;
        std::mem::forget(self.relax_capture());
        Ok(())
    }

    /// Waits until earlier writes of network cards to the GPU's memory are visible to its kernels.
    pub(crate) fn settle_network_writes(&self) -> Result<()> {
        let Some(flush) = self.driver.cuFlushGPUDirectRDMAWrites else {
            return Ok(());
        };
        let _entered = self.enter()?;
        let target =
            CUflushGPUDirectRDMAWritesTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX;
        let scope = CUflushGPUDirectRDMAWritesScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER;
        // SAFETY: it takes two numbers, and the context is current.
        let code = unsafe { flush(target as c_int, scope as c_int) };
        self.driver.check(code, "wait for writes of network cards")
    }

    /// As [`enter`](Self::enter) and [`relax_capture`](Self::relax_capture): for calls that are not part of a capture, which
    /// another thread may have in progress.
    pub(crate) fn enter_relaxed(&self) -> Result<(Relaxed<'_>, Entered<'_>)> {
        let entered = self.enter()?;
        // First in the pair, and so dropped first: in this context.
        Ok((self.relax_capture(), entered))
    }

    /// Allows the calling thread, until the guard is dropped, calls that a capture elsewhere in the process
    /// would forbid (allocate, query): none of them touches the captured streams.
    pub(crate) fn relax_capture(&self) -> Relaxed<'_> {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_int;
        // SAFETY: `mode` is an output parameter for one mode, read and then set to the thread's
        // previous one.
        let answer = unsafe { (self.driver.cuThreadExchangeStreamCaptureMode)(&mut mode) };
        Relaxed {
            context: self,
            previous: (answer == status::SUCCESS).then_some(mode),
            thread: PhantomData,
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once, when this was made.
        let code = unsafe { (self.driver.cuDevicePrimaryCtxRelease_v2)(self.device) };
        if code != status::SUCCESS {
            tracing::warn!(
                code,
                ordinal = self.ordinal,
                "the GPU's context was not released"
            );
        }
    }
}

debug_text!(Context, |it| "Context(cuda:{})", it.ordinal);

/// Guard: restores the previous context when dropped.
pub(crate) struct Entered<'a> {
    context: &'a Context,
    restore: CUcontext,
    /// Makes the guard !Send: the current context is a property of the thread.
    thread: PhantomData<*const ()>,
}

impl Drop for Entered<'_> {
    #[inline]
    fn drop(&mut self) {
        if !self.restore.is_null() {
            // SAFETY: it was the thread's context before; if its owner destroyed it meanwhile the
            // driver refuses it and the thread keeps ours.
            let code = unsafe { (self.context.driver.cuCtxSetCurrent)(self.restore) };
            status::warn_unless_gone(code, "the thread's previous context was not restored");
        }
    }
}

/// Guard: restores the previous capture mode when dropped.
pub(crate) struct Relaxed<'a> {
    context: &'a Context,
    previous: Option<c_int>,
    /// Makes the guard !Send: the mode is a property of the thread.
    thread: PhantomData<*const ()>,
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        if let Some(mut mode) = self.previous {
            // SAFETY: `mode` is an output parameter for one mode and holds one that the driver gave.
            let code =
                unsafe { (self.context.driver.cuThreadExchangeStreamCaptureMode)(&mut mode) };
            status::warn_unless_gone(code, "the thread's capture mode was not restored");
        }
    }
}
