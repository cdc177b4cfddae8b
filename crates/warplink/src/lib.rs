//! One-sided, zero-copy communication between GPUs.
//!
//! A rank registers memory once, its peers map it, and from then on a transfer is a put or a get
//! plus a signal. The modules stand on one another in this order, each only on those after it:
//!
//! | module | subject |
//! |---|---|
//! | [`communicator`] | the front door: join the other ranks, allocate, exchange, synchronize |
//! | [`overlap`] | matrix products overlapped with the communication that feeds or follows them |
//! | [`program`] | host programs: what each rank enqueues, verified before it runs |
//! | [`p2p`] | send and receive in stream order, with the get and the put protocol |
//! | [`signal`] | words that one rank sets and another waits for |
//! | [`memory`] | regions, handles on the wire, mappings of a peer's memory, their cache |
//! | [`bootstrap`] | the key-value store, unique ids, all-gather and barrier of bytes |
//! | [`device`] | what a device does, and the two that do it: `cuda` and `host` |
//! | [`dtype`], [`error`], [`deadline`], [`sync`] | element types, the error type, deadlines, atomics |

pub mod bootstrap;
pub mod communicator;
pub mod deadline;
pub mod device;
pub mod dtype;
pub mod error;
pub mod memory;
pub mod overlap;
pub mod p2p;
pub mod program;
pub mod signal;
pub mod sync;

pub use communicator::{Communicator, Config};
pub use deadline::Deadline;
pub use device::{Device, DeviceKind};
pub use dtype::DType;
pub use error::{Error, ErrorKind, Rank, Result};
