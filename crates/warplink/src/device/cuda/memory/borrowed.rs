//! Views of device memory that other code allocated.

use super::{Borrowed, CudaBacking, Source, foreign_identity, next_identity};
use crate::device::cuda::driver::status;
use crate::device::cuda::gpu::Gpu;
use crate::device::{DeviceSlice, combined_identity};
use crate::error::{Error, Result};
use cudarc::driver::sys::{CUpointer_attribute, CUpointer_attribute_enum as Attribute};
use std::any::Any;
use std::ffi::{c_uint, c_void};
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
    let at = place(gpu, address);
    if !at.is_device() {
        return Err(foreign(format!(
            "{address:#x} is not device memory; expected memory of this GPU"
        )));
    }
    if at.ordinal as usize != gpu.context.ordinal {
        return Err(foreign(format!(
            "{address:#x} is memory of GPU {}; expected memory of this GPU",
            at.ordinal
        )));
    }
    let end = address.checked_add(bytes as u64).ok_or_else(|| {
        foreign(format!(
            "{bytes} bytes at {address:#x} overflow the address space"
        ))
    })?;
    let ipc_capable = at.ipc_capable == 1;
    let pieces = pieces(gpu, address, end, ipc_capable, at);
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
    let pieces = pieces(gpu, base, base + bytes as u64, plain, place(gpu, base));
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

/// Contiguous mappings from the one at `address`, which is at `first`, to `end`; plain memory is always one.
fn pieces(
    gpu: &Gpu,
    address: u64,
    end: u64,
    plain: bool,
    first: BorrowedPlace,
) -> Vec<MappedPiece> {
    let mut pieces: Vec<MappedPiece> = Vec::new();
    let (mut next, mut at) = (address, first);
    while next < end && at.is_device() {
        let (base, bytes) = at.extent(plain);
        // The next piece must begin where the previous one ends.
        if bytes == 0 || !pieces.is_empty() && base != next {
            break;
        }
        pieces.push(MappedPiece {
            base,
            bytes: bytes as usize,
            id: Some(at.id).filter(|id| *id != 0),
        });
        next = base + bytes;
        if plain || next >= end {
            break;
        }
        at = place(gpu, next);
    }
    pieces
}

/// The driver's attributes of an address, all of them zero for one that it does not know.
#[derive(Clone, Copy, Debug, Default)]
struct BorrowedPlace {
    memory_type: u64,
    ordinal: u64,
    /// 1 for plain memory.
    ipc_capable: u64,
    /// Of the allocation, or of the physical piece; never used again.
    id: u64,
    range_start: u64,
    range_bytes: u64,
    mapping_start: u64,
    mapping_bytes: u64,
}

impl BorrowedPlace {
    fn is_device(&self) -> bool {
        self.memory_type == DEVICE_MEMORY
    }

    /// Start and length of the mapping. The range of memory that is not plain may be a whole reservation, so that the
    /// single physical piece counts.
    fn extent(&self, plain: bool) -> (u64, u64) {
        if plain || self.mapping_start == 0 || self.mapping_bytes == 0 {
            return (self.range_start, self.range_bytes);
        }
        (self.mapping_start, self.mapping_bytes)
    }
}

/// Asks for all attributes at once: each call of the driver takes a lock, and callers pass addresses in every call of
/// theirs.
fn place(gpu: &Gpu, address: u64) -> BorrowedPlace {
    // Attributes have 1, 4 or 8 bytes. The zeroed upper bytes widen them on little-endian machines, which are
    // all that this driver supports.
    let mut place = BorrowedPlace::default();
    let values: [(CUpointer_attribute, *mut u64); 8] = [
        (
            Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            &raw mut place.memory_type,
        ),
        (
            Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            &raw mut place.ordinal,
        ),
        (
            Attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
            &raw mut place.ipc_capable,
        ),
        (Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID, &raw mut place.id),
        (
            Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            &raw mut place.range_start,
        ),
        (
            Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            &raw mut place.range_bytes,
        ),
        (
            Attribute::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR,
            &raw mut place.mapping_start,
        ),
        (
            Attribute::CU_POINTER_ATTRIBUTE_MAPPING_SIZE,
            &raw mut place.mapping_bytes,
        ),
    ];
    let mut attributes = values.map(|(attribute, _)| attribute);
    let mut pointers = values.map(|(_, value)| value.cast::<c_void>());
    // SAFETY: the number of attributes is that of the pointers, each to a value with space for the largest attribute.
    let code = unsafe {
        (gpu.context.driver.cuPointerGetAttributes)(
            attributes.len() as c_uint,
            attributes.as_mut_ptr(),
            pointers.as_mut_ptr(),
            address,
        )
    };
    if code == status::SUCCESS {
        place
    } else {
        BorrowedPlace::default()
    }
}
