//! Environment variables as text.

use crate::error::{Error, Result};
use std::ffi::OsString;

/// The value of a variable of this process.
///
/// # Errors
/// [`ErrorKind::Parse`] if it is not UTF-8.
pub fn read(name: &str) -> Result<Option<String>> {
    text(name, std::env::var_os(name))
}

/// Converts a variable's value to text.
///
/// # Errors
/// As [`read`].
pub(crate) fn text(name: &str, value: Option<OsString>) -> Result<Option<String>> {
    let refused = |_| {
        Error::parse(format!("{name} is not UTF-8; expected text"))
            .with_help(format!("set {name} to text, or unset it"))
    };
    value
        .map(|value| value.into_string().map_err(refused))
        .transpose()
}
