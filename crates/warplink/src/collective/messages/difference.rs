//! Errors of messages whose two ends do not match.

use crate::error::{Error, ErrorKind};
use crate::p2p::Direction;

/// Marks an unknown number of units. Must match the kernel.
pub(super) const ANY_UNITS: u64 = u64::MAX;

/// Error of an end that moves at most `own` bytes while the other end states `theirs`; `length` is the actual
/// length, if known.
pub(super) fn difference(
    direction: Direction,
    own: u64,
    theirs: u64,
    length: Option<u64>,
) -> Error {
    let (operation, here, there) = match direction {
        Direction::Send => ("send", "sends", "receives"),
        Direction::Receive => ("receive", "receives", "sends"),
    };
    let (text, help) = if own != theirs {
        (
            format!("the peer {there} {theirs} bytes; expected {own}, as this rank {here}"),
            "give the send and its receive the same length",
        )
    } else {
        match length.filter(|length| *length > own) {
            Some(length) => (
                format!(
                    "{length} bytes by the count in device memory; expected at most {own}, the limit given on the host"
                ),
                "raise the limit on all ranks",
            ),
            None => (
                "the peer has another count in device memory, or other rows; expected the same at both ends".to_owned(),
                "give the send and its receive the same rows and counts",
            ),
        }
    };
    Error::new(ErrorKind::Mismatch, text)
        .with_operation(operation)
        .with_help(help)
}

/// Error recorded by a kernel, as 32-bit words; see `refuse` there.
pub(super) fn noted(words: &[u32]) -> Error {
    let word = |number: usize| {
        let half = |number: usize| u64::from(words.get(number).copied().unwrap_or(0));
        half(2 * number + 1) << 32 | half(2 * number)
    };
    let direction = if word(0) >> 63 == 0 {
        Direction::Send
    } else {
        Direction::Receive
    };
    let length = Some(word(2)).filter(|length| *length != ANY_UNITS);
    difference(direction, word(0) & (u64::MAX >> 1), word(1), length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_mismatch_describes_both_ends() {
        let text = noted(&[100, 1 << 31, 64, 0, 64, 0]).to_string();
        assert!(
            text.contains("receive: the peer sends 64 bytes; expected 100, as this rank receives"),
            "{text}"
        );
        let text = noted(&[64, 0, 0, 1, 0, 0]).to_string();
        assert!(
            text.contains("send: the peer receives 4294967296 bytes; expected 64"),
            "{text}"
        );
        let text = noted(&[64, 0, 64, 0, 80, 0]).to_string();
        assert!(text.contains("80 bytes by the count"), "{text}");
        let text = noted(&[64, 0, 64, 0, u32::MAX, u32::MAX]).to_string();
        assert!(text.contains("another count in device memory"), "{text}");
    }
}
