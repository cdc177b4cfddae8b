//! Views of device memory that other code allocated.

use super::{Borrowed, CudaBacking, Source, foreign_identity, next_identity};
use crate::device::cuda::driver::status;
use crate::device::cuda::gpu::Gpu;
use crate::device::{DeviceSlice, combined_identity};
use crate::error::{Error, Result};
use crate::sync::lock;
use cudarc::driver::sys::{CUpointer_attribute, CUpointer_attribute_enum as Attribute};
use std::any::Any;
use std::ffi::{c_uint, c_void};
use std::sync::{Arc, Mutex};

/// `CU_MEMORYTYPE_DEVICE`.
const DEVICE_MEMORY: u64 = 2;

/// Maximum mappings whose attributes are cached: allocators suballocate most memory from few of them.
const MAX_KNOWN: usize = 64;

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
    let ipc_capable = at.is_plain();
    let mut found = pieces(gpu, address, end, ipc_capable, at);
    if end_of(&found, address) < end {
        // Memory of a pool may have grown under its id.
        gpu.known_places.clear();
        found = pieces(gpu, address, end, ipc_capable, place(gpu, address));
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
    let first = place(gpu, base);
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

    fn is_plain(&self) -> bool {
        self.ipc_capable == 1
    }

    /// Whether the mapping contains an address.
    fn contains(&self, address: u64) -> bool {
        let (start, bytes) = self.extent(self.is_plain());
        start <= address && address - start < bytes
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

/// Attributes of recently borrowed mappings: callers pass addresses in every call of theirs, and all attributes
/// together take the driver microseconds.
#[derive(Debug, Default)]
pub(crate) struct KnownPlaces(Mutex<PlaceRing>);

#[derive(Debug, Default)]
struct PlaceRing {
    places: Vec<BorrowedPlace>,
    /// Index of the entry that the next insertion replaces once the ring is full.
    oldest: usize,
}

impl KnownPlaces {
    fn find(&self, address: u64) -> Option<BorrowedPlace> {
        let ring = lock(&self.0);
        ring.places
            .iter()
            .find(|place| place.contains(address))
            .copied()
    }

    fn clear(&self) {
        lock(&self.0).places.clear();
    }

    /// Adds `place`, and removes mappings that it overlaps, which are gone.
    fn insert(&self, place: BorrowedPlace) {
        let mut ring = lock(&self.0);
        let (start, _) = place.extent(place.is_plain());
        ring.places.retain(|known| {
            let (known_start, _) = known.extent(known.is_plain());
            !known.contains(start) && !place.contains(known_start)
        });
        if ring.places.len() < MAX_KNOWN {
            ring.places.push(place);
            return;
        }
        let oldest = ring.oldest % MAX_KNOWN;
        ring.places[oldest] = place;
        ring.oldest = oldest + 1;
    }
}

/// Attributes of an address. Cached ones are used only if the mapping still has the same id, which the driver never
/// uses again.
fn place(gpu: &Gpu, address: u64) -> BorrowedPlace {
    if let Some(known) = gpu.known_places.find(address)
        // The memory may have been freed and allocated anew; one cheap query shows that, the others are saved.
        && buffer_id(gpu, address) == Some(known.id)
    {
        return known;
    }
    let place = all_attributes(gpu, address);
    if place.is_device() && place.id != 0 {
        gpu.known_places.insert(place);
    }
    place
}

/// The id of the allocation, or of the physical piece, at an address.
fn buffer_id(gpu: &Gpu, address: u64) -> Option<u64> {
    let mut id = 0;
    query(
        gpu,
        address,
        [(Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID, &mut id)],
    )
    .then_some(id)
}

fn all_attributes(gpu: &Gpu, address: u64) -> BorrowedPlace {
    // Attributes have 1, 4 or 8 bytes. The zeroed upper bytes widen them on little-endian machines, which are
    // all that this driver supports.
    let mut place = BorrowedPlace::default();
    let values: [(CUpointer_attribute, &mut u64); 8] = [
        (
            Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            &mut place.memory_type,
        ),
        (
            Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            &mut place.ordinal,
        ),
        (
            Attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
            &mut place.ipc_capable,
        ),
        (Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID, &mut place.id),
        (
            Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            &mut place.range_start,
        ),
        (
            Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            &mut place.range_bytes,
        ),
        (
            Attribute::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR,
            &mut place.mapping_start,
        ),
        (
            Attribute::CU_POINTER_ATTRIBUTE_MAPPING_SIZE,
            &mut place.mapping_bytes,
        ),
    ];
    if query(gpu, address, values) {
        place
    } else {
        BorrowedPlace::default()
    }
}

/// Queries attributes in one call, since each call takes a lock of the driver; returns whether it succeeded.
fn query<const N: usize>(
    gpu: &Gpu,
    address: u64,
    values: [(CUpointer_attribute, &mut u64); N],
) -> bool {
    let mut attributes = values.each_ref().map(|(attribute, _)| *attribute);
    let mut pointers = values.map(|(_, value)| std::ptr::from_mut(value).cast::<c_void>());
    // SAFETY: the number of attributes is that of the pointers, each to a value with space for the largest attribute.
    let code = unsafe {
        (gpu.context.driver.cuPointerGetAttributes)(
            attributes.len() as c_uint,
            attributes.as_mut_ptr(),
            pointers.as_mut_ptr(),
            address,
        )
    };
    code == status::SUCCESS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(start: u64, bytes: u64, id: u64) -> BorrowedPlace {
        BorrowedPlace {
            memory_type: DEVICE_MEMORY,
            id,
            mapping_start: start,
            mapping_bytes: bytes,
            ..BorrowedPlace::default()
        }
    }

    #[test]
    fn newer_mappings_replace_those_that_they_overlap_and_the_oldest() {
        let known = KnownPlaces::default();
        let id = |address| known.find(address).map(|place| place.id);
        known.insert(at(100, 50, 1));
        known.insert(at(150, 50, 2));
        assert_eq!(
            [99, 100, 149, 150, 199, 200].map(id),
            [None, Some(1), Some(1), Some(2), Some(2), None]
        );
        known.insert(at(140, 20, 3));
        assert_eq!([100, 140, 159, 160].map(id), [None, Some(3), Some(3), None]);
        for number in 0..2 * MAX_KNOWN as u64 {
            known.insert(at(1000 + 10 * number, 10, number));
            assert_eq!(id(1009 + 10 * number), Some(number));
        }
        assert_eq!(id(140), None);
        assert_eq!(lock(&known.0).places.len(), MAX_KNOWN);
        known.clear();
        known.insert(at(1000, 10, 4));
        assert_eq!([1000, 1010].map(id), [Some(4), None]);
    }
}
