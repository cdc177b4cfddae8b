//! The device's copy engine, by a stream.

use crate::deadline::Deadline;
use crate::device::{Device, DeviceSlice, MemoryOp, Priority, Stream, Word};
use crate::error::Result;
use std::sync::Arc;

/// Moves bytes and sets words in the order of the calls, which do not block. It uses copies and words in
/// stream order alone, never a kernel: one of the user's may leave no multiprocessor free.
#[derive(Debug)]
pub(crate) struct CopyEngine {
    stream: Stream,
}

impl CopyEngine {
    pub(crate) fn new(device: &Arc<dyn Device>) -> Result<Self> {
        Ok(Self {
            stream: device.create_stream(Priority::High)?,
        })
    }

    /// Copies `source` to `target`, of the same length, either of which may be a peer's.
    pub(crate) fn copy(&self, target: &DeviceSlice, source: &DeviceSlice) -> Result<()> {
        self.stream.copy(target, source)
    }

    /// Sets each word to its value when everything before is done and visible.
    pub(crate) fn set(&self, words: &[(&Word, u64)]) -> Result<()> {
        let writes: Vec<MemoryOp<'_>> = words
            .iter()
            .map(|&(word, value)| MemoryOp::Write { word, value })
            .collect();
        self.stream.memory_ops(&writes)
    }

    /// Whether everything is done.
    pub(crate) fn is_idle(&self) -> Result<bool> {
        self.stream.is_idle()
    }

    /// Blocks until everything is done.
    pub(crate) fn drain(&self, deadline: Deadline) -> Result<()> {
        self.stream.synchronize(deadline)
    }
}
