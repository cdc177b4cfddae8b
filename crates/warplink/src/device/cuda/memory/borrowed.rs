//! Views of device memory that other code allocated.

use super::{Borrowed, CudaBacking, Source, foreign_identity, next_identity};
use crate::device::cuda::driver::status;
use crate::device::cuda::gpu::Gpu;
use crate::device::{DeviceSlice, combined_identity};
use crate::error::{Error, Result};
use cudarc::driver::sys::{CUpointer_attribute, CUpointer_attribute_enum as Attribute};
use std::any::Any;
use std::sync::Arc;

/// `CU_MEMORYTYPE_DEVICE`.
const DEVICE_MEMORY: u64 = 2;

/// Creates a slice of `bytes` at `address`. Its backing spans the whole allocation, or the pieces of virtual
/// memory that contain the range.
///
/// # Safety
/// As [`Device::borrow`](crate::device::Device::borrow).
pub(crate) unsafe fn borrow(
    gpu: &Arc<Gpu>,
    address: u64,
    bytes: usize,
    owner: Arc<dyn Any + Send + Sync>,
) -> Result<DeviceSlice> {
    let _entered = gpu.context.enter()?;
    let _relaxed = gpu.context.relax_capture();
    let foreign = |text: String| {
        Error::invalid(text)
            .with_operation("borrow device memory")
            .with_device(gpu.name())
    };
    if bytes == 0 {
        return Err(foreign(
            "the view has 0 bytes; expected at least 1".to_owned(),
        ));
    }
    if attribute(gpu, Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) != Some(DEVICE_MEMORY) {
        return Err(foreign(format!(
            "{address:#x} is not device memory; expected memory of this GPU"
        )));
    }
    if let Some(ordinal) = attribute(gpu, Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)
        && ordinal as u32 as usize != gpu.context.ordinal
    {
        return Err(foreign(format!(
            "{address:#x} is memory of GPU {}; expected memory of this GPU",
            ordinal as u32
        )));
    }
    let end = address.checked_add(bytes as u64).ok_or_else(|| {
        foreign(format!(
            "{bytes} bytes at {address:#x} overflow the address space"
        ))
    })?;
    let ipc_capable = attribute(
        gpu,
        Attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
        address,
    ) == Some(1);
    let pieces = pieces(gpu, address, end, ipc_capable)?;
    let base = pieces.first().map_or(address, |piece| piece.base);
    let size: usize = pieces.iter().map(|piece| piece.bytes).sum();
    let allocation_end = base + size as u64;
    if end > allocation_end {
        return Err(foreign(format!(
            "{bytes} bytes at {address:#x} pass the end of the allocation; expected an end of at most {allocation_end:#x}"
        )));
    }
    // Without a buffer id from the driver nothing proves that this is the same allocation as before, so treat
    // it as a new one: no stale mapping is used, at the price of another exchange.
    let numbered = identity_of(&pieces);
    let identity = numbered.unwrap_or_else(next_identity);
    let source = Source::Borrowed(Borrowed {
        owner: Some(owner),
        is_numbered: numbered.is_some(),
        ipc_capable,
        pieces: pieces.iter().map(|piece| piece.bytes).collect(),
    });
    let whole = CudaBacking::slice(gpu, base, size, identity, source);
    let start = (address - base) as usize;
    whole.slice(start..start + bytes)
}

/// The current identity of a range, if the driver has ids for all of its pieces.
pub(super) fn identity(gpu: &Gpu, base: u64, bytes: usize, plain: bool) -> Option<u64> {
    let _entered = gpu.context.enter().ok()?;
    let _relaxed = gpu.context.relax_capture();
    let pieces = pieces(gpu, base, base + bytes as u64, plain).ok()?;
    let all = pieces.iter().map(|piece| piece.bytes).sum::<usize>();
    let is_same = all == bytes && pieces.first().is_some_and(|piece| piece.base == base);
    identity_of(&pieces).filter(|_| is_same)
}

fn identity_of(pieces: &[MappedPiece]) -> Option<u64> {
    let ids: Option<Vec<u64>> = pieces.iter().map(|piece| piece.id).collect();
    ids.map(|ids| foreign_identity(combined_identity(&ids)))
}

/// A mapping of physical memory.
struct MappedPiece {
    base: u64,
    bytes: usize,
    id: Option<u64>,
}

/// Contiguous mappings from the one at `address` to `end`; plain memory is always one.
fn pieces(gpu: &Gpu, address: u64, end: u64, plain: bool) -> Result<Vec<MappedPiece>> {
    let mut pieces: Vec<MappedPiece> = Vec::new();
    let mut next = address;
    while next < end {
        let (base, bytes) = extent(gpu, next, plain)?;
        // The next piece must begin where the previous one ends.
        if bytes == 0 || !pieces.is_empty() && base != next {
            break;
        }
        let id = attribute(gpu, Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID, base);
        pieces.push(MappedPiece {
            base,
            bytes,
            id: id.filter(|id| *id != 0),
        });
        next = base + bytes as u64;
        let goes_on = !plain
            && attribute(gpu, Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, next)
                == Some(DEVICE_MEMORY);
        if !goes_on {
            break;
        }
    }
    Ok(pieces)
}

/// Start and length of the mapping at `address`.
fn extent(gpu: &Gpu, address: u64, plain: bool) -> Result<(u64, usize)> {
    if !plain {
        // Query the single physical piece: the address range may be the whole reservation.
        let base = attribute(
            gpu,
            Attribute::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR,
            address,
        );
        let bytes = attribute(gpu, Attribute::CU_POINTER_ATTRIBUTE_MAPPING_SIZE, address);
        if let (Some(base), Some(bytes)) = (base, bytes)
            && base != 0
            && bytes != 0
        {
            return Ok((base, bytes as usize));
        }
    }
    let driver = gpu.context.driver;
    let (mut base, mut size) = (0, 0);
    // SAFETY: both point to writable values; an unknown address is refused.
    let code = unsafe { (driver.cuMemGetAddressRange_v2)(&mut base, &mut size, address) };
    driver.check(code, "find the allocation behind an address")?;
    Ok((base, size))
}

/// An attribute of an address, if the driver has it.
fn attribute(gpu: &Gpu, which: CUpointer_attribute, address: u64) -> Option<u64> {
    // Attributes have 1, 4 or 8 bytes. The zeroed upper bytes widen them on little-endian machines, which are
    // all that this driver supports.
    let mut value = 0_u64;
    // SAFETY: `value` has room for the widest attribute that is asked for here.
    let code = unsafe {
        (gpu.context.driver.cuPointerGetAttribute)((&raw mut value).cast(), which, address)
    };
    (code == status::SUCCESS).then_some(value)
}
