//! Making a connection from what both ends offer.

use super::{ConnectionExchange, End, EndOffer};
use crate::channel::connection::{Connection, ConnectionEnd, Held};
use crate::channel::proxy::Route;
use crate::channel::request::Transport;
use crate::device::ChannelMemory;
use crate::device::channel::{ChannelParts, Windows};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::memory::RemoteRegion;
use crate::signal::{Offer, RemoteSlot};
use crate::transport::CopyEngine;
use std::sync::{Arc, Mutex};

/// What an end has of its peer's memory.
struct PeerMappings {
    slot_page: RemoteRegion,
    slot: RemoteSlot,
    region: RemoteRegion,
}

impl ConnectionExchange {
    /// The connection of this rank's end `own` and the one that the peer published as `message`.
    pub(super) fn match_end(&self, own: Offer<End<'_>>, message: &[u8]) -> Result<Connection> {
        let (job_peer, end) = (own.job_peer, own.item);
        let request = end.request;
        let named = |error: Error| {
            error
                .with_operation("connect")
                .with_rank(self.group.rank())
                .with_peer(request.peer)
                .with_key(format!("connection with tag {}", request.tag))
        };
        let offer = EndOffer::decode(message).map_err(named)?;
        if offer.transport != request.transport {
            // The peer finds the same and gives up too, so nobody will write to the slot.
            self.decline(job_peer, &offer);
            self.slots.recycle(end.slot.number);
            let what = format!(
                "this rank uses the {} transport, the peer the {}",
                request.transport, offer.transport
            );
            return Err(named(
                Error::new(ErrorKind::Mismatch, what)
                    .with_help("choose the same transport on both ranks"),
            ));
        }
        let number = end.slot.number;
        self.make(end, job_peer, &offer).map_err(|error| {
            // The peer believes in the connection, and lets go of this end when it drops its own.
            self.releases.end_dropped(job_peer, number, offer.slot);
            named(error)
        })
    }

    fn make(&self, end: End<'_>, job_peer: Rank, offer: &EndOffer) -> Result<Connection> {
        let request = end.request;
        let mapped = self.map(job_peer, offer)?;
        let table = self.tables.allocate()?;
        let own = request.region.clone();
        let windows = Windows::new(
            &self.device,
            table.memory().clone(),
            own.memory().clone(),
            mapped.region.memory().clone(),
        )?;
        let windows = Arc::new(windows);
        let words = end.slot.channel_words()?;
        let outbound = mapped.slot.word(false).clone();
        let proxy = match request.transport {
            Transport::Direct => None,
            Transport::Proxied => {
                let proxy = (self.proxies.0)()?;
                let carrier = CopyEngine::new(&self.device, &windows, &outbound, &words.completed)?;
                let route = Route::new(request.peer, &self.fault, Box::new(carrier));
                let end = proxy.register(route)?;
                Some((proxy, end))
            }
        };
        let (proxy, proxy_end) = proxy.unzip();
        let peer = u32::try_from(request.peer).map_err(|_| Error::invalid("too many ranks"))?;
        let memory = ChannelMemory::new(ChannelParts {
            peer,
            windows,
            inbound: words.inbound,
            awaited: words.awaited,
            completed: words.completed,
            abort: words.abort,
            outbound,
            proxy: proxy_end,
        });
        let held = Held {
            job_peer,
            regions: Mutex::new(vec![(own, mapped.region)]),
            slot: end.slot,
            peer_slot: offer.slot,
            _remote_slot_page: mapped.slot_page,
            _table: table,
            releases: self.releases.clone(),
        };
        let made = ConnectionEnd {
            peer: request.peer,
            job_peer,
            tag: request.tag,
            number: end.number,
            transport: request.transport,
            memory: Arc::new(memory),
            held: Arc::new(held),
            proxy,
        };
        Ok(Connection::new(made, &self.in_flight))
    }

    /// Maps what the peer offers: its words and its region.
    fn map(&self, peer: Rank, offer: &EndOffer) -> Result<PeerMappings> {
        let words = self
            .memory
            .open_handle(peer, &offer.inbound)
            .and_then(|page| Ok((RemoteSlot::new(page.memory())?, page)));
        let (slot, slot_page) = words.inspect_err(|_| {
            self.memory.decline_handle(peer, &offer.region);
        })?;
        Ok(PeerMappings {
            slot_page,
            slot,
            region: self.memory.open_handle(peer, &offer.region)?,
        })
    }

    fn decline(&self, peer: Rank, offer: &EndOffer) {
        for handle in [&offer.region, &offer.inbound] {
            self.memory.decline_handle(peer, handle);
        }
    }
}
