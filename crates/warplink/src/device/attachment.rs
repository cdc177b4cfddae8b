//! Where a device is attached to its machine, as the kernel's file system of devices tells.

use super::pci::PciAddress;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// Where the kernel shows its devices.
const SYSFS: &str = "/sys";

/// Where a device is attached to its machine. What the machine does not tell is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attachment {
    /// Its place on the PCI bus. None for a device that is no card, which any number of ranks may use.
    pub address: Option<PciAddress>,
    /// The NUMA node that it is attached to.
    pub numa_node: Option<u32>,
    /// The network device that is nearest on the PCI bus; of several as near, one for InfiniBand or
    /// RoCE, and then the first by name.
    pub network: Option<NetworkDevice>,
}

/// A network device of the machine.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NetworkDevice {
    /// What the kernel calls it, such as `mlx5_0` or `eth0`.
    pub name: String,
    /// What it speaks.
    pub kind: NetworkKind,
    /// How far it is from the device; none where the device is no card.
    pub distance: Option<PciDistance>,
}

/// What a network device speaks.
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

/// How far apart two devices of a machine are, from near to far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PciDistance {
    /// Below one port of a processor: data between them passes PCI switches only.
    SameSwitch,
    /// Below one PCI root of a processor: data passes that root.
    SameRoot,
    /// Below different roots of one NUMA node.
    SameNode,
    /// On different NUMA nodes, or nothing better is known.
    OtherNode,
}

impl Attachment {
    /// That of the card at `address`, or of this machine's processors.
    pub(super) fn find(address: Option<PciAddress>) -> Self {
        Self::find_below(Path::new(SYSFS), address)
    }

    fn find_below(sysfs: &Path, address: Option<PciAddress>) -> Self {
        let place = address.map(|address| {
            let link = sysfs.join("bus/pci/devices").join(address.to_string());
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

/// A device's place in the tree of PCI buses.
struct BusPlace {
    /// The PCI root, then every bridge, then the device.
    chain: Vec<String>,
    numa_node: Option<u32>,
}

impl BusPlace {
    /// That of the device at `path`, all links in it resolved.
    fn of(path: &Path) -> Self {
        let mut chain = Vec::new();
        let mut card = PathBuf::new();
        for component in path.components() {
            let name = component.as_os_str().to_string_lossy();
            let is_root = chain.is_empty() && name.starts_with("pci") && name.contains(':');
            let is_card = !chain.is_empty() && name.parse::<PciAddress>().is_ok();
            // Below the card is what its driver made of it.
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
            // The kernel says -1 where there is none.
            numa_node: text.trim().parse().ok(),
        }
    }

    /// How far `other` is, and over how many steps in the tree.
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

/// The network devices that are cards: name, kind, and resolved path.
fn network_devices(sysfs: &Path) -> Vec<(String, NetworkKind, PathBuf)> {
    let mut found: Vec<(String, NetworkKind, PathBuf)> = Vec::new();
    for (name, path) in rdma_cards(sysfs) {
        let kind = rdma_kind(&sysfs.join("class/infiniband").join(&name));
        found.push((name, kind, path));
    }
    for (name, path) in devices_of_class(sysfs, "net") {
        // The interface of a card that is listed already.
        if found.iter().all(|(_, _, known)| *known != path) {
            found.push((name, NetworkKind::Ethernet, path));
        }
    }
    found
}

/// Whether there are network cards that read and write memory by themselves (RDMA).
pub(super) fn has_rdma_cards() -> bool {
    !rdma_cards(Path::new(SYSFS)).is_empty()
}

fn rdma_cards(sysfs: &Path) -> Vec<(String, PathBuf)> {
    devices_of_class(sysfs, "infiniband")
}

/// The devices of a class that belong to a card: name, and the card's resolved path.
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

    /// A made-up file system of devices.
    struct Machine {
        root: TempDir,
    }

    impl Machine {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            fs::create_dir_all(root.path().join("bus/pci/devices")).unwrap();
            Self { root }
        }

        /// A card at `chain` below a root, on a NUMA node.
        fn card(&self, chain: &str, numa_node: i32) -> PathBuf {
            let path = self.root.path().join("devices").join(chain);
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join("numa_node"), format!("{numa_node}\n")).unwrap();
            let link = self.root.path().join("bus/pci/devices");
            symlink(&path, link.join(path.file_name().unwrap())).unwrap();
            path
        }

        /// A device of a class, made of a card by its driver.
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

        // Of two that are as far by their kind of distance, the one over fewer steps.
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
