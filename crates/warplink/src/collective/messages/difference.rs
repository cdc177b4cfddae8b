//! Errors of messages whose two ends do not match.

use crate::error::{Error, ErrorKind};
use crate::p2p::Direction;

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
