//! Device selection and options.

use super::links::PeerAccess;
use crate::named::named;
use std::time::Duration;

named! {
    /// Kind of device.
    pub enum DeviceKind: "device" {
        /// Shared memory and threads of this machine's processors.
        Host = "host",
        /// An NVIDIA GPU.
        Cuda = "cuda",
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

named! {
    /// Simulates a machine without a feature, so that fallbacks can be tested anywhere. Peers see the same limits
    /// towards a rank that pretends.
    #[derive(Default)]
    pub enum Pretend: "limit" {
        /// Use all features.
        #[default]
        Nothing = "nothing",
        /// No atomic operations on memory of other devices.
        NoAtomics = "no-atomics",
        /// No access between this device's memory and that of other devices, in either direction.
        NoPeerAccess = "no-peer-access",
    }
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

/// Random delays of host-device operations.
#[derive(Clone, Copy, Debug)]
pub struct Delays {
    /// Seed; each stream of a device draws its own sequence.
    pub seed: u64,
    /// Maximum delay.
    pub max: Duration,
}
