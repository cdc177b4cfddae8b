//! Regions that peers may reach, handles of them on the wire, and mappings of peers' regions.
//!
//! # What holds
//! 1. A region's memory is not freed while a peer maps it: its registration outlives the region
//!    until every handle that was given out has come back, or the peer is gone.
//! 2. A mapping is closed when its last user is gone and the owner asks, the cache's bound asks, or
//!    the communicator closes; then the owner is told how many handles came back.
//! 3. A freed and reallocated buffer at the same address is another allocation, with another
//!    identity and generation; a mapping of the old one is never used for it.
//! 4. An allocation that is kept for reuse is not freed: it stays registered, and mapped by peers. It
//!    is used again when no stream and no peer uses it.

mod cache;
#[cfg(all(test, loom))]
mod cache_loom;
#[cfg(all(test, not(loom)))]
mod cache_tests;
mod exchanged;
mod exports;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod handle;
mod limits;
mod mapping;
mod message;
mod notifier;
#[cfg(test)]
mod notifier_tests;
mod opening;
mod peers;
mod publications;
mod region;
mod registry;
mod releaser;
mod service;
mod service_client;
mod shared;
mod socket;

pub(crate) use exchanged::{ExportedHandle, PeerHandle};
pub use handle::{HANDLE_BYTES, Handle, HandleKey};
pub use limits::IdleMappings;
pub(crate) use message::{Message, Notice};
pub(crate) use publications::Heard;
pub use region::{Region, RemoteRegion};
pub(crate) use registry::MemoryRegistry;
