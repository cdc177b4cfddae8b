//! The two all-gathers by which ranks discover the topology.

use super::class::TopologyClass;
use super::mesh::LinkCounts;
use super::place::RankLocation;
use super::survey::{RankAnswer, Topology};
use crate::device::{Attachment, Device, LinkQuery};
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Rank, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

const OPERATION: &str = "find the topology";

/// First message of a rank.
#[derive(Serialize, Deserialize)]
struct Introduction {
    place: RankLocation,
    /// Class forced by this rank's environment.
    forced: Option<TopologyClass>,
}

/// Discovers the topology of all ranks. Collective; blocks in `all_gather`, twice. A device that cannot
/// report its links is part of the answer rather than an error.
///
/// # Errors
/// Those of `all_gather`, and [`ErrorKind::Protocol`] for a malformed answer.
pub fn rendezvous(
    device: &dyn Device,
    rank: Rank,
    forced: Option<TopologyClass>,
    mut all_gather: impl FnMut(Vec<u8>) -> Result<Vec<Vec<u8>>>,
) -> Result<Topology> {
    // A failure here must not skip the gathers below: the other ranks would wait for this one.
    let (attachment, failed) = match device.attachment() {
        Ok(attachment) => (attachment, None),
        Err(error) => (Attachment::default(), Some(error)),
    };
    let own = Introduction {
        place: RankLocation::of(device, attachment),
        forced,
    };
    meet(device, failed.as_ref(), rank, &own, &mut all_gather)
}

/// Both all-gathers of a rank with this introduction; `failed` is its error if it could not locate its
/// device.
fn meet(
    device: &(impl LinkQuery + ?Sized),
    failed: Option<&Error>,
    rank: Rank,
    own: &Introduction,
    all_gather: &mut dyn FnMut(Vec<u8>) -> Result<Vec<Vec<u8>>>,
) -> Result<Topology> {
    let introductions: Vec<Introduction> = read_all(all_gather(write(own)?)?)?;
    let (places, forced): (Vec<_>, Vec<_>) = introductions
        .into_iter()
        .map(|introduction| (introduction.place, introduction.forced))
        .unzip();

    let links = match failed {
        None => LinkCounts::ask(device, rank, &places),
        Some(error) => LinkCounts::failed(error),
    };
    // In a second round, since a rank counts links to the devices that the first one named.
    let counts: Vec<LinkCounts> = read_all(all_gather(write(&links)?)?)?;
    // Numbers of a peer index ranks below.
    for (peer, counts) in counts.iter().enumerate() {
        let checked = counts.check(peer, places.len());
        checked.map_err(|error| error.with_operation(OPERATION).with_peer(peer))?;
    }
    let answers = places.into_iter().zip(counts);
    let answers = answers.map(|(place, links)| RankAnswer { place, links });
    Ok(Topology::new(answers.collect(), &forced))
}

fn write(value: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(value)
        .map_err(|error| Error::internal(error.to_string()).with_operation(OPERATION))
}

