//! Who and where a rank is.

use crate::device::{Attachment, Device, NetworkDevice, PciAddress, machine_identity};
use serde::{Deserialize, Serialize};

/// Who and where a rank is: what it tells the others first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The same for two ranks if and only if they run on the same machine.
    pub machine: String,
    /// The name of the machine, for people.
    pub host: String,
    /// The model of the device.
    pub device: String,
    /// The device's place on the PCI bus. None for a device that any number of ranks may use.
    #[serde(default)]
    pub address: Option<PciAddress>,
    /// The NUMA node that the device is attached to.
    #[serde(default)]
    pub numa_node: Option<u32>,
    /// The network device that is nearest to the device.
    #[serde(default)]
    pub network: Option<NetworkDevice>,
}

impl Place {
    /// That of a rank with `device`, which is attached so.
    pub(super) fn of(device: &dyn Device, attachment: Attachment) -> Self {
        let host = rustix::system::uname()
            .nodename()
            .to_string_lossy()
            .into_owned();
        let identity = u128::from_be_bytes(machine_identity());
        Self {
            machine: match identity {
                // Without a boot id, the name has to do.
                0 => host.clone(),
                _ => format!("{identity:032x}"),
            },
            host,
            device: device.properties().model,
            address: attachment.address,
            numa_node: attachment.numa_node,
            network: attachment.network,
        }
    }

    /// Whether both ranks use the same device, of which each should have one of its own.
    pub(super) fn shares_device_with(&self, other: &Self) -> bool {
        self.machine == other.machine && self.address.is_some() && self.address == other.address
    }
}
