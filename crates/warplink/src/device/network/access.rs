//! Whether the network library accesses device memory directly.

use crate::error::{Error, ErrorKind, Result};
use std::fmt;
use std::str::FromStr;

/// How network connections transfer device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DeviceAccess {
    /// Always through host staging memory.
    Staged,
    /// Directly if network cards can access the device memory at both ends, else through staging memory.
    #[default]
    Automatic,
    /// Directly whenever the network library can do so at both ends, even if it copies small pieces through
    /// the host and waits for each. That is slower than staging, and a copy delayed behind waiting streams
    /// (`CUDA_DEVICE_MAX_CONNECTIONS`) delays all connections of the rank.
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
