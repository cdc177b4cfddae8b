//! Frames that prove that they come from the other end of the connection, whole and in order.
//!
//! After the handshake every frame is followed by a tag: a keyed hash over the number of frames
//! before it in this direction, its request and its body. An altered, replayed, missing or
//! reordered frame has the wrong tag, and the connection ends. Nothing is encrypted.

use super::frame::{self, Frame};
use super::secret::Proof;
use crate::error::{Error, ErrorKind, Result};
use hmac::{Hmac, Mac};
use sha2::Sha256;
use std::io::Read;

/// Bytes of a tag.
const TAG: usize = 16;

/// The key of one direction, and how many frames went that way.
struct Direction {
    keyed: Hmac<Sha256>,
    frames: u64,
}

impl Direction {
    fn new(key: &Proof) -> Result<Self> {
        let keyed = Hmac::new_from_slice(key)
            .map_err(|_| Error::new(ErrorKind::Internal, "HMAC rejected a key of 32 bytes"))?;
        Ok(Self { keyed, frames: 0 })
    }

    /// The hash of the next frame.
    fn next(&mut self, id: u64, body: &[u8]) -> Hmac<Sha256> {
        let mut mac = self.keyed.clone();
        mac.update(&self.frames.to_le_bytes());
        mac.update(&id.to_le_bytes());
        mac.update(&(body.len() as u64).to_le_bytes());
        mac.update(body);
        self.frames += 1;
        mac
    }
}

/// Seals the frames that this end sends.
pub(crate) struct Sealer(Direction);

impl Sealer {
    pub(crate) fn new(key: &Proof) -> Result<Self> {
        Direction::new(key).map(Self)
    }

    /// The bytes of the next frame.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] when the body is too long; the next frame is still the next.
    pub(crate) fn seal(&mut self, id: u64, body: &[u8]) -> Result<Vec<u8>> {
        let mut bytes = frame::encode(id, body, TAG)?;
        let tag = self.0.next(id, body).finalize().into_bytes();
        bytes.extend_from_slice(&tag[..TAG]);
        Ok(bytes)
    }
}

/// Checks the frames that this end receives.
pub(crate) struct Opener(Direction);

impl Opener {
    pub(crate) fn new(key: &Proof) -> Result<Self> {
        Direction::new(key).map(Self)
    }

    /// Reads the next frame, with a body of at most `limit` bytes; `None` when the stream ends
    /// before it. Tags are compared in constant time.
    ///
    /// # Errors
    /// As [`frame::read`], and [`ErrorKind::Authentication`] for a wrong tag. The connection cannot
    /// be used after an error.
    pub(crate) fn read(&mut self, reader: &mut impl Read, limit: usize) -> Result<Option<Frame>> {
        let Some(frame) = frame::read(reader, limit)? else {
            return Ok(None);
        };
        let mut tag = [0; TAG];
        reader
            .read_exact(&mut tag)
            .map_err(|error| match error.kind() {
                std::io::ErrorKind::UnexpectedEof => frame::truncated(),
                _ => Error::io("read a frame", &error),
            })?;
        match self
            .0
            .next(frame.id, &frame.body)
            .verify_truncated_left(&tag)
        {
            Ok(()) => Ok(Some(frame)),
            Err(_) => Err(Error::new(
                ErrorKind::Authentication,
                "a frame was altered or replayed; expected the sender's tag",
            )),
        }
    }
}

/// Both directions of one end.
pub(crate) struct Seals {
    pub(crate) sealer: Sealer,
    pub(crate) opener: Opener,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::frame::MAX_BODY;
    use proptest::prelude::*;

    fn pair() -> (Sealer, Opener) {
        let key = [7; 32];
        (Sealer::new(&key).unwrap(), Opener::new(&key).unwrap())
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
                let read = opener.read(&mut reader, MAX_BODY).unwrap();
                prop_assert_eq!(read, Some(Frame { id, body }));
            }
            prop_assert_eq!(opener.read(&mut reader, MAX_BODY).unwrap(), None);
        }
    }

    #[test]
    fn every_altered_bit_and_every_truncation_is_refused() {
        let bytes = pair().0.seal(9, b"a body").unwrap();
        for bit in 0..8 * bytes.len() {
            let mut altered = bytes.clone();
            altered[bit / 8] ^= 1 << (bit % 8);
            let read = pair().1.read(&mut &altered[..], MAX_BODY);
            assert!(
                matches!(kind(read), ErrorKind::Authentication | ErrorKind::Protocol),
                "bit {bit}"
            );
        }
        for length in 1..bytes.len() {
            let read = pair().1.read(&mut &bytes[..length], MAX_BODY);
            assert_eq!(kind(read), ErrorKind::Protocol, "{length} bytes");
        }
    }

    #[test]
    fn replayed_missing_and_reordered_frames_are_refused() {
        let (mut sealer, _) = pair();
        let [first, second] = [b"1", b"2"].map(|body| sealer.seal(1, body).unwrap());
        for (order, good) in [
            ([&first, &second], 2),
            ([&first, &first], 1),
            ([&second, &first], 0),
            ([&second, &second], 0),
        ] {
            let bytes = order.map(Clone::clone).concat();
            let (mut reader, mut opener) = (&bytes[..], pair().1);
            let read = (0..2).take_while(|_| opener.read(&mut reader, MAX_BODY).is_ok());
            assert_eq!(read.count(), good);
        }
    }

    #[test]
    fn frames_of_another_connection_are_refused() {
        let bytes = Sealer::new(&[8; 32]).unwrap().seal(1, b"x").unwrap();
        let read = pair().1.read(&mut &bytes[..], MAX_BODY);
        assert_eq!(kind(read), ErrorKind::Authentication);
    }
}
