//! Reasons against the direct path.

use super::class::TopologyClass;
use crate::device::PciAddress;
use crate::error::Rank;
use crate::named::comma;
use serde::Serialize;
use std::fmt;

/// Reason why ranks cannot access one another's memory directly.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "what")]
pub enum Obstacle {
    /// The ranks run on several machines.
    DifferentMachines {
        /// Ranks of each machine, with the machine's name.
        machines: Vec<(String, Vec<Rank>)>,
    },
    /// Ranks of one machine are in several network namespaces, as containers are by default.
    DifferentNamespaces {
        /// The machine's name.
        host: String,
        /// The ranks of each namespace.
        namespaces: Vec<Vec<Rank>>,
    },
    /// Several ranks use one device.
    SharedDevice {
        /// PCI address of the device.
        address: PciAddress,
        /// Its ranks.
        ranks: Vec<Rank>,
    },
    /// A rank cannot query the links of its device.
    LinksUnknown {
        /// The rank.
        rank: Rank,
        /// Why.
        reason: String,
    },
    /// Two ranks disagree on the number of links between them.
    MeshesDiffer {
        /// One rank.
        rank: Rank,
        /// Links that it counts.
        links: u32,
        /// The other.
        peer: Rank,
        /// Links that the peer counts.
        peer_links: u32,
    },
    /// Some ranks are not linked, so the mesh has no known class.
    NotLinked {
        /// The first such rank.
        rank: Rank,
        /// The first rank without a link to it.
        peer: Rank,
        /// Number of such pairs.
        pairs: usize,
    },
    /// The environment forces the class `unknown`.
    ForcedUnknown,
    /// The environment forces different classes on two ranks.
    ForcedDifferently {
        /// One rank.
        rank: Rank,
        /// Class forced on it.
        class: Option<TopologyClass>,
        /// The other.
        peer: Rank,
        /// Class forced on the peer.
        peer_class: Option<TopologyClass>,
    },
    /// The environment forces a class that requires another number of ranks.
    ForcedOutOfPlace {
        /// The class.
        class: TopologyClass,
        /// Number of ranks.
        world: usize,
    },
}

impl Obstacle {
    /// Whether it remains an obstacle when a class is forced.
    pub(super) fn withstands_force(&self) -> bool {
        // A forced class is for tests of the paths on other links, so obstacles of the links themselves do
        // not count.
        matches!(
            self,
            Self::DifferentMachines { .. }
                | Self::DifferentNamespaces { .. }
                | Self::ForcedUnknown
                | Self::ForcedDifferently { .. }
                | Self::ForcedOutOfPlace { .. }
        )
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DifferentMachines { machines } => {
                let all = machines.iter();
                let all = comma(all.map(|(host, ranks)| format!("{} on {host}", list(ranks))));
                write!(f, "the ranks run on {} machines: {all}", machines.len())
            }
            Self::DifferentNamespaces { host, namespaces } => {
                let ranks: Vec<String> = namespaces.iter().map(|ranks| list(ranks)).collect();
                write!(
                    f,
                    "the ranks of {host} are in {} network namespaces: {}; transfers treat these as other machines \
                     (give containers the host's network, or one they share)",
                    ranks.len(),
                    ranks.join(" | ")
                )
            }
            Self::SharedDevice { address, ranks } => {
                write!(f, "{} use one device, {address}", list(ranks))
            }
            Self::LinksUnknown { rank, reason } => {
                write!(f, "rank {rank} cannot query its links: {reason}")
            }
            Self::MeshesDiffer {
                rank,
                links,
                peer,
                peer_links,
            } => write!(
                f,
                "rank {rank} sees {links} links to rank {peer}, which sees {peer_links}"
            ),
            Self::NotLinked { rank, peer, pairs } => {
                write!(f, "no link connects ranks {rank} and {peer}")?;
                match pairs {
                    1 => Ok(()),
                    2 => f.write_str(", and one other pair is not linked either"),
                    _ => write!(f, ", and {} other pairs are not linked either", pairs - 1),
                }
            }
            Self::ForcedUnknown => f.write_str("the class unknown is forced"),
            Self::ForcedDifferently {
                rank,
                class,
                peer,
                peer_class,
            } => {
                let name = |class: &Option<TopologyClass>| {
                    class.map_or_else(|| "none".to_owned(), |class| class.to_string())
                };
                write!(
                    f,
                    "the class {} is forced on rank {rank} and {} on rank {peer}",
                    name(class),
                    name(peer_class)
                )
            }
            Self::ForcedOutOfPlace { class, world } => {
                write!(f, "the class {class} is forced on {world} ranks")
            }
        }
    }
}

/// `rank 3`, or `ranks 0 to 3, 5`.
fn list(ranks: &[Rank]) -> String {
    let mut runs: Vec<(Rank, Rank)> = Vec::new();
    for &rank in ranks {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let text: Vec<_> = runs
        .iter()
        .map(|&(first, last)| match last - first {
            0 => first.to_string(),
            1 => format!("{first}, {last}"),
            _ => format!("{first} to {last}"),
        })
        .collect();
    let word = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{word} {}", text.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_obstacle_names_the_ranks() {
        let machines = vec![
            ("a".to_owned(), vec![0, 1, 2, 5]),
            ("b".to_owned(), vec![3]),
        ];
        assert_eq!(
            Obstacle::DifferentMachines { machines }.to_string(),
            "the ranks run on 2 machines: ranks 0 to 2, 5 on a, rank 3 on b"
        );
        let shared = Obstacle::SharedDevice {
            address: "0000:1b:00.0".parse().unwrap(),
            ranks: vec![0, 1],
        };
        assert_eq!(
            shared.to_string(),
            "ranks 0, 1 use one device, 0000:1b:00.0"
        );
        let forced = Obstacle::ForcedDifferently {
            rank: 0,
            class: None,
            peer: 2,
            peer_class: Some(TopologyClass::FullyConnected),
        };
        assert_eq!(
            forced.to_string(),
            "the class none is forced on rank 0 and fully-connected on rank 2"
        );
    }
}
