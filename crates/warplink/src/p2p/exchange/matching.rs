//! Builds a transfer from both matched ends.

use super::flow::agreed;
use super::{EndOffer, RequestedTransfer, TransferExchange};
use crate::error::{Error, Rank, Result};
use crate::p2p::end::TransferEnd;
use crate::p2p::packets::Unpacking;
use crate::p2p::path::Flow;
use crate::p2p::protocol::Role;
use crate::p2p::recording::{GraphMark, TransferRecording};
use crate::p2p::transfer::Transfer;
use std::sync::atomic::AtomicU64;

impl TransferExchange {
    /// Builds the transfer of this rank's `end` and the peer's.
    pub(super) fn make(
        &self,
        end: RequestedTransfer,
        job_peer: Rank,
        terms: EndOffer,
    ) -> Result<Transfer> {
        let agreed = check_alike(&end, &terms).and_then(|()| agreed(&end, &terms));
        let handle = |wire| self.pairs.memory.peer_handle(job_peer, wire);
        // Wrapped before any check can fail, since a handle that is dropped returns itself to the peer.
        let (buffer, scratch) = (terms.buffer.map(handle), terms.scratch.map(handle));
        let inbound = handle(terms.inbound);
        let RequestedTransfer {
            request,
            protocol,
            path,
            slot,
            scratch: own_scratch,
            ..
        } = end;
        let flow = agreed.inspect_err(|_| {
            // The peer detects the same mismatch and drops its end, so nobody writes to the slot.
            self.pairs.slots.recycle(slot.number);
        })?;
        // From here on an error releases both slots through the pair's drop, not by `recycle`: the peer may use its
        // end.
        let slots = self.pairs.pair_slots(slot, job_peer, terms.slot, inbound)?;
        let role = request.direction.role(protocol);
        if buffer.is_some() != (role == Role::Initiator) {
            return Err(Error::protocol(
                "the peer offers a buffer where it copies, or none where it does not",
            )
            .with_help("run the same version of Warplink on every rank"));
        }
        let remote = buffer.map(|handle| handle.open()).transpose()?;
        let expected = request.buffer.bytes();
        if let Some(remote) = &remote
            && remote.memory().bytes() != expected
        {
            let what = format!(
                "the handle of the peer's buffer covers {} bytes; expected {expected}",
                remote.memory().bytes()
            );
            return Err(Error::invalid_handle(what));
        }
        // The ends may have offered scratch before they agreed on another flow; it is returned unopened.
        let scratch = scratch.filter(|_| matches!(flow, Flow::Packets { .. }));
        let scratch = scratch.map(|handle| handle.open()).transpose()?;
        let line = self.line(&request, flow, (own_scratch, scratch), slots.own.abort()?)?;
        let (line, scratch) = line.unzip();
        let inbound = slots.own.inbound_word().clone();
        let met = match (&line, role) {
            (Some(_), _) => (slots.own.completed_word().clone(), flow.arrivals()),
            (None, Role::Target) => (inbound, flow.arrivals()),
            (None, Role::Initiator) => (inbound, 1),
        };
        let pairs = &self.pairs;
        let end = TransferEnd {
            direction: request.direction,
            protocol,
            path,
            flow,
            peer: request.peer,
            tag: request.tag,
            progress: self.progress.add(&request, met),
            buffer: request.buffer,
            remote,
            slots,
            recording: TransferRecording::default(),
            graph_mark: GraphMark::new(&pairs.device),
            line,
            _scratch: scratch,
            unpacking: Unpacking::new(&pairs.device),
            posted_on: AtomicU64::new(0),
        };
        Ok(Transfer::new(end, &pairs.in_flight))
    }
}

/// Fails where the two ends differ in length or protocol.
fn check_alike(end: &RequestedTransfer, offer: &EndOffer) -> Result<()> {
    let bytes = end.request.buffer.bytes() as u64;
    if offer.bytes != bytes {
        let what = format!(
            "this rank's {} has {bytes} bytes, the peer's end {}",
            end.request.direction, offer.bytes
        );
        return Err(Error::mismatch(what).with_help("give both ends the same length"));
    }
    if offer.protocol != end.protocol {
        let what = format!(
            "this rank uses {}, the peer {}",
            end.protocol, offer.protocol
        );
        return Err(Error::mismatch(what).with_help("choose the same protocol on both ranks"));
    }
    Ok(())
}
