//! The encrypted channel between a member and the store: the Noise protocol with a pre-shared key, by `snow`.
//!
//! In the pattern `NNpsk0` neither end has a static key: both authenticate by holding the job's secret, and a Diffie-Hellman
//! exchange gives every connection its own keys, so a recorded connection cannot be replayed, nor decrypted by somebody who
//! learns the secret later.
//!
//! Each direction of a connection is a sequence of records: a length (u16, little-endian) and as many bytes. The records of
//! the handshake are in the clear (`handshake.rs`). Those after it are ciphertext and tag, and their plaintexts together
//! are frames, each of which begins with a record:
//!
//! ```text
//! u32 little-endian   bytes of the body
//! u64 little-endian   number of the request that this is or answers; 0 where there is none
//! [u8]                the body
//! ```
//!
//! The nonce of a record is its number in its direction. An altered, replayed, missing or reordered record therefore fails
//! to decrypt, which ends the connection.

use super::message::MAX_BODY;
use super::secret::Secret;
use crate::error::{Error, ErrorKind, Result};
use snow::{Builder, HandshakeState, StatelessTransportState};
use std::io::Read;
use std::sync::Arc;

/// Bytes of each of the two handshake messages: an ephemeral public key, and the tag of an empty payload.
pub(super) const HANDSHAKE_MESSAGE: usize = 32 + TAG;
// `psk0` mixes the secret in before the first message, so the store can reject a stranger on that message alone.
const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_SHA256";
/// Bytes that encryption adds to a record.
const TAG: usize = 16;
/// The largest plaintext of a record: Noise, like the length, limits a message to 65,535 bytes.
const MAX_PLAINTEXT: usize = u16::MAX as usize - TAG;
/// Bytes of a frame before its body.
const HEADER: usize = 12;

/// A frame that arrived.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) id: u64,
    pub(crate) body: Vec<u8>,
}

/// Begins the handshake, as the joiner, who sends the first message, or as the store. The messages authenticate `prologue`,
/// which both ends must know.
pub(super) fn begin(secret: &Secret, prologue: &[u8], is_joiner: bool) -> Result<HandshakeState> {
    // Derived, since the secret itself is the key of other proofs.
    let key = secret.proof("warplink channel", &[])?;
    let builder = PATTERN.parse().map(Builder::new).map_err(internal)?;
    let builder = builder.psk(0, &key).map_err(internal)?;
    let builder = builder.prologue(prologue).map_err(internal)?;
    let state = if is_joiner {
        builder.build_initiator()
    } else {
        builder.build_responder()
    };
    state.map_err(internal)
}

/// An error of the library that no input can cause.
pub(super) fn internal(error: snow::Error) -> Error {
    Error::internal(format!("the Noise library failed: {error}"))
}

/// The error of a stream that ends too early.
fn truncated() -> Error {
    Error::protocol("the connection ended in the middle of a frame")
}

/// Adds a record in the clear to `bytes`. It must be shorter than 64 KiB.
pub(super) fn push_record(bytes: &mut Vec<u8>, record: &[u8]) {
    bytes.extend_from_slice(&(record.len() as u16).to_le_bytes());
    bytes.extend_from_slice(record);
}

/// Reads one record; `None` when the stream ends before it. Memory grows with the bytes that arrive, not with the length that
/// was announced.
pub(super) fn read_record(reader: &mut impl Read) -> Result<Option<Vec<u8>>> {
    let mut next = |count: usize| {
        let mut bytes = Vec::new();
        let read = reader.take(count as u64).read_to_end(&mut bytes);
        read.map_err(|error| Error::io("read a frame", &error))?;
        Ok::<_, Error>(bytes)
    };
    let length = match next(2)?[..] {
        [low, high] => usize::from(u16::from_le_bytes([low, high])),
        // Only between records is the end of the stream an orderly close; after half a length it is not.
        [] => return Ok(None),
        _ => return Err(truncated()),
    };
    let record = next(length)?;
    if record.len() < length {
        return Err(truncated());
    }
    Ok(Some(record))
}

/// The two directions of one end.
pub(crate) struct Channel {
    pub(crate) sealer: Sealer,
    pub(crate) opener: Opener,
}

impl Channel {
    /// The channel after both handshake messages.
    pub(super) fn new(handshake: HandshakeState) -> Result<Self> {
        let keys = handshake
            // Stateless, with the nonces counted here: one thread can seal while another opens, without a lock in
            // common.
            .into_stateless_transport_mode()
            .map_err(internal)?;
        let keys = Arc::new(keys);
        Ok(Self {
            sealer: Sealer {
                keys: keys.clone(),
                records: 0,
            },
            opener: Opener { keys, records: 0 },
        })
    }
}

