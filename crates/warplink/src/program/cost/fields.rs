//! What is said of a field of a hardware model that does not fit.

use crate::error::{Error, ErrorKind};

/// The error of a field that is `value`, where `expected` says what it should be.
pub(super) fn refused(name: &str, value: f64, expected: &str) -> Error {
    Error::new(
        ErrorKind::Parse,
        format!("'{name}' is {value}; expected {expected}"),
    )
}
