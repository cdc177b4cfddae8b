//! Allocations of the operands of calls, which callers pass by address, again and again.

use super::{Borrowed, CudaBacking, Source, borrowed};
use crate::device::DeviceSlice;
use crate::device::cuda::gpu::Gpu;
use crate::error::Result;
use crate::sync::lock;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

/// Maximum cached allocations. All are dropped at once beyond, since a process that has so many rarely uses the same ones.
const MAX_CACHED: usize = 1024;

/// Cache of borrowed allocations without owners, which saves a query of the driver for each operand: an address stays
/// right when its allocation is replaced, and those who share allocations with peers ask by themselves
/// ([`DeviceSlice::renewed`]).
#[derive(Debug, Default)]
pub(crate) struct Operands(Mutex<Vec<CachedAllocation>>);

/// An allocation. They do not overlap, and are sorted.
#[derive(Debug)]
struct CachedAllocation {
    start: u64,
    end: u64,
    whole: DeviceSlice,
}

impl Operands {
    /// See [`Device::borrow_operand`](crate::device::Device::borrow_operand).
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn borrow(
        &self,
        gpu: &Arc<Gpu>,
        address: u64,
        bytes: usize,
    ) -> Result<DeviceSlice> {
        if let Some(known) = self.find(address, bytes) {
            return Ok(known);
        }
        // SAFETY: guaranteed by the caller.
        let slice = unsafe { borrowed::borrow(gpu, address, bytes, Arc::new(())) }?;
        self.insert(&slice);
        Ok(slice)
    }

    fn find(&self, address: u64, bytes: usize) -> Option<DeviceSlice> {
        let known = lock(&self.0);
        let place = known.partition_point(|one| one.end <= address);
        let CachedAllocation { start, whole, .. } = known.get(place)?;
        let offset = address.checked_sub(*start)? as usize;
        // Relaxed: a hint, as where it is set.
        let is_gone = |backing: &CudaBacking| backing.gone.load(Ordering::Relaxed);
        if bytes == 0 || CudaBacking::of(whole).is_ok_and(is_gone) {
            return None;
        }
        let end = offset.checked_add(bytes)?;
        if end > whole.bytes() {
            return None;
        }
        whole.slice(offset..end).ok()
    }

    /// Adds the allocation of a slice, unless it has several pieces, since operands then overlap one another's.
    fn insert(&self, slice: &DeviceSlice) {
        let is_one_piece = |backing: &CudaBacking| matches!(&backing.source, Source::Borrowed(Borrowed { pieces, .. }) if pieces.len() == 1);
        if !CudaBacking::of(slice).is_ok_and(is_one_piece) {
            return;
        }
        if let Some(backing) = slice.backing().without_owner() {
            self.insert_whole(DeviceSlice::whole(backing));
        }
    }

    /// Adds an allocation, and removes those that it overlaps, which are gone.
    fn insert_whole(&self, whole: DeviceSlice) {
        let (start, end) = (whole.address(), whole.address() + whole.bytes() as u64);
        let mut known = lock(&self.0);
        if known.len() >= MAX_CACHED {
            known.clear();
        }
        let first = known.partition_point(|one| one.end <= start);
        let past = known.partition_point(|one| one.start < end);
        let added = CachedAllocation { start, end, whole };
        // Dropping one runs no foreign code, since it has no owner.
        drop(known.splice(first..past, [added]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Backing, DeviceKind};
    use std::any::Any;

    /// Base, length and identity.
    #[derive(Debug)]
    struct Allocation(u64, usize, u64);

    impl Backing for Allocation {
        fn base(&self) -> u64 {
            self.0
        }
        fn bytes(&self) -> usize {
            self.1
        }
        fn identity(&self) -> u64 {
            self.2
        }
        fn kind(&self) -> DeviceKind {
            DeviceKind::Cuda
        }
        fn as_any(&self) -> &dyn Any {
            self
        }
    }

    #[test]
    fn operands_are_found_within_the_newest_allocation() {
        let operands = Operands::default();
        let add = |base, bytes, identity| {
            let allocation = Arc::new(Allocation(base, bytes, identity));
            operands.insert_whole(DeviceSlice::whole(allocation));
        };
        let find = |address, bytes| {
            let found = operands.find(address, bytes)?;
            assert_eq!((found.address(), found.bytes()), (address, bytes));
            Some(found.backing().identity())
        };
        add(100, 50, 1);
        add(150, 50, 2);
        let found = [
            (99, 1),
            (100, 50),
            (149, 1),
            (149, 2),
            (150, 50),
            (199, 2),
            (100, 0),
        ];
        let found = found.map(|(address, bytes)| find(address, bytes));
        assert_eq!(found, [None, Some(1), Some(1), None, Some(2), None, None]);
        assert_eq!((find(u64::MAX, 1), find(150, usize::MAX)), (None, None));
        add(140, 20, 3);
        assert_eq!(
            [100, 140, 159, 160].map(|at| find(at, 1)),
            [None, Some(3), Some(3), None]
        );
        add(120, 300, 4);
        assert_eq!([140, 419].map(|at| find(at, 1)), [Some(4), Some(4)]);
        for number in 0..MAX_CACHED as u64 {
            add(1000 + 10 * number, 10, number);
        }
        assert_eq!(
            (find(140, 1), find(1000 + 10 * (MAX_CACHED as u64 - 1), 10)),
            (None, Some(MAX_CACHED as u64 - 1))
        );
    }
}
