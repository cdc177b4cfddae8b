//! Regions that are added to connections later.

use super::ConnectionExchange;
use crate::channel::connection::{Connection, Reach};
use crate::deadline::Deadline;
use crate::device::channel::Place;
use crate::device::channel::trigger::MAX_OFFSET;
use crate::error::{Error, Result};
use crate::memory::{Region, RemoteRegion};
use crate::signal::{Missing, Offer};
use crate::sync::lock;

/// A connection, and the region that is added to it.
type Added<'a> = (&'a Connection, &'a Region);

impl ConnectionExchange {
    /// Adds a region to each connection, on both ranks, under the number that is given back: kernels name
    /// it as `warplink::At(number, offset)`, and those that run already may. The two ranks call this at the
    /// same time, each with a region of its own, which may have different lengths; calls for one connection
    /// are matched by their order. Blocks the caller until all peers have called it. A region that this rank cannot
    /// open has its number all the same, and those of the other connections are added.
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
        let mut offers: Vec<Offer<Added<'_>>> = Vec::with_capacity(added.len());
        let prepared = added.iter().try_for_each(|&(connection, region)| {
            let offer = self.offer_region(connection, region)?;
            if offers
                .iter()
                .any(|earlier| earlier.own_key == offer.own_key)
            {
                self.publisher.cancel(offer);
                return Err(Error::invalid("a connection is given twice; expected once")
                    .with_peer(connection.peer())
                    .with_key(connection.end().key())
                    .with_help("add one region to a connection at a time"));
            }
            offers.push(offer);
            Ok(())
        });
        if let Err(error) = prepared.and_then(|()| self.publisher.publish(&offers, deadline)) {
            for offer in offers {
                self.publisher.cancel(offer);
            }
            return Err(error);
        }
        let handles = match self.publisher.take(&offers, deadline, missing_region) {
            Ok(handles) => handles,
            Err(error) => {
                // A peer that took the handle has added the region.
                let complete = |offer: Offer<Added<'_>>, handle: &[u8]| {
                    let (connection, region) = offer.item;
                    drop(self.add(connection, region, handle));
                };
                self.publisher.withdraw(offers, |_| (), complete);
                return Err(error);
            }
        };
        // Every region is added before the first failure is reported, so that both ranks go on with the same numbers.
        let numbers: Vec<_> = added
            .iter()
            .zip(&handles)
            .map(|((connection, region), handle)| self.add(connection, region, handle))
            .collect();
        numbers.into_iter().collect()
    }

    /// Adds a region to a connection, and the one that the peer adds. Where the latter cannot be opened, the number is
    /// used up, as it is at the peer, which may write to this rank's region.
    fn add(&self, connection: &Connection, region: &Region, handle: &[u8]) -> Result<u32> {
        let end = connection.end();
        let windows = &end.memory.parts().windows;
        let (opened, remote, place) = match self.open_region(connection, windows.next()?, handle) {
            Ok((remote, place)) => (Ok(()), remote, place),
            Err(error) => (Err(error), None, Place::Elsewhere(0)),
        };
        // Kept before kernels find it.
        lock(&end.held.regions).push((region.clone(), remote));
        let number = windows.add(region.memory().clone(), place);
        opened.map_err(|error| self.group.in_own_ranks(error))?;
        number
    }

    /// Opens a region that the peer adds.
    fn open_region(
        &self,
        connection: &Connection,
        number: u32,
        handle: &[u8],
    ) -> Result<(Option<RemoteRegion>, Place)> {
        let end = connection.end();
        if let Reach::Network(link) = &end.held.reach {
            return Ok((None, Place::Elsewhere(link.open(handle, number)?)));
        }
        let remote = self.memory.open_handle(end.job_peer, handle)?;
        let place = Place::Mapped(remote.memory().clone());
        Ok((Some(remote), place))
    }

    /// The offer of a region that is added to a connection.
    fn offer_region<'a>(
        &self,
        connection: &'a Connection,
        region: &'a Region,
    ) -> Result<Offer<Added<'a>>> {
        let end = connection.end();
        let next = end.memory.parts().windows.next()?;
        if end.proxy.is_some() && region.bytes() as u64 > MAX_OFFSET {
            return Err(Error::invalid(format!(
                "a region of {} bytes; expected at most {MAX_OFFSET} for a proxied connection",
                region.bytes()
            ))
            .with_peer(end.peer)
            .with_help("add a part of the region"));
        }
        let (rank, peer) = (self.group.rank(), end.peer);
        let keys = [(rank, peer), (peer, rank)].map(|(from, to)| {
            let connection = self.store_key(from, to, end.tag, end.number);
            format!("{connection}/region {next}")
        });
        let mut offer = self.publisher.offer(peer, keys, (connection, region))?;
        let handle = match &end.held.reach {
            Reach::Mapped { .. } => self.publisher.export(&mut offer, region)?,
            Reach::Network(link) => link.expose(region, next)?,
        };
        Ok(offer.with_message(handle))
    }
}

/// Whose region did not come, and to which connection.
fn missing_region(offer: &Offer<Added<'_>>) -> Missing {
    Missing {
        what: format!(
            "rank {} to add a region to its {}",
            offer.peer,
            offer.item.0.end().key()
        ),
        help: "check that the peer adds a region too",
    }
}
