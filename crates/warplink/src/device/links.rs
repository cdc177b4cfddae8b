//! A device's location and its links to other devices of the machine.

use super::attachment::Attachment;
use super::pci::PciAddress;
use crate::error::Result;

/// Queries of a device's location and links.
pub trait LinkQuery {
    /// PCI address, NUMA node and nearest network device.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::ErrorKind::Driver) if the PCI address cannot be determined. Other missing
    /// information is not an error.
    fn attachment(&self) -> Result<Attachment>;

    /// Active links. The host device has one, to the memory shared by all ranks of the machine.
    ///
    /// # Errors
    /// [`ErrorKind::LibraryMissing`](crate::ErrorKind::LibraryMissing) without the vendor's library,
    /// [`ErrorKind::Driver`](crate::ErrorKind::Driver) if the query fails.
    fn links(&self) -> Result<DeviceLinks>;

    /// Whether it can access the memory of the device of the same kind at `peer` on this machine (`None` for
    /// a device without address), over any path. False if that device is not visible to this process.
    ///
    /// # Errors
    /// As [`links`](Self::links).
    fn reaches(&self, peer: Option<PciAddress>) -> Result<bool>;

    /// Access to the memory of the device of the same kind at `peer` on this machine (`None` for a device
    /// without address), possibly itself. `None` if this process cannot determine it.
    fn peer_access(&self, _peer: Option<PciAddress>) -> Option<PeerAccess> {
        None
    }
}

/// Access of a device to another device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerAccess {
    /// Can map it.
    pub mapped: bool,
    /// Can perform atomic operations on it while mapped.
    pub atomics: bool,
}

impl PeerAccess {
    /// Full access, as to a device's own memory.
    pub const FULL: Self = Self {
        mapped: true,
        atomics: true,
    };

    /// No access.
    pub const NONE: Self = Self {
        mapped: false,
        atomics: false,
    };

    /// Intersection of two accesses.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            mapped: self.mapped && other.mapped,
            atomics: self.atomics && other.atomics,
        }
    }
}

/// Links of a device: device interconnects such as NVLink, not PCIe.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceLinks {
    /// Active links.
    pub links: Vec<DeviceLink>,
}

/// One link of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLink {
    /// Index among the device's links.
    pub number: u32,
    /// Protocol version, major and minor, if known.
    pub version: Option<(u8, u8)>,
    /// Other end.
    pub end: LinkEnd,
}

/// Other end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkEnd {
    /// Another device.
    Device(PciAddress),
    /// A switch. All switches of a machine are assumed to be interconnected.
    Switch,
    /// Any other device, such as a processor.
    Other,
}
