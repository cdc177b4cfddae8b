//! Memory from the virtual memory interface: physical memory, shared by descriptor, mapped into a
//! range of addresses that was reserved for it.

use super::FREEING;
use crate::device::cuda::driver::status;
use crate::device::cuda::gpu::Gpu;
use crate::error::{Error, ErrorKind, Result};
use cudarc::driver::sys::*;
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

const DESCRIPTOR: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Physical memory and where it is mapped. Each part that was done is undone when it is dropped.
pub(crate) struct VirtualMemory {
    gpu: Arc<Gpu>,
    pub(crate) address: u64,
    pub(crate) bytes: usize,
    handle: CUmemGenericAllocationHandle,
    /// How far the making got, so that a failure undoes what was done and nothing else.
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, PartialOrd)]
enum Stage {
    Handle,
    Reserved,
    Mapped,
}

impl VirtualMemory {
    /// Allocates at least `bytes` and maps them.
    pub(crate) fn allocate(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self> {
        if bytes == 0 {
            return Err(
                Error::invalid("the allocation has 0 bytes; expected at least 1")
                    .with_operation("allocate device memory")
                    .with_help("leave out empty allocations"),
            );
        }
        if !gpu.capabilities.virtual_memory || !gpu.capabilities.descriptors {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "the GPU cannot share memory by descriptor",
            )
            .with_device(gpu.name())
            .with_help("use AllocationKind::Plain"));
        }
        let _entered = gpu.context.enter()?;
        let _relaxed = gpu.context.relax_capture();
        let driver = gpu.context.driver;
        let property = property(gpu);
        let bytes = round_up(gpu, &property, bytes)?;
        let mut handle = 0;
        // SAFETY: `handle` is an output parameter for one handle, `property` is fully set, no flags
        // exist.
        let mut code = unsafe { (driver.cuMemCreate)(&mut handle, bytes, &property, 0) };
        if code == status::OUT_OF_MEMORY {
            gpu.give_back(Instant::now() + FREEING);
            // SAFETY: as above.
            code = unsafe { (driver.cuMemCreate)(&mut handle, bytes, &property, 0) };
        }
        driver
            .check(code, "allocate physical memory")
            .map_err(|error| {
                error
                    .with_device(gpu.name())
                    .with_help(format!("{bytes} bytes were asked for"))
            })?;
        Self::map(gpu, handle, bytes)
    }

    /// Maps the physical memory behind a peer's `descriptor`, of at least `bytes`.
    pub(crate) fn import(gpu: &Arc<Gpu>, descriptor: BorrowedFd<'_>, bytes: usize) -> Result<Self> {
        let _entered = gpu.context.enter()?;
        let _relaxed = gpu.context.relax_capture();
        let driver = gpu.context.driver;
        let bytes = round_up(gpu, &property(gpu), bytes)?;
        let mut handle = 0;
        // The driver takes the descriptor's number in place of a pointer.
        let number = descriptor.as_raw_fd() as usize as *mut c_void;
        // SAFETY: `handle` is an output parameter for one handle. The descriptor is open during the
        // call; one that is not of the driver's making is refused.
        let code =
            unsafe { (driver.cuMemImportFromShareableHandle)(&mut handle, number, DESCRIPTOR) };
        driver.check(code, "open a peer's memory by descriptor")?;
        Self::map(gpu, handle, bytes).map_err(|error| {
            // Mapping past the end of the physical memory is an invalid value.
            if error.code() == Some(status::INVALID_VALUE.into()) {
                Error::new(
                    ErrorKind::InvalidHandle,
                    format!("the peer's allocation is smaller than expected: its handle says {bytes} bytes"),
                )
                .with_operation("map a peer's memory")
                .with_code(status::INVALID_VALUE.into())
            } else {
                error
            }
        })
    }

    /// Reserves addresses and maps `handle`, which it takes over also if that fails.
    fn map(gpu: &Arc<Gpu>, handle: CUmemGenericAllocationHandle, bytes: usize) -> Result<Self> {
        let driver = gpu.context.driver;
        let mut memory = Self {
            gpu: gpu.clone(),
            address: 0,
            bytes,
            handle,
            stage: Stage::Handle,
        };
        // SAFETY: `address` is an output parameter for one address; 0 asks for any alignment and
        // any address.
        let code = unsafe { (driver.cuMemAddressReserve)(&mut memory.address, bytes, 0, 0, 0) };
        driver.check(code, "reserve addresses")?;
        memory.stage = Stage::Reserved;
        // SAFETY: the range was reserved just now, for as many bytes, and nothing is mapped in it.
        let code = unsafe { (driver.cuMemMap)(memory.address, bytes, 0, handle, 0) };
        driver.check(code, "map physical memory")?;
        memory.stage = Stage::Mapped;
        memory.allow(gpu)?;
        Ok(memory)
    }

    /// Lets `gpu` read and write it.
    pub(crate) fn allow(&self, gpu: &Gpu) -> Result<()> {
        allow(gpu, self.address, self.bytes)
    }

    /// A descriptor of the physical memory.
    pub(crate) fn export(&self) -> Result<OwnedFd> {
        export(&self.gpu, self.handle)
    }
}

