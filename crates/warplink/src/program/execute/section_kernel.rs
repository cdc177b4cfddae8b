//! Kernel of a section, bound to a workspace and signals.

use super::kernel::BoundKernels;
use super::lane::SectionLanes;
use crate::device::{Device, Kernel, Launch, ModuleSource};
use crate::error::Result;
use crate::program::section::{KERNEL, SectionInstance};

impl BoundKernels {
    /// Compiles and loads the kernel of `section`: `text` on devices that take code, unless a kernel of the same text
    /// is already loaded, or `lanes` on devices that take closures. Returns the parameters of its launch as well.
    pub(super) fn load(
        &self,
        device: &dyn Device,
        section: &SectionInstance,
        text: impl Fn() -> Result<String> + Send + Sync + 'static,
        lanes: SectionLanes,
    ) -> Result<(Kernel, Launch)> {
        let source = ModuleSource::new("kernel section")
            .with_written_cuda(text)
            .with_host_lanes(KERNEL, section.world, lanes);
        // SAFETY: the kernel accesses only what the section names of the workspace, of the memory that a plan holds,
        // and of the tensors of a launch. The verifier has checked that these accesses are in bounds, and a launch
        // checks that its tensors have the section's lengths.
        let module = unsafe { device.load_module(&source)? };
        let kernel = module.kernel(KERNEL)?;
        // A cooperative launch takes longer. Blocks that do not fit at first are scheduled when other kernels end, so
        // it suffices that all of them fit on the device together.
        let blocks = section.blocks.max(1);
        let launch = Launch::new(
            (section.lanes * blocks) as u32,
            (section.threads / blocks) as u32,
        );
        let ranks_per_device = self.reach.ranks_per_device;
        kernel.check_together(&launch, ranks_per_device)?;
        let launch = kernel.early(launch, ranks_per_device);
        Ok((kernel, launch))
    }
}
