//! What everything of one opened GPU shares: its context, its fault, and the threads and buffers
//! that have to be there before anything goes wrong.

use super::capabilities::{self, Capabilities};
use super::compute::workspace::{Workspace, Workspaces};
use super::driver::context::Context;
use super::kernels::transfer::TransferKernel;
use super::kernels::user::WrittenModules;
use super::memory::block_pool::{Block, BlockPool};
use super::memory::reaper::Reaper;
use super::memory::staging::Staging;
use super::nccl::watch::Watched;
use super::properties;
use super::stream::memory_ops;
use super::stream::signals::Signals;
use crate::device::{DeviceProperties, Fault};
use crate::error::Result;
use cudarc::driver::sys::CUdevice_attribute_enum;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// So large a part of the GPU's memory is kept when more is allocated of the driver.
const POOLED_PART: usize = 4;

/// An opened GPU. Streams, events and memory hold it.
pub(super) struct Gpu {
    pub(super) context: Arc<Context>,
    pub(super) fault: Arc<Fault>,
    pub(super) capabilities: Capabilities,
    pub(super) reaper: Reaper,
    /// Freed memory that is kept for the next allocation.
    pub(super) blocks: Arc<BlockPool>,
    pub(super) staging: Staging,
    pub(super) signals: Arc<Signals>,
    pub(super) workspaces: Workspaces,
    pub(super) written: WrittenModules,
    /// The communicators of the vendor's collectives.
    pub(super) collectives: Watched,
    /// Loaded with the first signals, which come before the first transfer.
    pub(super) transfer_kernel: OnceLock<Option<TransferKernel>>,
    /// Whether the driver records writes and waits into graphs; found out when the GPU is opened.
    captures_memory_ops: OnceLock<bool>,
    /// Asked for once, since NVML takes milliseconds to start.
    properties: OnceLock<DeviceProperties>,
}

impl Gpu {
    pub(super) fn open(ordinal: usize) -> Result<Arc<Self>> {
        let context = Context::retain(ordinal)?;
        let capabilities = capabilities::of_context(&context)?;
        let fault = Arc::new(Fault::default());
        let staging = Staging::create(&context, &fault)?;
        let reaper = Reaper::start(&context)?;
        let signals = Signals::start(&context, &reaper).inspect_err(|_| reaper.stop())?;
        fault.when_raised(&signals, |signals| {
            if let Some(signals) = signals.upgrade() {
                signals.raise();
            }
        });
        let max_pooled_bytes = capabilities.memory / POOLED_PART;
        Ok(Arc::new(Self {
            context,
            fault,
            capabilities,
            reaper,
            blocks: Arc::new(BlockPool::new(max_pooled_bytes)),
            staging,
            signals,
            workspaces: Workspaces::default(),
            written: WrittenModules::default(),
            collectives: Watched::default(),
            transfer_kernel: OnceLock::new(),
            captures_memory_ops: OnceLock::new(),
            properties: OnceLock::new(),
        }))
    }

    /// What the driver and NVML say about the GPU.
    pub(super) fn properties(&self) -> DeviceProperties {
        let properties = self.properties.get_or_init(|| {
            let attribute = |which| self.context.driver.attribute(self.context.device, which);
            properties::of(&self.capabilities, &attribute)
        });
        properties.clone()
    }

    /// Finds out, with a live word at `address`, what [`captures_memory_ops`](Self::captures_memory_ops)
    /// says.
    pub(super) fn try_capturing(&self, address: u64) -> Result<()> {
        let captures = memory_ops::are_captured(&self.context, address)?;
        self.captures_memory_ops.get_or_init(|| captures);
        Ok(())
    }

    /// Whether the driver records writes and waits into graphs.
    #[inline]
    pub(super) fn captures_memory_ops(&self) -> bool {
        self.captures_memory_ops.get().copied().unwrap_or(true)
    }

    /// Gives freed memory that is kept to the driver, until `until` at most; whether that is done.
    pub(super) fn give_back(&self, until: Instant) -> bool {
        self.free_blocks(self.blocks.take_all());
        self.free_workspaces(self.workspaces.take_unborrowed());
        self.reaper.flush(until)
    }

    /// Gives blocks that nobody uses to the driver. Does not wait.
    pub(super) fn free_blocks(&self, blocks: Vec<Block>) {
        for block in blocks {
            self.reaper.free(block);
        }
    }

    /// Gives scratch memory to the driver, which lets what uses it end first. Does not wait.
    pub(super) fn free_workspaces(&self, workspaces: Vec<Workspace>) {
        if !workspaces.is_empty() {
            self.reaper.run(move |_| drop(workspaces));
        }
    }

    /// The CPUs of the GPU's part of the machine, as the system says.
    pub(super) fn local_cpus(&self) -> Vec<usize> {
        let attribute = |which| self.context.driver.attribute(self.context.device, which);
        let [domain, bus, device] = [
            CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID,
            CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID,
            CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID,
        ]
        .map(attribute);
        let path =
            format!("/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{device:02x}.0/local_cpulist");
        std::fs::read_to_string(path).map_or_else(|_| Vec::new(), |list| parse_cpus(&list))
    }

    /// Name for people.
    pub(super) fn name(&self) -> String {
        self.capabilities.device_name()
    }
}

/// The CPUs of a list such as `0-3,8`; what cannot be read is left out.
fn parse_cpus(list: &str) -> Vec<usize> {
    let ranges = list.trim().split(',').filter_map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?)
    });
    ranges.flat_map(|range| range.take(1 << 16)).collect()
}

impl Drop for Gpu {
    fn drop(&mut self) {
        self.signals.stop();
        // Calls that the driver may hold until the GPU is idle, which it is only once the signals' thread
        // has ended what still waits.
        let workspaces = self.workspaces.take_all();
        let (buffer, kernel) = (self.staging.close(), self.transfer_kernel.take());
        let written = self.written.take_all();
        self.reaper
            .run(move |_| drop((workspaces, buffer, kernel, written)));
        self.free_blocks(self.blocks.close());
        self.reaper.stop();
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cpus_are_read() {
        assert_eq!(parse_cpus("0-3,8,10-11\n"), [0, 1, 2, 3, 8, 10, 11]);
        assert!(parse_cpus("\n").is_empty() && parse_cpus("all").is_empty());
    }
}
