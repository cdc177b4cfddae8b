//! Links between the ranks' devices, and mutual memory access.

use super::place::RankLocation;
use crate::device::{DeviceLinks, LinkEnd, LinkQuery};
use crate::error::{Error, Rank, Result};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// A rank's view of its device's links: its second message.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkCounts {
    /// Number of direct links to each rank's device; ranks without any are omitted.
    #[serde(default)]
    pub direct: BTreeMap<Rank, u32>,
    /// Number of links to switches.
    #[serde(default)]
    pub switch: u32,
    /// Ranks whose memory the device can access, over links or the bus.
    #[serde(default)]
    pub reaches: BTreeSet<Rank>,
    /// Link version, such as `4.0`, if known.
    #[serde(default)]
    pub version: Option<String>,
    /// Why the query failed, if it did.
    #[serde(default)]
    pub error: Option<String>,
}

/// Connection between two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "by", content = "links")]
pub enum Connection {
    /// The rank itself.
    Itself,
    /// Direct links between the devices.
    Links(u32),
    /// Links to switches; the smaller number of the two devices.
    Switches(u32),
    /// The machine's bus only: each device can access the other's memory, but not over links.
    Bus,
    /// No access to each other's memory.
    Nothing,
}

/// Links among the devices of all ranks, as reported by the ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mesh {
    /// Number of the machine and network namespace of each rank.
    machines: Vec<usize>,
    counts: Vec<LinkCounts>,
}

impl LinkCounts {
    /// Queries the device of `rank`. A failure is part of the answer, so that the rank can still send one.
    pub(super) fn ask(
        device: &(impl LinkQuery + ?Sized),
        rank: Rank,
        places: &[RankLocation],
    ) -> Self {
        let links = match device.links() {
            Ok(links) => links,
            Err(error) => return Self::failed(&error),
        };
        let Some(own) = places.get(rank) else {
            return Self::default();
        };
        let mut reaches = BTreeSet::new();
        for (peer, place) in places.iter().enumerate() {
            if peer == rank || !place.is_near(own) {
                continue;
            }
            match device.reaches(place.address) {
                Ok(true) => {
                    reaches.insert(peer);
                }
                Ok(false) => {}
                // A partial answer would look like a device without access, which is a different obstacle.
                Err(error) => return Self::failed(&error),
            }
        }
        Self {
            reaches,
            ..Self::count(&links, rank, places)
        }
    }

    /// An answer without links, because of `error`.
    pub(super) fn failed(error: &Error) -> Self {
        Self {
            error: Some(error.to_string()),
            ..Self::default()
        }
    }

    /// Maps the links' other ends to ranks. Several ranks may use one device.
    fn count(links: &DeviceLinks, rank: Rank, places: &[RankLocation]) -> Self {
        let mut counts = Self::default();
        for link in &links.links {
            match link.end {
                LinkEnd::Switch => counts.switch += 1,
                LinkEnd::Other => {}
                LinkEnd::Device(address) => {
                    for (peer, place) in places.iter().enumerate() {
                        let same = places.get(rank).is_some_and(|own| own.is_near(place));
                        if peer != rank && same && place.address == Some(address) {
                            *counts.direct.entry(peer).or_default() += 1;
                        }
                    }
                }
            }
        }
        // The oldest version bounds the features that all links have.
        let version = links.links.iter().filter_map(|link| link.version).min();
        counts.version = version.map(|(major, minor)| format!("{major}.{minor}"));
        counts
    }

    /// Validates an answer from `rank`, one of `world`.
    pub(super) fn check(&self, rank: Rank, world: usize) -> Result<()> {
        let named = self.direct.keys().chain(&self.reaches);
        match named.copied().find(|&peer| peer >= world || peer == rank) {
            None => Ok(()),
            Some(peer) => Err(Error::protocol(format!(
                "the answer of rank {rank} names a link to rank {peer}; expected another rank \
                     below {world}"
            ))),
        }
    }
}

impl Mesh {
    /// The mesh of ranks at `places` with these link counts, in rank order.
    pub(super) fn new(places: &[RankLocation], counts: Vec<LinkCounts>) -> Self {
        let mut known: Vec<&RankLocation> = Vec::new();
        let machines = places
            .iter()
            .map(|place| {
                let found = known.iter().position(|first| first.is_near(place));
                found.unwrap_or_else(|| {
                    known.push(place);
                    known.len() - 1
                })
            })
            .collect();
        Self { machines, counts }
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.counts.len()
    }

    /// Number of the machine and network namespace of `rank`, from 0 in rank order.
    pub fn machine(&self, rank: Rank) -> Option<usize> {
        self.machines.get(rank).copied()
    }

    /// Answer of `rank`.
    pub fn counts(&self, rank: Rank) -> Option<&LinkCounts> {
        self.counts.get(rank)
    }

    /// Direct links between two ranks' devices; the smaller number if the two disagree.
    pub fn direct(&self, rank: Rank, peer: Rank) -> u32 {
        // No path may depend on a link that one of its ends denies. The disagreement is reported as an
        // obstacle.
        self.counted(rank, peer).min(self.counted(peer, rank))
    }

