//! The published offer of one end of a transfer.

use crate::p2p::path::{Flow, Path};
use crate::p2p::protocol::Protocol;
use serde::{Deserialize, Serialize};

/// Offer of one end to the other, under its key in the store.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EndOffer {
    pub(super) bytes: u64,
    pub(super) protocol: Protocol,
    pub(super) path: Path,
    /// Flow that this end selected for the path.
    pub(super) flow: Flow,
    /// Whether other work than this end's copy stores the bytes.
    pub(super) stored: bool,
    /// Handle of this end's scratch memory, if it has any.
    pub(super) scratch: Option<Vec<u8>>,
    /// Handle of the buffer, if the other end copies.
    pub(super) buffer: Option<Vec<u8>>,
    /// Handle of the inbound words of this end's slot.
    pub(super) inbound: Vec<u8>,
    /// The slot's number.
    pub(super) slot: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::exchange::{decode, encode};

    #[test]
    fn offers_survive_the_wire() {
        let offer = EndOffer {
            bytes: 4096,
            protocol: Protocol::Get,
            path: Path::Multiprocessors,
            flow: Flow::Packets {
                blocks: 4,
                threads: 128,
            },
            stored: false,
            scratch: Some(vec![3; 168]),
            buffer: Some(vec![1; 168]),
            inbound: vec![2; 168],
            slot: 7,
        };
        let wire = encode(&offer).unwrap();
        assert_eq!(decode::<EndOffer>(&wire).unwrap(), offer);
        let longer = [&wire[..], &[0]].concat();
        for altered in [&wire[..wire.len() - 1], &longer] {
            let error = decode::<EndOffer>(altered).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol);
        }
    }
}
