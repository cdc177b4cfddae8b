//! Which device, and how it is opened.

use super::links::PeerAccess;
use crate::error::{Error, ErrorKind, Result};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Which of the devices.
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

/// What to open.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// Which device.
    pub kind: DeviceKind,
    /// Which of the GPUs that this process sees; the host device ignores it.
    pub ordinal: usize,
    /// Random delays before (and inside) operations of the host device, to bring out missing waits.
    pub delays: Option<Delays>,
    /// What it is to do without.
    pub pretend: Pretend,
}

impl DeviceConfig {
    /// The device of `kind` with `ordinal`, without delays.
    pub fn new(kind: DeviceKind, ordinal: usize) -> Self {
        Self {
            kind,
            ordinal,
            delays: None,
            pretend: Pretend::default(),
        }
    }
}

/// What a device does without, as if the machine lacked it, so that any machine shows what happens on such a one. Peers
/// find the same between themselves and a rank that pretends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pretend {
    /// Nothing: it is what it is.
    #[default]
    Nothing,
    /// No atomic operations on the memory of other devices.
    NoAtomics,
    /// No access to the memory of other devices, nor they to its own.
    NoPeerAccess,
}

impl Pretend {
    /// What is left of an access to another device's memory.
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

/// Random delays of the host device's operations.
#[derive(Clone, Copy, Debug)]
pub struct Delays {
    /// Seed of the delays; streams of one device draw different ones.
    pub seed: u64,
    /// The longest delay.
    pub max: Duration,
}
