//! The kernel of a section, on the workspace and the signals that kernels are bound to.

use super::kernel::BoundKernels;
use super::lane::SectionLanes;
use crate::device::{Device, DeviceSlice, Kernel, Launch, ModuleSource};
use crate::error::Result;
use crate::program::section::{KERNEL, SectionInstance};

/// A kernel that is loaded, and how it is launched.
pub(super) struct SectionKernel {
    pub(super) kernel: Kernel,
    pub(super) launch: Launch,
    /// Its argument behind the words of a launch.
    pub(super) signals: DeviceSlice,
}

impl BoundKernels {
    /// Compiles and loads the kernel of `section`: `text` for devices that take code, where no kernel of the same text
    /// was loaded before, `lanes` for those that take closures.
    pub(super) fn load(
        &self,
        device: &dyn Device,
        section: &SectionInstance,
        text: impl Fn() -> Result<String> + Send + Sync + 'static,
        lanes: SectionLanes,
    ) -> Result<SectionKernel> {
        let source = ModuleSource::new("kernel section")
            .with_written_cuda(text)
            .with_host_lanes(KERNEL, section.world, lanes);
        // SAFETY: the kernel accesses what the section says of the workspace, of the memory that a plan holds, and of
        // the tensors of a launch; the verifier has checked that this stays within them, and a launch that they have
        // the section's lengths.
        let module = unsafe { device.load_module(&source)? };
        let kernel = module.kernel(KERNEL)?;
        // A launch that asks for all blocks together takes longer. Blocks that find no room get it when other
        // kernels end, so it is enough that they fit.
        let launch = Launch::new(section.lanes as u32, section.threads as u32);
        let ranks_per_device = self.reach.ranks_per_device;
        kernel.check_together(&launch, ranks_per_device)?;
        let launch = kernel.early(launch, ranks_per_device);
        let signals = self.signals.region().memory();
        Ok(SectionKernel {
            kernel,
            launch,
            signals: signals.clone(),
        })
    }
}
