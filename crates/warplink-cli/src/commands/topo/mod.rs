//! `warplink topo`: links between the ranks, as a matrix or drawing.

mod draw;
mod layout;
mod text;

use super::ranks;
use crate::options::Options;
use crate::report;
use anyhow::{Context, Result};
use clap::Args;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use warplink::file;
use warplink::topology::Topology;

/// Show the topology of the ranks: links, NUMA nodes, network devices
///
/// Prints the location of each rank's device, and the links between the devices of each pair of ranks; then the
/// class of the mesh, and whether ranks can access one another's memory directly.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    warplink topo\n  \
    warplink topo --json > machine.json\n  \
    warplink topo --mesh machine.json --svg machine.svg")]
pub(crate) struct Topo {
    /// Draw the links into this file, as SVG
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Show the topology recorded in this file, written with --json, instead of this machine's
    #[arg(long, value_name = "FILE", conflicts_with = "ranks")]
    mesh: Option<PathBuf>,
}

impl Topo {
    pub(crate) fn run(self, options: &Options) -> Result<ExitCode> {
        if let Some(path) = &self.svg {
            // Before ranks start, since measuring takes longer than finding a wrong path.
            report::check_output(path)?;
        }
        if let Some(path) = &self.mesh {
            self.show(&recorded(path)?, options)?;
            return Ok(ExitCode::SUCCESS);
        }
        ranks::run_checked(
            options,
            |_, _| Ok(()),
            |comm| {
                let topology = comm.topology()?;
                if comm.rank() == 0 {
                    self.show(&topology, options)?;
                }
                Ok(ExitCode::SUCCESS)
            },
        )
    }

    fn show(&self, topology: &Topology, options: &Options) -> Result<()> {
        if let Some(path) = &self.svg {
            let drawing = draw::draw(topology)?;
            report::write_file(path, drawing.as_bytes())?;
        }
        report::print_result(options.json, topology, || text::describe(topology))
    }
}

/// Maximum length of a topology file; one of 64 ranks has some 500 KiB.
const MAX_MESH_BYTES: usize = 16 << 20;

/// Reads a topology file.
fn recorded(path: &Path) -> Result<Topology> {
    let text = file::read_text(path, MAX_MESH_BYTES)?;
    Topology::from_json(&text).with_context(|| format!("read {}", path.display()))
}
