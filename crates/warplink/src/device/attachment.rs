//! PCI and NUMA location of a device, read from Linux sysfs.

use super::pci::PciAddress;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// Mount point of sysfs.
const SYSFS: &str = "/sys";

/// Location of a device in its machine. Fields that the machine does not report are `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attachment {
    /// PCI address. `None` for a device that is not a PCI card, which any number of ranks may share.
    pub address: Option<PciAddress>,
    /// NUMA node.
    pub numa_node: Option<u32>,
    /// Nearest network device on the PCI bus. Ties prefer InfiniBand and RoCE over Ethernet, then the first
    /// by name.
    pub network: Option<NetworkDevice>,
}

/// A network device of the machine.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NetworkDevice {
    /// Kernel name, such as `mlx5_0` or `eth0`.
    pub name: String,
    /// Link type.
    pub kind: NetworkKind,
    /// PCI distance to the device; `None` if the device is not a PCI card.
    pub distance: Option<PciDistance>,
}

/// Link type of a network device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NetworkKind {
    /// InfiniBand.
    Infiniband,
    /// RDMA over Ethernet.
    Roce,
    /// A network interface without RDMA.
    Ethernet,
}

/// PCI distance between two devices of a machine, nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PciDistance {
    /// Same processor port: traffic passes PCI switches only.
    SameSwitch,
    /// Same PCI root complex.
    SameRoot,
    /// Different PCI roots of one NUMA node.
    SameNode,
    /// Different NUMA nodes, or unknown.
    OtherNode,
}

impl Attachment {
    /// Location of the card at `address`, or of the processors if there is none.
    pub(super) fn find(address: Option<PciAddress>) -> Self {
        Self::find_below(Path::new(SYSFS), address)
    }

    fn find_below(sysfs: &Path, address: Option<PciAddress>) -> Self {
        let place = address.map(|address| {
            let link = sysfs.join("bus/pci/devices").join(address.to_string());
            // The link's target is the path through the bridges, from which the distance is counted.
            BusPlace::of(&fs::canonicalize(&link).unwrap_or(link))
        });
        let nearest = network_devices(sysfs)
            .into_iter()
            .map(|(name, kind, path)| {
                let (distance, hops) = match &place {
                    Some(place) => {
                        let (distance, hops) = place.distance(&BusPlace::of(&path));
                        (Some(distance), hops)
                    }
                    None => (None, 0),
                };
                (distance, hops, kind, name)
            })
            // By distance, then hops, then kind, in which RDMA precedes Ethernet. The name breaks ties.
            .min();
        Self {
            address,
            numa_node: place.and_then(|place| place.numa_node),
            network: nearest.map(|(distance, _, kind, name)| NetworkDevice {
                name,
                kind,
                distance,
            }),
        }
    }
}

impl fmt::Display for NetworkKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Infiniband => "InfiniBand",
            Self::Roce => "RoCE",
            Self::Ethernet => "Ethernet",
        })
    }
}

impl fmt::Display for PciDistance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::SameSwitch => "same PCI switch",
            Self::SameRoot => "same PCI root",
            Self::SameNode => "same NUMA node",
            Self::OtherNode => "other NUMA node",
        })
    }
}

/// Position of a device in the PCI tree.
struct BusPlace {
    /// The PCI root, then every bridge, then the device itself.
    chain: Vec<String>,
    numa_node: Option<u32>,
}

impl BusPlace {
    /// Position of the device at `path`, a canonical sysfs path.
    fn of(path: &Path) -> Self {
        let mut chain = Vec::new();
        let mut card = PathBuf::new();
        for component in path.components() {
            let name = component.as_os_str().to_string_lossy();
            let is_root = chain.is_empty() && name.starts_with("pci") && name.contains(':');
            let is_card = !chain.is_empty() && name.parse::<PciAddress>().is_ok();
            // Entries below the card are interfaces that its driver created.
            if !chain.is_empty() && !is_card {
                break;
            }
            card.push(component);
            if is_root || is_card {
                chain.push(name.into_owned());
            }
        }
        let text = fs::read_to_string(card.join("numa_node")).unwrap_or_default();
        Self {
            chain,
            // sysfs reports -1 for "no node".
            numa_node: text.trim().parse().ok(),
        }
    }

    /// Distance to `other`, and the number of hops in the tree.
    fn distance(&self, other: &Self) -> (PciDistance, usize) {
        let pairs = self.chain.iter().zip(&other.chain);
        let shared = pairs.take_while(|(own, theirs)| own == theirs).count();
        let steps = self.chain.len() + other.chain.len() - 2 * shared;
        let distance = match shared {
            0 if self.numa_node.is_some() && self.numa_node == other.numa_node => {
                PciDistance::SameNode
            }
            0 => PciDistance::OtherNode,
            1 => PciDistance::SameRoot,
            _ => PciDistance::SameSwitch,
        };
        (distance, steps)
    }
}

/// Network devices on PCI cards: name, kind and canonical path.
fn network_devices(sysfs: &Path) -> Vec<(String, NetworkKind, PathBuf)> {
    let mut found: Vec<(String, NetworkKind, PathBuf)> = Vec::new();
    for (name, path) in rdma_cards(sysfs) {
        let kind = rdma_kind(&sysfs.join("class/infiniband").join(&name));
        found.push((name, kind, path));
    }
    for (name, path) in devices_of_class(sysfs, "net") {
        // RDMA devices come first, so skip the Ethernet interface of a card already listed.
        if found.iter().all(|(_, _, known)| *known != path) {
            found.push((name, NetworkKind::Ethernet, path));
        }
    }
    found
}

/// Whether the machine has RDMA network cards.
pub(super) fn has_rdma_cards() -> bool {
    !rdma_cards(Path::new(SYSFS)).is_empty()
}

