//! What the ranks of a communicator are connected by: which machine and device each has, the links
//! between the devices, and what follows for how data may go.
//!
//! The ranks find out in two steps ([`rendezvous`]). First each tells the others who and where it is:
//! machine, device, address on the bus. Then each asks its own device for its links to theirs, and
//! tells the others what it found. From the same answers every rank derives the same [`Topology`]. What
//! speaks against sending directly is an [`Obstacle`] in it, not an error, so that a caller can choose
//! another way: ranks on several machines, two ranks on one device, links that two ranks count
//! differently.
//!
//! | file | subject |
//! |---|---|
//! | `place.rs` | who and where a rank is |
//! | `mesh.rs` | the links between ranks, and what each reaches |
//! | `class.rs`, `cube.rs` | the classes of meshes, and recognizing a hybrid cube mesh |
//! | `obstacle.rs` | why the direct path is not possible |
//! | `survey.rs` | a topology from the answers of all ranks, and as a file |
//! | `rendezvous.rs` | the two steps |

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
pub use place::Place;
pub use rendezvous::rendezvous;
pub use survey::{RankAnswer, Topology};
