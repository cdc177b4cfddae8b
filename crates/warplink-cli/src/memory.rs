//! Checks that a request fits this machine's memory.

use crate::report::counted;
use anyhow::{Result, ensure};
use warplink::DeviceKind;

/// Fails if ranks on this machine would exceed its memory: each of `ranks` needs `host` bytes, and `device`
/// bytes of device memory, which the host device takes from the same memory.
///
/// An allocation that is far too large would kill the process instead of failing.
pub(crate) fn check(kind: DeviceKind, ranks: usize, host: u128, device: u128) -> Result<()> {
    let each = match kind {
        // The host device's memory is the machine's.
        DeviceKind::Host => host.saturating_add(device),
        DeviceKind::Cuda => host,
    };
    let needed = each.saturating_mul(ranks as u128);
    let info = rustix::system::sysinfo();
    // The total and not the free memory, most of it in caches: this rejects sizes that can never fit.
    let there = u128::from(info.totalram) * u128::from(info.mem_unit);
    ensure!(
        needed <= there,
        "{} need{} {} GiB of memory; expected at most {} GiB; help: choose smaller sizes",
        counted(ranks, "rank"),
        if ranks == 1 { "s" } else { "" },
        needed.div_ceil(1 << 30),
        there >> 30,
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absurd_sizes_are_refused() {
        assert!(check(DeviceKind::Host, 2, 1 << 20, 1 << 20).is_ok());
        assert!(check(DeviceKind::Host, 2, 1 << 20, 1 << 60).is_err());
        assert!(check(DeviceKind::Cuda, 2, 1 << 20, 1 << 60).is_ok());
        assert!(check(DeviceKind::Cuda, usize::MAX, u128::MAX, 0).is_err());
    }
}
