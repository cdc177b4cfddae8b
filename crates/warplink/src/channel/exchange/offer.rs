//! What is published for one end of a connection.

use crate::channel::request::Transport;
use crate::error::{Error, ErrorKind, Result};
use crate::transport::StagingShape;
use serde::{Deserialize, Serialize};

/// What one end tells the other.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct EndOffer {
    pub(super) transport: Transport,
    /// The handle of the region; its key, over the network.
    pub(super) region: Vec<u8>,
    /// The handle, or the key, of the inbound words of this end's slot.
    pub(super) inbound: Vec<u8>,
    /// The slot's number.
    pub(super) slot: u64,
    /// Where this rank is found, over the network; else empty.
    pub(super) address: Vec<u8>,
    /// Over the network, where it does not reach the region: what the keys are for instead.
    pub(super) staging: Option<StagingOffer>,
}

/// Rings of staging memory: the keys are those of the ring and of its control memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StagingOffer {
    pub(super) shape: StagingShape,
    /// Bytes of the region itself.
    pub(super) region_bytes: u64,
}

impl EndOffer {
    pub(super) fn encode(&self) -> Result<Vec<u8>> {
        postcard::to_stdvec(self).map_err(|error| {
            Error::new(ErrorKind::Internal, error.to_string())
                .with_operation("encode a connection's end")
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
            transport: Transport::Direct,
            region: vec![1; 168],
            inbound: vec![2; 168],
            slot: 7,
            address: vec![3; 40],
            staging: None,
        };
        let wire = offer.encode().unwrap();
        assert_eq!(EndOffer::decode(&wire).unwrap(), offer);
        let error = EndOffer::decode(&wire[..wire.len() - 1]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol);
    }
}
