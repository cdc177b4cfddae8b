//! `warplink bench`: benchmarks, compared with the hardware's limits and the vendor's library.

pub(crate) mod case;
mod cases;
pub(crate) mod clock;
pub(crate) mod peers;
mod plot;
pub(crate) mod report;
mod shape;

use crate::options::Options;
use anyhow::Result;
use clap::Args;
use std::process::ExitCode;

/// Run a benchmark on this machine
#[derive(Debug, Args)]
#[command(arg_required_else_help = true)]
pub(crate) struct Bench {
    #[command(subcommand)]
    case: cases::Cases,
}

impl Bench {
    pub(crate) fn run(self, options: &Options) -> Result<ExitCode> {
        self.case.run(options)
    }
}
