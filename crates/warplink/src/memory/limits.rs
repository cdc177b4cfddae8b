//! How much is kept though nobody uses it.

use std::time::Duration;

/// Limits of the mappings of peers' memory that are kept for later though no transfer uses them.
/// Opening a mapping is slow, and a mapping that its owner still has registered costs little.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdleMappings {
    /// How many allocations.
    pub max_count: usize,
    /// Bytes of them all.
    pub max_bytes: u64,
    /// How long one is kept after its last use, which is looked at 20 times a second at most.
    pub max_age: Duration,
}

impl Default for IdleMappings {
    /// 256 allocations, 64 GiB, 5 minutes.
    fn default() -> Self {
        Self {
            max_count: 256,
            max_bytes: 64 << 30,
            max_age: Duration::from_secs(300),
        }
    }
}
