//! Messages between the memory services of a machine's ranks, as fixed-size records.

use super::handle::HANDLE_BYTES;
use crate::error::{Error, Rank, Result};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Maximum length of a request: a record, followed by a handle if something is published.
pub(super) const MAX_REQUEST_BYTES: usize = size_of::<Record>() + HANDLE_BYTES;

/// Length of the token in every request.
pub(super) const TOKEN_BYTES: usize = 16;

/// A request or notice from one rank to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// To the owner: request for a piece of an allocation.
    Piece {
        allocation: u64,
        generation: u64,
        index: u64,
    },
    /// From the owner: request to unmap an allocation.
    Unmap { allocation: u64, generation: u64 },
    /// To the owner: handles are returned. The peer no longer uses their `region`, though its allocation may still be
    /// mapped; with region 0, it holds no mapping opened from them.
    Released {
        generation: u64,
        region: u64,
        handles: u64,
    },
    /// To a peer: its signal slot will not be written any more.
    SlotReleased { slot: u64 },
    /// Offers a peer an entry that this rank publishes. The number of the publication is the receiver's.
    Offered {
        publication: u64,
        entry: u64,
        handle: [u8; HANDLE_BYTES],
    },
    /// About an entry of a publication; its number is the receiver's.
    Published {
        publication: u64,
        entry: u64,
        notice: Notice,
    },
}

/// Notices between ranks about a published allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    /// To the owner: the peer has mapped it.
    Taken,
    /// To the owner: the peer cannot map it.
    Refused,
    /// The owner's launches that use it are complete; unmap it.
    Withdrawn,
    /// To the owner: the peer has unmapped it.
    LetGo,
}

/// A message and its sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) from: Rank,
    /// Sequence number among the notices of `from` to the receiver, starting from 1, so that retransmissions
    /// are ignored; 0 for idempotent requests.
    pub(super) number: u64,
    pub(super) message: Message,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Record {
    token: [u8; TOKEN_BYTES],
    kind: U32,
    from: U32,
    number: U64,
    arguments: [U64; 3],
}

impl Message {
    fn to_wire(self) -> (u32, [u64; 3]) {
        match self {
            Self::Piece {
                allocation,
                generation,
                index,
            } => (1, [allocation, generation, index]),
            Self::Unmap {
                allocation,
                generation,
            } => (2, [allocation, generation, 0]),
            Self::Released {
                generation,
                region,
                handles,
            } => (3, [generation, region, handles]),
            Self::SlotReleased { slot } => (4, [slot, 0, 0]),
            Self::Offered {
                publication, entry, ..
            } => (5, [publication, entry, 0]),
            Self::Published {
                publication,
                entry,
                notice,
            } => {
                let kind = match notice {
                    Notice::Taken => 6,
                    Notice::Refused => 7,
                    Notice::Withdrawn => 8,
                    Notice::LetGo => 9,
                };
                (kind, [publication, entry, 0])
            }
        }
    }

    fn from_wire(
        kind: u32,
        [first, second, third]: [u64; 3],
        handle: Option<[u8; HANDLE_BYTES]>,
    ) -> Option<Self> {
        let published = |notice| Self::Published {
            publication: first,
            entry: second,
            notice,
        };
        // The length of a request depends on its kind, so reject a handle where there should be none.
        if let Some(handle) = handle {
            return (kind == 5).then_some(Self::Offered {
                publication: first,
                entry: second,
                handle,
            });
        }
        Some(match kind {
            6 => published(Notice::Taken),
            7 => published(Notice::Refused),
            8 => published(Notice::Withdrawn),
            9 => published(Notice::LetGo),
            1 => Self::Piece {
                allocation: first,
                generation: second,
                index: third,
            },
            2 => Self::Unmap {
                allocation: first,
                generation: second,
            },
            3 => Self::Released {
                generation: first,
                region: second,
                handles: third,
            },
            4 => Self::SlotReleased { slot: first },
            _ => return None,
        })
    }
}

