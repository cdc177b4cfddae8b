//! Properties of a device, for cost models.

/// Properties known without measuring. Rates are hardware peaks in one direction, and 0 if unknown.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceProperties {
    /// Model name, equal for all devices of the same design.
    pub model: String,
    /// Driver version or processor name, on which measured figures depend too.
    pub version: String,
    /// Number of multiprocessors, or hardware threads.
    pub multiprocessors: usize,
    /// Maximum number of blocks of a kernel that can access one another's shared memory; 1 without such clusters.
    pub cluster_blocks: usize,
    /// Clock rate in Hz.
    pub clock: f64,
    /// Matrix throughput of all multiprocessors in operations per second, for 16-bit and 32-bit floats.
    pub products: [f64; 2],
    /// Memory bandwidth in bytes per second.
    pub memory_rate: f64,
    /// Bandwidth to peers over links, or else PCIe, in bytes per second in one direction.
    pub link_rate: f64,
    /// Whether it has a device interconnect, such as NVLink.
    pub linked: bool,
    /// Whether all ranks of a machine share its multiprocessors and memory.
    pub shared: bool,
    /// Whether kernels can copy in a [`sequence`](super::StreamBackend::sequence).
    pub kernel_copies: bool,
}
