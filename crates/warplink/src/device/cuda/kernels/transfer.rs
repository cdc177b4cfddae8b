//! Loading of the kernels that perform a transfer, with its waits and signals, in one launch.

use super::module::{EARLY_LAUNCHES, Function, Module};
use super::nvrtc;
use crate::device::Launch;
use crate::device::cuda::capabilities::Capabilities;
use crate::device::cuda::driver::context::Context;
use crate::device::cuda::gpu::reaper::Reaper;
use crate::error::Result;
use std::sync::Arc;

/// Maximum threads of a block; must match the kernels' launch bounds.
pub(crate) const MAX_THREADS: u32 = 1024;

/// The transfer kernels, loaded before anything can spin.
#[derive(Debug)]
pub(crate) struct TransferKernel {
    pub(crate) transfer: OneKernel,
    pub(crate) packets: OneKernel,
}

/// A kernel, and the maximum threads of launches that start early.
#[derive(Debug)]
pub(crate) struct OneKernel {
    pub(crate) function: Function,
    early_threads: u32,
}

impl TransferKernel {
    /// Loads the kernels. `None` without a compiler; small transfers then use the copy engine.
    pub(crate) fn load(
        context: &Arc<Context>,
        reaper: &Reaper,
        capabilities: &Capabilities,
    ) -> Option<Self> {
        let loaded =
            Module::load(context, reaper, capabilities, &nvrtc::TRANSFER).and_then(|module| {
                Ok(Self {
                    transfer: OneKernel::new(module.function(c"warplink_transfer")?, capabilities)?,
                    packets: OneKernel::new(module.function(c"warplink_packets")?, capabilities)?,
                })
            });
        loaded
            .inspect_err(
                |error| tracing::info!(%error, "small transfers use the copy engine, which is slower"),
            )
            .ok()
    }
}

impl OneKernel {
    fn new(function: Function, capabilities: &Capabilities) -> Result<Self> {
        let blocks = function.blocks_per_multiprocessor(MAX_THREADS, 0)?;
        Ok(Self {
            early_threads: early_threads(capabilities, blocks),
            function,
        })
    }

    pub(crate) fn launch(&self, blocks: u32, threads: u32) -> Launch {
        Launch::new(blocks, threads).with_early_start(blocks * threads <= self.early_threads)
    }
}

/// Threads of launches that may start early, given how many of the largest blocks fit on a multiprocessor.
/// Zero if processes share the GPU, since their launches cannot be counted.
fn early_threads(capabilities: &Capabilities, blocks_per_multiprocessor: u32) -> u32 {
    if !capabilities.starts_kernels_early() || capabilities.multi_process_service {
        return 0;
    }
    capabilities.multiprocessors * blocks_per_multiprocessor * MAX_THREADS / EARLY_LAUNCHES as u32
}
