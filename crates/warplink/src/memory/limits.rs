//! Limits of idle mappings.

use std::time::Duration;

/// Limits of cached mappings of peers' memory that no transfer uses. Opening a mapping is slow, and a mapping
/// of memory that its owner still has registered costs little.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdleMappings {
    /// Maximum number of allocations.
    pub max_count: usize,
    /// Maximum total bytes.
    pub max_bytes: u64,
    /// Maximum idle time, checked at most 20 times a second.
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
