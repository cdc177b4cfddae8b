//! What a device says about itself, for models of its cost.

/// Figures of a device that are known without measuring. Rates are the highest that its parts are built for, in one
/// direction, and 0 where nobody says.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceProperties {
    /// The name of the model, the same for all devices that are built alike.
    pub model: String,
    /// What else figures that were measured depend on: the version of the driver, or the name of the processor.
    pub version: String,
    /// How many multiprocessors, or threads of processors, compute side by side.
    pub multiprocessors: usize,
    /// Cycles per second of a multiprocessor.
    pub clock: f64,
    /// Operations per second of all multiprocessors in a product of matrices of 16-bit floats, and of 32-bit floats.
    pub products: [f64; 2],
    /// Bytes per second between the multiprocessors and the device's memory.
    pub memory_rate: f64,
    /// Bytes per second that the links to peers, or else the bus, take in one direction.
    pub link_rate: f64,
    /// Whether there are links made for devices, such as NVLink.
    pub linked: bool,
    /// Whether all ranks of a machine share the multiprocessors and memory.
    pub shared: bool,
    /// Whether kernels can copy in a [`sequence`](super::Stream::sequence).
    pub kernel_copies: bool,
}