impl Drop for VirtualMemory {
    fn drop(&mut self) {
        let (address, bytes, handle, stage) = (self.address, self.bytes, self.handle, self.stage);
        self.gpu.reaper.run(move |context| {
            let driver = context.driver;
            let mut codes = [status::SUCCESS; 3];
            if stage >= Stage::Mapped {
                // SAFETY: mapped once, as one range; nothing names it any more.
                codes[0] = unsafe { (driver.cuMemUnmap)(address, bytes) };
            }
            if stage >= Stage::Reserved && codes[0] == status::SUCCESS {
                // SAFETY: reserved once, and no longer mapped.
                codes[1] = unsafe { (driver.cuMemAddressFree)(address, bytes) };
            }
            // SAFETY: the handle was created or imported once and is released once.
            codes[2] = unsafe { (driver.cuMemRelease)(handle) };
            if codes != [status::SUCCESS; 3] {
                tracing::warn!(
                    ?codes,
                    "virtual memory at {address:#x} was not wholly freed"
                );
            }
        });
    }
}

/// Lets `gpu` read and write the mapped range.
pub(crate) fn allow(gpu: &Gpu, address: u64, bytes: usize) -> Result<()> {
    let _entered = gpu.context.enter()?;
    let access = CUmemAccessDesc {
        location: location(gpu),
        flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    // SAFETY: `access` is one description; a range that is not mapped is refused.
    let code = unsafe { (gpu.context.driver.cuMemSetAccess)(address, bytes, &access, 1) };
    gpu.context
        .driver
        .check(code, "allow access to virtual memory")
}

/// A descriptor of the physical memory mapped at `address`, which others allocated.
pub(crate) fn export_mapped(gpu: &Gpu, address: u64) -> Result<OwnedFd> {
    let _entered = gpu.context.enter()?;
    let driver = gpu.context.driver;
    let mut handle = 0;
    // SAFETY: `handle` is an output parameter for one handle; an address that is not mapped memory
    // of the virtual memory interface is refused.
    let code = unsafe {
        (driver.cuMemRetainAllocationHandle)(&mut handle, address as usize as *mut c_void)
    };
    driver.check(code, "find the physical memory behind an address")?;
    let descriptor = export(gpu, handle);
    // SAFETY: retained just above, released once.
    let code = unsafe { (driver.cuMemRelease)(handle) };
    if code != status::SUCCESS {
        tracing::warn!(code, "a handle of physical memory was not released");
    }
    descriptor
}

fn export(gpu: &Gpu, handle: CUmemGenericAllocationHandle) -> Result<OwnedFd> {
    let _entered = gpu.context.enter()?;
    let _relaxed = gpu.context.relax_capture();
    let mut descriptor: c_int = -1;
    // SAFETY: for this type of handle the driver writes one `int`; the handle is held.
    let code = unsafe {
        (gpu.context.driver.cuMemExportToShareableHandle)(
            (&raw mut descriptor).cast(),
            handle,
            DESCRIPTOR,
            0,
        )
    };
    gpu.context.driver.check(code, "export memory by descriptor").map_err(|error| {
        error.with_help("memory must be allocated as shareable by descriptor; in PyTorch, expandable segments are unless they were made for fabric handles")
    })?;
    if descriptor < 0 {
        return Err(
            Error::new(ErrorKind::Driver, "the driver gave no descriptor")
                .with_operation("export memory by descriptor"),
        );
    }
    // SAFETY: the driver made this descriptor for the caller, who is its only owner.
    let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
    // A program that this process starts must not inherit it.
    rustix::io::fcntl_setfd(&descriptor, rustix::io::FdFlags::CLOEXEC)?;
    Ok(descriptor)
}

fn location(gpu: &Gpu) -> CUmemLocation {
    CUmemLocation {
        type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: gpu.context.device,
    }
}

fn property(gpu: &Gpu) -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: DESCRIPTOR,
        location: location(gpu),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: gpu.capabilities.virtual_memory_rdma.into(),
            usage: 0,
            reserved: [0; 4],
        },
    }
}

fn round_up(gpu: &Gpu, property: &CUmemAllocationProp, bytes: usize) -> Result<usize> {
    let mut granularity = 0;
    let which = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    // SAFETY: `granularity` is an output parameter for one size, and `property` is fully set.
    let code = unsafe {
        (gpu.context.driver.cuMemGetAllocationGranularity)(&mut granularity, property, which)
    };
    gpu.context
        .driver
        .check(code, "ask for the granularity of virtual memory")?;
    bytes
        .checked_next_multiple_of(granularity.max(1))
        .ok_or_else(|| {
            Error::invalid("the allocation overflows the address space")
                .with_operation("allocate device memory")
        })
}