/// Encrypts the frames that this end sends.
pub(crate) struct Sealer {
    keys: Arc<StatelessTransportState>,
    /// Records sealed so far: the nonce of the next.
    records: u64,
}

impl Sealer {
    /// The records of the next frame. They must be sent in the order of the calls.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] when the body is too long; nothing was sealed then.
    pub(crate) fn seal(&mut self, id: u64, body: &[u8]) -> Result<Vec<u8>> {
        if body.len() > MAX_BODY {
            return Err(Error::invalid(format!(
                "a message has {} bytes; expected at most {MAX_BODY}",
                body.len()
            )));
        }
        let length = (body.len() as u32).to_le_bytes();
        // Header and body as one plaintext: a short message is a single record, with one tag and one write.
        let frame = [&length[..], &id.to_le_bytes(), body].concat();
        let records = frame.len().div_ceil(MAX_PLAINTEXT);
        let mut sealed = Vec::with_capacity(frame.len() + records * (2 + TAG));
        for plaintext in frame.chunks(MAX_PLAINTEXT) {
            let length = plaintext.len() + TAG;
            sealed.extend_from_slice(&(length as u16).to_le_bytes());
            let begin = sealed.len();
            sealed.resize(begin + length, 0);
            let record = &mut sealed[begin..];
            let written = self.keys.write_message(self.records, plaintext, record);
            written.map_err(internal)?;
            self.records += 1;
        }
        Ok(sealed)
    }
}

/// Decrypts the frames that this end receives.
pub(crate) struct Opener {
    keys: Arc<StatelessTransportState>,
    /// Records opened so far: the nonce of the next.
    records: u64,
}

impl Opener {
    /// Reads the next frame; `None` when the stream ends before it.
    ///
    /// # Errors
    /// [`ErrorKind::Authentication`] for a record that does not decrypt; [`ErrorKind::Protocol`] for a body longer than
    /// [`MAX_BODY`] and for a stream that ends in the middle; an operating-system error as the reader gives it. The
    /// connection cannot be used after an error.
    pub(crate) fn read(&mut self, reader: &mut impl Read) -> Result<Option<Frame>> {
        let Some(first) = self.open(reader)? else {
            return Ok(None);
        };
        let malformed = |text: String| Error::protocol(text);
        let Some((&[l0, l1, l2, l3, ref id @ ..], rest)) = first.split_first_chunk::<HEADER>()
        else {
            let text = format!("a frame has {} bytes; expected {HEADER}", first.len());
            return Err(malformed(text));
        };
        let length = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
        if length > MAX_BODY {
            return Err(malformed(format!(
                "a frame announces {length} bytes; expected at most {MAX_BODY}"
            )));
        }
        // Grows record by record: a frame that only announces `MAX_BODY` bytes allocates none of them.
        let mut body = rest.to_vec();
        while body.len() < length {
            body.extend(self.open(reader)?.ok_or_else(truncated)?);
        }
        if body.len() > length {
            return Err(malformed(format!("a frame is longer than {length} bytes")));
        }
        Ok(Some(Frame {
            id: u64::from_le_bytes(*id),
            body,
        }))
    }

