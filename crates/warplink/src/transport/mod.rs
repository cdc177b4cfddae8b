//! How bytes and signals reach a peer when a host moves them on a kernel's behalf.
//!
//! A direct channel needs none of this: its kernels reach the peer's mapped memory themselves.

mod copy_engine;

pub(crate) use copy_engine::CopyEngine;
