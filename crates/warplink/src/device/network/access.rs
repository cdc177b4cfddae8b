//! Whether the network's library reads and writes memory that only the device reaches.

use crate::error::{Error, ErrorKind, Result};
use std::fmt;
use std::str::FromStr;

/// How connections over the network move bytes of memory that only the device reaches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DeviceAccess {
    /// Through staging memory of the host, always.
    Staged,
    /// By the network's library itself where a network card reads and writes the device's memory at both ends, else
    /// through staging memory.
    #[default]
    Automatic,
    /// By the network's library itself wherever it can at both ends, also where it copies small pieces through
    /// the host on its own, and waits for each: that is slower than staging, and a copy that is held up behind
    /// streams that wait (`CUDA_DEVICE_MAX_CONNECTIONS`) holds up all connections of the rank.
    Direct,
}

impl DeviceAccess {
    const NAMES: [(&'static str, Self); 3] = [
        ("staged", Self::Staged),
        ("auto", Self::Automatic),
        ("direct", Self::Direct),
    ];
}

impl fmt::Display for DeviceAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::NAMES.iter().find(|(_, access)| access == self);
        f.write_str(name.map_or("", |(name, _)| name))
    }
}

impl FromStr for DeviceAccess {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = Self::NAMES.iter().find(|(name, _)| *name == text);
        found.map(|(_, access)| *access).ok_or_else(|| {
            Error::new(
                ErrorKind::Parse,
                format!("unknown access '{text}'; expected staged, auto or direct"),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for (name, access) in DeviceAccess::NAMES {
            assert_eq!(access.to_string(), name);
            assert_eq!(name.parse::<DeviceAccess>().unwrap(), access);
        }
        let error = "Direct".parse::<DeviceAccess>().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Parse);
    }
}
