//! The published offer of one end of a connection.

use crate::channel::request::Transport;
use crate::transport::NetworkOffer;
use serde::{Deserialize, Serialize};

/// Offer of one end to the other.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EndOffer {
    pub(super) transport: Transport,
    /// The slot's number.
    pub(super) slot: u64,
    pub(super) memory: OfferedMemory,
}

/// How the other end reaches this one's memory.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum OfferedMemory {
    /// By handles of the inbound words of the slot, and of the region.
    Handles([Vec<u8>; 2]),
    Network(NetworkOffer),
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::exchange::{decode, encode};
    use crate::transport::{RingShape, StagingConfig, StagingOffer};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn whatever_is_published_is_an_offer_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            match decode::<EndOffer>(&bytes) {
                Ok(offer) => {
                    let again = decode::<EndOffer>(&encode(&offer).unwrap()).unwrap();
                    prop_assert_eq!(again, offer);
                }
                Err(error) => prop_assert_eq!(error.kind(), ErrorKind::Protocol),
            }
        }
    }

    #[test]
    fn offers_survive_the_wire() {
        let shape = RingShape::new(&StagingConfig::default()).unwrap();
        let staged = |region| StagingOffer {
            shape,
            region_bytes: 1 << 40,
            region,
        };
        let network = |staging| {
            OfferedMemory::Network(NetworkOffer {
                address: vec![3; 40],
                words: vec![2; 168],
                region: vec![1; 168],
                staging,
            })
        };
        for memory in [
            OfferedMemory::Handles([vec![2; 168], vec![1; 168]]),
            network(None),
            network(Some(staged(Vec::new()))),
            network(Some(staged(vec![4; 60]))),
        ] {
            let offer = EndOffer {
                transport: Transport::Direct,
                slot: 7,
                memory,
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
}
