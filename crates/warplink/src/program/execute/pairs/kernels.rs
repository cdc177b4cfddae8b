//! The kernels of a program of pairs: one for launches of few messages, and one for many.
//!
//! They differ in the size of their argument only. Setting a kernel's arguments takes the host 0.8 ns per byte, which is
//! 3 µs for as many messages as a launch can have.

use super::table::MAX_MESSAGES;
use crate::device::{Device, Launch, ModuleSource, Readying, SerialKernel, SerialKernels};
use crate::error::Result;
use crate::program::section::KERNEL;
use std::sync::{Arc, OnceLock};

/// Minimum capacity of the kernel for few messages: all sends and receives between a rank and two neighbors, twice.
const MIN_FEW: usize = 8;

/// Writes the text of the kernel for at most so many messages.
pub(super) type WriteText = dyn Fn(usize) -> Result<String> + Send + Sync;

pub(super) struct PairKernels {
    few: LoadedKernel,
    /// Loaded by the first launch that needs it, as it takes a second to compile where it is not cached.
    many: OnceLock<LoadedKernel>,
    loader: KernelLoader,
}

pub(super) struct LoadedKernel {
    pub(super) kernel: SerialKernel,
    pub(super) max_messages: usize,
    /// Maximum blocks of a launch that may start early.
    pub(super) early_blocks: u32,
}

pub(super) struct KernelLoader {
    pub(super) device: Arc<dyn Device>,
    /// The kernel of devices that take closures.
    pub(super) source: ModuleSource,
    pub(super) text: Arc<WriteText>,
    /// The largest launch.
    pub(super) largest: Launch,
    /// Ranks that share the device.
    pub(super) sharing: usize,
}

impl PairKernels {
    /// Loads the kernel for the messages of an all-to-all of `world` ranks. May wait for the device.
    pub(super) fn load(loader: KernelLoader, world: usize) -> Result<Self> {
        // A send and a receive for each rank.
        let few = (2 * world).clamp(MIN_FEW, MAX_MESSAGES);
        Ok(Self {
            // Prepared at joining, where waiting for the device is allowed.
            few: loader.load(few, Readying::Always)?,
            many: OnceLock::new(),
            loader,
        })
    }

    /// The kernel for a launch of `messages`. The first one for many may wait for the device.
    pub(super) fn of(&self, messages: usize) -> Result<&LoadedKernel> {
        if messages <= self.few.max_messages {
            return Ok(&self.few);
        }
        if let Some(many) = self.many.get() {
            return Ok(many);
        }
        // If another thread was faster, its kernel is used.
        let many = self.loader.load(MAX_MESSAGES, Readying::WithCode)?;
        Ok(self.many.get_or_init(|| many))
    }
}

impl KernelLoader {
    fn load(&self, max_messages: usize, readying: Readying) -> Result<LoadedKernel> {
        let text = self.text.clone();
        let source = self.source.clone();
        let source = source.with_written_cuda(move || text(max_messages));
        // SAFETY: the kernel accesses the workspaces within its regions, which the verifier has checked, and the
        // memory of a launch's messages within the lengths that its words state.
        let kernel = unsafe { self.device.load_module(&source)? }.kernel(KERNEL)?;
        let Launch {
            blocks, threads, ..
        } = self.largest;
        // All lanes of a launch may wait for one another's peers, so they must be resident together.
        kernel.check_together(&self.largest, self.sharing)?;
        let early = |blocks: &u32| {
            let launch = Launch::new(*blocks, threads);
            kernel.early(launch, self.sharing).early
        };
        // The largest number of blocks that may start early.
        let numbers: Vec<u32> = (1..=blocks).collect();
        let early_blocks = numbers.partition_point(early) as u32;
        Ok(LoadedKernel {
            kernel: SerialKernels::default().ready(kernel, &self.largest, readying)?,
            max_messages,
            early_blocks,
        })
    }
}
