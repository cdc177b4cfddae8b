//! Making a transfer from what both ends offer.

use super::flow::agreed;
use super::{End, EndOffer, TransferExchange};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::RemoteRegion;
use crate::p2p::end::TransferEnd;
use crate::p2p::packets::Unpacking;
use crate::p2p::path::Flow;
use crate::p2p::protocol::{Protocol, Role};
use crate::p2p::recording::{GraphMark, Recording};
use crate::p2p::request::TransferRequest;
use crate::p2p::transfer::Transfer;
use crate::signal::{Offer, RemoteSlot};
use std::sync::atomic::AtomicU64;

/// What an end has of its peer's memory.
struct PeerMappings {
    slot_page: RemoteRegion,
    slot: RemoteSlot,
    /// The buffer, at the initiator.
    buffer: Option<RemoteRegion>,
    /// Its scratch memory, where both have some.
    scratch: Option<RemoteRegion>,
}

impl TransferExchange {
    /// The transfer of this rank's end `own` and the one that the peer published as `message`.
    pub(super) fn match_end(&self, own: Offer<End<'_>>, message: &[u8]) -> Result<Transfer> {
        let (job_peer, end) = (own.job_peer, own.item);
        let named = |error| self.with_context(end.request, &own.own_key, error);
        let request = end.request;
        let offer = EndOffer::decode(message).map_err(named)?;
        let alike = check_alike(request, end.protocol, &offer);
        let flow = match alike.and_then(|()| agreed(&end, &offer)) {
            Ok(flow) => flow,
            Err(error) => {
                // The peer finds the same and gives up too, so nobody will write to the slot.
                let handles = offer.buffer.iter().chain(&offer.scratch);
                handles
                    .chain([&offer.inbound])
                    .for_each(|wire| self.memory.decline_handle(job_peer, wire));
                self.slots.recycle(end.slot.number);
                return Err(named(error));
            }
        };
        let mapped = self.map(&offer, request, end.protocol, flow);
        let mapped = mapped.and_then(|mut mapped| {
            let line = self.line(&end, flow, mapped.scratch.take())?;
            Ok((mapped, line.unzip()))
        });
        let (mapped, (line, scratch)) = match mapped {
            Ok(mapped) => mapped,
            Err(error) => {
                // The peer believes in the transfer, and lets go of this end when it drops its own.
                self.releases
                    .end_dropped(job_peer, end.slot.number, offer.slot);
                return Err(named(error));
            }
        };
        let inbound = end.slot.inbound_word().clone();
        let met = match (&line, request.direction.role(end.protocol)) {
            (Some(_), _) => (end.slot.completed_word().clone(), flow.arrivals()),
            (None, Role::Target) => (inbound, flow.arrivals()),
            (None, Role::Initiator) => (inbound, 1),
        };
        let end = TransferEnd {
            direction: request.direction,
            protocol: end.protocol,
            path: end.path,
            flow,
            peer: request.peer,
            job_peer,
            tag: request.tag,
            buffer: request.buffer.clone(),
            remote: mapped.buffer,
            slot: end.slot,
            remote_slot: mapped.slot,
            _remote_slot_page: mapped.slot_page,
            peer_slot: offer.slot,
            progress: self.progress.add(request, met),
            recording: Recording::default(),
            graph_mark: GraphMark::new(&self.device),
            line,
            _scratch: scratch,
            unpacking: Unpacking::new(&self.device),
            posted_on: AtomicU64::new(0),
            releases: self.releases.clone(),
        };
        Ok(Transfer::new(end, &self.in_flight))
    }

    /// Maps what the peer offers: its words, and its buffer where this end copies.
    fn map(
        &self,
        offer: &EndOffer,
        request: &TransferRequest,
        protocol: Protocol,
        flow: Flow,
    ) -> Result<PeerMappings> {
        let peer = self.group.job_rank(request.peer)?;
        let words = self
            .memory
            .open_handle(peer, &offer.inbound)
            .and_then(|page| Ok((RemoteSlot::new(page.memory())?, page)));
        let initiator = request.direction.role(protocol) == Role::Initiator;
        let buffer = match (&offer.buffer, initiator, &words) {
            (Some(wire), true, Ok(_)) => self.memory.open_handle(peer, wire).map(Some),
            (None, false, _) => Ok(None),
            (Some(wire), ..) => {
                self.memory.decline_handle(peer, wire);
                Err(wrong_role())
            }
            (None, true, _) => Err(wrong_role()),
        };
        let scratch = match (&offer.scratch, &words, &buffer) {
            (Some(wire), Ok(_), Ok(_)) if matches!(flow, Flow::Packets { .. }) => {
                self.memory.open_handle(peer, wire).map(Some)
            }
            (Some(wire), ..) => {
                self.memory.decline_handle(peer, wire);
                Ok(None)
            }
            (None, ..) => Ok(None),
        };
        let (slot, slot_page) = words?;
        let (buffer, scratch) = (buffer?, scratch?);
        let expected = request.buffer.bytes();
        if let Some(remote) = &buffer
            && remote.memory().bytes() != expected
        {
            let what = format!(
                "the handle of the peer's buffer covers {} bytes; expected {expected}",
                remote.memory().bytes()
            );
            return Err(Error::new(ErrorKind::InvalidHandle, what));
        }
        Ok(PeerMappings {
            slot_page,
            slot,
            buffer,
            scratch,
        })
    }

    fn with_context(&self, request: &TransferRequest, key: &str, error: Error) -> Error {
        error
            .with_operation("exchange transfers")
            .with_rank(self.group.rank())
            .with_peer(request.peer)
            .with_key(key.to_owned())
    }
}

/// Fails where the two ends differ in length or protocol.
fn check_alike(request: &TransferRequest, protocol: Protocol, offer: &EndOffer) -> Result<()> {
    let bytes = request.buffer.bytes() as u64;
    if offer.bytes != bytes {
        let what = format!(
            "this rank's {} has {bytes} bytes, the peer's end {}",
            request.direction, offer.bytes
        );
        return Err(
            Error::new(ErrorKind::Mismatch, what).with_help("give both ends the same length")
        );
    }
    if offer.protocol != protocol {
        let what = format!("this rank uses {protocol}, the peer {}", offer.protocol);
        return Err(Error::new(ErrorKind::Mismatch, what)
            .with_help("choose the same protocol on both ranks"));
    }
    Ok(())
}

fn wrong_role() -> Error {
    Error::new(
        ErrorKind::Protocol,
        "the peer offers a buffer where it copies, or none where it does not",
    )
    .with_help("run the same version of Warplink on every rank")
}
