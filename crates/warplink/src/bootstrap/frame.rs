//! Frames: a length, a request's number and a body.
//!
//! ```text
//! u32 little-endian   bytes of the body
//! u64 little-endian   the request that this is or answers; 0 where there is none
//! [u8]                the body
//! ```

use crate::error::{Error, ErrorKind, Result};
use std::io::{self, Read};

/// The longest body of a frame between members.
pub(crate) const MAX_BODY: usize = 64 << 20;
/// The longest body that a process may send before it has proved that it holds the secret.
pub(crate) const MAX_HANDSHAKE: usize = 4 << 10;
/// Bytes before the body.
pub(crate) const HEADER: usize = 12;
/// How much memory a length that was merely announced may claim.
const INITIAL_CAPACITY: usize = 64 << 10;

/// A frame that arrived.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) id: u64,
    pub(crate) body: Vec<u8>,
}

/// The bytes of a frame, with room for `extra` more.
pub(crate) fn encode(id: u64, body: &[u8], extra: usize) -> Result<Vec<u8>> {
    if body.len() > MAX_BODY {
        return Err(Error::invalid(format!(
            "a message has {} bytes; expected at most {MAX_BODY}",
            body.len()
        )));
    }
    let mut bytes = Vec::with_capacity(HEADER + body.len() + extra);
    bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&id.to_le_bytes());
    bytes.extend_from_slice(body);
    Ok(bytes)
}

/// Reads one frame with a body of at most `limit` bytes; `None` when the stream ends before it.
///
/// # Errors
/// [`ErrorKind::Protocol`] for a longer one and for a stream that ends in the middle; an
/// operating-system error as the reader gives it.
pub(crate) fn read(reader: &mut impl Read, limit: usize) -> Result<Option<Frame>> {
    let mut header = [0; HEADER];
    let mut filled = 0;
    while filled < HEADER {
        match reader.read(&mut header[filled..]) {
            Ok(0) if filled == 0 => return Ok(None),
            Ok(0) => return Err(truncated()),
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Error::io("read a frame", &error)),
        }
    }
    let [l0, l1, l2, l3, id @ ..] = header;
    let length = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
    if length > limit {
        return Err(Error::new(
            ErrorKind::Protocol,
            format!("a frame announces {length} bytes; expected at most {limit}"),
        ));
    }
    let mut body = Vec::with_capacity(length.min(INITIAL_CAPACITY));
    reader
        .take(length as u64)
        .read_to_end(&mut body)
        .map_err(|error| Error::io("read a frame", &error))?;
    if body.len() < length {
        return Err(truncated());
    }
    Ok(Some(Frame {
        id: u64::from_le_bytes(id),
        body,
    }))
}

/// The error of a stream that ends too early.
pub(crate) fn truncated() -> Error {
    Error::new(
        ErrorKind::Protocol,
        "the connection ended in the middle of a frame",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn survives_and_ends_cleanly(id: u64, body: Vec<u8>) {
            let bytes = encode(id, &body, 0).unwrap();
            let mut reader = &bytes[..];
            prop_assert_eq!(read(&mut reader, MAX_BODY).unwrap(), Some(Frame { id, body }));
            prop_assert_eq!(read(&mut reader, MAX_BODY).unwrap(), None);
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes: Vec<u8>) {
            let mut reader = &bytes[..];
            while let Ok(Some(_)) = read(&mut reader, MAX_HANDSHAKE) {}
        }
    }

    #[test]
    fn refuses_a_truncation_at_every_byte() {
        let bytes = encode(9, b"a body", 0).unwrap();
        for length in 1..bytes.len() {
            let error = read(&mut &bytes[..length], MAX_BODY).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol, "{length} bytes");
        }
    }

    #[test]
    fn refuses_a_length_beyond_the_limit_without_claiming_memory() {
        for length in [MAX_HANDSHAKE as u32 + 1, u32::MAX] {
            let mut bytes = length.to_le_bytes().to_vec();
            bytes.extend([0; 8]);
            let error = read(&mut &bytes[..], MAX_HANDSHAKE).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol);
        }
    }
}
