//! NCCL's interface, served by Warplink: programs that use NCCL run on it unchanged.
//!
//! The library has the SONAME `libnccl.so.2`. A program that is linked with NCCL, or opens it by that name, gets this one
//! where `LD_PRELOAD` has loaded it first. `docs/nccl.md` is for users.
//!
//! | module | subject |
//! |---|---|
//! | `table` | every function that is exported, declared once: its name, its `pnccl` twin, and the real library's |
//! | `abi` | types as C passes them |
//! | `status` | results, and texts of errors |
//! | `communicator` | what stands behind a handle |
//! | `join` | how communicators are made: by rank, all at once, split, shrunk, grown |
//! | `route` | who does a communicator's calls |
//! | `leave` | how they end |
//! | `group` | calls between `ncclGroupStart` and `ncclGroupEnd` |
//! | `calls` | collectives, sends and receives |
//! | `operators` | sums whose inputs are multiplied beforehand |
//! | `streams`, `devices` | CUDA's streams and devices; those of the host device |
//! | `memory` | allocations, registrations, windows |
//! | `properties` | what a communicator says of itself |
//! | `watch` | what becomes of calls for which no host waits |
//! | `real` | NCCL itself, for what Warplink does not serve |
//! | `log`, `report` | what is logged, and which calls went where |
//!
//! Three rules hold throughout. No panic crosses the border: every function runs in `status::entry`. Handles are numbers
//! of entries in a table, so one that is not alive is an error. `unsafe` is used where C's pointers are followed and the
//! real library's functions called, and nowhere else.

mod abi;
mod calls;
mod communicator;
mod devices;
mod group;
mod join;
mod leave;
mod log;
mod memory;
mod operators;
mod properties;
mod real;
mod report;
mod route;
mod status;
mod streams;
mod table;
mod watch;

pub use table::NAMES;
