//! The subcommands, each with its arguments and what it does with them.

pub(crate) mod launch;
