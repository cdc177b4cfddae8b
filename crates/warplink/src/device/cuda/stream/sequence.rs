//! Sequences: decides which copies and word operations are merged into one kernel.

use super::transfer::{MAX_OPERATIONS, MAX_PARTS};
use super::{CudaStream, check_copy, check_kind};
use crate::device::cuda::kernels::transfer::TransferKernel;
use crate::device::{
    DeviceSlice, KernelCopy, MemoryOp, PacketPart, StreamBackend, StreamOp, Unit, Word,
};
use crate::error::{Error, Result};

/// A word operation not yet enqueued.
type Pending<'a> = (MemoryOp<'a>, Unit);

impl CudaStream {
    /// The transfer kernels, if they could be loaded.
    pub(super) fn kernels(&self) -> Option<&TransferKernel> {
        self.gpu.transfer_kernel.get().and_then(Option::as_ref)
    }

    fn needed_kernels(&self) -> Result<&TransferKernel> {
        self.kernels().ok_or_else(|| {
            Error::unsupported("the kernels for transfers could not be loaded")
                .with_device(self.gpu.name())
                .with_help("install NVRTC, or let the copy engine do the transfer")
        })
    }

    pub(super) fn enqueue_sequence(&self, ops: &[StreamOp<'_>]) -> Result<()> {
        let mut pending: Vec<Pending<'_>> = Vec::with_capacity(MAX_OPERATIONS);
        let mut at = 0;
        while let Some(op) = ops.get(at) {
            at += 1;
            match op {
                StreamOp::Memory(op, unit) => pending.push((*op, *unit)),
                StreamOp::Copy { target, source } => {
                    self.enqueue_pending(&mut pending)?;
                    self.copy(target, source)?;
                }
                StreamOp::KernelCopy(copy) => {
                    let joins =
                        |unit| unit == Unit::Kernel || (unit == Unit::Beside && copy.blocks == 1);
                    let before = pending.iter().rev().take_while(|(_, unit)| joins(*unit));
                    // Operations beyond the launch's limit are enqueued before it. Half of its places are left for
                    // operations after the copy.
                    let mut before = before.count().min(MAX_OPERATIONS / 2);
                    if copy.blocks > 1 {
                        // Every block executes the operations of its launch, so only those may join that can be
                        // repeated.
                        before = waits_at_end(&pending[pending.len() - before..]);
                    }
                    let joined: Vec<MemoryOp<'_>> = pending
                        .drain(pending.len() - before..)
                        .map(|(op, _)| op)
                        .collect();
                    self.enqueue_pending(&mut pending)?;
                    let mut after = Vec::new();
                    while before + after.len() < MAX_OPERATIONS
                        && let Some(StreamOp::Memory(op, unit)) = ops.get(at)
                        && joins(*unit)
                        && (copy.blocks == 1 || matches!(op, MemoryOp::Wait { .. }))
                    {
                        after.push(*op);
                        at += 1;
                    }
                    self.enqueue_kernel_copy(&joined, copy, &after)?;
                }
                StreamOp::Packets(part) => {
                    self.enqueue_pending(&mut pending)?;
                    let mut parts = vec![*part];
                    while parts.len() < MAX_PARTS
                        && let Some(StreamOp::Packets(next)) = ops.get(at)
                        && !parts.iter().any(|part| part.excludes(next))
                    {
                        parts.push(*next);
                        at += 1;
                    }
                    self.enqueue_packets(&parts)?;
                }
            }
        }
        self.enqueue_pending(&mut pending)
    }

    /// Enqueues word operations, as kernels if requested.
    fn enqueue_pending(&self, pending: &mut Vec<Pending<'_>>) -> Result<()> {
        let in_kernel = |(_, unit): &Pending<'_>| *unit == Unit::Kernel;
        for run in pending.chunk_by(|a, b| in_kernel(a) == in_kernel(b)) {
            let ops: Vec<MemoryOp<'_>> = run.iter().map(|(op, _)| *op).collect();
            if run.first().is_some_and(in_kernel) {
                self.enqueue_words_in_kernel(self.needed_kernels()?, &ops)?;
            } else {
                self.memory_ops(&ops)?;
            }
        }
        pending.clear();
        Ok(())
    }

    pub(super) fn enqueue_words_in_kernel(
        &self,
        kernels: &TransferKernel,
        ops: &[MemoryOp<'_>],
    ) -> Result<()> {
        let _noted = self.depend_on(ops);
        let (_, _entered) = self.enter()?;
        let _enqueuing = self.enqueue_ops(ops);
        ops.chunks(MAX_OPERATIONS)
            .try_for_each(|ops| kernels.words(self.raw, ops))
    }

    pub(super) fn enqueue_kernel_copy(
        &self,
        before: &[MemoryOp<'_>],
        copy: &KernelCopy<'_>,
        after: &[MemoryOp<'_>],
    ) -> Result<()> {
        check_copy(copy.target, copy.source)?;
        let kernels = self.needed_kernels()?;
        let _noted = self.depend_on(before.iter().chain(after));
        let (_, _entered) = self.enter()?;
        let arrivals = copy.arrivals.into_iter().flatten();
        let words = arrivals.chain([copy.counter]).map(Word::as_slice);
        let _enqueuing = self.enqueue([copy.target, copy.source].into_iter().chain(words));
        let _with_words = self.enqueue_ops(before.iter().chain(after));
        kernels.copy(self.raw, before, copy, after)
    }

    pub(super) fn enqueue_packets(&self, parts: &[PacketPart<'_>]) -> Result<()> {
        let mut used: Vec<&DeviceSlice> = Vec::with_capacity(5 * parts.len());
        for part in parts {
            part.check()?;
            check_kind(part.data)?;
            used.push(part.data);
            used.extend(part.line.scratch());
            used.push(part.line.abort().as_slice());
            used.extend(part.completed.map(Word::as_slice));
        }
        let faults = parts.iter().filter_map(|part| part.line.abort().fault());
        let _noted = self.faults.add(faults);
        let kernels = self.needed_kernels()?;
        let (_, _entered) = self.enter()?;
        let _enqueuing = self.enqueue(used);
        kernels.packets(self.raw, parts)
    }
}

/// Number of operations at the end of `pending` that every block of a kernel can execute itself: waits, and
/// resets of words among those waits, which are executed once all blocks have waited. Any other write or
/// reset must not be repeated by several blocks.
fn waits_at_end(pending: &[Pending<'_>]) -> usize {
    let written = |(op, _): &Pending<'_>| matches!(op, MemoryOp::Write { .. });
    let first = pending.iter().rposition(written).map_or(0, |at| at + 1);
    let run = &pending[first..];
    let awaited = |before: &[Pending<'_>], word: &Word| {
        before.iter().any(|(op, _)| match op {
            MemoryOp::Wait { word: awaited, .. } => awaited.address() == word.address(),
            MemoryOp::Write { .. } | MemoryOp::Reset { .. } => false,
        })
    };
    // For each start, whether every reset has its wait between the start and itself.
    let mut start = 0;
    while let Some(reset) = (start..run.len()).find(|at| match run[*at].0 {
        MemoryOp::Reset { word } => !awaited(&run[start..*at], word),
        MemoryOp::Wait { .. } | MemoryOp::Write { .. } => false,
    }) {
        start = reset + 1;
    }
    run.len() - start
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{DeviceConfig, DeviceKind};

    #[test]
    fn blocks_wait_for_words_without_concurrent_reset() {
        let device = crate::device::open(&DeviceConfig::new(DeviceKind::Host, 0)).unwrap();
        let page = device.allocate_signals(64).unwrap();
        let [a, b] = [0, 8].map(|at| page.word(at).unwrap());
        let pending = |op| (op, Unit::Kernel);
        let wait = |word| pending(MemoryOp::wait(word, 1));
        let reset = |word| pending(MemoryOp::Reset { word });
        let write = |word| pending(MemoryOp::write(word, 1));
        assert_eq!(waits_at_end(&[]), 0);
        assert_eq!(waits_at_end(&[wait(&a), wait(&b), reset(&b)]), 3);
        // A captured receive with its wait, followed by a captured send.
        let both = [reset(&a), write(&b), wait(&a), wait(&b), reset(&b)];
        assert_eq!(waits_at_end(&both), 3);
        // A second block would see the word before its reset.
        assert_eq!(waits_at_end(&[reset(&a), wait(&a)]), 1);
        assert_eq!(waits_at_end(&[wait(&b), reset(&a), wait(&a), reset(&a)]), 2);
        assert_eq!(waits_at_end(&[wait(&a), write(&b)]), 0);
    }
}