    /// Reads and decrypts the next record.
    fn open(&mut self, reader: &mut impl Read) -> Result<Option<Vec<u8>>> {
        let Some(record) = read_record(reader)? else {
            return Ok(None);
        };
        // A record shorter than a tag must fail to decrypt below, not underflow here.
        let mut plaintext = vec![0; record.len().saturating_sub(TAG)];
        let opened = self
            .keys
            .read_message(self.records, &record, &mut plaintext);
        opened.map_err(|_| {
            Error::new(
                ErrorKind::Authentication,
                "a frame was altered or replayed; expected the sender's next frame",
            )
        })?;
        self.records += 1;
        Ok(Some(plaintext))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Both ends of a connection, or none where the store refuses the first message.
    fn connect(secrets: [u8; 2], prologues: [&[u8]; 2]) -> Option<(Channel, Channel)> {
        let [joiner, store] = secrets.map(|byte| Secret::from_bytes([byte; 32]));
        let mut joiner = begin(&joiner, prologues[0], true).unwrap();
        let mut store = begin(&store, prologues[1], false).unwrap();
        let (mut message, mut payload) = ([0; HANDSHAKE_MESSAGE], [0; HANDSHAKE_MESSAGE]);
        joiner.write_message(&[], &mut message).unwrap();
        store.read_message(&message, &mut payload).ok()?;
        store.write_message(&[], &mut message).unwrap();
        joiner.read_message(&message, &mut payload).unwrap();
        let [joiner, store] = [joiner, store].map(|end| Channel::new(end).unwrap());
        Some((joiner, store))
    }

    fn pair() -> (Sealer, Opener) {
        let (joiner, store) = connect([7; 2], [b""; 2]).unwrap();
        (joiner.sealer, store.opener)
    }

    fn kind(result: Result<Option<Frame>>) -> ErrorKind {
        result.unwrap_err().kind()
    }

    proptest! {
        #[test]
        fn frames_survive_in_order(frames: Vec<(u64, Vec<u8>)>) {
            let (mut sealer, mut opener) = pair();
            let mut bytes = Vec::new();
            for (id, body) in &frames {
                bytes.extend(sealer.seal(*id, body).unwrap());
            }
            let mut reader = &bytes[..];
            for (id, body) in frames {
                prop_assert_eq!(opener.read(&mut reader).unwrap(), Some(Frame { id, body }));
            }
            prop_assert_eq!(opener.read(&mut reader).unwrap(), None);
        }

        #[test]
        fn arbitrary_records_are_errors(bytes: Vec<u8>) {
            prop_assume!(!bytes.is_empty());
            prop_assert!(pair().1.read(&mut &bytes[..]).is_err());
        }
    }

    #[test]
    fn long_frames_take_several_records_in_both_directions() {
        let (joiner, store) = connect([7; 2], [b""; 2]).unwrap();
        for (mut from, mut to) in [(joiner.sealer, store.opener), (store.sealer, joiner.opener)] {
            for length in [MAX_PLAINTEXT - HEADER, MAX_PLAINTEXT, 1 << 20] {
                let body: Vec<u8> = (0..length).map(|at| (at / 7) as u8).collect();
                let bytes = from.seal(3, &body).unwrap();
                let read = to.read(&mut &bytes[..]).unwrap();
                assert!(read == Some(Frame { id: 3, body }), "{length} bytes");
            }
        }
        let too_long = pair().0.seal(3, &vec![0; MAX_BODY + 1]).unwrap_err();
        assert_eq!(too_long.kind(), ErrorKind::InvalidArgument);
    }

    #[test]
    fn every_altered_bit_and_every_truncation_is_refused() {
        let (mut sealer, opener) = pair();
        let bytes = sealer.seal(9, b"a body").unwrap();
        let open = |bytes: &[u8]| {
            let keys = opener.keys.clone();
            Opener { keys, records: 0 }.read(&mut &bytes[..])
        };
        assert!(open(&bytes).is_ok());
        for bit in 0..8 * bytes.len() {
            let mut altered = bytes.clone();
            altered[bit / 8] ^= 1 << (bit % 8);
            assert!(
                matches!(
                    kind(open(&altered)),
                    ErrorKind::Authentication | ErrorKind::Protocol
                ),
                "bit {bit}"
            );
        }
        for length in 1..bytes.len() {
            let read = open(&bytes[..length]);
            assert_eq!(kind(read), ErrorKind::Protocol, "{length} bytes");
        }
    }

    #[test]
    fn replayed_missing_and_reordered_frames_are_refused() {
        for (order, good) in [([0, 1], 2), ([0, 0], 1), ([1, 0], 0), ([1, 1], 0)] {
            let (mut sealer, mut opener) = pair();
            let frames = [b"1", b"2"].map(|body| sealer.seal(1, body).unwrap());
            let bytes = order.map(|frame| frames[frame].clone()).concat();
            let mut reader = &bytes[..];
            let read = (0..2).take_while(|_| opener.read(&mut reader).is_ok());
            assert_eq!(read.count(), good, "{order:?}");
        }
    }

    #[test]
    fn frames_of_another_connection_are_refused() {
        let bytes = pair().0.seal(1, b"x").unwrap();
        let read = pair().1.read(&mut &bytes[..]);
        assert_eq!(kind(read), ErrorKind::Authentication);
    }

    #[test]
    fn another_secret_and_another_prologue_are_refused_at_the_first_message() {
        let hellos: [&[u8]; 2] = [b"rank 1", b"rank 2"];
        assert!(connect([1, 1], [hellos[0]; 2]).is_some());
        assert!(connect([1, 2], [hellos[0]; 2]).is_none());
        assert!(connect([1, 1], hellos).is_none());
    }

    /// An authenticated peer that breaks the protocol.
    #[test]
    fn malformed_frames_are_refused() {
        let (length, id) = (MAX_BODY as u32 + 1, [0; 8]);
        let too_long = [&length.to_le_bytes()[..], &id].concat();
        let surplus = [&1u32.to_le_bytes()[..], &id, b"ab"].concat();
        for frame in [&b"short"[..], &too_long, &surplus] {
            let (sealer, mut opener) = pair();
            let mut record = vec![0; frame.len() + TAG];
            sealer.keys.write_message(0, frame, &mut record).unwrap();
            let mut bytes = Vec::new();
            push_record(&mut bytes, &record);
            assert_eq!(kind(opener.read(&mut &bytes[..])), ErrorKind::Protocol);
        }
    }
}
