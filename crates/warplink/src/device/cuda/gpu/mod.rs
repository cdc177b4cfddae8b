//! State shared by everything on one opened GPU: context, fault, and the threads and buffers that must exist
//! before anything fails.

pub(super) mod block_pool;
pub(super) mod gate;
pub(super) mod known_places;
pub(super) mod live;
pub(super) mod reaper;
mod second_context;
pub(super) mod signals;
pub(super) mod staging;
pub(super) mod workspace;

use self::block_pool::{Block, BlockPool};
use self::known_places::{BorrowedPlace, KnownPlaces};
use self::reaper::Reaper;
use self::signals::Signals;
use self::staging::Staging;
use self::workspace::{Workspace, Workspaces};
use super::capabilities::{self, Capabilities};
use super::driver::context::Context;
use super::driver::memory_ops;
use super::kernels::module::WrittenModules;
use super::kernels::transfer::TransferKernel;
use super::nccl::watch::Watched;
use super::properties;
use crate::device::{DeviceProperties, Fault, PciAddress};
use crate::error::Result;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// The pool of freed blocks keeps up to 1 / `POOLED_PART` of the GPU's memory.
const POOLED_PART: usize = 4;

/// An opened GPU. Streams, events and memory hold it.
pub(super) struct Gpu {
    pub(super) context: Arc<Context>,
    pub(super) fault: Arc<Fault>,
    pub(super) capabilities: Capabilities,
    pub(super) reaper: Reaper,
    /// Freed memory kept for later allocations.
    pub(super) blocks: Arc<BlockPool>,
    pub(super) staging: Staging,
    pub(super) known_places: KnownPlaces,
    pub(super) signals: Arc<Signals>,
    pub(super) workspaces: Workspaces,
    pub(super) written: WrittenModules,
    /// Communicators of the vendor's library.
    pub(super) collectives: Watched,
    /// Loaded with the first signals, which precede the first transfer.
    pub(super) transfer_kernel: OnceLock<Option<TransferKernel>>,
    /// Whether the driver captures memory operations into graphs; probed when the GPU is opened.
    captures_memory_ops: OnceLock<bool>,
    /// Queried once, since starting NVML takes milliseconds.
    properties: OnceLock<DeviceProperties>,
}

impl Gpu {
    pub(super) fn open(ordinal: usize) -> Result<Arc<Self>> {
        let context = Context::retain(ordinal)?;
        let capabilities = capabilities::of_context(&context)?;
        let fault = Arc::new(Fault::default());
        let staging = Staging::create(&context, &fault)?;
        let reaper = Reaper::start(&context)?;
        // Stopped explicitly: its thread holds the context, and would outlive a device that failed to open.
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
            known_places: KnownPlaces::default(),
            signals,
            workspaces: Workspaces::default(),
            written: WrittenModules::default(),
            collectives: Watched::default(),
            transfer_kernel: OnceLock::new(),
            captures_memory_ops: OnceLock::new(),
            properties: OnceLock::new(),
        }))
    }

    /// The address by which NVML and the system know it.
    pub(super) fn pci_address(&self) -> Result<PciAddress> {
        self.context.driver.pci_address(self.context.device)
    }

    /// Properties reported by the driver and NVML.
    pub(super) fn properties(&self) -> DeviceProperties {
        let properties = self.properties.get_or_init(|| {
            let attribute = |which| self.context.driver.attribute(self.context.device, which);
            properties::of(&self.capabilities, self.pci_address().ok(), &attribute)
        });
        properties.clone()
    }

    /// Probes [`captures_memory_ops`](Self::captures_memory_ops) with a live word at `address`.
    pub(super) fn try_capturing(&self, address: u64) -> Result<()> {
        let captures = memory_ops::are_captured(&self.context, address)?;
        self.captures_memory_ops.get_or_init(|| captures);
        Ok(())
    }

    /// Whether the driver captures memory operations into graphs.
    #[inline]
    pub(super) fn captures_memory_ops(&self) -> bool {
        self.captures_memory_ops.get().copied().unwrap_or(true)
    }

    /// The driver's attributes of an address of borrowed memory.
    pub(super) fn place(&self, address: u64) -> BorrowedPlace {
        self.known_places.place(&self.context, address)
    }

    /// Returns pooled memory to the driver, by `until`; returns whether it completed.
    pub(super) fn give_back(&self, until: Instant) -> bool {
        self.free_blocks(self.blocks.take_all());
        self.free_workspaces(self.workspaces.take_unborrowed());
        self.reaper.flush(until)
    }

    /// Returns unused blocks to the driver, asynchronously.
    pub(super) fn free_blocks(&self, blocks: Vec<Block>) {
        for block in blocks {
            self.reaper.free(block);
        }
    }

    /// Frees scratch memory, asynchronously; the driver waits for work that uses it.
    pub(super) fn free_workspaces(&self, workspaces: Vec<Workspace>) {
        if !workspaces.is_empty() {
            self.reaper.run(move |_| drop(workspaces));
        }
    }

    /// CPUs local to the GPU, as the system reports.
    pub(super) fn local_cpus(&self) -> Vec<usize> {
        let Ok(address) = self.pci_address() else {
            return Vec::new();
        };
        let path = format!("/sys/bus/pci/devices/{address}/local_cpulist");
        std::fs::read_to_string(path).map_or_else(|_| Vec::new(), |list| parse_cpus(&list))
    }

    /// Name in messages.
    pub(super) fn name(&self) -> String {
        self.capabilities.device_name()
    }
}

/// Parses a CPU list such as `0-3,8`; skips entries that it cannot parse.
fn parse_cpus(list: &str) -> Vec<usize> {
    let ranges = list.trim().split(',').filter_map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?)
    });
    // Bounded, since a malformed range could name billions of CPUs.
    ranges.flat_map(|range| range.take(1 << 16)).collect()
}

impl Drop for Gpu {
    fn drop(&mut self) {
        self.signals.stop();
        // These calls may block until the GPU is idle, which requires the signals' thread to abort
        // outstanding waits first.
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
