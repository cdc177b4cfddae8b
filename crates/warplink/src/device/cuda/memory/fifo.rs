//! Memory of a FIFO between GPU kernels and a host thread.
//!
//! The ring and the read count are in pinned host memory: kernels store to it and the host polls it. Words
//! that only kernels use (positions claimed, cached read count, refresh lock) and the stop flag, which
//! kernels check after each claim, are in GPU memory, where kernels reach them fast.

use super::PlainMemory;
use crate::debug::debug_text;
use crate::device::DeviceSlice;
use crate::device::channel::fifo::{Fifo, FifoAddresses, FifoMemory};
use crate::device::cuda::driver::raw::Pinned;
use crate::device::cuda::gpu::Gpu;
use crate::error::Result;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Size of the four counters in GPU memory.
const COUNTERS: usize = 32;
/// Offset of the stop flag; must match `device.cuh`.
const STOPPED: u64 = 24;

pub(crate) struct CudaFifoMemory {
    gpu: Arc<Gpu>,
    /// `None` only while being dropped.
    pinned: Option<Pinned>,
    words: usize,
    slots: usize,
    counters: DeviceSlice,
}

// SAFETY: the pinned words are accessed atomically only, after they were set to zero by the thread that
// made this.
unsafe impl Sync for CudaFifoMemory {}

impl CudaFifoMemory {
    pub(crate) fn allocate(gpu: &Arc<Gpu>, slots: usize) -> Result<Self> {
        let words = Fifo::words(slots);
        let mut pinned = Pinned::allocate(&gpu.context, 8 * words)?;
        // SAFETY: the memory is not shared yet.
        unsafe { pinned.write(0, &vec![0; 8 * words]) };
        let counters = PlainMemory::allocate(gpu, COUNTERS)?;
        // SAFETY: just allocated, of at least as many bytes.
        unsafe { gpu.staging.zero(counters.address, COUNTERS)? };
        Ok(Self {
            gpu: gpu.clone(),
            pinned: Some(pinned),
            words,
            slots,
            counters: counters.into_slice(COUNTERS),
        })
    }

    fn word(&self, word: usize) -> Option<&AtomicU64> {
        let pinned = self.pinned.as_ref().filter(|_| word < self.words)?;
        // SAFETY: 8 bytes inside of the allocation, which is aligned to pages and lives as long as `self`;
        // host and kernels access them atomically only.
        Some(unsafe { AtomicU64::from_ptr(pinned.at(8 * word).cast()) })
    }
}

impl FifoMemory for CudaFifoMemory {
    fn load(&self, word: usize) -> u64 {
        self.word(word)
            // Pairs with the kernels' system-scope release store of a trigger half.
            .map_or(0, |word| word.load(Ordering::Acquire))
    }

    fn store(&self, word: usize, value: u64) {
        if let Some(word) = self.word(word) {
            // Pairs with the kernels' acquire load of the read count: the slot was read before it is reused.
            word.store(value, Ordering::Release);
        }
    }

    fn claim(&self, _: u64) -> bool {
        false
    }

    fn has_host_producers(&self) -> bool {
        false
    }

    fn claimed(&self) -> Result<u64> {
        let mut bytes = [0; 8];
        // SAFETY: the slice is live device memory of more bytes.
        unsafe {
            self.gpu
                .staging
                .download(self.counters.address(), &mut bytes)?;
        }
        Ok(u64::from_ne_bytes(bytes))
    }

    fn set_kernels_stopped(&self, stopped: bool) -> Result<()> {
        let address = self.counters.address() + STOPPED;
        // SAFETY: the word is in the slice, which is live device memory. Kernels load it in one access.
        unsafe {
            self.gpu
                .staging
                .upload(address, &u64::from(stopped).to_ne_bytes())
        }
    }

    fn addresses(&self) -> FifoAddresses {
        let at = |word: usize| {
            let pinned = self.pinned.as_ref();
            // Pinned memory has the same address on the GPU.
            pinned.map_or(0, |pinned| pinned.at(8 * word) as usize as u64)
        };
        FifoAddresses {
            ring: at(0),
            tail: at(2 * self.slots),
            counters: Some(self.counters.clone()),
        }
    }
}

impl Drop for CudaFifoMemory {
    fn drop(&mut self) {
        // The driver may wait for the GPU, so free this on the reaper's thread, as device memory.
        let pinned = self.pinned.take();
        self.gpu.reaper.run(move |_| drop(pinned));
    }
}

debug_text!(
    CudaFifoMemory,
    |it| "FIFO of {} slots of {:?}",
    it.slots,
    it.gpu
);
