//! Views of device memory that other code allocated.

use super::{Borrowed, CudaBacking, Source, foreign_identity, next_identity};
use crate::device::cuda::gpu::Gpu;
use crate::device::cuda::gpu::known_places::BorrowedPlace;
use crate::device::{DeviceSlice, combined_identity};
use crate::error::{Error, Result};
use std::any::Any;
use std::sync::Arc;

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
    let _entered = gpu.context.enter_relaxed()?;
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
    let at = gpu.place(address);
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
    let ipc_capable = at.is_plain();
    let mut found = pieces(gpu, address, end, ipc_capable, at);
    if end_of(&found, address) < end {
        // Memory of a pool may have grown under its id.
        gpu.known_places.clear();
        found = pieces(gpu, address, end, ipc_capable, gpu.place(address));
    }
    let pieces = found;
    let base = pieces.first().map_or(address, |piece| piece.base);
    let allocation_end = end_of(&pieces, address);
    let size = (allocation_end - base) as usize;
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
    let _entered = gpu.context.enter_relaxed().ok()?;
    let first = gpu.place(base);
    if first.id != 0 && first.extent(plain) == (base, bytes as u64) {
        return Some(foreign_identity(combined_identity(&[first.id])));
    }
    let pieces = pieces(gpu, base, base + bytes as u64, plain, first);
    let all = pieces.iter().map(|piece| piece.bytes).sum::<usize>();
    let is_same = all == bytes && pieces.first().is_some_and(|piece| piece.base == base);
    identity_of(&pieces).filter(|_| is_same)
}

fn identity_of(pieces: &[MappedPiece]) -> Option<u64> {
    let ids: Option<Vec<u64>> = pieces.iter().map(|piece| piece.id).collect();
    ids.map(|ids| foreign_identity(combined_identity(&ids)))
}

/// End of contiguous mappings, of which the first contains `address`.
fn end_of(pieces: &[MappedPiece], address: u64) -> u64 {
    pieces
        .last()
        .map_or(address, |piece| piece.base + piece.bytes as u64)
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
        // An allocation of `cuMemAlloc` is one piece; only virtual memory is mapped in several.
        if plain || next >= end {
            break;
        }
        at = gpu.place(next);
    }
    pieces
}