fn rdma_cards(sysfs: &Path) -> Vec<(String, PathBuf)> {
    devices_of_class(sysfs, "infiniband")
}

/// Devices of a sysfs class that belong to a PCI card: name and canonical path of the card.
fn devices_of_class(sysfs: &Path, class: &str) -> Vec<(String, PathBuf)> {
    let entries = fs::read_dir(sysfs.join("class").join(class));
    entries
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let path = fs::canonicalize(entry.path().join("device")).ok()?;
            Some((entry.file_name().to_string_lossy().into_owned(), path))
        })
        .collect()
}

fn rdma_kind(device: &Path) -> NetworkKind {
    let ports = fs::read_dir(device.join("ports"));
    let infiniband = ports.into_iter().flatten().flatten().any(|port| {
        let layer = fs::read_to_string(port.path().join("link_layer")).unwrap_or_default();
        layer.trim() == "InfiniBand"
    });
    if infiniband {
        NetworkKind::Infiniband
    } else {
        NetworkKind::Roce
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use tempfile::TempDir;

    /// Fake sysfs tree.
    struct Machine {
        root: TempDir,
    }

    impl Machine {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            fs::create_dir_all(root.path().join("bus/pci/devices")).unwrap();
            Self { root }
        }

        /// Creates a card at `chain` below a root, on a NUMA node.
        fn card(&self, chain: &str, numa_node: i32) -> PathBuf {
            let path = self.root.path().join("devices").join(chain);
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join("numa_node"), format!("{numa_node}\n")).unwrap();
            let link = self.root.path().join("bus/pci/devices");
            symlink(&path, link.join(path.file_name().unwrap())).unwrap();
            path
        }

        /// Creates a device of a class on a card.
        fn device(&self, card: &Path, class: &str, name: &str) -> PathBuf {
            let path = card.join(class).join(name);
            fs::create_dir_all(&path).unwrap();
            symlink(card, path.join("device")).unwrap();
            let class = self.root.path().join("class").join(class);
            fs::create_dir_all(&class).unwrap();
            symlink(&path, class.join(name)).unwrap();
            path
        }

        fn rdma(&self, card: &Path, name: &str, layer: &str) {
            let port = self.device(card, "infiniband", name).join("ports/1");
            fs::create_dir_all(&port).unwrap();
            fs::write(port.join("link_layer"), format!("{layer}\n")).unwrap();
        }

        fn find(&self, address: &str) -> Attachment {
            Attachment::find_below(self.root.path(), Some(address.parse().unwrap()))
        }
    }

    fn network(name: &str, kind: NetworkKind, distance: PciDistance) -> Option<NetworkDevice> {
        Some(NetworkDevice {
            name: name.to_owned(),
            kind,
            distance: Some(distance),
        })
    }

    #[test]
    fn the_nearest_network_device_is_found_by_the_tree() {
        let machine = Machine::new();
        machine.card("pci0000:15/0000:15:01.0/0000:16:00.0/0000:1b:00.0", 0);
        machine.card("pci0000:37/0000:37:01.0/0000:3b:00.0", 0);
        machine.card("pci0000:97/0000:97:01.0/0000:9b:00.0", 1);
        let near = machine.card("pci0000:15/0000:15:01.0/0000:16:01.0/0000:1c:00.0", 0);
        assert!(rdma_cards(machine.root.path()).is_empty());
        machine.rdma(&near, "mlx5_3", "InfiniBand");
        assert_eq!(rdma_cards(machine.root.path()).len(), 1);
        machine.device(&near, "net", "ib3");
        let far = machine.card("pci0000:00/0000:00:1f.6", 0);
        machine.device(&far, "net", "eno1");

        let attached = machine.find("0000:1b:00.0");
        assert_eq!(attached.numa_node, Some(0));
        let expected = network("mlx5_3", NetworkKind::Infiniband, PciDistance::SameSwitch);
        assert_eq!(attached.network, expected);

        // Equal distance class: the one with fewer hops wins.
        let expected = network("eno1", NetworkKind::Ethernet, PciDistance::SameNode);
        assert_eq!(machine.find("0000:3b:00.0").network, expected);

        let attached = machine.find("0000:9b:00.0");
        assert_eq!(attached.numa_node, Some(1));
        assert_eq!(
            attached.network.unwrap().distance,
            Some(PciDistance::OtherNode)
        );
    }

    #[test]
    fn of_devices_as_near_one_with_rdma_is_taken() {
        let machine = Machine::new();
        machine.card("pci0000:00/0000:00:04.0", -1);
        for (slot, name) in [("01", "eth0"), ("02", "eth1")] {
            let card = machine.card(&format!("pci0000:00/0000:00:{slot}.0"), -1);
            machine.device(&card, "net", name);
        }
        let attached = machine.find("0000:00:04.0");
        assert_eq!(attached.numa_node, None);
        let expected = network("eth0", NetworkKind::Ethernet, PciDistance::SameRoot);
        assert_eq!(attached.network, expected);

        let card = machine.card("pci0000:00/0000:00:03.0", -1);
        machine.rdma(&card, "rocep0s3", "Ethernet");
        machine.device(&card, "net", "eth2");
        let expected = network("rocep0s3", NetworkKind::Roce, PciDistance::SameRoot);
        assert_eq!(machine.find("0000:00:04.0").network, expected);
    }

    #[test]
    fn a_card_or_a_machine_that_tells_nothing_is_no_error() {
        let machine = Machine::new();
        let attached = machine.find("0000:1b:00.0");
        assert_eq!((attached.numa_node, attached.network), (None, None));
        let nothing = Attachment::find_below(Path::new("/nonexistent"), None);
        assert_eq!(nothing, Attachment::default());
    }
}
