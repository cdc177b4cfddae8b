//! The classes of meshes.

use super::cube;
use super::mesh::Mesh;
use crate::named::named;

/// Environment variable that forces the class.
pub(crate) const CLASS_VARIABLE: &str = "WARPLINK_TOPOLOGY";

named! {
    /// Class of a mesh. Independent of the order of the ranks.
    pub enum TopologyClass: "topology class" {
        /// Every pair of ranks is linked, directly or through switches.
        FullyConnected = "fully-connected",
        /// Eight ranks in two groups of four: links connect all ranks of a group, and each rank with one of the
        /// other group. There are no other links.
        HybridCubeMesh = "hybrid-cube-mesh",
        /// Any other.
        Unknown = "unknown",
    }
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
