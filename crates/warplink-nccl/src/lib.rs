//! NCCL's interface, implemented by Warplink: programs that use NCCL run on it unchanged.
//!
//! The library has the SONAME `libnccl.so.2`. A program that is linked with NCCL, or opens it by that name, uses this
//! library if `LD_PRELOAD` has loaded it first. `docs/nccl.md` is the user documentation.
//!
//! | module | subject |
//! |---|---|
//! | `table` | every exported function, declared once: its name, its `pnccl` twin, and the real library's function |
//! | `abi` | types of the C ABI |
//! | `status` | results and error texts |
//! | `communicator` | the object that a handle refers to |
//! | `join` | creation of communicators: by rank, all at once, split, shrunk, grown |
//! | `route` | selection of the library that executes a communicator's calls |
//! | `leave` | finalization, destruction and abort |
//! | `group` | calls between `ncclGroupStart` and `ncclGroupEnd` |
//! | `calls` | collectives, sends and receives |
//! | `operators` | sums with premultiplied inputs |
//! | `streams`, `devices` | CUDA's streams and devices; those of the host device |
//! | `memory` | allocations, registrations, device communicators |
//! | `windows`, `signals` | windows; puts and signals |
//! | `properties` | properties of the library and of communicators |
//! | `watch` | asynchronous errors of calls that no host thread waits for |
//! | `real`, `bind` | the real NCCL, for calls that Warplink does not support |
//! | `counterpart` | its communicators |
//! | `log`, `report` | logging, and the report of calls by route |
//!
//! Three rules hold throughout. No panic crosses the language boundary: every function runs in `status::entry`. Handles
//! are keys of table entries, so a handle that is not live is an error. `unsafe` is used only to dereference C pointers,
//! to call functions of the real library, and to bind these to itself.

mod abi;
mod bind;
mod calls;
mod communicator;
mod counterpart;
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
mod signals;
mod status;
mod streams;
mod table;
mod watch;
mod windows;

pub use table::NAMES;
