//! Virtual memory: physical memory, shareable by descriptor, mapped into a reserved address range.

use super::FREEING;
use crate::debug::debug_text;
use crate::device::cuda::driver::status;
use crate::device::cuda::gpu::Gpu;
use crate::device::{Piece, Segment};
use crate::error::{Error, ErrorKind, Result};
use crate::sync::lock;
use cudarc::driver::sys::*;
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Instant;

const DESCRIPTOR: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Pieces of physical memory mapped contiguously into a reserved address range. Dropping it undoes each
/// completed step.
pub(crate) struct VirtualMemory {
    gpu: Arc<Gpu>,
    pub(crate) address: u64,
    /// Total length of the pieces.
    pub(crate) bytes: usize,
    reserved: usize,
    pieces: Vec<Mapped>,
}

/// A mapped piece.
#[derive(Clone, Copy)]
struct Mapped {
    handle: CUmemGenericAllocationHandle,
    bytes: usize,
}

impl VirtualMemory {
    /// Allocates and maps at least `bytes`.
    pub(crate) fn allocate(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self> {
        let mut memory = Self::reserve(gpu, bytes)?;
        memory.grow(bytes)?;
        Ok(memory)
    }

    /// Reserves an address range of at least `bytes`.
    pub(crate) fn reserve(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self> {
        if bytes == 0 {
            return Err(
                Error::invalid("the allocation has 0 bytes; expected at least 1")
                    .with_operation("allocate device memory")
                    .with_help("leave out empty allocations"),
            );
        }
        if !gpu.capabilities.virtual_memory || !gpu.capabilities.descriptors {
            return Err(
                Error::unsupported("the GPU cannot share memory by descriptor")
                    .with_device(gpu.name())
                    .with_help("use AllocationKind::Plain"),
            );
        }
        let _entered = gpu.context.enter_relaxed()?;
        let driver = gpu.context.driver;
        let reserved = round_up(gpu, &property(gpu), bytes)?;
        let mut address = 0;
        // SAFETY: `address` points to a writable address; 0 asks for any alignment and
        // any address.
        let code = unsafe { (driver.cuMemAddressReserve)(&mut address, reserved, 0, 0, 0) };
        driver.check(code, "reserve addresses")?;
        Ok(Self {
            gpu: gpu.clone(),
            address,
            bytes: 0,
            reserved,
            pieces: Vec::new(),
        })
    }

    /// Adds a new piece of at least `bytes`.
    pub(crate) fn grow(&mut self, bytes: usize) -> Result<()> {
        let gpu = self.gpu.clone();
        let _entered = gpu.context.enter_relaxed()?;
        let driver = gpu.context.driver;
        let property = property(&gpu);
        let bytes = round_up(&gpu, &property, bytes.max(1))?;
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
        self.map(Mapped { handle, bytes })
    }

    /// Maps the physical memory behind a peer's descriptors.
    pub(crate) fn import(gpu: &Arc<Gpu>, pieces: &[Piece]) -> Result<Self> {
        let granularity = |piece: &Piece| round_up(gpu, &property(gpu), piece.bytes);
        let lengths: Vec<usize> = pieces.iter().map(granularity).collect::<Result<_>>()?;
        let whole = lengths
            .iter()
            .try_fold(0_usize, |sum, bytes| sum.checked_add(*bytes));
        let whole = whole.ok_or_else(|| {
            Error::invalid_handle("the peer's pieces overflow the address space")
                .with_operation("map a peer's memory")
        })?;
        let mut memory = Self::reserve(gpu, whole)?;
        let _entered = gpu.context.enter_relaxed()?;
        let driver = gpu.context.driver;
        for (piece, bytes) in pieces.iter().zip(lengths) {
            let mut handle = 0;
            // The driver takes the descriptor cast to a pointer.
            let number = piece.descriptor.as_raw_fd() as usize as *mut c_void;
            // SAFETY: `handle` is an output parameter for one handle. The descriptor is open during
            // the call; one that is not of the driver's making is refused.
            let code =
                unsafe { (driver.cuMemImportFromShareableHandle)(&mut handle, number, DESCRIPTOR) };
            driver.check(code, "open a peer's memory by descriptor")?;
            memory.map(Mapped { handle, bytes }).map_err(|error| {
                // The driver reports a mapping beyond the physical memory as an invalid value.
                if error.code() == Some(status::INVALID_VALUE.into()) {
                    let text = format!(
                        "the peer's allocation is smaller than expected: a piece has {bytes} bytes according to its owner"
                    );
                    Error::invalid_handle(text)
                    .with_operation("map a peer's memory")
                    .with_code(status::INVALID_VALUE.into())
                } else {
                    error
                }
            })?;
        }
        Ok(memory)
    }

    /// Maps `piece` after the others. Takes ownership even on failure.
    fn map(&mut self, piece: Mapped) -> Result<()> {
        let driver = self.gpu.context.driver;
        let mapped = self.map_behind(piece);
        if mapped.is_err() {
            // SAFETY: the handle was created or imported once, is mapped nowhere and released once.
            let code = unsafe { (driver.cuMemRelease)(piece.handle) };
            if code != status::SUCCESS {
                tracing::warn!(code, "physical memory was not freed");
            }
            return mapped;
        }
        let start = self.address + self.bytes as u64;
        self.pieces.push(piece);
        self.bytes += piece.bytes;
        // Mapped memory is not accessible to any device until access is granted.
        allow(&self.gpu, start, piece.bytes)
    }

    fn map_behind(&self, piece: Mapped) -> Result<()> {
        if piece.bytes > self.reserved - self.bytes {
            return Err(Error::invalid(format!(
                "{} bytes do not fit behind {} of {} reserved; expected less",
                piece.bytes, self.bytes, self.reserved
            ))
            .with_operation("map physical memory"));
        }
        let driver = self.gpu.context.driver;
        let start = self.address + self.bytes as u64;
        // SAFETY: the range was reserved, and nothing is mapped in it behind the pieces so far.
        let code = unsafe { (driver.cuMemMap)(start, piece.bytes, 0, piece.handle, 0) };
        driver.check(code, "map physical memory")
    }

    /// Gives `gpu` read and write access.
    pub(crate) fn allow(&self, gpu: &Gpu) -> Result<()> {
        allow(gpu, self.address, self.bytes)
    }

    /// Exports its pieces for peers.
    pub(crate) fn export(&self) -> Result<Vec<Piece>> {
        let piece = |piece: &Mapped| {
            Ok(Piece {
                descriptor: export(&self.gpu, piece.handle)?,
                bytes: piece.bytes,
            })
        };
        self.pieces.iter().map(piece).collect()
    }
}

impl Drop for VirtualMemory {
    fn drop(&mut self) {
        let (address, reserved) = (self.address, self.reserved);
        let pieces = std::mem::take(&mut self.pieces);
        self.gpu.reaper.run(move |context| {
            let driver = context.driver;
            let (mut start, mut failed) = (address, None);
            let mut note = |code| {
                if code != status::SUCCESS {
                    failed = Some(code);
                }
            };
            for piece in pieces {
                // SAFETY: mapped once, as one range; nothing names it any more.
                note(unsafe { (driver.cuMemUnmap)(start, piece.bytes) });
                // SAFETY: the handle was created or imported once and is released once.
                note(unsafe { (driver.cuMemRelease)(piece.handle) });
                start += piece.bytes as u64;
            }
            // SAFETY: reserved once; the driver refuses it where something is still mapped.
            note(unsafe { (driver.cuMemAddressFree)(address, reserved) });
            if let Some(code) = failed {
                tracing::warn!(code, "virtual memory at {address:#x} was not wholly freed");
            }
        });
    }
}

/// Growable memory of a GPU.
#[derive(Debug)]
pub(crate) struct CudaSegment(Mutex<VirtualMemory>);

impl CudaSegment {
    pub(crate) fn reserve(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self> {
        VirtualMemory::reserve(gpu, bytes).map(|memory| Self(Mutex::new(memory)))
    }
}

impl Segment for CudaSegment {
    fn address(&self) -> u64 {
        lock(&self.0).address
    }

    fn bytes(&self) -> usize {
        lock(&self.0).bytes
    }

    fn grow(&self, bytes: usize) -> Result<()> {
        lock(&self.0).grow(bytes)
    }
}

debug_text!(
    VirtualMemory,
    |it| "{} bytes at {:#x}",
    it.bytes,
    it.address
);

/// Gives `gpu` read and write access to the mapped range.
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

/// A descriptor of physical memory at `address` that other code allocated.
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
    // The descriptor holds the memory by itself, so the handle can be released whether or not this succeeds.
    let descriptor = export(gpu, handle);
    // SAFETY: retained above, released once.
    let code = unsafe { (driver.cuMemRelease)(handle) };
    if code != status::SUCCESS {
        tracing::warn!(code, "a handle of physical memory was not released");
    }
    descriptor
}

fn export(gpu: &Gpu, handle: CUmemGenericAllocationHandle) -> Result<OwnedFd> {
    let _entered = gpu.context.enter_relaxed()?;
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
        error.with_help("memory must be allocated as shareable by descriptor; in PyTorch, expandable segments are unless they use fabric handles")
    })?;
    if descriptor < 0 {
        return Err(
            Error::new(ErrorKind::Driver, "the driver gave no descriptor")
                .with_operation("export memory by descriptor"),
        );
    }
    // SAFETY: the driver made this descriptor for the caller, who is its only owner.
    let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
    // Child processes must not inherit it.
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
