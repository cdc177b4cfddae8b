//! Where a device is attached, and the links that it has to others of its machine.

use super::attachment::Attachment;
use super::pci::PciAddress;
use crate::error::Result;

/// What a device tells of its place in the machine.
pub trait LinkQuery {
    /// Where it is attached to its machine: its address, its NUMA node, the nearest network device.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::ErrorKind::Driver) where its address cannot be had. What else the
    /// machine does not tell is no error.
    fn attachment(&self) -> Result<Attachment>;

    /// Its links that are up. The host device has one, to the memory that all ranks of the machine
    /// share.
    ///
    /// # Errors
    /// [`ErrorKind::LibraryMissing`](crate::ErrorKind::LibraryMissing) without the vendor's library,
    /// [`ErrorKind::Driver`](crate::ErrorKind::Driver) where that fails.
    fn links(&self) -> Result<DeviceLinks>;

    /// Whether it reads and writes the memory of the device of its kind at `peer` on the same machine
    /// (none for a device without an address), by whatever way. False also where this process cannot
    /// see that device.
    ///
    /// # Errors
    /// As [`links`](Self::links).
    fn reaches(&self, peer: Option<PciAddress>) -> Result<bool>;

    /// What it can do with the memory of the device of its kind at `peer` on the same machine (none for a device
    /// without an address), which may be the device itself; `None` where this process cannot find out.
    fn peer_access(&self, _peer: Option<PciAddress>) -> Option<PeerAccess> {
        None
    }
}

/// What a device can do with another one's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerAccess {
    /// Map it.
    pub mapped: bool,
    /// Change words of it atomically, where it is mapped.
    pub atomics: bool,
}

impl PeerAccess {
    /// All that there is, as a device has to its own memory.
    pub const FULL: Self = Self {
        mapped: true,
        atomics: true,
    };

    /// None at all.
    pub const NONE: Self = Self {
        mapped: false,
        atomics: false,
    };

    /// What both can do.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            mapped: self.mapped && other.mapped,
            atomics: self.atomics && other.atomics,
        }
    }
}

/// What a device is linked to. Links are those made for devices (NVLink, say), not the PCI bus.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceLinks {
    /// The links that are up.
    pub links: Vec<DeviceLink>,
}

/// One link of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLink {
    /// Its number among the device's links.
    pub number: u32,
    /// The version of its protocol, major and minor, as far as it is told.
    pub version: Option<(u8, u8)>,
    /// What is at the other end.
    pub end: LinkEnd,
}

/// What is at the other end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkEnd {
    /// Another device.
    Device(PciAddress),
    /// A switch. All switches of a machine are taken to be connected with one another.
    Switch,
    /// Something else, such as a processor.
    Other,
}
