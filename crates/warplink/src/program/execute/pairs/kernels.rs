//! The kernels of a program of pairs, which differ in how many messages a launch can have.
//!
//! That decides the size of their argument, and setting it takes the host 0.8 ns per byte: 3 µs for as many messages as
//! there may be. Most launches have few.

use crate::device::{Device, Launch, ModuleSource, Readying, SerialKernel, SerialKernels};
use crate::error::{Error, Result};
use crate::program::section::KERNEL;

/// The kernels of a program, by the number of messages that a launch can have.
pub(super) struct PairKernels(Vec<LoadedKernel>);

/// One of them, prepared for launches.
pub(super) struct LoadedKernel {
    pub(super) kernel: SerialKernel,
    pub(super) max_messages: usize,
    /// Maximum blocks of a launch that may start early.
    pub(super) early_blocks: u32,
}

impl PairKernels {
    /// Loads a kernel for each of `max_messages`, in ascending order; `source` returns its module. `largest` is the
    /// largest launch, and `sharing` the number of ranks that share the device. May wait for the device.
    pub(super) fn load(
        device: &dyn Device,
        max_messages: &[usize],
        source: impl Fn(usize) -> ModuleSource,
        (largest, sharing): (&Launch, usize),
    ) -> Result<Self> {
        let load = |max_messages| -> Result<LoadedKernel> {
            // SAFETY: the kernel accesses the workspaces within its regions, which the verifier has checked, and the
            // memory of a launch's messages within the lengths that its words state.
            let module = unsafe { device.load_module(&source(max_messages))? };
            let kernel = module.kernel(KERNEL)?;
            // All lanes of a launch may wait for one another's peers, so they must be resident together.
            kernel.check_together(largest, sharing)?;
            let early = |blocks: &u32| {
                let launch = Launch::new(*blocks, largest.threads);
                kernel.early(launch, sharing).early
            };
            // The largest number of blocks that may start early.
            let numbers: Vec<u32> = (1..=largest.blocks).collect();
            let early_blocks = numbers.partition_point(early) as u32;
            Ok(LoadedKernel {
                // Prepared at joining, where waiting for the device is allowed.
                kernel: SerialKernels::default().ready(kernel, largest, Readying::Always)?,
                max_messages,
                early_blocks,
            })
        };
        let kernels = max_messages.iter().copied().map(load);
        kernels.collect::<Result<_>>().map(Self)
    }

    /// The kernel for a launch of `messages`.
    pub(super) fn of(&self, messages: usize) -> Result<&LoadedKernel> {
        let mut kernels = self.0.iter();
        let found = kernels.find(|kernel| messages <= kernel.max_messages);
        found.ok_or_else(|| {
            let most = self.0.last().map_or(0, |kernel| kernel.max_messages);
            let text = format!("{messages} messages in one group; expected at most {most}");
            Error::invalid(text).with_help("make several groups")
        })
    }
}
