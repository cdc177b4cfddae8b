//! What is published for one end of a transfer.

use crate::error::{Error, ErrorKind, Result};
use crate::p2p::path::{Flow, Path};
use crate::p2p::protocol::Protocol;
use serde::{Deserialize, Serialize};

/// What one end tells the other, under its key in the store.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct EndOffer {
    pub(super) bytes: u64,
    pub(super) protocol: Protocol,
    pub(super) path: Path,
    /// What follows from the path here.
    pub(super) flow: Flow,
    /// Whether something else than this end's copy stores the bytes.
    pub(super) stored: bool,
    /// The handle of this end's scratch memory, where there is one.
    pub(super) scratch: Option<Vec<u8>>,
    /// The handle of the buffer, where the other end copies.
    pub(super) buffer: Option<Vec<u8>>,
    /// The handle of the inbound words of this end's slot.
    pub(super) inbound: Vec<u8>,
    /// The slot's number.
    pub(super) slot: u64,
}

impl EndOffer {
    pub(super) fn encode(&self) -> Result<Vec<u8>> {
        postcard::to_stdvec(self).map_err(|error| {
            Error::new(ErrorKind::Internal, error.to_string())
                .with_operation("encode a transfer's end")
        })
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self> {
        postcard::from_bytes(bytes).map_err(|error| {
            Error::new(
                ErrorKind::Protocol,
                format!("the peer's end is malformed: {error}"),
            )
            .with_help("run the same version of Warplink on every rank")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let wire = offer.encode().unwrap();
        assert_eq!(EndOffer::decode(&wire).unwrap(), offer);
        let error = EndOffer::decode(&wire[..wire.len() - 1]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol);
    }
}
