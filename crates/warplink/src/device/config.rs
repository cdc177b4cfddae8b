//! Device selection and options.

use super::links::PeerAccess;
use crate::error::{Error, ErrorKind, Result};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// Shared memory and threads of this machine's processors.
    Host,
    /// An NVIDIA GPU.
    Cuda,
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Host => "host",
            Self::Cuda => "cuda",
        })
    }
}

impl FromStr for DeviceKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "host" => Ok(Self::Host),
            "cuda" => Ok(Self::Cuda),
            _ => Err(Error::new(
                ErrorKind::Parse,
                format!("unknown device '{text}'; expected host or cuda"),
            )),
        }
    }
}

/// Options for opening a device.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// Kind of device.
    pub kind: DeviceKind,
    /// Index among the GPUs visible to this process; ignored by the host device.
    pub ordinal: usize,
    /// Random delays before and inside host-device operations, to expose missing waits.
    pub delays: Option<Delays>,
    /// Features to treat as missing.
    pub pretend: Pretend,
}

impl DeviceConfig {
    /// Device `ordinal` of `kind`, without delays.
    pub fn new(kind: DeviceKind, ordinal: usize) -> Self {
        Self {
            kind,
            ordinal,
            delays: None,
            pretend: Pretend::default(),
        }
    }
}

/// Simulates a machine without a feature, so that fallbacks can be tested anywhere. Peers see the same limits
/// towards a rank that pretends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pretend {
    /// Use all features.
    #[default]
    Nothing,
    /// No atomic operations on memory of other devices.
    NoAtomics,
    /// No access between this device's memory and that of other devices, in either direction.
    NoPeerAccess,
}

impl Pretend {
    /// Restricts an access to another device's memory accordingly.
    pub(super) fn limit(self, access: PeerAccess) -> PeerAccess {
        match self {
            Self::Nothing => access,
            Self::NoAtomics => PeerAccess {
                atomics: false,
                ..access
            },
            Self::NoPeerAccess => PeerAccess::NONE,
        }
    }
}

impl FromStr for Pretend {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "no-atomics" => Ok(Self::NoAtomics),
            "no-peer-access" => Ok(Self::NoPeerAccess),
            _ => Err(Error::new(
                ErrorKind::Parse,
                format!("unknown limit '{text}'; expected no-atomics or no-peer-access"),
            )),
        }
    }
}

/// Random delays of host-device operations.
#[derive(Clone, Copy, Debug)]
pub struct Delays {
    /// Seed; each stream of a device draws its own sequence.
    pub seed: u64,
    /// Maximum delay.
    pub max: Duration,
}
