//! Channels as arguments of kernels.

use super::memory::ChannelMemory;
use crate::device::{AllocationKind, Device, DeviceSlice, Stream};
use crate::error::{Error, Result};
use std::fmt;
use std::sync::Arc;

/// A channel that a kernel can be given, with what keeps it valid while a stream uses it.
pub trait ChannelHandle: Send + Sync + fmt::Debug {
    /// What the kernel gets.
    fn memory(&self) -> &Arc<ChannelMemory>;

    /// Has everything behind it kept until `stream` is past what was enqueued so far.
    fn note(&self, stream: &Stream);

    /// Fails with what its proxy failed with.
    fn check(&self) -> Result<()>;
}

/// Several channels in device memory, for kernels that reach several peers.
#[derive(Debug)]
pub struct ChannelArray {
    table: DeviceSlice,
    handles: Vec<Arc<dyn ChannelHandle>>,
}

impl ChannelArray {
    /// Copies the channels, in this order, to memory of `device`. Blocks until that is done.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) for no channels or those of
    /// another kind of device; those of an allocation.
    pub fn new(device: &Arc<dyn Device>, channels: &[Arc<dyn ChannelHandle>]) -> Result<Arc<Self>> {
        let failed = |text: &'static str, help: &'static str| {
            Err(Error::invalid(text)
                .with_operation("make an array of channels")
                .with_help(help))
        };
        if channels.is_empty() {
            return failed(
                "an array of no channels; expected at least one",
                "leave out the array",
            );
        }
        let other = |channel: &Arc<dyn ChannelHandle>| channel.memory().kind() != device.kind();
        if channels.iter().any(other) {
            return failed(
                "a channel belongs to another kind of device; expected channels of this one",
                "use the device of the channels' communicator",
            );
        }
        let bytes: Vec<u8> = channels
            .iter()
            .flat_map(|channel| channel.memory().descriptor())
            .flat_map(u64::to_ne_bytes)
            .collect();
        let table = device.allocate(bytes.len(), AllocationKind::Plain)?;
        device.upload(&table, &bytes)?;
        Ok(Arc::new(Self {
            table,
            handles: channels.to_vec(),
        }))
    }

    /// The channels.
    pub fn handles(&self) -> &[Arc<dyn ChannelHandle>] {
        &self.handles
    }

    /// Where kernels find them.
    pub(crate) fn table(&self) -> &DeviceSlice {
        &self.table
    }
}
