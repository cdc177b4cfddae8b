//! Identity and location of a rank.

use crate::device::{
    Attachment, Device, NetworkDevice, PciAddress, machine_identity, network_namespace,
};
use serde::{Deserialize, Serialize};

/// Identity and location of a rank: its first message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankLocation {
    /// Equal for two ranks if and only if they run on the same machine.
    pub machine: String,
    /// Network namespace. Ranks of one machine can map each other's memory only within one namespace.
    #[serde(default)]
    pub namespace: u64,
    /// Host name, for messages.
    pub host: String,
    /// Model of the device.
    pub device: String,
    /// PCI address of the device. None for a device that any number of ranks may use.
    #[serde(default)]
    pub address: Option<PciAddress>,
    /// NUMA node of the device.
    #[serde(default)]
    pub numa_node: Option<u32>,
    /// Network device nearest to the device.
    #[serde(default)]
    pub network: Option<NetworkDevice>,
}

impl RankLocation {
    /// The place of a rank with `device` and its attachment.
    pub(super) fn of(device: &dyn Device, attachment: Attachment) -> Self {
        let host = rustix::system::uname()
            .nodename()
            .to_string_lossy()
            .into_owned();
        let identity = u128::from_be_bytes(machine_identity());
        Self {
            machine: match identity {
                // Fall back to the host name without a boot id.
                0 => host.clone(),
                _ => format!("{identity:032x}"),
            },
            namespace: network_namespace(),
            host,
            device: device.properties().model,
            address: attachment.address,
            numa_node: attachment.numa_node,
            network: attachment.network,
        }
    }

    /// Whether the ranks can map each other's memory: same machine and same network namespace.
    pub(super) fn is_near(&self, other: &Self) -> bool {
        self.machine == other.machine && self.namespace == other.namespace
    }

    /// Whether both ranks use the same physical device.
    pub(super) fn shares_device_with(&self, other: &Self) -> bool {
        // A device without address, the host device, serves any number of ranks.
        self.machine == other.machine && self.address.is_some() && self.address == other.address
    }
}
