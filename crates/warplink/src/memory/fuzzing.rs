//! Entry points for the fuzz target of the memory service.

use super::MemoryRegistry;
use super::limits::IdleMappings;
use super::message::{MAX_REQUEST_BYTES, Message, Request, TOKEN_BYTES};
use super::peers::PeerInfo;
use super::service::{self, ANSWER_BYTES, Handler};
use super::service_client::read_answer;
use crate::device::{AllocationKind, Device, DeviceConfig, DeviceKind};
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, socketpair};
use std::sync::{Arc, OnceLock};

/// Interprets bytes as packets that a rank's memory service receives from rank 1 of two. The first byte of
/// each packet selects in its low half which arguments are replaced by valid numbers, and in its high half
/// the length; the rest follows the token. Then parses the same bytes as a service's answer.
///
/// # Panics
/// If a packet does not round-trip, or damages this rank's state.
pub fn service_packets(bytes: &[u8]) {
    let Some(registry) = registry() else { return };
    let shared = &registry.shared;
    let Ok(region) = registry.allocate(64, AllocationKind::Plain) else {
        return;
    };
    let content: Vec<u8> = (0..64).collect();
    let uploaded = region.upload(&content).is_ok();
    let Ok(exported) = registry.export_handle(&region, 1) else {
        return;
    };
    let wire = exported.sent();
    let Ok(handle) = super::Handle::decode(&wire, &shared.key) else {
        return;
    };
    let publication = registry.listen(|_| {});
    let known = [
        handle.allocation,
        handle.generation,
        handle.region,
        publication,
    ];
    let answered = registry.requests.clone();
    let handler: Handler = Box::new(move |request| answered.answer(request));
    let mut rest = bytes;
    while let [form, tail @ ..] = rest {
        let length = match form >> 4 {
            0 => MAX_REQUEST_BYTES - TOKEN_BYTES,
            1 => usize::from(*form),
            _ => 40,
        };
        let (body, next) = tail.split_at(length.min(tail.len()));
        rest = next;
        let mut packet = shared.token.to_vec();
        packet.extend_from_slice(body);
        // The arguments follow kind, sender and number.
        for argument in 0..3 {
            let at = TOKEN_BYTES + 16 + 8 * argument;
            if form >> argument & 1 == 1
                && let Some(place) = packet.get_mut(at..at + 8)
            {
                let index = usize::from(place[0]) % known.len();
                place.copy_from_slice(&known[index].to_le_bytes());
            }
        }
        if form >> 3 & 1 == 1
            && let Some(wrapped) = packet.get_mut(TOKEN_BYTES + 40..)
            && wrapped.len() == wire.len()
        {
            wrapped.copy_from_slice(&wire);
        }
        receive(&packet, &shared.token, &handler);
    }
    registry.stop_listening(publication);
    // This rank must still hold its region whatever a peer has released.
    assert!(
        registry.export_handle(&region, 1).is_ok(),
        "a region is gone"
    );
    if uploaded {
        assert_eq!(
            region.download().ok(),
            Some(content),
            "a region was changed"
        );
    }
    drop(region);
    answer(bytes);
}

/// Registry of rank 0 of two, whose peer does not listen.
fn registry() -> Option<&'static MemoryRegistry> {
    static REGISTRY: OnceLock<Option<MemoryRegistry>> = OnceLock::new();
    let make = || {
        let device: Arc<dyn Device> =
            crate::device::open(&DeviceConfig::new(DeviceKind::Host, 0)).ok()?;
        let peer = PeerInfo::of_this_rank(&*device, b"warplink-nobody-listens");
        let peer = postcard::to_stdvec(&peer).ok()?;
        let idle = IdleMappings::default();
        let gather = |own: Vec<u8>| {
            // The second exchange is about access to each other's memory.
            let peer = if own.len() == 2 {
                own.clone()
            } else {
                peer.clone()
            };
            Ok(vec![own, peer])
        };
        MemoryRegistry::start(0, &device, b"fuzz", idle, 1 << 20, gather).ok()
    };
    REGISTRY.get_or_init(make).as_ref()
}

/// Passes a packet to the service and its answer to the peer.
fn receive(packet: &[u8], token: &[u8; TOKEN_BYTES], handler: &Handler) {
    if let Ok(request) = Request::decode(packet, token) {
        let offer = matches!(request.message, Message::Offered { .. });
        let again = Request::decode(&request.encode(token), token);
        assert_eq!(again.ok(), Some(request), "a request changed");
        assert_eq!(
            packet.len() == MAX_REQUEST_BYTES,
            offer,
            "a handle got lost"
        );
    }
    let Some([asking, answering]) = pair() else {
        return;
    };
    if rustix::net::send(&asking, packet, SendFlags::NOSIGNAL).is_ok()
        && service::answer(&answering, token, handler).is_ok()
    {
        drop(answering);
        let _ = read_answer(&asking);
    }
}

/// Parses a peer's answer.
fn answer(bytes: &[u8]) {
    let Some([asking, answering]) = pair() else {
        return;
    };
    let bytes = &bytes[..bytes.len().min(ANSWER_BYTES + 1)];
    if rustix::net::send(&answering, bytes, SendFlags::NOSIGNAL).is_ok() {
        drop(answering);
        let piece = read_answer(&asking);
        assert!(
            !matches!(piece, Ok(Some(_))),
            "a descriptor came from nowhere"
        );
    }
}

fn pair() -> Option<[std::os::fd::OwnedFd; 2]> {
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let (first, second) = socketpair(AddressFamily::UNIX, kind, flags, None).ok()?;
    Some([first, second])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_packet_damages_this_ranks_state(bytes: Vec<u8>) {
            super::service_packets(&bytes);
        }
    }
}