    /// Direct links to `peer` as counted by `rank`.
    pub fn counted(&self, rank: Rank, peer: Rank) -> u32 {
        let counts = self.counts.get(rank);
        counts
            .and_then(|counts| counts.direct.get(&peer))
            .copied()
            .unwrap_or(0)
    }

    /// Switch links that two ranks of one machine have in common.
    pub fn through_switches(&self, rank: Rank, peer: Rank) -> u32 {
        match (self.counts.get(rank), self.counts.get(peer)) {
            (Some(own), Some(theirs)) if self.machines.get(rank) == self.machines.get(peer) => {
                // A switch connects all of its ports, so the device with fewer links to it limits the pair.
                own.switch.min(theirs.switch)
            }
            _ => 0,
        }
    }

    /// Connection between two ranks: the first applicable in the order of [`Connection`].
    pub fn connection(&self, rank: Rank, peer: Rank) -> Connection {
        if rank == peer {
            return Connection::Itself;
        }
        let reaches = |rank: Rank, peer| {
            let counts = self.counts.get(rank);
            counts.is_some_and(|counts| counts.reaches.contains(&peer))
        };
        match (self.direct(rank, peer), self.through_switches(rank, peer)) {
            // Both directions, since each side of a pair writes to the other.
            (0, 0) if reaches(rank, peer) && reaches(peer, rank) => Connection::Bus,
            (0, 0) => Connection::Nothing,
            (0, links) => Connection::Switches(links),
            (links, _) => Connection::Links(links),
        }
    }

    /// Whether two ranks are connected by links, direct or through switches.
    pub fn is_linked(&self, rank: Rank, peer: Rank) -> bool {
        matches!(
            self.connection(rank, peer),
            Connection::Links(_) | Connection::Switches(_)
        )
    }

    /// Ranks whose memory `rank` can access, over links or the bus.
    pub fn reached_by(&self, rank: Rank) -> Vec<Rank> {
        let unreached = [Connection::Itself, Connection::Nothing];
        (0..self.world())
            .filter(|&peer| !unreached.contains(&self.connection(rank, peer)))
            .collect()
    }

    /// Every pair of ranks, smaller first.
    pub(super) fn pairs(&self) -> impl Iterator<Item = (Rank, Rank)> + use<> {
        let world = self.world();
        (0..world).flat_map(move |rank| (rank + 1..world).map(move |peer| (rank, peer)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;
    use crate::device::DeviceLink;

    fn place(machine: &str, address: &str) -> RankLocation {
        RankLocation {
            machine: machine.to_owned(),
            namespace: 0,
            host: machine.to_owned(),
            device: "made up".to_owned(),
            address: Some(address.parse().unwrap()),
            numa_node: None,
            network: None,
        }
    }

    fn links(ends: &[LinkEnd]) -> DeviceLinks {
        let link = |(number, &end)| DeviceLink {
            number,
            version: Some((4, 0)),
            end,
        };
        DeviceLinks {
            links: (0..).zip(ends).map(link).collect(),
        }
    }

    #[test]
    fn links_are_counted_by_the_address_at_their_other_end() {
        let places = [
            place("a", "0000:10:00.0"),
            place("a", "0000:20:00.0"),
            // The same address on another machine.
            place("b", "0000:20:00.0"),
            place("a", "0000:30:00.0"),
        ];
        let device = |address: &str| LinkEnd::Device(address.parse().unwrap());
        let found = links(&[
            device("0000:20:00.0"),
            LinkEnd::Switch,
            device("0000:20:00.0"),
            LinkEnd::Other,
            // A device that no rank uses.
            device("0000:40:00.0"),
        ]);
        let counts = LinkCounts::count(&found, 0, &places);
        assert_eq!(counts.direct, BTreeMap::from([(1, 2)]));
        assert_eq!(counts.switch, 1);
        assert_eq!(counts.version.as_deref(), Some("4.0"));
    }

    #[test]
    fn ranks_on_two_machines_share_no_switch() {
        let places = [
            place("a", "0000:10:00.0"),
            place("b", "0000:10:00.0"),
            place("a", "0000:20:00.0"),
        ];
        let counts = LinkCounts {
            switch: 18,
            ..LinkCounts::default()
        };
        let mesh = Mesh::new(&places, vec![counts; 3]);
        assert_eq!(mesh.connection(0, 2), Connection::Switches(18));
        assert_eq!(mesh.connection(0, 1), Connection::Nothing);
        assert_eq!(mesh.reached_by(0), [2]);
    }

    #[test]
    fn an_answer_that_names_no_other_rank_is_refused() {
        for direct in [BTreeMap::from([(2, 1)]), BTreeMap::from([(0, 1)])] {
            let counts = LinkCounts {
                direct,
                ..LinkCounts::default()
            };
            assert_eq!(counts.check(0, 2).unwrap_err().kind(), ErrorKind::Protocol);
        }
    }
}
