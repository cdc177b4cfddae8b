//! The classes of meshes.

use super::cube;
use super::mesh::Mesh;
use crate::error::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Environment variable that forces the class.
pub(crate) const CLASS_VARIABLE: &str = "WARPLINK_TOPOLOGY";

/// Class of a mesh. Independent of the order of the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TopologyClass {
    /// Every pair of ranks is linked, directly or through switches.
    FullyConnected,
    /// Eight ranks in two groups of four: links connect all ranks of a group, and each rank with one of the
    /// other group. There are no other links.
    HybridCubeMesh,
    /// Any other.
    Unknown,
}

impl TopologyClass {
    /// The class of `mesh`.
    pub fn of(mesh: &Mesh) -> Self {
        if mesh.pairs().all(|(rank, peer)| mesh.is_linked(rank, peer)) {
            Self::FullyConnected
        } else if cube::positions(mesh).is_some() {
            Self::HybridCubeMesh
        } else {
            Self::Unknown
        }
    }

    /// Whether a mesh of `world` ranks can be of this class.
    pub(super) fn fits(self, world: usize) -> bool {
        self != Self::HybridCubeMesh || world == cube::CUBE_RANKS
    }
}

impl fmt::Display for TopologyClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::FullyConnected => "fully-connected",
            Self::HybridCubeMesh => "hybrid-cube-mesh",
            Self::Unknown => "unknown",
        })
    }
}

impl FromStr for TopologyClass {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let all = [Self::FullyConnected, Self::HybridCubeMesh, Self::Unknown];
        all.into_iter()
            .find(|class| class.to_string() == text)
            .ok_or_else(|| {
                Error::new(
                    ErrorKind::Parse,
                    format!(
                        "unknown topology class '{text}'; expected fully-connected, \
                         hybrid-cube-mesh or unknown"
                    ),
                )
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_is_read_as_it_is_written() {
        for class in ["fully-connected", "hybrid-cube-mesh", "unknown"] {
            assert_eq!(class.parse::<TopologyClass>().unwrap().to_string(), class);
        }
        let error = "ring".parse::<TopologyClass>().unwrap_err();
        assert!(error.to_string().contains("expected fully-connected"));
    }
}
