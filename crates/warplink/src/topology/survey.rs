//! A topology derived from the answers of all ranks, and its file format.

use super::class::TopologyClass;
use super::cube;
use super::mesh::{LinkCounts, Mesh};
use super::obstacle::Obstacle;
use super::place::RankLocation;
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Rank, Result};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Answers of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankAnswer {
    /// Identity and location.
    pub place: RankLocation,
    /// Links of its device.
    #[serde(default)]
    pub links: LinkCounts,
}

/// Connections between the ranks of a communicator, identical on all of them.
///
/// ```
/// use warplink::topology::{Connection, Topology, TopologyClass};
///
/// let text = r#"{ "ranks": [
///     { "place": { "machine": "a", "host": "a", "device": "GPU" }, "links": { "direct": { "1": 4 } } },
///     { "place": { "machine": "a", "host": "a", "device": "GPU" }, "links": { "direct": { "0": 4 } } }
/// ] }"#;
/// let topology = Topology::from_json(text)?;
/// assert_eq!(topology.class(), TopologyClass::FullyConnected);
/// assert_eq!(topology.mesh().connection(0, 1), Connection::Links(4));
/// assert!(topology.is_direct());
/// # Ok::<(), warplink::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    places: Vec<RankLocation>,
    mesh: Mesh,
    class: TopologyClass,
    is_forced: bool,
    obstacles: Vec<Obstacle>,
}

/// File format of a recorded topology. Derived values are not stored but computed again.
#[derive(Deserialize)]
struct Recorded {
    ranks: Vec<RankAnswer>,
}

#[derive(Serialize)]
struct SurveyRecording<'a> {
    class: TopologyClass,
    forced: bool,
    direct: bool,
    obstacles: &'a [Obstacle],
    ranks: Vec<RankAnswer>,
}

impl Topology {
    /// Derives the topology from the answers of all ranks, in rank order, and the classes forced on them.
    pub(super) fn new(answers: Vec<RankAnswer>, forced: &[Option<TopologyClass>]) -> Self {
        let (places, counts): (Vec<_>, Vec<_>) = answers
            .into_iter()
            .map(|answer| (answer.place, answer.links))
            .unzip();
        let mesh = Mesh::new(&places, counts);
        let mut obstacles = found(&places, &mesh);
        let own = TopologyClass::of(&mesh);
        let class = match agreed(forced, mesh.world()) {
            Ok(class) => class,
            Err(obstacle) => {
                obstacles.push(obstacle);
                None
            }
        };
        if class.is_some() {
            // A forced class overrides the links, but not obstacles such as a second machine.
            obstacles.retain(Obstacle::withstands_force);
        }
        if class == Some(TopologyClass::Unknown) {
            obstacles.push(Obstacle::ForcedUnknown);
        }
        // A class that is unknown needs a reason: the first pair without links.
        if class.is_none() && own == TopologyClass::Unknown {
            obstacles.extend(unlinked(&mesh));
        }
        Self {
            places,
            mesh,
            class: class.unwrap_or(own),
            is_forced: class.is_some(),
            obstacles,
        }
    }

    /// Parses a topology written by [`to_json`](Self::to_json) or by hand.
    ///
    /// # Errors
    /// [`ErrorKind::Parse`] if the text is invalid.
    pub fn from_json(text: &str) -> Result<Self> {
        let malformed = |message: String| {
            Error::parse(message)
                .with_operation("parse a topology")
                .with_help("record one with `warplink topo --json`")
        };
        let recorded: Recorded =
            serde_json::from_str(text).map_err(|error| malformed(error.to_string()))?;
        if recorded.ranks.is_empty() {
            return Err(malformed(
                "the list of ranks is empty; expected one or more".to_owned(),
            ));
        }
        for (rank, answer) in recorded.ranks.iter().enumerate() {
            let checked = answer.links.check(rank, recorded.ranks.len());
            checked.map_err(|error| malformed(error.message().to_owned()))?;
        }
        // A recorded class is derived anew: the file may be edited by hand, and this process may force none.
        let forced = vec![None; recorded.ranks.len()];
        Ok(Self::new(recorded.ranks, &forced))
    }

    /// All answers and derived values, as JSON.
    ///
    /// # Errors
    /// None in practice; serialization is fallible in principle.
    pub fn to_json(&self) -> Result<String> {
        serde_json::to_string(self)
            .map_err(|error| Error::internal(error.to_string()).with_operation("write a topology"))
    }

    /// Identity and location of each rank, in rank order.
    pub fn places(&self) -> &[RankLocation] {
        &self.places
    }

    /// The links.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Class of the mesh, or the forced one.
    pub fn class(&self) -> TopologyClass {
        self.class
    }

    /// Whether the class is forced.
    pub fn is_forced(&self) -> bool {
        self.is_forced
    }

    /// Whether every rank may access every other's memory as the class implies. If not, see
    /// [`obstacles`](Self::obstacles).
    pub fn is_direct(&self) -> bool {
        self.obstacles.is_empty()
    }

