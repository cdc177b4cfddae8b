//! What is published for one end of a transfer.

use crate::error::{Error, ErrorKind, Result};
use crate::p2p::protocol::Protocol;
use serde::{Deserialize, Serialize};

/// What one end tells the other.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct EndOffer {
    pub(super) bytes: u64,
    pub(super) protocol: Protocol,
    /// The handle of the buffer, where the other end copies.
    pub(super) buffer: Option<Vec<u8>>,
    /// The handle of the inbound words of this end's slot.
    pub(super) inbound: Vec<u8>,
    /// The slot's number.
    pub(super) slot: u64,
}

/// What stands under an end's key in the store.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum EndMessage {
    Offer(EndOffer),
    /// The end will not come.
    Refusal {
        reason: String,
    },
}

impl EndMessage {
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
    fn offers_and_refusals_survive_the_wire() {
        let offer = EndMessage::Offer(EndOffer {
            bytes: 4096,
            protocol: Protocol::Get,
            buffer: Some(vec![1; 168]),
            inbound: vec![2; 168],
            slot: 7,
        });
        let refusal = EndMessage::Refusal {
            reason: "no input".to_owned(),
        };
        for message in [offer, refusal] {
            let wire = message.encode().unwrap();
            assert_eq!(EndMessage::decode(&wire).unwrap(), message);
            let error = EndMessage::decode(&wire[..wire.len() - 1]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol);
        }
    }
}
