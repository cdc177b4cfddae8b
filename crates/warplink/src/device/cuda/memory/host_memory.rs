//! Host memory that the GPUs of several processes map: a shared-memory file that each process registers with
//! its driver. Replaces device memory between GPUs that cannot map each other's.

use super::{CudaBacking, Source, next_identity, not_ours, release};
use crate::device::cuda::driver::context::Context;
use crate::device::cuda::driver::status;
use crate::device::cuda::gpu::Gpu;
use crate::device::cuda::gpu::live::Uses;
use crate::device::host::memory as files;
use crate::device::{AllocationKind, DeviceSlice, Fault, Piece};
use crate::error::{Error, ErrorKind, Result};
use std::ffi::c_void;
use std::sync::Arc;

/// `CU_MEMHOSTREGISTER_PORTABLE` and `CU_MEMHOSTREGISTER_DEVICEMAP`.
const ALL_CONTEXTS_MAPPED: u32 = 1 | 2;

/// Our own allocation, or a peer's mapped here. Unregistered and unmapped once streams have completed their
/// use.
pub(in crate::device::cuda) struct HostMemory {
    gpu: Arc<Gpu>,
    /// `None` only while being dropped.
    registered: Option<Registered>,
    pub(super) uses: Arc<Uses>,
    /// Fault that aborts waits for signals in this memory.
    pub(super) fault: Option<Arc<Fault>>,
    pub(super) is_of_a_peer: bool,
}

/// A mapped file that is registered with the driver.
struct Registered {
    context: Arc<Context>,
    file: DeviceSlice,
    /// Address on the GPU.
    address: u64,
}

impl HostMemory {
    /// Allocates `bytes` of zeroed memory.
    pub(in crate::device::cuda) fn allocate(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self> {
        let file = files::allocate(bytes, AllocationKind::Host)?;
        Self::new(gpu, file, false)
    }

    /// Allocates zeroed signal words; `fault` and the device's fault abort waits for them.
    pub(in crate::device::cuda) fn allocate_signals(
        gpu: &Arc<Gpu>,
        bytes: usize,
        fault: &Arc<Fault>,
    ) -> Result<Self> {
        super::check_words(bytes)?;
        let mut memory = Self::allocate(gpu, bytes)?;
        memory.fault = Some(fault.clone());
        gpu.signals.add(memory.address(), bytes, fault);
        Ok(memory)
    }

    /// Maps a peer's memory of at least `bytes`.
    pub(super) fn import(gpu: &Arc<Gpu>, piece: Piece, bytes: usize) -> Result<Self> {
        Self::new(gpu, files::map(vec![piece], bytes, None)?, true)
    }

    fn new(gpu: &Arc<Gpu>, file: DeviceSlice, is_of_a_peer: bool) -> Result<Self> {
        Ok(Self {
            gpu: gpu.clone(),
            registered: Some(Registered::new(&gpu.context, file)?),
            uses: Arc::default(),
            fault: None,
            is_of_a_peer,
        })
    }

    fn address(&self) -> u64 {
        self.registered.as_ref().map_or(0, |it| it.address)
    }

    /// File descriptor by which peers map it.
    pub(super) fn export(&self) -> Result<Vec<Piece>> {
        match &self.registered {
            Some(it) if !self.is_of_a_peer => Ok(files::pieces(&it.file)?.0),
            _ => Err(not_ours()),
        }
    }

    /// Wraps it in a slice.
    pub(in crate::device::cuda) fn into_slice(self, bytes: usize) -> DeviceSlice {
        let (gpu, address) = (self.gpu.clone(), self.address());
        CudaBacking::slice(&gpu, address, bytes, next_identity(), Source::Host(self))
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        let (registered, reaper) = (self.registered.take(), self.gpu.reaper.clone());
        let address = registered.as_ref().map_or(0, |it| it.address);
        let free = move || reaper.run(move |_| drop(registered));
        if self.is_of_a_peer {
            // Free while no stream has work, before the owner is notified.
            return free();
        }
        let signals = self.fault.as_ref().map(|_| address);
        release(&self.gpu, &self.uses, signals, free);
    }
}

impl Registered {
    fn new(context: &Arc<Context>, file: DeviceSlice) -> Result<Self> {
        let _entered = context.enter_relaxed()?;
        let driver = context.driver;
        let pages = file.bytes().next_multiple_of(rustix::param::page_size());
        let start = std::ptr::with_exposed_provenance_mut::<c_void>(file.address() as usize);
        // SAFETY: the whole pages are mapped for as long as `file` is held, and the context is current.
        let code = unsafe { (driver.cuMemHostRegister_v2)(start, pages, ALL_CONTEXTS_MAPPED) };
        driver
            .check(code, "register memory of the host")
            .map_err(|error| match code {
                status::OUT_OF_MEMORY => Error::new(
                    ErrorKind::OutOfMemory,
                    format!("{pages} bytes of the host's memory cannot be pinned"),
                )
                .with_code(code.into())
                .with_help("allocate less, or raise the limit on locked memory (ulimit -l)"),
                _ => error,
            })?;
        let mut address = 0;
        // SAFETY: `address` points to a writable address; the memory was registered above.
        let code = unsafe { (driver.cuMemHostGetDevicePointer_v2)(&mut address, start, 0) };
        // Made before the result is checked, so that a failure unregisters the memory.
        let registered = Self {
            context: context.clone(),
            file,
            address,
        };
        driver.check(code, "ask where the GPU has memory of the host")?;
        Ok(registered)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        let _relaxed = self.context.relax_capture();
        let start = std::ptr::with_exposed_provenance_mut::<c_void>(self.file.address() as usize);
        // SAFETY: registered once and unregistered once, before the file is unmapped.
        let code = unsafe { (self.context.driver.cuMemHostUnregister)(start) };
        status::warn_unless_gone(code, "host memory was not unregistered");
    }
}
