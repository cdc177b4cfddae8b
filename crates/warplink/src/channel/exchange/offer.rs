//! The published offer of one end of a connection.

use crate::channel::request::Transport;
use crate::transport::RingShape;
use serde::{Deserialize, Serialize};

/// Offer of one end to the other.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EndOffer {
    pub(super) transport: Transport,
    /// Handle of the region, or its key over the network.
    pub(super) region: Vec<u8>,
    /// Handle of the inbound words of this end's slot, or their key over the network.
    pub(super) inbound: Vec<u8>,
    /// The slot's number.
    pub(super) slot: u64,
    /// Address of this rank over the network; else empty.
    pub(super) address: Vec<u8>,
    /// Staging rings, if the network cannot reach the region: the keys above are then those of the rings.
    pub(super) staging: Option<StagingOffer>,
}

/// Rings of staging memory: the keys are those of the ring and of its control memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StagingOffer {
    pub(super) shape: RingShape,
    /// Length of the region itself, in bytes.
    pub(super) region_bytes: u64,
    /// Its key, if the network library can reach it without staging; else empty.
    pub(super) region: Vec<u8>,
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::exchange::{decode, encode};
    use crate::transport::StagingConfig;
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
        for staging in [None, Some(staged(Vec::new())), Some(staged(vec![4; 60]))] {
            let offer = EndOffer {
                transport: Transport::Direct,
                region: vec![1; 168],
                inbound: vec![2; 168],
                slot: 7,
                address: vec![3; 40],
                staging,
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
