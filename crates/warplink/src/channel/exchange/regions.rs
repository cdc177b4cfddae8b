//! Regions that are added to connections later.

use super::ConnectionExchange;
use crate::channel::connection::Connection;
use crate::deadline::Deadline;
use crate::device::channel::trigger::MAX_OFFSET;
use crate::error::{Error, Result};
use crate::memory::Region;
use crate::sync::lock;

impl ConnectionExchange {
    /// Adds a region to each connection, on both ranks, under the number that is given back: kernels name
    /// it as `warplink::At(number, offset)`, and those that run already may. The two ranks call this at the
    /// same time, each with a region of its own, which may have different lengths; calls for one connection
    /// are matched by their order. Blocks the caller until all peers have called it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) where a connection is given twice
    /// or has as many regions as it can; those of [`connect`](Self::connect).
    pub fn add_regions(
        &self,
        added: &[(&Connection, &Region)],
        deadline: Deadline,
    ) -> Result<Vec<u32>> {
        self.exchange_regions(added, deadline)
            .map_err(|error| error.with_operation("add regions"))
            .map_err(|error| self.group.with_job_ranks(error))
    }

    fn exchange_regions(
        &self,
        added: &[(&Connection, &Region)],
        deadline: Deadline,
    ) -> Result<Vec<u32>> {
        self.fault.check()?;
        let (mut published, mut peer_keys) = (Vec::new(), Vec::new());
        let mut publish = || -> Result<()> {
            for (connection, region) in added {
                let end = connection.end();
                let next = end.memory.parts().windows.next()?;
                let key = |from, to| {
                    let connection = self.store_key(from, to, end.tag, end.number);
                    format!("{connection}/region {next}")
                };
                let (rank, peer) = (self.group.rank(), end.peer);
                let own_key = key(rank, peer);
                if published.iter().any(|(key, _)| *key == own_key) {
                    return Err(Error::invalid("a connection is given twice; expected once")
                        .with_peer(peer)
                        .with_key(end.key())
                        .with_help("add one region to a connection at a time"));
                }
                if end.proxy.is_some() && region.bytes() as u64 > MAX_OFFSET {
                    return Err(Error::invalid(format!(
                        "a region of {} bytes; expected at most {MAX_OFFSET} for a proxied connection",
                        region.bytes()
                    ))
                    .with_peer(peer)
                    .with_help("add a part of the region"));
                }
                let handle = self.memory.export_handle(region, end.job_peer);
                let handle = handle.map_err(|error| self.group.in_own_ranks(error))?;
                published.push((own_key, handle.to_vec()));
                peer_keys.push(key(peer, rank));
            }
            let set = self.bootstrap.store().multi_set(&published);
            set.map_err(|error| self.group.in_own_ranks(error))
        };
        if let Err(error) = publish() {
            self.cancel(&added[..published.len()]);
            return Err(error);
        }
        let peers = added.iter().map(|(connection, _)| connection.peer());
        let taken = self
            .bootstrap
            .store()
            .multi_take(&peer_keys, &self.wait_for(peers, deadline)?);
        let handles = match taken {
            Ok(handles) => handles,
            Err(error) => {
                for ((connection, region), (key, _)) in added.iter().zip(&published) {
                    // One that the peer took is the peer's to give back.
                    if matches!(self.bootstrap.store().delete(key), Ok(true)) {
                        self.cancel(&[(connection, region)]);
                    }
                }
                return Err(self.group.in_own_ranks(error));
            }
        };
        let opened: Vec<_> = added
            .iter()
            .zip(&handles)
            .map(|((connection, _), handle)| {
                self.memory.open_handle(connection.end().job_peer, handle)
            })
            .collect();
        let mut numbers = Vec::with_capacity(added.len());
        for ((connection, region), remote) in added.iter().zip(opened) {
            let remote = remote.map_err(|error| self.group.in_own_ranks(error))?;
            let end = connection.end();
            // Kept before kernels find it.
            lock(&end.held.regions).push(((*region).clone(), remote.clone()));
            let windows = &end.memory.parts().windows;
            numbers.push(windows.add(region.memory().clone(), remote.memory().clone())?);
        }
        Ok(numbers)
    }

    fn cancel(&self, added: &[(&Connection, &Region)]) {
        for (connection, region) in added {
            self.memory.cancel_handle(region, connection.end().job_peer);
        }
    }
}
