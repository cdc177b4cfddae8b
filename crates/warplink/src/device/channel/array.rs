//! Channels as arguments of kernels.

use super::memory::ChannelMemory;
use crate::device::{AllocationKind, Device, DeviceSlice, Stream};
use crate::error::{Error, Result};
use std::fmt;
use std::sync::Arc;

/// A channel that can be passed to a kernel, with the resources that keep it valid while in use.
pub trait ChannelHandle: Send + Sync + fmt::Debug {
    /// Channel descriptor for the kernel.
    fn memory(&self) -> &Arc<ChannelMemory>;

    /// Keeps the channel alive until `stream` has completed the work enqueued so far.
    fn note(&self, stream: &Stream);

    /// Returns the error of the channel's proxy, if it failed.
    fn check(&self) -> Result<()>;
}

/// Several channels in device memory, for kernels that reach several peers.
#[derive(Debug)]
pub struct ChannelArray {
    table: DeviceSlice,
    handles: Vec<Arc<dyn ChannelHandle>>,
}

impl ChannelArray {
    /// Copies the channel descriptors, in this order, to memory of `device`. Blocks until the copy is done.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if the list is empty or a channel
    /// belongs to another kind of device; allocation errors.
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
            // Native order: kernels read the words as they are.
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

    /// Device memory that holds the descriptors.
    pub(crate) fn table(&self) -> &DeviceSlice {
        &self.table
    }
}
