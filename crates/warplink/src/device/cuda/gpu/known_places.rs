//! The driver's attributes of addresses of borrowed memory, and a cache of them.

use crate::device::cuda::driver::context::Context;
use crate::device::cuda::driver::status;
use crate::sync::lock;
use cudarc::driver::sys::{CUpointer_attribute, CUpointer_attribute_enum as Attribute};
use std::ffi::{c_uint, c_void};
use std::sync::Mutex;

/// `CU_MEMORYTYPE_DEVICE`.
const DEVICE_MEMORY: u64 = 2;

/// Maximum mappings whose attributes are cached: allocators suballocate most memory from few of them.
const MAX_KNOWN: usize = 64;

/// The driver's attributes of an address, all of them zero for one that it does not know.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BorrowedPlace {
    memory_type: u64,
    pub(crate) ordinal: u64,
    /// 1 for plain memory.
    ipc_capable: u64,
    /// Of the allocation, or of the physical piece; never used again.
    pub(crate) id: u64,
    range_start: u64,
    range_bytes: u64,
    mapping_start: u64,
    mapping_bytes: u64,
}

impl BorrowedPlace {
    pub(crate) fn is_device(&self) -> bool {
        self.memory_type == DEVICE_MEMORY
    }

    pub(crate) fn is_plain(&self) -> bool {
        self.ipc_capable == 1
    }

    /// Whether the mapping contains an address.
    fn contains(&self, address: u64) -> bool {
        let (start, bytes) = self.extent(self.is_plain());
        start <= address && address - start < bytes
    }

    /// Start and length of the mapping. The range of memory that is not plain may be a whole reservation, so that the
    /// single physical piece counts.
    pub(crate) fn extent(&self, plain: bool) -> (u64, u64) {
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
    /// Attributes of an address. Cached ones are used only if the mapping still has the same id, which the driver never
    /// uses again.
    pub(crate) fn place(&self, context: &Context, address: u64) -> BorrowedPlace {
        if let Some(known) = self.find(address)
            // The memory may have been freed and allocated anew; one cheap query shows that, the others are saved.
            && buffer_id(context, address) == Some(known.id)
        {
            return known;
        }
        let place = all_attributes(context, address);
        if place.is_device() && place.id != 0 {
            self.insert(place);
        }
        place
    }

    fn find(&self, address: u64) -> Option<BorrowedPlace> {
        let ring = lock(&self.0);
        ring.places
            .iter()
            .find(|place| place.contains(address))
            .copied()
    }

    pub(crate) fn clear(&self) {
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

/// The id of the allocation, or of the physical piece, at an address.
fn buffer_id(context: &Context, address: u64) -> Option<u64> {
    let mut id = 0;
    query(
        context,
        address,
        [(Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID, &mut id)],
    )
    .then_some(id)
}

fn all_attributes(context: &Context, address: u64) -> BorrowedPlace {
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
    if query(context, address, values) {
        place
    } else {
        BorrowedPlace::default()
    }
}

/// Queries attributes in one call, since each call takes a lock of the driver; returns whether it succeeded.
fn query<const N: usize>(
    context: &Context,
    address: u64,
    values: [(CUpointer_attribute, &mut u64); N],
) -> bool {
    let mut attributes = values.each_ref().map(|(attribute, _)| *attribute);
    let mut pointers = values.map(|(_, value)| std::ptr::from_mut(value).cast::<c_void>());
    // SAFETY: the number of attributes is that of the pointers, each to a value with space for the largest attribute.
    let code = unsafe {
        (context.driver.cuPointerGetAttributes)(
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
