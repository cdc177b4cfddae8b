//! Regions added to established connections.

use super::ConnectionExchange;
use crate::channel::connection::{Connection, PeerReach};
use crate::deadline::Deadline;
use crate::device::channel::RegionPlace;
use crate::device::channel::trigger::MAX_OFFSET;
use crate::error::{Error, Rank, Result};
use crate::exchange::{Matching, Missing, Offer, PairExchange};
use crate::memory::{Region, RemoteRegion};
use crate::sync::lock;
use std::collections::HashSet;

/// The exchange of added regions. It needs no sequence numbers of ends, because connections number their regions.
struct Regions<'a>(&'a ConnectionExchange);

/// A region, and the connection to add it to.
struct Added {
    connection: Connection,
    region: Region,
    number: u32,
}

impl ConnectionExchange {
    /// Adds a region to each connection, on both ranks, and returns its number: kernels address it as
    /// `warplink::At(number, offset)`, including kernels that are already running. Both ranks call this at the same
    /// time, each with its own region, and lengths may differ; calls for one connection match in order. Blocks until
    /// all peers have called it. If this rank cannot open a region, its number is still consumed, and the regions of
    /// the other connections are added.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if a connection is given twice or already
    /// has the maximum number of regions; the errors of [`connect`](Self::connect).
    pub fn add_regions(
        &self,
        added: &[(&Connection, &Region)],
        deadline: Deadline,
    ) -> Result<Vec<u32>> {
        let mut seen = HashSet::new();
        let offers = added.iter().map(|&(connection, region)| {
            let end = connection.end();
            if !seen.insert((end.peer, end.tag, end.number)) {
                return Err(Error::invalid("a connection is given twice; expected once")
                    .with_peer(end.peer)
                    .with_key(end.key())
                    .with_help("add one region to a connection at a time"));
            }
            self.added(connection, region)
        });
        Regions(self)
            .exchange(offers, deadline)
            .map_err(|error| error.with_operation("add regions"))
            .map_err(|error| self.pairs.group.with_job_ranks(error))
    }

    fn added(&self, connection: &Connection, region: &Region) -> Result<Offer<Added>> {
        let end = connection.end();
        let number = end.memory.parts().windows.next()?;
        if end.proxy.is_some() && region.bytes() as u64 > MAX_OFFSET {
            return Err(Error::invalid(format!(
                "a region of {} bytes; expected at most {MAX_OFFSET} for a proxied connection",
                region.bytes()
            ))
            .with_peer(end.peer)
            .with_help("add a part of the region"));
        }
        let keys = self
            .store_keys(end.peer, end.tag, end.number)
            .map(|connection| format!("{connection}/region {number}"));
        let added = Added {
            connection: connection.clone(),
            region: region.clone(),
            number,
        };
        self.pairs.offer(end.peer, keys, added)
    }

    /// Adds this rank's and the peer's region to a connection. If the peer's cannot be opened, the number is consumed
    /// anyway, as it is at the peer, which may write to this rank's region.
    fn add(&self, connection: &Connection, region: &Region, handle: &[u8]) -> Result<u32> {
        let end = connection.end();
        let windows = &end.memory.parts().windows;
        let (opened, remote, place) = match self.open_region(connection, windows.next()?, handle) {
            Ok((remote, place)) => (Ok(()), remote, place),
            Err(error) => (Err(error), None, RegionPlace::Elsewhere(0)),
        };
        // Kept alive before kernels can find it.
        lock(&end.held.regions).push((region.clone(), remote));
        let number = windows.add(region.memory().clone(), place);
        opened.and(number)
    }

    /// Opens a region added by the peer.
    fn open_region(
        &self,
        connection: &Connection,
        number: u32,
        handle: &[u8],
    ) -> Result<(Option<RemoteRegion>, RegionPlace)> {
        let end = connection.end();
        if let PeerReach::Network(link) = &end.held.reach {
            return Ok((None, RegionPlace::Elsewhere(link.open(handle, number)?)));
        }
        let remote = self.pairs.memory.peer_handle(end.job_peer, handle).open()?;
        let place = RegionPlace::Mapped(remote.memory().clone());
        Ok((Some(remote), place))
    }
}

impl Matching for Regions<'_> {
    type Key = (Rank, u64);
    type End = Added;
    /// A handle, or a key over the network.
    type Terms = Vec<u8>;
    type Made = u32;

    fn pairs(&self) -> &PairExchange<(Rank, u64)> {
        &self.0.pairs
    }

    fn describe(&self, offer: &mut Offer<Added>) -> Result<Vec<u8>> {
        let Added {
            connection,
            region,
            number,
        } = &offer.end;
        match &connection.end().held.reach {
            PeerReach::Mapped(_) => {
                let region = region.clone();
                self.0.pairs.export(offer, &region)
            }
            PeerReach::Network(link) => link.expose(region, *number),
        }
    }

    fn missing(&self, offer: &Offer<Added>) -> Missing {
        let end = offer.end.connection.end();
        Missing {
            what: format!("rank {} to add a region to its {}", offer.peer, end.key()),
            help: "check that the peer adds a region too",
        }
    }

    // Nothing is reserved: the number is taken only by `add`, on both ranks alike.
    fn forget(&self, _: Added) {}

    fn unreadable(&self, end: Added) {
        // An empty handle is never valid, so this only consumes the number, as the peer has done.
        drop(self.0.add(&end.connection, &end.region, &[]));
    }

    fn meet(&self, end: Added, _: Rank, handle: Vec<u8>) -> Result<u32> {
        self.0.add(&end.connection, &end.region, &handle)
    }
}
