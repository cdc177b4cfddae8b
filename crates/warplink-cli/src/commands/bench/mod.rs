//! `warplink bench`: benchmarks, compared with the hardware's limits and the vendor's library.

mod channel;
mod collective;
mod expert_parallel;
mod overlap;
mod p2p;
mod program;
pub(crate) mod second_stream;
mod section;
pub(crate) mod timing;

use crate::options::Options;
use anyhow::Result;
use clap::{Args, Subcommand};
use std::process::ExitCode;

/// Run a benchmark on this machine
#[derive(Debug, Args)]
#[command(arg_required_else_help = true)]
pub(crate) struct Bench {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    P2p(p2p::P2p),
    Channel(channel::Channel),
    Collective(collective::Collective),
    ExpertParallel(expert_parallel::ExpertParallel),
    Overlap(overlap::Overlap),
    Program(program::Program),
    Section(section::Section),
}

impl Bench {
    pub(crate) fn run(self, options: &Options) -> Result<ExitCode> {
        match self.what {
            What::P2p(command) => command.run(options),
            What::Channel(command) => command.run(options),
            What::Collective(command) => command.run(options),
            What::ExpertParallel(command) => command.run(options),
            What::Overlap(command) => command.run(options),
            What::Program(command) => command.run(options),
            What::Section(command) => command.run(options),
        }
    }
}
