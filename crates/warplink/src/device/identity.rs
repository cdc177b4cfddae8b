//! Identities of physical devices and machines.

use sha2::{Digest, Sha256};
use std::fmt;

/// Identity of a physical device, independent of ordinals: a GPU's UUID, or the machine's boot id for the
/// host device.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceIdentity(pub [u8; 16]);

impl fmt::Debug for DeviceIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Boot id of the machine, equal for all of its processes; ranks with the same id can share memory. Zero if
/// the kernel does not provide it.
pub(crate) fn machine_identity() -> [u8; 16] {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16).unwrap_or(0).to_be_bytes()
}

/// Network namespace of this process; 0 if unknown. Containers on one machine may have different ones.
pub(crate) fn network_namespace() -> u64 {
    rustix::fs::stat("/proc/self/ns/net").map_or(0, |stat| stat.st_ino)
}

/// Identity of memory made of several pieces: that of a single piece, or a hash for several.
pub(crate) fn combined_identity(pieces: &[u64]) -> u64 {
    if let [single] = pieces {
        return *single;
    }
    let mut hash = Sha256::new();
    for piece in pieces {
        hash.update(piece.to_le_bytes());
    }
    let hash = hash.finalize();
    let mut number = [0; 8];
    number.copy_from_slice(&hash[..8]);
    // Counted identities never reach this bit, so they cannot collide with hashes.
    u64::from_le_bytes(number) | 1 << 62
}