impl Request {
    /// Encodes the request.
    pub(super) fn encode(&self, token: &[u8; TOKEN_BYTES]) -> Vec<u8> {
        let (kind, arguments) = self.message.to_wire();
        let record = Record {
            token: *token,
            kind: kind.into(),
            from: (self.from as u32).into(),
            number: self.number.into(),
            arguments: arguments.map(U64::new),
        };
        let mut bytes = record.as_bytes().to_vec();
        if let Message::Offered { handle, .. } = self.message {
            bytes.extend_from_slice(&handle);
        }
        bytes
    }

    /// Decodes a request.
    ///
    /// # Errors
    /// [`ErrorKind::Protocol`] if length, token or kind is wrong.
    pub(super) fn decode(bytes: &[u8], token: &[u8; TOKEN_BYTES]) -> Result<Self> {
        let refuse = |what: String| Error::protocol(what).with_operation("read a request");
        let wrong_length = || {
            refuse(format!(
                "the request has {} bytes; expected {}, or {MAX_REQUEST_BYTES} with a handle",
                bytes.len(),
                size_of::<Record>()
            ))
        };
        let (record, rest) = Record::read_from_prefix(bytes).map_err(|_| wrong_length())?;
        let handle = match rest {
            [] => None,
            rest => Some(<[u8; HANDLE_BYTES]>::try_from(rest).map_err(|_| wrong_length())?),
        };
        // Constant-time comparison, so that timing does not reveal a matching prefix.
        let difference = record
            .token
            .iter()
            .zip(token)
            .fold(0, |all, (a, b)| all | (a ^ b));
        if difference != 0 {
            return Err(refuse(
                "the request does not carry the job's token".to_owned(),
            ));
        }
        let kind = record.kind.get();
        let message = Message::from_wire(kind, record.arguments.map(U64::get), handle);
        let message = message.ok_or_else(|| {
            refuse(format!(
                "unknown kind of request {kind}; expected 1 to 9, and 5 with a handle"
            ))
        })?;
        Ok(Self {
            from: record.from.get() as Rank,
            number: record.number.get(),
            message,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    const TOKEN: [u8; TOKEN_BYTES] = [5; TOKEN_BYTES];

    #[test]
    fn every_message_survives_the_wire() {
        let messages = [
            Message::Piece {
                allocation: 7,
                generation: 9,
                index: 3,
            },
            Message::Unmap {
                allocation: 1 << 40,
                generation: 2,
            },
            Message::Released {
                generation: 3,
                region: 5,
                handles: u64::MAX,
            },
            Message::SlotReleased { slot: 11 },
            Message::Offered {
                publication: 3,
                entry: 1023,
                handle: [7; HANDLE_BYTES],
            },
        ];
        let notices = [
            Notice::Taken,
            Notice::Refused,
            Notice::Withdrawn,
            Notice::LetGo,
        ];
        let published = notices.map(|notice| Message::Published {
            publication: 3,
            entry: 1023,
            notice,
        });
        let messages = messages.into_iter().chain(published);
        for message in messages {
            let request = Request {
                from: 3,
                number: 1 << 33,
                message,
            };
            assert_eq!(
                Request::decode(&request.encode(&TOKEN), &TOKEN).unwrap(),
                request
            );
        }
    }

    #[test]
    fn wrong_lengths_tokens_and_kinds_are_refused() {
        let request = Request {
            from: 0,
            number: 4,
            message: Message::SlotReleased { slot: 1 },
        };
        let wire = request.encode(&TOKEN);
        assert!(Request::decode(&wire[1..], &TOKEN).is_err());
        assert!(Request::decode(&wire, &[6; TOKEN_BYTES]).is_err());
        let mut unknown = wire.clone();
        unknown[TOKEN_BYTES] = 99;
        let error = Request::decode(&unknown, &TOKEN).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol);
        assert!(error.to_string().contains("kind of request 99"), "{error}");
        // A superfluous handle, half a handle, and a missing one.
        let mut longer = wire.clone();
        longer.extend([0; HANDLE_BYTES]);
        assert!(Request::decode(&longer, &TOKEN).is_err());
        longer[TOKEN_BYTES] = 5;
        assert!(Request::decode(&longer, &TOKEN).is_ok());
        assert!(Request::decode(&longer[..wire.len() + 9], &TOKEN).is_err());
        assert!(Request::decode(&longer[..wire.len()], &TOKEN).is_err());
    }
}
