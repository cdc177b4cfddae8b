//! The kernel that does a small transfer, with its waits and signals, in one launch.

use super::module::{Function, Module};
use super::nvrtc;
use crate::device::cuda::capabilities::Capabilities;
use crate::device::cuda::driver::context::Context;
use crate::device::cuda::stream::memory_ops::address;
use crate::device::{DeviceSlice, MemoryOp};
use crate::error::Result;
use cudarc::driver::sys::CUstream;
use std::ffi::c_void;
use std::sync::Arc;

/// Most operations of one launch; must match the kernel.
pub(crate) const MAX_OPERATIONS: usize = 16;

/// Most threads of the block; must match the kernel's launch bounds.
const BLOCK: u32 = 1024;

/// Bytes that a thread copies at once, and how often before it stores; fewer threads suffice for
/// less.
const BYTES_PER_THREAD: usize = 16 * 4;

/// Transfers up to this length run in the kernel unless `WARPLINK_KERNEL_BYTES` says otherwise. One
/// block moves about 40 GB/s over a link, so that a longer one is faster by the copy engine.
const DEFAULT_MAX_BYTES: usize = 256 << 10;

/// As the kernel has it.
#[repr(C)]
struct Parameters {
    target: u64,
    source: u64,
    bytes: u64,
    before: u32,
    count: u32,
    waits: u32,
    resets: u32,
    operations: [[u64; 2]; MAX_OPERATIONS],
}

/// The kernel, loaded before anything can spin.
#[derive(Debug)]
pub(crate) struct TransferKernel {
    function: Function,
    largest: usize,
}

impl TransferKernel {
    /// Loads the kernel; `None` where the compiler is missing or it was switched off, and the copy
    /// engine does small transfers too.
    pub(crate) fn load(context: &Arc<Context>, capabilities: &Capabilities) -> Option<Self> {
        let largest = match std::env::var("WARPLINK_KERNEL_BYTES") {
            Err(_) => DEFAULT_MAX_BYTES,
            Ok(text) => text.parse().unwrap_or_else(|_| {
                tracing::warn!(
                    text,
                    "unknown value of WARPLINK_KERNEL_BYTES; expected a number of bytes; it is ignored"
                );
                DEFAULT_MAX_BYTES
            }),
        };
        if largest == 0 {
            return None;
        }
        let function = Module::load(context, capabilities, &nvrtc::TRANSFER)
            .and_then(|module| module.function(c"warplink_transfer"));
        match function {
            Ok(function) => Some(Self { function, largest }),
            Err(error) => {
                tracing::info!(%error, "small transfers use the copy engine, which is slower");
                None
            }
        }
    }

    /// The longest copy that is better done by the kernel.
    pub(in super::super) fn limit(&self) -> usize {
        self.largest
    }

    /// Whether a copy of `bytes` is better done by the kernel.
    #[inline]
    pub(crate) fn takes(&self, bytes: usize) -> bool {
        bytes <= self.largest
    }

    /// Enqueues `before`, the copy from the second slice to the first, if there is one, and `after`:
    /// at most [`MAX_OPERATIONS`].
    pub(crate) fn enqueue(
        &self,
        stream: CUstream,
        before: &[MemoryOp<'_>],
        copy: Option<(&DeviceSlice, &DeviceSlice)>,
        after: &[MemoryOp<'_>],
    ) -> Result<()> {
        let (mut waits, mut resets) = (0, 0);
        let bytes = copy.map_or(0, |(target, _)| target.bytes());
        let mut parameters = Parameters {
            target: copy.map_or(0, |(target, _)| target.address()),
            source: copy.map_or(0, |(_, source)| source.address()),
            bytes: bytes as u64,
            before: before.len() as u32,
            count: (before.len() + after.len()) as u32,
            waits: 0,
            resets: 0,
            operations: [[0; 2]; MAX_OPERATIONS],
        };
        for (index, (operation, entry)) in before
            .iter()
            .chain(after)
            .zip(&mut parameters.operations)
            .enumerate()
        {
            *entry = match operation {
                MemoryOp::Write { word, value } => [address(word)?, *value],
                MemoryOp::Reset { word } => {
                    resets |= 1 << index;
                    [address(word)?, 0]
                }
                MemoryOp::Wait { word, value } => {
                    waits |= 1 << index;
                    [address(word)?, *value]
                }
            };
        }
        (parameters.waits, parameters.resets) = (waits, resets);
        let threads = bytes.div_ceil(BYTES_PER_THREAD).next_multiple_of(32) as u32;
        // SAFETY: the kernel takes one parameter, of this layout. The slices are live device memory
        // of as many bytes, the words are aligned and live, and no more than fit are given.
        unsafe {
            self.function.launch(
                stream,
                1,
                threads.clamp(32, BLOCK),
                &mut [(&raw mut parameters).cast::<c_void>()],
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_is_the_kernels() {
        assert_eq!(size_of::<Parameters>(), 40 + 16 * MAX_OPERATIONS);
        assert_eq!(std::mem::offset_of!(Parameters, operations), 40);
    }
}
