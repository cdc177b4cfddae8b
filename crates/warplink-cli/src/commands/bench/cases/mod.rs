//! One file for each benchmark, and the list of them.

mod channel;
mod collective;
mod expert_parallel;
mod fused;
mod overlap;
mod p2p;
mod program;
mod section;

use super::case::{Bench, Case};
use crate::options::Options;
use anyhow::Result;
use clap::Subcommand;
use std::process::ExitCode;

macro_rules! cases {
    ($($module:ident :: $case:ident),+ $(,)?) => {
        #[derive(Debug, Subcommand)]
        pub(super) enum Cases {
            $(
                #[command(name = <$module::$case as Case>::NAME)]
                // Boxed, since the options of benchmarks differ widely in size.
                $case(Box<Bench<$module::$case>>),
            )+
        }

        impl Cases {
            pub(super) fn run(self, options: &Options) -> Result<ExitCode> {
                match self {
                    $(Self::$case(bench) => bench.run(options),)+
                }
            }
        }
    };
}

// In the order of the help.
cases! {
    p2p::P2p,
    channel::Channel,
    collective::CollectiveBench,
    expert_parallel::ExpertParallel,
    fused::Fused,
    overlap::Overlap,
    program::ProgramBench,
    section::Section,
}
