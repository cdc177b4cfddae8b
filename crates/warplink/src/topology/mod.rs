//! Topology of a communicator: machine and device of each rank, links between devices, and the resulting data
//! paths.
//!
//! Ranks discover it in two all-gathers ([`rendezvous`]): first everyone's machine, device and PCI address,
//! then the links of each device to the others. From the same answers every rank derives the same
//! [`Topology`]. A reason against direct access is an [`Obstacle`] in it rather than an error, so that
//! callers can choose another path: ranks on several machines, two ranks on one device, inconsistent link
//! counts.
//!
//! | file | subject |
//! |---|---|
//! | `place.rs` | identity and location of a rank |
//! | `mesh.rs` | links between ranks, and mutual access |
//! | `class.rs`, `cube.rs` | classes of meshes, and recognition of a hybrid cube mesh |
//! | `obstacle.rs` | reasons against the direct path |
//! | `survey.rs` | a topology derived from all answers, and its file format |
//! | `rendezvous.rs` | the two all-gathers |

mod class;
mod cube;
mod mesh;
mod obstacle;
mod place;
mod rendezvous;
mod survey;

pub(crate) use class::CLASS_VARIABLE;
pub use class::TopologyClass;
pub use cube::CUBE_RANKS;
pub(crate) use cube::is_cube_link;
pub use mesh::{Connection, LinkCounts, Mesh};
pub use obstacle::Obstacle;
pub use place::RankLocation;
pub use rendezvous::rendezvous;
pub use survey::{RankAnswer, Topology};
