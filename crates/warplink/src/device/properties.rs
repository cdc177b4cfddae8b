//! What a device says about itself, for models of its cost.

/// Figures of a device that are known without measuring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceProperties {
    /// The name of the model, the same for all devices that are built alike.
    pub model: String,
    /// How many multiprocessors, or threads of processors, compute side by side.
    pub multiprocessors: usize,
    /// Whether all ranks of a machine share the multiprocessors and memory.
    pub shared: bool,
    /// Whether kernels can copy in a [`sequence`](super::Stream::sequence).
    pub kernel_copies: bool,
}
