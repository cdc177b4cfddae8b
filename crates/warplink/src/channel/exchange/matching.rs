//! Making a connection from what both ends offer.

use super::{ConnectionExchange, End, EndOffer};
use crate::channel::answers::Answers;
use crate::channel::connection::{Connection, ConnectionEnd, Held, Reach};
use crate::channel::proxy::Route;
use crate::channel::request::Transport;
use crate::device::channel::{ChannelParts, Place, Windows};
use crate::device::{ChannelMemory, Word};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::memory::RemoteRegion;
use crate::signal::{Offer, RemoteSlot};
use crate::transport::{Carrier, CopyEngine, NetworkCarrier, Offered, OfferedRings, StagedCarrier};
use std::sync::{Arc, Mutex};

/// What an end has of its peer.
struct Reached {
    reach: Reach,
    /// The peer's inbound word and its region, where they are mapped.
    outbound: Option<Word>,
    region: Option<RemoteRegion>,
    place: Place,
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
        let is_staged = end
            .exposed
            .as_ref()
            .map(|exposed| exposed.staging().is_some());
        let other_staging = is_staged.is_some_and(|is_staged| is_staged != offer.staging.is_some());
        if offer.transport != end.transport || other_staging {
            // The peer finds the same and gives up too, so nobody will write to the slot.
            self.decline(job_peer, &offer);
            let (what, help) = if offer.transport == end.transport {
                let what = "one rank stages what goes over the network, the other does not";
                (what.to_owned(), "configure the same staging on every rank")
            } else {
                let what = format!(
                    "this rank uses the {} transport, the peer the {}",
                    end.transport, offer.transport
                );
                (what, "choose the same transport on both ranks")
            };
            self.give_back(end);
            return Err(named(Error::new(ErrorKind::Mismatch, what).with_help(help)));
        }
        self.make(end, job_peer, &offer).map_err(named)
    }

    fn make(&self, mut end: End<'_>, job_peer: Rank, offer: &EndOffer) -> Result<Connection> {
        let request = end.request;
        let Reached {
            reach,
            outbound,
            region,
            place,
        } = self.reach(&mut end, job_peer, offer)?;
        let words = end.slot.channel_words()?;
        let own = request.region.clone();
        let table = self.tables.allocate()?;
        let held = Arc::new(Held {
            job_peer,
            regions: Mutex::new(vec![(own.clone(), region)]),
            slot: end.slot,
            reach,
            table,
            answers: Answers::new(&self.slots, &self.memory),
        });
        let windows = Windows::new(
            &self.device,
            held.table.memory().clone(),
            own.memory().clone(),
            place,
        )?;
        let windows = Arc::new(windows);
        let carrier: Option<Box<dyn Carrier>> = match (&held.reach, &outbound) {
            (Reach::Network(link), _) if link.is_staged() => Some(Box::new(StagedCarrier::new(
                &self.device,
                (request.peer, link),
                (own.memory(), &windows),
                [&words.inbound, &words.completed],
                &self.fault,
            )?)),
            (Reach::Network(link), _) => Some(Box::new(NetworkCarrier::new(
                &self.device,
                link,
                &windows,
                &words.completed,
                &self.fault,
            )?)),
            (Reach::Mapped { .. }, Some(outbound)) if end.transport == Transport::Proxied => {
                let engine = CopyEngine::new(&self.device, &windows, outbound, &words.completed)?;
                Some(Box::new(engine))
            }
            _ => None,
        };
        let proxy = match carrier {
            None => None,
            Some(carrier) => {
                let proxy = (self.proxies.0)()?;
                let route = Route::new(request.peer, &self.fault, &windows, carrier);
                let end = proxy.register(route)?;
                Some((proxy, end))
            }
        };
        let (proxy, proxy_end) = proxy.unzip();
        let peer = u32::try_from(request.peer).map_err(|_| Error::invalid("too many ranks"))?;
        let memory = ChannelMemory::new(ChannelParts {
            peer,
            tag: request.tag,
            windows,
            inbound: words.inbound,
            awaited: words.awaited,
            completed: words.completed,
            abort: words.abort,
            outbound,
            proxy: proxy_end,
        });
        let made = ConnectionEnd {
            peer: request.peer,
            job_peer,
            tag: request.tag,
            number: end.number,
            transport: end.transport,
            memory: Arc::new(memory),
            held,
            proxy,
        };
        Ok(Connection::new(&self.device, made, &self.in_flight))
    }

    /// Maps what the peer offers, or connects to it. From then on dropping what is given tells the peer that
    /// this end is gone; so does a failure.
    fn reach(&self, end: &mut End<'_>, job_peer: Rank, offer: &EndOffer) -> Result<Reached> {
        if let Some(exposed) = end.exposed.take() {
            let offered = Offered {
                address: &offer.address,
                words: &offer.inbound,
                region: &offer.region,
                staging: offer.staging.as_ref().map(|staging| OfferedRings {
                    shape: staging.shape,
                    region_bytes: staging.region_bytes,
                    region: &staging.region,
                }),
            };
            let link = self.networks.connect(end.request.peer, exposed, &offered)?;
            let (peer, tag, path) = (end.request.peer, end.request.tag, link.path());
            tracing::debug!(peer, tag, ?path, "connected over the network");
            let bytes = match &offer.staging {
                Some(staging) => staging.region_bytes,
                None => link.region(0)?.bytes() as u64,
            };
            return Ok(Reached {
                reach: Reach::Network(Arc::new(link)),
                outbound: None,
                region: None,
                place: Place::Elsewhere(bytes),
            });
        }
        let words = self
            .memory
            .open_handle(job_peer, &offer.inbound)
            .and_then(|page| Ok((RemoteSlot::new(page.memory())?, page)));
        let mapped = match words {
            Ok((slot, page)) => {
                let region = self.memory.open_handle(job_peer, &offer.region);
                region.map(|region| (slot, page, region))
            }
            Err(error) => {
                self.memory.decline_handle(job_peer, &offer.region);
                Err(error)
            }
        };
        let (slot, page, region) = mapped.inspect_err(|_| {
            // The peer believes in the connection, and lets go of this end when it drops its own.
            self.releases
                .end_dropped(job_peer, end.slot.number, offer.slot);
        })?;
        Ok(Reached {
            reach: Reach::Mapped {
                peer_slot: offer.slot,
                _slot_page: page,
                releases: self.releases.clone(),
            },
            outbound: Some(slot.word(false).clone()),
            place: Place::Mapped(region.memory().clone()),
            region: Some(region),
        })
    }

    fn decline(&self, peer: Rank, offer: &EndOffer) {
        if offer.transport == Transport::Network {
            return;
        }
        for handle in [&offer.region, &offer.inbound] {
            self.memory.decline_handle(peer, handle);
        }
    }
}
