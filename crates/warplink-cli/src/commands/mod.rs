//! The subcommands, each with its arguments and what it does with them.

pub(crate) mod bench;
pub(crate) mod demo;
pub(crate) mod doctor;
pub(crate) mod faults;
pub(crate) mod launch;
pub(crate) mod program;
pub(crate) mod ranks;
pub(crate) mod topo;
pub(crate) mod tune;
