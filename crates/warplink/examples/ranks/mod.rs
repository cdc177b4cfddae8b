//! Shared by the examples: running as several ranks, however they were started.

use std::process::ExitCode;
use warplink::{Communicator, DeviceKind, Result, device};

/// Runs `body` in every rank, and says what went wrong where something does.
///
/// A launcher (`warplink launch`, say) starts this program once for each rank and sets
/// `WARPLINK_RANK`. Then this process is one rank. Without a launcher, the ranks are threads of this
/// process: as many as there are GPUs, or `threads` on a machine without.
pub(crate) fn run(threads: usize, body: impl Fn(&Communicator) -> Result<()> + Sync) -> ExitCode {
    let launched = std::env::var_os("WARPLINK_RANK").is_some();
    let result = if launched {
        one_rank(&body)
    } else {
        number_of_threads(threads).and_then(|world| Communicator::run_threads(world, &body))
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn one_rank(body: impl Fn(&Communicator) -> Result<()>) -> Result<()> {
    let comm = Communicator::from_env()?;
    body(&comm)?;
    // Ranks that end without this count as lost, and the others are told so.
    comm.close()
}

fn number_of_threads(without_gpu: usize) -> Result<usize> {
    let kind = match std::env::var("WARPLINK_DEVICE") {
        Ok(name) => name.parse()?,
        Err(_) => DeviceKind::detect(),
    };
    match kind {
        DeviceKind::Host => Ok(without_gpu),
        // Two ranks can share one GPU; one rank has nobody to talk to.
        DeviceKind::Cuda => Ok(device::count(kind)?.max(2)),
    }
}
