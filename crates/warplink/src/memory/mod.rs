//! Regions that peers may access, handles on the wire, and mappings of peers' regions.
//!
//! # Invariants
//! 1. A region's memory is not freed while a peer maps it: its registration persists until every issued
//!    handle has been returned, or the peer is gone.
//! 2. A mapping is closed after its last use when the owner requests it, the cache evicts it, or the job closes; then
//!    the owner receives the number of returned handles.
//! 3. A buffer freed and reallocated at the same address is another allocation, with another identity and
//!    generation; a mapping of the old one is never used for it.
//! 4. A pooled allocation is not freed: it stays registered, and mapped by peers. It is reused once no stream
//!    and no peer uses it.

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
mod outbox;
mod peers;
mod process;
mod publications;
mod region;
mod registry;
mod releaser;
mod requests;
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
