//! What tells physical devices and machines apart.

use sha2::{Digest, Sha256};
use std::fmt;

/// Which physical device, whatever ordinal a process sees it under: a GPU's UUID, the machine's
/// boot id for the host device.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceIdentity(pub [u8; 16]);

impl fmt::Debug for DeviceIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The machine's boot id, the same for every process on it: ranks that agree on it can share memory.
/// Zero where the kernel gives none.
pub(crate) fn machine_identity() -> [u8; 16] {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16).unwrap_or(0).to_be_bytes()
}

/// The number of memory that consists of pieces with these numbers: that of a single one, and one that
/// no other memory has in practice for several.
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
    // Numbers that are counted do not get so far.
    u64::from_le_bytes(number) | 1 << 62
}
