//! Whether the network library accesses device memory directly.

use crate::named::named;

named! {
    /// How network connections transfer device memory.
    #[derive(Default)]
    pub enum DeviceAccess: "access" {
        /// Always through host staging memory.
        Staged = "staged",
        /// Directly if network cards can access the device memory at both ends, else through staging memory.
        #[default]
        Automatic = "auto",
        /// Directly whenever the network library can do so at both ends, even if it copies small pieces through
        /// the host and waits for each. That is slower than staging, and a copy delayed behind waiting streams
        /// (`CUDA_DEVICE_MAX_CONNECTIONS`) delays all connections of the rank.
        Direct = "direct",
    }
}
