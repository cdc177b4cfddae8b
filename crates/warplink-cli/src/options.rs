//! The options that every subcommand takes.

use crate::report::has_colour;
use anyhow::{Result, ensure};
use clap::Args;
use std::io;
use tracing_subscriber::EnvFilter;
use warplink::DeviceKind;
use warplink::device;

/// Ranks that one machine may start; far above what any has use for, and low enough to be a slip
/// of the finger's last stop.
const MAX_RANKS: usize = 1024;

/// What every subcommand takes, before or after its name.
#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    /// Which device: host or cuda [default: cuda where a GPU can be used, else host]
    #[arg(long, global = true, value_name = "DEVICE")]
    pub(crate) device: Option<DeviceKind>,

    /// How many ranks [default: one for each GPU; 2 on the host device]
    #[arg(short = 'n', long, global = true, value_name = "N", value_parser = rank_count)]
    pub(crate) ranks: Option<usize>,

    /// Print the result as one JSON object on standard output
    #[arg(long, global = true)]
    pub(crate) json: bool,

    /// Say more on standard error: -v for information, -vv to debug, -vvv for everything
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
}

impl Options {
    /// The device that was asked for, or the best that is there.
    pub(crate) fn device(&self) -> DeviceKind {
        self.device.unwrap_or_else(DeviceKind::detect)
    }

    /// The number of ranks that was asked for, or one for each GPU, or 2 on the host device, where
    /// a rank takes no more than a process.
    pub(crate) fn ranks(&self) -> Result<usize> {
        match (self.ranks, self.device()) {
            (Some(ranks), _) => Ok(ranks),
            (None, DeviceKind::Host) => Ok(2),
            (None, DeviceKind::Cuda) => {
                let count = device::count(DeviceKind::Cuda)?;
                ensure!(
                    count > 0,
                    "this process sees no GPU; choose --device host, or set CUDA_VISIBLE_DEVICES"
                );
                Ok(count)
            }
        }
    }
}

fn rank_count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count) if (1..=MAX_RANKS).contains(&count) => Ok(count),
        _ => Err(format!("give a number from 1 to {MAX_RANKS}")),
    }
}

/// Sends the library's log to standard error. `WARPLINK_LOG` overrides the number of `-v`, with the
/// filters of the `tracing` crates.
pub(crate) fn start_log(verbose: u8) {
    let level = match verbose {
        0 => "warn",
        1 => "info",
        2 => "debug",
        _ => "trace",
    };
    let filter = EnvFilter::try_from_env("WARPLINK_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    // It fails only where a log was started before, which then goes on.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(has_colour(&io::stderr()))
        .try_init();
}
