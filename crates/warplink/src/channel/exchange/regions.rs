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
        let mut offers = Vec::with_capacity(added.len());
        let prepared = added.iter().try_for_each(|&(connection, region)| {
            let offer = self.offer_region(connection, region)?;
            if offers
                .iter()
                .any(|earlier: &Offer<_>| earlier.own_key == offer.own_key)
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
                // A handle that the peer took is the peer's to give back, and so is its own.
                let complete = |offer: Offer<&Connection>, handle: &[u8]| {
                    if let Reach::Mapped { .. } = offer.item.end().held.reach {
                        self.memory.decline_handle(offer.job_peer, handle);
                    }
                };
                self.publisher.withdraw(offers, |_| (), complete);
                return Err(error);
            }
        };
        let opened: Vec<_> = added
            .iter()
            .zip(&handles)
            .map(|((connection, _), handle)| self.open_region(connection, handle))
            .collect();
        let mut numbers = Vec::with_capacity(added.len());
        for ((connection, region), opened) in added.iter().zip(opened) {
            let (remote, place) = opened.map_err(|error| self.group.in_own_ranks(error))?;
            let end = connection.end();
            // Kept before kernels find it.
            lock(&end.held.regions).push(((*region).clone(), remote));
            let windows = &end.memory.parts().windows;
            numbers.push(windows.add(region.memory().clone(), place)?);
        }
        Ok(numbers)
    }

    /// Opens a region that the peer adds.
    fn open_region(
        &self,
        connection: &Connection,
        handle: &[u8],
    ) -> Result<(Option<RemoteRegion>, Place)> {
        let end = connection.end();
        if let Reach::Network(link) = &end.held.reach {
            return Ok((None, Place::Elsewhere(link.open(handle)?)));
        }
        let remote = self.memory.open_handle(end.job_peer, handle)?;
        let place = Place::Mapped(remote.memory().clone());
        Ok((Some(remote), place))
    }

    /// The offer of a region that is added to a connection.
    fn offer_region<'a>(
        &self,
        connection: &'a Connection,
        region: &Region,
    ) -> Result<Offer<&'a Connection>> {
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
        let mut offer = self.publisher.offer(peer, keys, connection)?;
        let handle = match &end.held.reach {
            Reach::Mapped { .. } => self.publisher.export(&mut offer, region)?,
            Reach::Network(link) => link.expose(region, next)?,
        };
        Ok(offer.with_message(handle))
    }
}

/// Whose region did not come, and to which connection.
fn missing_region(offer: &Offer<&Connection>) -> Missing {
    Missing {
        what: format!(
            "rank {} to add a region to its {}",
            offer.peer,
            offer.item.end().key()
        ),
        help: "check that the peer adds a region too",
    }
}
