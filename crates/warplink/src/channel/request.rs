//! Connection requests.

use crate::error::Rank;
use crate::memory::Region;
use crate::named::named;

named! {
    /// How the bytes of a connection reach the peer. In C, 0 leaves the choice to the library.
    #[derive(Default)]
    #[non_exhaustive]
    pub enum Transport: "transport" {
        /// The kernel itself stores to and loads from the peer's mapped memory. The device must support atomic
        /// operations on that memory, as GPUs do over NVLink.
        #[default]
        Direct = "direct" (1),
        /// A host thread (proxy) moves the bytes with the device's copy engine on request of kernels: to the peer's
        /// memory, or through host memory that both devices map, if they cannot map each other's.
        Proxied = "proxied" (2),
        /// A host thread (proxy) sends the bytes over the network (UCX) on request of kernels: to ranks of other
        /// machines, or of this one if requested.
        Network = "network" (3),
    }
}

/// One end of a connection, for [`connect`](super::ConnectionExchange::connect).
#[derive(Clone, Debug)]
pub struct ConnectionRequest {
    pub(super) peer: Rank,
    pub(super) tag: u64,
    pub(super) region: Region,
    /// Explicit transport; by default it depends on the location of the peer.
    pub(super) transport: Option<Transport>,
    pub(super) network_devices: Option<String>,
}

impl ConnectionRequest {
    /// A connection to `peer` with `tag`, between `region` here and the peer's region, which may have another length.
    /// Kernels of both ranks may put to and get from the other's region. Direct if the peer's memory can be mapped
    /// and supports atomics, else by the proxy, or over the network if the peer is on another machine.
    pub fn new(peer: Rank, tag: u64, region: &Region) -> Self {
        Self {
            peer,
            tag,
            region: region.clone(),
            transport: None,
            network_devices: None,
        }
    }

    /// Sets the transport; the same on both ranks.
    pub fn with_transport(mut self, transport: Transport) -> Self {
        self.transport = Some(transport);
        self
    }

    /// Uses the network, by these devices of this rank only: names of the network library, separated by commas, such
    /// as `mlx5_0:1` or `eth0`.
    pub fn with_network_devices(mut self, devices: impl Into<String>) -> Self {
        self.network_devices = Some(devices.into());
        self.with_transport(Transport::Network)
    }
}
