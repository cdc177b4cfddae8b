//! Rendezvous of the ranks of a job: unique ids, a key-value store, collectives of bytes, and failure detection.
//!
//! One rank serves a store over TCP: rank 0, or a rank of the process that created the unique id. Every rank is a client of
//! it, that one included. Client and server authenticate each other by the job's secret. While the connection is open and
//! heartbeats arrive, the rank is present. When the connection ends although the rank has not left, the rank is lost, and
//! every wait that depends on it ends with an error that names it. When the rank that serves the store is lost, another
//! one takes over.
//!
//! ```
//! use std::time::Duration;
//! use warplink::Deadline;
//! use warplink::bootstrap::{Bootstrap, JoinConfig, Rendezvous, UniqueId, Wait};
//!
//! # fn main() -> warplink::Result<()> {
//! let id = UniqueId::create([127, 0, 0, 1].into(), 0)?;
//! let soon = Deadline::after(Duration::from_secs(10));
//! let ranks = [0, 1].map(|rank| {
//!     let config = JoinConfig::new(Rendezvous::Id(id.clone()), rank, 2);
//!     std::thread::spawn(move || -> warplink::Result<()> {
//!         let job = Bootstrap::join(&config)?;
//!         let peer = 1 - rank;
//!         job.store().set(format!("greeting/{rank}"), format!("I am {rank}"))?;
//!         let greeting = job.store().get(&format!("greeting/{peer}"), &Wait::on([peer], soon))?;
//!         assert_eq!(greeting, format!("I am {peer}").as_bytes());
//!         assert_eq!(job.all_gather(&[rank as u8], soon)?, [[0], [1]]);
//!         job.close(soon)
//!     })
//! });
//! for rank in ranks {
//!     rank.join().unwrap()?;
//! }
//! # Ok(())
//! # }
//! ```
//!
//! | file | subject |
//! |---|---|
//! | `member.rs` | joining, membership, leaving |
//! | `config.rs`, `environment.rs`, `nodelist.rs` | rendezvous, rank and world size, from launchers' variables |
//! | `unique_id.rs`, `secret.rs` | the id on the wire, keys |
//! | `store.rs`, `group.rs`, `health.rs` | the interface: key-value store, collectives of bytes, lost ranks |
//! | `client.rs`, `connection.rs` | a member's requests, its connection |
//! | `query.rs` | queries to ranks whose programs may be busy |
//! | `handover.rs`, `candidates.rs`, `journal.rs`, `restore.rs` | another rank takes over the store |
//! | `heartbeat.rs`, `pulse.rs` | heartbeats |
//! | `server.rs` | the connections of all members, on the rank that serves |
//! | `table.rs`, `members.rs`, `values.rs`, `waiters.rs`, `gathers.rs`, `outgoing.rs` | the store's state, without sockets or clocks |
//! | `declarations.rs` | detecting groups that differ between their members |
//! | `handshake.rs`, `channel.rs`, `message.rs` | the protocol: admission, encrypted frames, messages |
//! | `outbox.rs`, `socket.rs` | sending without blocking, socket options |

mod abort_handle;
mod candidates;
mod channel;
mod client;
mod config;
mod connection;
mod declarations;
mod environment;
mod gathers;
mod group;
mod group_name;
mod handover;
mod handshake;
mod health;
mod heartbeat;
mod journal;
mod member;
mod members;
mod message;
mod nodelist;
mod outbox;
mod outgoing;
mod pulse;
mod query;
mod restore;

mod secret;
mod server;
mod socket;
mod store;
mod table;
mod unique_id;
mod values;
mod waiters;

#[cfg(any(test, fuzzing))]
pub mod fuzzing;

pub use abort_handle::AbortHandle;
pub(crate) use client::failed_group;
pub use config::{JoinConfig, Rendezvous};
pub use group::Group;
pub(crate) use group_name::GroupName;
pub use health::Health;
pub use member::Bootstrap;
pub(crate) use member::aborted;
pub(crate) use query::Respondent;
pub use secret::Secret;
pub use store::{Store, Wait};
pub use unique_id::{HeldPort, UniqueId};
