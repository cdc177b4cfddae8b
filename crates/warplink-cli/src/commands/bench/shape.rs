//! Options that fix how Warplink executes the calls of a benchmark, instead of its choice by size.

use crate::names::OneOf;
use crate::options::{at_least, between};
use clap::Args;
use warplink::collective::{Algorithm, CollectiveOptions};

#[derive(Debug, Args)]
pub(super) struct CallShape {
    /// Algorithm of Warplink's calls [default: chosen by size]
    #[arg(long, value_name = "NAME", value_parser = OneOf(&Algorithm::ALL))]
    pub(super) algorithm: Option<Algorithm>,
    #[command(flatten)]
    lanes: LaneShape,
}

/// Options of calls that have one algorithm.
#[derive(Debug, Args)]
pub(super) struct LaneShape {
    /// Maximum number of multiprocessors for one of Warplink's calls
    // One block moves data, and another one synchronizes with the other ranks.
    #[arg(long, value_name = "N", value_parser = at_least::<u16>(2))]
    multiprocessors: Option<u16>,
    /// Number of lanes that move data in one of Warplink's calls [default: chosen by size]
    #[arg(long, value_name = "N", value_parser = between::<u16>(1, 128))]
    lanes: Option<u16>,
    /// Threads of each lane [default: chosen by size]
    // CUDA's limit for a block.
    #[arg(long, value_name = "N", value_parser = between::<u16>(1, 1024))]
    threads: Option<u16>,
}

impl CallShape {
    pub(super) fn options(&self) -> CollectiveOptions {
        CollectiveOptions {
            algorithm: self.algorithm,
            ..self.lanes.options()
        }
    }
}

impl LaneShape {
    pub(super) fn options(&self) -> CollectiveOptions {
        CollectiveOptions {
            multiprocessors: self.multiprocessors.map(usize::from),
            lanes: self.lanes.map(usize::from),
            threads: self.threads.map(usize::from),
            ..CollectiveOptions::default()
        }
    }
}
