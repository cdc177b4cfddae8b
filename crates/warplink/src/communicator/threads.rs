//! A whole job in one process, with ranks as threads.

use super::Communicator;
use crate::bootstrap::{JoinConfig, Rendezvous, UniqueId};
use crate::config::Config;
use crate::device::{self, DeviceKind};
use crate::error::{Error, ErrorKind, Rank, Result};
use std::net::Ipv4Addr;

impl Communicator {
    /// Runs `body` as every rank of a job of `world` ranks, each a thread of this process. The environment
    /// selects the device, as for [`from_env`](Self::from_env); if there are fewer GPUs than ranks, ranks
    /// share them. Blocks until all have ended.
    ///
    /// # Errors
    /// The error of the lowest rank that failed with a cause of its own, or otherwise of the lowest that lost
    /// a peer.
    pub fn run_threads(world: usize, body: impl Fn(&Self) -> Result<()> + Sync) -> Result<()> {
        let id = UniqueId::create(Ipv4Addr::LOCALHOST.into(), 0)?;
        let gpus = match Config::device_kind()? {
            DeviceKind::Host => world,
            DeviceKind::Cuda => device::count(DeviceKind::Cuda)?,
        };
        let run = |rank: Rank| {
            let join = JoinConfig::new(Rendezvous::Id(id.clone()), rank, world)
                .with_local_rank(rank % gpus.max(1));
            let comm = Self::join(&Config::from_variables(join, |name| {
                std::env::var_os(name)
            })?)?;
            body(&comm)?;
            comm.close()
        };
        let results: Vec<Result<()>> = std::thread::scope(|scope| {
            let run = &run;
            let ranks: Vec<_> = (0..world)
                .map(|rank| scope.spawn(move || run(rank)))
                .collect();
            let panicked = || Error::internal("the thread of a rank panicked");
            ranks
                .into_iter()
                // Join every thread before returning: `body` is borrowed.
                .enumerate()
                .map(|(rank, thread)| match thread.join() {
                    Ok(result) => result,
                    Err(_) => Err(panicked().with_rank(rank)),
                })
                .collect()
        });
        let mut errors: Vec<Error> = results.into_iter().filter_map(Result::err).collect();
        // Secondary errors (a lost peer) sort after the cause.
        errors
            .sort_by_key(|error| matches!(error.kind(), ErrorKind::PeerLost | ErrorKind::PeerLeft));
        errors.into_iter().next().map_or(Ok(()), Err)
    }
}
