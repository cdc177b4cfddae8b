//! Transfers by kernels, with their waits and signals, in one launch.

use crate::device::cuda::driver::memory_ops::address;
use crate::device::cuda::kernels::transfer::{MAX_THREADS, TransferKernel};
use crate::device::cuda::memory::CudaBacking;
use crate::device::{KernelCopy, MemoryOp, PacketPart, Word};
use crate::error::Result;
use cudarc::driver::sys::CUstream;
use std::ffi::c_void;

/// Maximum operations of one launch; must match the kernel.
pub(super) const MAX_OPERATIONS: usize = 16;

/// Maximum packet transfers of one launch; must match the kernel.
pub(super) const MAX_PARTS: usize = 8;

/// Bytes that a thread copies per iteration: four 16-byte loads before the stores. Shorter copies use fewer
/// threads.
const BYTES_PER_THREAD: usize = 16 * 4;

/// Layout must match the kernel.
#[repr(C)]
struct Parameters {
    target: u64,
    source: u64,
    bytes: u64,
    before: u32,
    count: u32,
    waits: u32,
    resets: u32,
    late: u32,
    own: u32,
    arrivals: [u64; 2],
    counter: u64,
    operations: [[u64; 2]; MAX_OPERATIONS],
}

/// Layout must match the kernel.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct TransferPart {
    data: u64,
    bytes: u64,
    own: u64,
    peer: u64,
    abort: u64,
    completed: u64,
    blocks: u32,
    threads: u32,
    receives: u32,
    unused: u32,
}

/// Layout must match the kernel.
#[repr(C)]
struct Parts {
    parts: [TransferPart; MAX_PARTS],
    count: u32,
    unused: u32,
}

impl TransferKernel {
    /// Enqueues only operations on words, at most [`MAX_OPERATIONS`].
    pub(super) fn words(&self, stream: CUstream, ops: &[MemoryOp<'_>]) -> Result<()> {
        self.enqueue(stream, ops, None, &[])
    }

    /// Enqueues `before`, the copy and `after`, at most [`MAX_OPERATIONS`] each. If several blocks copy,
    /// `after` may only wait.
    pub(super) fn copy(
        &self,
        stream: CUstream,
        before: &[MemoryOp<'_>],
        copy: &KernelCopy<'_>,
        after: &[MemoryOp<'_>],
    ) -> Result<()> {
        self.enqueue(stream, before, Some(copy), after)
    }

    fn enqueue(
        &self,
        stream: CUstream,
        before: &[MemoryOp<'_>],
        copy: Option<&KernelCopy<'_>>,
        after: &[MemoryOp<'_>],
    ) -> Result<()> {
        let bytes = copy.map_or(0, |copy| copy.target.bytes());
        let blocks = copy.map_or(1, |copy| copy.blocks.max(1));
        let mut parameters = Parameters {
            target: copy.map_or(0, |copy| copy.target.address()),
            source: copy.map_or(0, |copy| copy.source.address()),
            bytes: bytes as u64,
            before: before.len() as u32,
            count: (before.len() + after.len()) as u32,
            waits: 0,
            resets: 0,
            late: 0,
            own: 0,
            arrivals: [0; 2],
            counter: copy.map_or(Ok(0), |copy| address(copy.counter))?,
            operations: [[0; 2]; MAX_OPERATIONS],
        };
        if let Some(copy) = copy {
            for (place, word) in parameters.arrivals.iter_mut().zip(copy.arrivals) {
                *place = word.map_or(Ok(0), address)?;
            }
        }
        for (index, (operation, entry)) in before
            .iter()
            .chain(after)
            .zip(&mut parameters.operations)
            .enumerate()
        {
            *entry = match operation {
                MemoryOp::Write { word, value } => {
                    if !CudaBacking::of(word.as_slice())?.is_of_a_peer() {
                        parameters.own |= 1 << index;
                    }
                    [address(word)?, *value]
                }
                MemoryOp::Reset { word } => {
                    parameters.resets |= 1 << index;
                    if blocks > 1 && is_awaited(&before[..index.min(before.len())], word) {
                        parameters.late |= 1 << index;
                    }
                    [address(word)?, 0]
                }
                MemoryOp::Wait { word, value } => {
                    parameters.waits |= 1 << index;
                    [address(word)?, *value]
                }
            };
        }
        let each = bytes.div_ceil(blocks as usize);
        let threads = each.div_ceil(BYTES_PER_THREAD).next_multiple_of(32) as u32;
        // Several blocks are used for bandwidth, which is highest with one thread per access.
        let threads = match blocks {
            1 => threads,
            _ => each.div_ceil(16).next_multiple_of(32) as u32,
        };
        // SAFETY: the kernel takes one parameter, of this layout. The slices are live device memory
        // of as many bytes, the words are aligned and live, and no more than fit are given.
        unsafe {
            self.transfer.function.launch(
                stream,
                &self.transfer.launch(blocks, threads.clamp(32, MAX_THREADS)),
                &mut [(&raw mut parameters).cast::<c_void>()],
            )
        }
    }

    /// Enqueues `parts` concurrently, at most [`MAX_PARTS`], all compatible with one another.
    pub(super) fn packets(&self, stream: CUstream, parts: &[PacketPart<'_>]) -> Result<()> {
        let mut parameters = Parts {
            parts: [TransferPart::default(); MAX_PARTS],
            count: parts.len().min(MAX_PARTS) as u32,
            unused: 0,
        };
        let (mut blocks, mut threads) = (0, 32);
        for (entry, part) in parameters.parts.iter_mut().zip(parts) {
            let (shape, [own, peer]) = (part.line.shape(), part.line.scratch());
            *entry = TransferPart {
                data: part.data.address(),
                bytes: part.data.bytes() as u64,
                own: own.address(),
                peer: peer.address(),
                abort: address(part.line.abort())?,
                completed: part.completed.map_or(Ok(0), address)?,
                blocks: shape.blocks,
                threads: shape.threads,
                receives: u32::from(part.receives),
                unused: 0,
            };
            blocks += shape.blocks;
            threads = threads.max(shape.threads);
        }
        // SAFETY: the kernel takes one parameter, of this layout. The data is live device memory, and so is
        // scratch of the length that the shape asks for; words are aligned and live.
        unsafe {
            self.packets.function.launch(
                stream,
                &self.packets.launch(blocks, threads.min(MAX_THREADS)),
                &mut [(&raw mut parameters).cast::<c_void>()],
            )
        }
    }
}

/// Whether one of `operations` waits for `word`.
fn is_awaited(operations: &[MemoryOp<'_>], word: &Word) -> bool {
    operations.iter().any(|operation| match operation {
        MemoryOp::Wait { word: awaited, .. } => awaited.address() == word.address(),
        MemoryOp::Write { .. } | MemoryOp::Reset { .. } => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layouts_are_the_kernels() {
        assert_eq!(size_of::<Parameters>(), 72 + 16 * MAX_OPERATIONS);
        assert_eq!(std::mem::offset_of!(Parameters, operations), 72);
        assert_eq!(std::mem::offset_of!(Parameters, arrivals), 48);
        assert_eq!(
            (
                size_of::<TransferPart>(),
                std::mem::offset_of!(TransferPart, blocks)
            ),
            (64, 48)
        );
        assert_eq!(std::mem::offset_of!(Parts, count), 64 * MAX_PARTS);
    }
}
