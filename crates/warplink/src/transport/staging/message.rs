//! Messages of a staged connection: the header next to each chunk.

use crate::device::At;
use crate::error::{Error, Result};

/// Words of a header.
pub(super) const WORDS: usize = 7;

/// Kinds of messages. Both ends run the same version, so the numbers may change between versions.
const PUT: u64 = 1;
const SIGNAL: u64 = 2;
const GET: u64 = 3;
const GOT: u64 = 4;
const END: u64 = 5;

/// A message between two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StagingMessage {
    /// The chunk's data belongs at this location.
    Put { at: At, bytes: u64 },
    /// Set the inbound word, after all earlier chunks.
    Signal { value: u64 },
    /// Send the data at this location.
    Get { id: u64, at: At, bytes: u64 },
    /// The chunk contains the requested data, from this offset.
    Got { id: u64, offset: u64, bytes: u64 },
    /// Last message.
    End,
}

impl StagingMessage {
    /// Payload bytes in its chunk.
    pub(super) fn payload(&self) -> u64 {
        match self {
            Self::Put { bytes, .. } | Self::Got { bytes, .. } => *bytes,
            Self::Signal { .. } | Self::Get { .. } | Self::End => 0,
        }
    }

    /// Encodes the header of message `number`.
    pub(super) fn encode(&self, number: u64) -> [u64; WORDS] {
        let [kind, region, offset, bytes, value] = match *self {
            Self::Put { at, bytes } => [PUT, at.region.into(), at.offset, bytes, 0],
            Self::Signal { value } => [SIGNAL, 0, 0, 0, value],
            Self::Get { id, at, bytes } => [GET, at.region.into(), at.offset, bytes, id],
            Self::Got { id, offset, bytes } => [GOT, 0, offset, bytes, id],
            Self::End => [END, 0, 0, 0, 0],
        };
        // Number and complement enclose the header: one that is stale or only partly written does not decode.
        [number, kind, region, offset, bytes, value, !number]
    }

    /// Decodes and validates the header of message `number`.
    ///
    /// # Errors
    /// [`ErrorKind::Protocol`] for headers that no end sends.
    pub(super) fn decode(header: [u64; WORDS], number: u64) -> Result<Self> {
        let [found, kind, region, offset, bytes, value, check] = header;
        if found != number || check != !number {
            return Err(malformed(format!(
                "a header is that of message {found}; expected {number}"
            )));
        }
        let place = || -> Result<At> {
            let region = u32::try_from(region)
                .map_err(|_| malformed(format!("a message names region {region}")))?;
            Ok(At { region, offset })
        };
        let message = match kind {
            PUT => Self::Put {
                at: place()?,
                bytes,
            },
            SIGNAL => Self::Signal { value },
            GET => Self::Get {
                id: value,
                at: place()?,
                bytes,
            },
            GOT => Self::Got {
                id: value,
                offset,
                bytes,
            },
            END => Self::End,
            _ => {
                return Err(malformed(format!(
                    "a message has the unknown kind {kind}; expected 1 to {END}"
                )));
            }
        };
        // Unused fields must be zero.
        if message.encode(number) != header {
            return Err(malformed(format!(
                "a message of kind {kind} has unexpected fields"
            )));
        }
        Ok(message)
    }
}

/// The error for a protocol violation by the peer.
pub(super) fn malformed(what: String) -> Error {
    Error::protocol(what).with_help("run the same version of Warplink on every rank")
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::ErrorKind;
    use proptest::prelude::*;

    fn messages() -> impl Strategy<Value = StagingMessage> {
        let place = || any::<(u32, u64)>().prop_map(At::from);
        prop_oneof![
            (place(), any::<u64>()).prop_map(|(at, bytes)| StagingMessage::Put { at, bytes }),
            any::<u64>().prop_map(|value| StagingMessage::Signal { value }),
            (any::<u64>(), place(), any::<u64>()).prop_map(|(id, at, bytes)| StagingMessage::Get {
                id,
                at,
                bytes
            }),
            any::<(u64, u64, u64)>().prop_map(|(id, offset, bytes)| StagingMessage::Got {
                id,
                offset,
                bytes
            }),
            Just(StagingMessage::End),
        ]
    }

    proptest! {
        #[test]
        fn messages_survive_and_keep_their_numbers(message in messages(), number: u64) {
            let header = message.encode(number);
            prop_assert_eq!(StagingMessage::decode(header, number).unwrap(), message);
            let other = StagingMessage::decode(header, number.wrapping_add(1)).unwrap_err();
            prop_assert_eq!(other.kind(), ErrorKind::Protocol);
        }

        #[test]
        fn any_header_is_a_message_or_an_error(
            mut header: [u64; WORDS], kind in 0_u64..8, number: u64
        ) {
            (header[0], header[1], header[6]) = (number, kind, !number);
            match StagingMessage::decode(header, number) {
                Ok(message) => prop_assert_eq!(message.encode(number), header),
                Err(error) => prop_assert_eq!(error.kind(), ErrorKind::Protocol),
            }
        }
    }
}
