//! What the examples share: running as several ranks, however they were started.
//!
//! Nothing here is special to Warplink's transfers; read the examples first.

use std::net::{IpAddr, Ipv4Addr};
use std::process::ExitCode;
use warplink::bootstrap::{JoinConfig, Rendezvous, UniqueId};
use warplink::device;
use warplink::{Communicator, Config, DeviceKind, Error, ErrorKind, Result};

/// Runs `body` in every rank, and says what went wrong where something does.
///
/// A launcher (`warplink launch`, say) starts this program once for each rank and sets
/// `WARPLINK_RANK`. Then this process is one rank. Without a launcher, the ranks are threads of this
/// process: as many as there are GPUs, or `threads` on a machine without.
pub(crate) fn run(threads: usize, body: impl Fn(&Communicator) -> Result<()> + Sync) -> ExitCode {
    let done = match std::env::var_os("WARPLINK_RANK") {
        Some(_) => Config::from_env().and_then(|config| run_rank(&config, &body)),
        None => run_threads(threads, &body),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Joins the other ranks, does the work, and leaves in order. Ranks that end without `close` count
/// as lost, and the others are told so.
fn run_rank(config: &Config, body: &impl Fn(&Communicator) -> Result<()>) -> Result<()> {
    let comm = Communicator::join(config)?;
    body(&comm)?;
    comm.close()
}

fn run_threads(threads: usize, body: &(impl Fn(&Communicator) -> Result<()> + Sync)) -> Result<()> {
    // The same variables as for a rank of its own choose the device and its settings.
    let variable = |name: &str| std::env::var(name).ok();
    let kind = match variable("WARPLINK_DEVICE") {
        Some(name) => name.parse()?,
        None => DeviceKind::detect(),
    };
    let gpus = match kind {
        DeviceKind::Host => 0,
        DeviceKind::Cuda => device::count(kind)?,
    };
    // Two ranks can share one GPU; one rank has nobody to talk to.
    let world = if gpus == 0 { threads } else { gpus.max(2) };
    // Says where the ranks meet, and holds the secret that admits them.
    let id = UniqueId::create(IpAddr::V4(Ipv4Addr::LOCALHOST), 0)?;
    let rank = |rank: usize| -> Result<()> {
        let mut join = JoinConfig::new(Rendezvous::Id(id.clone()), rank, world);
        join.local_rank = if gpus == 0 { rank } else { rank % gpus };
        run_rank(&Config::from_variables(join, variable)?, body)
    };
    std::thread::scope(|scope| {
        let rank = &rank;
        let ranks: Vec<_> = (0..world)
            .map(|number| scope.spawn(move || rank(number)))
            .collect();
        // All are waited for before the first failure is reported.
        let ends: Vec<Result<()>> = ranks
            .into_iter()
            .map(|rank| {
                rank.join()
                    .unwrap_or_else(|_| Err(Error::new(ErrorKind::Internal, "a rank panicked")))
            })
            .collect();
        ends.into_iter().collect()
    })
}
