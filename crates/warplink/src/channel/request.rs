//! Requests to connect.

use crate::error::Rank;
use crate::memory::Region;
use crate::named::named;

named! {
    /// How the bytes of a connection reach the peer. In C, 0 leaves the choice to the library.
    #[derive(Default)]
    #[non_exhaustive]
    pub enum Transport: "transport" {
        /// The kernel itself stores to and loads from the peer's memory, which is mapped. The device must have atomic
        /// operations on that memory, as GPUs have over NVLink.
        #[default]
        Direct = "direct" (1),
        /// A thread of the host has the device's copy engine move the bytes, when kernels ask it to: to the peer's memory,
        /// or through memory of the host that both devices map, where they cannot map each other's.
        Proxied = "proxied" (2),
        /// A thread of the host sends the bytes over the network (UCX), when kernels ask it to: to ranks of other
        /// machines, or of this one where that is wanted.
        Network = "network" (3),
    }
}

/// One end of a connection, to be connected with the other by
/// [`connect`](super::ConnectionExchange::connect).
#[derive(Clone, Debug)]
pub struct ConnectionRequest {
    pub(super) peer: Rank,
    pub(super) tag: u64,
    pub(super) region: Region,
    /// Chosen by where the peer is, where it is not given.
    pub(super) transport: Option<Transport>,
    pub(super) network_devices: Option<String>,
}

impl ConnectionRequest {
    /// A connection to `peer` with `tag`, between `region` here and the one that the peer gives, which may
    /// have another length. Both kernels may put to and get from both. Direct where the peer's memory can be
    /// mapped and changed atomically, by the proxy where not, over the network where it is on another machine.
    pub fn new(peer: Rank, tag: u64, region: &Region) -> Self {
        Self {
            peer,
            tag,
            region: region.clone(),
            transport: None,
            network_devices: None,
        }
    }

    /// Chooses how the bytes move; the same on both ranks.
    pub fn with_transport(mut self, transport: Transport) -> Self {
        self.transport = Some(transport);
        self
    }

    /// Has the bytes go over the network, by these devices of this rank alone: as the network's library
    /// names them and separated by commas, such as `mlx5_0:1` or `eth0`.
    pub fn with_network_devices(mut self, devices: impl Into<String>) -> Self {
        self.network_devices = Some(devices.into());
        self.with_transport(Transport::Network)
    }
}
