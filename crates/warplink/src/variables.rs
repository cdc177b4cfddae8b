//! Environment variables as text.

#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Result};
use std::ffi::OsString;
use std::path::PathBuf;

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

/// Directory of what is cached on disk; `None` if the environment specifies none.
pub(crate) fn cache_directory() -> Option<PathBuf> {
    let variable = |name| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    variable("WARPLINK_CACHE_DIR")
        .or_else(|| variable("XDG_CACHE_HOME").map(|path| path.join("warplink")))
        .or_else(|| variable("HOME").map(|path| path.join(".cache/warplink")))
        .filter(|path| path.is_absolute())
}