    /// Reasons against the direct path; empty if it is possible.
    pub fn obstacles(&self) -> &[Obstacle] {
        &self.obstacles
    }

    /// Rank at each position of a hybrid cube mesh: positions 0 to 3 are one group, 4 to 7 the other, and p
    /// is opposite p + 4. In rank order if the class is forced on another mesh.
    pub fn cube_positions(&self) -> Option<[Rank; cube::CUBE_RANKS]> {
        if self.class != TopologyClass::HybridCubeMesh {
            return None;
        }
        let in_order = std::array::from_fn(|position| position);
        Some(cube::positions(&self.mesh).unwrap_or(in_order))
    }

    fn answers(&self) -> Vec<RankAnswer> {
        let counts = (0..).map_while(|rank| self.mesh.counts(rank).cloned());
        let places = self.places.iter().cloned();
        places
            .zip(counts)
            .map(|(place, links)| RankAnswer { place, links })
            .collect()
    }
}

impl Serialize for Topology {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        SurveyRecording {
            class: self.class,
            forced: self.is_forced,
            direct: self.is_direct(),
            obstacles: &self.obstacles,
            ranks: self.answers(),
        }
        .serialize(serializer)
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let forced = if self.is_forced { " (forced)" } else { "" };
        write!(f, "{} ranks, {}{forced}", self.places.len(), self.class)?;
        for obstacle in &self.obstacles {
            write!(f, "; {obstacle}")?;
        }
        Ok(())
    }
}

/// Obstacles that follow from the answers.
fn found(places: &[RankLocation], mesh: &Mesh) -> Vec<Obstacle> {
    let mut obstacles = Vec::new();
    let machines = groups(0..places.len(), |a, b| {
        places[a].machine == places[b].machine
    });
    if machines.len() > 1 {
        let named = machines
            .iter()
            .map(|ranks| (places[ranks[0]].host.clone(), ranks.clone()));
        obstacles.push(Obstacle::DifferentMachines {
            machines: named.collect(),
        });
    }
    for ranks in machines {
        let host = places[ranks[0]].host.clone();
        let namespaces = groups(ranks, |a, b| places[a].is_near(&places[b]));
        if namespaces.len() > 1 {
            obstacles.push(Obstacle::DifferentNamespaces { host, namespaces });
        }
    }
    for (rank, place) in places.iter().enumerate() {
        let sharing = |other: &Rank| places[*other].shares_device_with(place);
        let ranks: Vec<Rank> = (0..places.len()).filter(sharing).collect();
        // Once for each device, with its lowest rank, rather than once for each rank.
        if let (Some(address), [first, _, ..]) = (place.address, ranks.as_slice())
            && *first == rank
        {
            obstacles.push(Obstacle::SharedDevice { address, ranks });
        }
    }
    for rank in 0..mesh.world() {
        if let Some(reason) = mesh.counts(rank).and_then(|counts| counts.error.clone()) {
            obstacles.push(Obstacle::LinksUnknown { rank, reason });
        }
    }
    for (rank, peer) in mesh.pairs() {
        let (links, peer_links) = (mesh.counted(rank, peer), mesh.counted(peer, rank));
        // A rank whose query failed counts no links, and has an obstacle of its own.
        let told = |rank| {
            mesh.counts(rank)
                .is_some_and(|counts| counts.error.is_none())
        };
        if links != peer_links && told(rank) && told(peer) {
            obstacles.push(Obstacle::MeshesDiffer {
                rank,
                links,
                peer,
                peer_links,
            });
        }
    }
    obstacles
}

/// The ranks that are alike, in the order of the first of each group.
fn groups(
    ranks: impl IntoIterator<Item = Rank>,
    alike: impl Fn(Rank, Rank) -> bool,
) -> Vec<Vec<Rank>> {
    let mut groups: Vec<Vec<Rank>> = Vec::new();
    for rank in ranks {
        match groups.iter_mut().find(|group| alike(group[0], rank)) {
            Some(group) => group.push(rank),
            None => groups.push(vec![rank]),
        }
    }
    groups
}

/// Unlinked pairs, as one obstacle.
fn unlinked(mesh: &Mesh) -> Option<Obstacle> {
    let mut pairs = mesh
        .pairs()
        .filter(|&(rank, peer)| !mesh.is_linked(rank, peer));
    let (rank, peer) = pairs.next()?;
    Some(Obstacle::NotLinked {
        rank,
        peer,
        pairs: 1 + pairs.count(),
    })
}

/// The class forced on all ranks, if they agree.
fn agreed(
    forced: &[Option<TopologyClass>],
    world: usize,
) -> std::result::Result<Option<TopologyClass>, Obstacle> {
    let first = forced.first().copied().flatten();
    if let Some(peer) = forced.iter().position(|class| *class != first) {
        return Err(Obstacle::ForcedDifferently {
            rank: 0,
            class: first,
            peer,
            peer_class: forced.get(peer).copied().flatten(),
        });
    }
    match first {
        Some(class) if !class.fits(world) => Err(Obstacle::ForcedOutOfPlace { class, world }),
        _ => Ok(first),
    }
}
