//! Exporting allocations to peers and importing theirs.

use super::host_memory::HostMemory;
use super::ipc::IpcMapping;
use super::virtual_memory::{self, VirtualMemory};
use super::{CudaBacking, Source, next_identity, not_ours};
use crate::device::cuda::driver::status;
use crate::device::cuda::gpu::Gpu;
use crate::device::{Backing, DeviceSlice, Export, Opening, Piece};
use crate::error::{Error, Result};
use cudarc::driver::sys::CUipcMemHandle;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Exports the allocation that contains `slice`.
pub(crate) fn export(slice: &DeviceSlice) -> Result<Export> {
    let backing = CudaBacking::of(slice)?;
    let gpu = &*backing.gpu;
    let host = matches!(backing.source, Source::Host(_));
    let (ipc, pieces) = match &backing.source {
        Source::Host(memory) => (None, memory.export()?),
        Source::Plain { .. } => (Some(ipc_handle(gpu, backing.base())?), Vec::new()),
        Source::Virtual(memory) => (None, memory.export()?),
        Source::Borrowed(borrowed) if borrowed.ipc_capable => {
            (Some(ipc_handle(gpu, backing.base())?), Vec::new())
        }
        Source::Borrowed(borrowed) => (None, mapped_pieces(gpu, backing.base(), &borrowed.pieces)?),
        Source::Pinned(_) | Source::Ipc { .. } | Source::Descriptor { .. } => {
            return Err(not_ours());
        }
    };
    Ok(Export {
        allocation: slice.allocation(),
        ipc,
        pieces,
        host,
    })
}

fn ipc_handle(gpu: &Gpu, base: u64) -> Result<[u8; 64]> {
    let _entered = gpu.context.enter_relaxed()?;
    let mut handle = CUipcMemHandle { reserved: [0; 64] };
    // SAFETY: `handle` is an output parameter for one handle; an address that cannot be shared is
    // refused.
    let code = unsafe { (gpu.context.driver.cuIpcGetMemHandle)(&mut handle, base) };
    gpu.context
        .driver
        .check(code, "make an IPC handle")
        .map_err(|error| error.with_device(gpu.name()))?;
    Ok(handle.reserved.map(|byte| byte as u8))
}

/// Descriptors of contiguous pieces that other code mapped.
fn mapped_pieces(gpu: &Gpu, base: u64, lengths: &[usize]) -> Result<Vec<Piece>> {
    let mut next = base;
    let piece = |bytes: &usize| {
        let descriptor = mapped_descriptor(gpu, next)?;
        next += *bytes as u64;
        Ok(Piece {
            descriptor,
            bytes: *bytes,
        })
    };
    lengths.iter().map(piece).collect()
}

/// A descriptor of memory that other code mapped.
fn mapped_descriptor(gpu: &Gpu, address: u64) -> Result<OwnedFd> {
    virtual_memory::export_mapped(gpu, address).map_err(|error| {
        let text = format!("the memory can be shared neither by IPC nor by descriptor: {}", error.message());
        Error::unsupported(text)
            .with_operation("export device memory")
            .with_device(gpu.name())
            .with_code(error.code().unwrap_or_default())
            .with_help("memory of a stream-ordered pool (cudaMallocAsync) cannot be shared unless its pool was created as shareable; use cudaMalloc, or PyTorch's own allocator")
    })
}

/// Imports a peer's allocation of `bytes`.
pub(crate) fn import(gpu: &Arc<Gpu>, opening: Opening, bytes: usize) -> Result<DeviceSlice> {
    if bytes == 0 {
        return Err(
            Error::invalid_handle("the handle names 0 bytes; expected at least 1")
                .with_operation("open a peer's memory"),
        );
    }
    let too_small = |has: usize| {
        Error::invalid_handle(format!(
            "the peer's allocation has {has} bytes; expected the {bytes} of its handle"
        ))
        .with_operation("open a peer's memory")
    };
    match opening {
        Opening::SameProcess(slice) => {
            let whole = slice.allocation();
            if whole.bytes() < bytes {
                return Err(too_small(whole.bytes()));
            }
            reach(gpu, CudaBacking::of(&whole)?)?;
            Ok(whole)
        }
        Opening::Ipc(handle) => {
            let mapping = IpcMapping::open(gpu, &handle)?;
            if mapping.bytes < bytes {
                return Err(too_small(mapping.bytes));
            }
            let (address, identity) = (mapping.address, mapping.identity);
            Ok(CudaBacking::slice(
                gpu,
                address,
                bytes,
                identity,
                Source::Ipc { _held: mapping },
            ))
        }
        Opening::Host(piece) => Ok(HostMemory::import(gpu, piece, bytes)?.into_slice(bytes)),
        Opening::Pieces(pieces) => {
            let memory = VirtualMemory::import(gpu, &pieces)?;
            if memory.bytes < bytes {
                return Err(too_small(memory.bytes));
            }
            let address = memory.address;
            Ok(CudaBacking::slice(
                gpu,
                address,
                bytes,
                next_identity(),
                Source::Descriptor { _held: memory },
            ))
        }
    }
}

/// Enables access of `gpu` to the memory of another GPU of this process.
fn reach(gpu: &Gpu, backing: &CudaBacking) -> Result<()> {
    let (mine, theirs) = (&gpu.context, &backing.gpu.context);
    if mine.device == theirs.device || matches!(backing.source, Source::Host(_)) {
        return Ok(());
    }
    if !mine.driver.can_access_peer(mine.device, theirs.device)? {
        let text = format!(
            "GPU {} cannot map the memory of GPU {}",
            mine.ordinal, theirs.ordinal
        );
        return Err(Error::unsupported(text)
            .with_operation("open a peer's memory")
            .with_help("run `warplink doctor` to see which GPUs reach which"));
    }
    let _entered = mine.enter_relaxed()?;
    // SAFETY: both contexts are retained for as long as they are held; the only valid flags are 0.
    let code = unsafe { (mine.driver.cuCtxEnablePeerAccess)(theirs.raw, 0) };
    // Access is per pair of contexts and is never disabled, so another allocation, or another library, may have
    // enabled it.
    if code != status::PEER_ACCESS_ALREADY_ENABLED {
        mine.driver.check(code, "enable peer access")?;
    }
    match &backing.source {
        // Peer access covers allocations of `cuMemAlloc` only; virtual memory has access rights of its own.
        Source::Virtual(memory) => memory.allow(gpu),
        // Virtual memory mapped by other code is not covered by peer access either.
        Source::Borrowed(borrowed) if !borrowed.ipc_capable => {
            virtual_memory::allow(gpu, backing.base(), backing.bytes())
        }
        Source::Pinned(_) | Source::Ipc { .. } | Source::Descriptor { .. } => Err(not_ours()),
        _ => Ok(()),
    }
}
