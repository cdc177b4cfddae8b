//! The subcommands: arguments and implementation.

pub(crate) mod bench;
pub(crate) mod demo;
pub(crate) mod doctor;
pub(crate) mod faults;
pub(crate) mod launch;
pub(crate) mod program;
pub(crate) mod ranks;
pub(crate) mod topo;
pub(crate) mod tune;
