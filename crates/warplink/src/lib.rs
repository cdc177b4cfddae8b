//! One-sided, zero-copy communication between GPUs.
//!
//! A rank registers memory once, its peers map it, and from then on a transfer is a put or a get
//! plus a signal. Modules in order of dependency, each depending only on those below it:
//!
//! | module | subject |
//! |---|---|
//! | [`job`] | the job that this process has joined |
//! | [`communicator`] | the entry point: a group of ranks that allocate, exchange, synchronize |
//! | `config` | configuration of joining, and resource limits |
//! | [`overlap`] | matmuls overlapped with the communication that feeds or follows them |
//! | [`collective`] | collectives of a communicator, on any memory |
//! | [`program`] | host programs: the operations that each rank enqueues, verified before they run |
//! | [`p2p`] | send and receive in stream order, with the get and the put protocol |
//! | [`channel`] | connections, and channels that kernels put, signal and wait through |
//! | `exchange` | exchange of handles and parameters before ranks communicate |
//! | `transport` | moving bytes to a peer from the host, on request of a kernel |
//! | [`signal`] | words that one rank sets and another waits for |
//! | [`memory`] | regions, handles on the wire, mappings of a peer's memory, their cache |
//! | [`topology`] | the links between the ranks' devices, and their classification |
//! | [`bootstrap`] | the key-value store, unique ids, all-gather and barrier of bytes |
//! | [`device`] | the device interface, and its implementations `cuda` and `host` |
//! | `variables`, `file`, `threads` | environment variables as text, bounded reading of files, starting threads |
//! | [`dtype`], [`deadline`], [`error`] | element types, deadlines, the error type |
//! | `shortage`, `debug` | resource exhaustion and rate-limited warnings, `Debug` of types by some of their fields |
//! | [`named`], [`sync`] | names of values, locks and atomics |
//!
//! # A ring of transfers
//!
//! Every rank sends to its right neighbour and receives from its left, as often as it likes after
//! one exchange. Started by `warplink launch -n 4 -- ...`, or by another launcher:
//!
//! ```no_run
//! use warplink::device::Priority;
//! use warplink::p2p::{TransferRequest, post_all, wait_all};
//! use warplink::{Communicator, Result};
//!
//! fn main() -> Result<()> {
//!     let comm = Communicator::from_env()?;
//!     let (rank, world) = (comm.rank(), comm.world());
//!     let (right, left) = ((rank + 1) % world, (rank + world - 1) % world);
//!
//!     // Memory that peers may reach, and the two transfers: here hosts wait for one another.
//!     let (own, received) = (comm.alloc(1 << 20)?, comm.alloc(1 << 20)?);
//!     let transfers = comm.exchange(&[
//!         TransferRequest::send(&own, right, 0),
//!         TransferRequest::receive(&received, left, 0),
//!     ])?;
//!     let group: Vec<_> = transfers.iter().collect();
//!
//!     // From here on only streams do.
//!     let stream = comm.create_stream(Priority::High)?;
//!     for _round in 0..32 {
//!         stream.fill(&own, rank as u8)?;
//!         post_all(&group, &stream)?;
//!         wait_all(&group, &stream)?;
//!         // Now `received` holds the left neighbour's bytes, and `own` may change.
//!     }
//!     comm.synchronize(&stream)?;
//!     drop(transfers);
//!     comm.close()
//! }
//! ```
//!
//! The examples `two_ranks` and `ring_all_gather_matmul` are made to be read next.

// Only modules that these builds leave out use some items.
#![cfg_attr(any(loom, fuzzing), allow(unused_imports, dead_code))]

pub mod bootstrap;
pub mod channel;
// Loom's models and fuzz targets reach none of the modules that are left out below, and build faster without them.
#[cfg(not(any(loom, fuzzing)))]
pub mod collective;
#[cfg(not(any(loom, fuzzing)))]
pub mod communicator;
mod config;
pub mod deadline;
mod debug;
pub mod device;
pub mod dtype;
pub mod error;
mod exchange;
#[doc(hidden)]
pub mod file;
#[cfg(not(any(loom, fuzzing)))]
pub mod job;
pub mod memory;
pub mod named;
#[cfg(not(any(loom, fuzzing)))]
pub mod overlap;
pub mod p2p;
#[cfg(not(loom))]
pub mod program;
mod shortage;
pub mod signal;
pub mod sync;
mod threads;
pub mod topology;
mod transport;
#[doc(hidden)]
pub mod variables;

#[cfg(not(any(loom, fuzzing)))]
pub use collective::Collectives;
#[cfg(not(any(loom, fuzzing)))]
pub use communicator::Communicator;
pub use config::Config;
pub use deadline::Deadline;
pub use device::{Device, DeviceKind};
pub use dtype::DType;
pub use error::{Error, ErrorKind, Rank, Result};
#[cfg(not(any(loom, fuzzing)))]
pub use job::{Job, PendingJob};

// The code of the README is run with the other examples of the documentation.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
