//! Host memory that a device's streams, the network and processors can access.

use super::slice::DeviceSlice;
use std::sync::atomic::{AtomicU64, Ordering};

/// Buffer between device memory and the network: streams copy to and from it at full bandwidth, a network
/// sends it and writes to it, and its words can be loaded and stored. Initially zero.
#[derive(Clone, Debug)]
pub struct StagingMemory(DeviceSlice);

impl StagingMemory {
    /// # Safety
    /// Processors of this process must be able to access `slice` at its address as long as it is held, and
    /// only devices, networks and this type may access it.
    pub(in crate::device) unsafe fn new(slice: DeviceSlice) -> Self {
        Self(slice)
    }

    /// As device memory.
    pub fn slice(&self) -> &DeviceSlice {
        &self.0
    }

    /// Loads the word at `offset` (acquire); zero if out of bounds.
    pub(crate) fn load(&self, offset: usize) -> u64 {
        self.word(offset)
            // Acquire: pairs with the release store of a local thread; the network's ordering is its
            // guarantee 1.
            .map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Stores the word at `offset` (release).
    pub(crate) fn store(&self, offset: usize, value: u64) {
        if let Some(word) = self.word(offset) {
            word.store(value, Ordering::Release);
        }
    }

    fn word(&self, offset: usize) -> Option<&AtomicU64> {
        let end = offset.checked_add(size_of::<u64>())?;
        let address = self.0.address() as usize + offset;
        if end > self.0.bytes() || !address.is_multiple_of(size_of::<u64>()) {
            return None;
        }
        // SAFETY: 8 aligned bytes inside of the slice, which processors reach at its address and which lives
        // as long as `self`; everybody in this process accesses words of it atomically.
        Some(unsafe { AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(address)) })
    }
}

#[cfg(test)]
mod tests {
    use crate::device::{self, DeviceConfig, DeviceKind};

    #[test]
    fn words_start_as_zeros_and_end_with_the_memory() {
        let device = device::open(&DeviceConfig::new(DeviceKind::Host, 0)).unwrap();
        let memory = device.allocate_staging(64).unwrap();
        assert!(memory.slice().backing().is_host_memory());
        assert_eq!((memory.load(0), memory.load(56)), (0, 0));
        memory.store(56, 7);
        // Past the end, and misaligned.
        for offset in [57, 64, usize::MAX] {
            memory.store(offset, 9);
            assert_eq!(memory.load(offset), 0);
        }
        let mut bytes = [0; 64];
        device.download(memory.slice(), &mut bytes).unwrap();
        assert_eq!(bytes[56..], 7_u64.to_ne_bytes());
    }
}