fn read_all<T: DeserializeOwned>(values: Vec<Vec<u8>>) -> Result<Vec<T>> {
    let read = |(peer, bytes): (Rank, Vec<u8>)| {
        serde_json::from_slice(&bytes).map_err(|error| {
            Error::protocol(error.to_string())
                .with_operation(OPERATION)
                .with_peer(peer)
                .with_help("ask for the topology at the same time on every rank")
        })
    };
    values.into_iter().enumerate().map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;
    use crate::device::{DeviceLink, DeviceLinks, LinkEnd, PciAddress};
    use crate::topology::{Connection, Obstacle};
    use std::sync::{Barrier, Mutex};

    /// A fake device.
    #[derive(Clone, Default)]
    struct MadeUp {
        machine: &'static str,
        namespace: u64,
        address: &'static str,
        links: Vec<LinkEnd>,
        forced: Option<TopologyClass>,
        fails: bool,
    }

    impl LinkQuery for MadeUp {
        fn attachment(&self) -> Result<Attachment> {
            Ok(Attachment {
                address: Some(self.address.parse()?),
                ..Attachment::default()
            })
        }

        fn links(&self) -> Result<DeviceLinks> {
            if self.fails {
                return Err(Error::new(ErrorKind::LibraryMissing, "no library"));
            }
            let link = |(number, &end)| DeviceLink {
                number,
                version: None,
                end,
            };
            Ok(DeviceLinks {
                links: (0..).zip(&self.links).map(link).collect(),
            })
        }

        fn reaches(&self, peer: Option<PciAddress>) -> Result<bool> {
            Ok(peer.is_some())
        }
    }

    /// The topology as computed by each rank, given their devices.
    fn topologies(devices: &[MadeUp]) -> Vec<Topology> {
        let world = devices.len();
        let (barrier, values) = (Barrier::new(world), Mutex::new(vec![Vec::new(); world]));
        let run = |(rank, device): (Rank, &MadeUp)| {
            let attachment = device.attachment().unwrap();
            let own = Introduction {
                place: RankLocation {
                    machine: device.machine.to_owned(),
                    namespace: device.namespace,
                    host: format!("host-{}", device.machine),
                    device: "made up".to_owned(),
                    address: attachment.address,
                    numa_node: None,
                    network: None,
                },
                forced: device.forced,
            };
            let mut all_gather = |bytes: Vec<u8>| {
                values.lock().unwrap()[rank] = bytes;
                barrier.wait();
                let all = values.lock().unwrap().clone();
                barrier.wait();
                Ok(all)
            };
            meet(device, None, rank, &own, &mut all_gather).unwrap()
        };
        std::thread::scope(|scope| {
            let run = &run;
            let ranks: Vec<_> = devices
                .iter()
                .enumerate()
                .map(|of_rank| scope.spawn(move || run(of_rank)))
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    /// The topology of `devices`, asserted equal on every rank.
    fn topology(devices: &[MadeUp]) -> Topology {
        let mut all = topologies(devices);
        let first = all.swap_remove(0);
        assert!(all.iter().all(|other| *other == first), "{all:?}");
        first
    }

    fn device(machine: &'static str, address: &'static str, ends: &[&str]) -> MadeUp {
        let end = |end: &&str| match *end {
            "switch" => LinkEnd::Switch,
            address => LinkEnd::Device(address.parse().unwrap()),
        };
        MadeUp {
            machine,
            address,
            links: ends.iter().map(end).collect(),
            ..MadeUp::default()
        }
    }

    const FIRST: &str = "0000:10:00.0";
    const SECOND: &str = "0000:20:00.0";

    #[test]
    fn linked_ranks_of_a_machine_are_fully_connected() {
        let found = topology(&[
            device("a", FIRST, &[SECOND, SECOND]),
            device("a", SECOND, &[FIRST, FIRST]),
        ]);
        assert_eq!(found.class(), TopologyClass::FullyConnected);
        assert_eq!(found.mesh().connection(0, 1), Connection::Links(2));
        assert!(found.is_direct(), "{found}");
    }

    #[test]
    fn ranks_on_two_machines_are_reported_and_no_error() {
        let found = topology(&[
            device("a", FIRST, &["switch"]),
            device("b", FIRST, &["switch"]),
            device("a", SECOND, &["switch"]),
        ]);
        assert_eq!(found.class(), TopologyClass::Unknown);
        let machines = vec![
            ("host-a".to_owned(), vec![0, 2]),
            ("host-b".to_owned(), vec![1]),
        ];
        assert_eq!(
            found.obstacles()[0],
            Obstacle::DifferentMachines { machines }
        );
        // Other information is still available.
        assert_eq!(found.mesh().reached_by(0), [2]);
    }

    #[test]
    fn ranks_in_two_network_namespaces_are_reported_and_no_error() {
        let mut devices = [FIRST, SECOND].map(|address| device("a", address, &["switch"]));
        devices[1].namespace = 1;
        let found = topology(&devices);
        let expected = Obstacle::DifferentNamespaces {
            host: "host-a".to_owned(),
            namespaces: vec![vec![0], vec![1]],
        };
        assert_eq!(found.obstacles()[0], expected);
        assert_eq!(found.mesh().connection(0, 1), Connection::Nothing);
        // The device is the same one, wherever its ranks are.
        devices[1].address = FIRST;
        let shared = |obstacle: &Obstacle| matches!(obstacle, Obstacle::SharedDevice { .. });
        assert!(topology(&devices).obstacles().iter().any(shared));
        for device in &mut devices {
            device.forced = Some(TopologyClass::FullyConnected);
        }
        assert_eq!(topology(&devices).obstacles(), [expected]);
    }

    #[test]
    fn two_ranks_on_one_device_are_reported_and_no_error() {
        let found = topology(&[
            device("a", FIRST, &["switch"]),
            device("a", SECOND, &["switch"]),
            device("a", FIRST, &["switch"]),
        ]);
        let address = FIRST.parse().unwrap();
        let ranks = vec![0, 2];
        assert_eq!(
            found.obstacles(),
            [Obstacle::SharedDevice { address, ranks }]
        );
    }

    #[test]
    fn ranks_that_see_different_meshes_are_reported_and_no_error() {
        let found = topology(&[
            device("a", FIRST, &[SECOND, SECOND]),
            device("a", SECOND, &[FIRST]),
        ]);
        let expected = Obstacle::MeshesDiffer {
            rank: 0,
            links: 2,
            peer: 1,
            peer_links: 1,
        };
        assert_eq!(found.obstacles(), [expected]);
        assert_eq!(found.mesh().connection(0, 1), Connection::Links(1));
    }

    #[test]
    fn a_rank_that_cannot_tell_its_links_takes_part() {
        let mut blind = device("a", SECOND, &[]);
        blind.fails = true;
        let found = topology(&[device("a", FIRST, &[SECOND]), blind]);
        assert!(!found.is_direct());
        let reason = "no library".to_owned();
        assert_eq!(
            found.obstacles()[0],
            Obstacle::LinksUnknown { rank: 1, reason }
        );
    }

    #[test]
    fn a_class_is_forced_on_all_ranks_or_on_none() {
        let forced = |classes: [Option<TopologyClass>; 2]| {
            let mut devices = [device("a", FIRST, &[]), device("a", FIRST, &[])];
            for (device, class) in devices.iter_mut().zip(classes) {
                device.forced = class;
            }
            topology(&devices)
        };
        let connected = Some(TopologyClass::FullyConnected);
        let found = forced([connected; 2]);
        assert_eq!(found.class(), TopologyClass::FullyConnected);
        assert!(found.is_forced() && found.is_direct(), "{found}");

        let found = forced([connected, None]);
        assert_eq!(found.class(), TopologyClass::Unknown);
        let differs = |obstacle: &Obstacle| matches!(obstacle, Obstacle::ForcedDifferently { .. });
        assert!(found.obstacles().iter().any(differs), "{found}");

        let found = forced([Some(TopologyClass::HybridCubeMesh); 2]);
        let misfits = |obstacle: &Obstacle| matches!(obstacle, Obstacle::ForcedOutOfPlace { .. });
        assert!(found.obstacles().iter().any(misfits), "{found}");

        let found = forced([Some(TopologyClass::Unknown); 2]);
        assert_eq!(found.obstacles(), [Obstacle::ForcedUnknown]);
    }

    #[test]
    fn no_force_joins_machines() {
        let mut devices = [device("a", FIRST, &[]), device("b", FIRST, &[])];
        for device in &mut devices {
            device.forced = Some(TopologyClass::FullyConnected);
        }
        let found = topology(&devices);
        assert!(
            !found.is_direct() && found.obstacles().len() == 1,
            "{found}"
        );
    }
}
