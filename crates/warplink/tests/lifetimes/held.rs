//! Resources of the system and of the device held by a rank, except those kept for reuse.

use super::{Footprint, MIB, open_files};
use std::time::Duration;
use warplink::Communicator;

/// Device memory that a driver may take for itself meanwhile, in MiB.
const DEVICE_SLACK_MIB: usize = 64;

/// Most bytes that a rank keeps for reuse, by default.
const MAX_KEPT: u64 = 1 << 30;

/// Most allocations that the ranks keep for reuse in tests that use a few at a time.
const MAX_KEPT_COUNT: usize = 64;

/// How often it is looked for what was let go of, and how long between.
const TRIES: usize = 40;
const PAUSE: Duration = Duration::from_millis(250);

/// Resources held by a rank.
#[derive(Debug)]
pub(crate) struct Held {
    process: Footprint,
    /// Allocations kept for reuse by all ranks, each of which its peer may have mapped.
    kept: usize,
    kept_mib: usize,
    device_free_mib: Option<usize>,
}

impl Held {
    /// Every rank calls this at the same time.
    pub(crate) fn now(comm: &Communicator) -> Self {
        let (count, bytes) = comm.pooled_allocations_and_bytes();
        assert!(bytes <= MAX_KEPT, "{bytes} bytes are kept");
        let mine = [count as u64, bytes].map(u64::to_le_bytes).concat();
        let all = comm.all_gather_bytes(&mine).unwrap();
        let sum = |at: usize| {
            let number = |one: &Vec<u8>| u64::from_le_bytes(one[at..at + 8].try_into().unwrap());
            all.iter().map(number).sum::<u64>() as usize
        };
        assert!(sum(0) <= MAX_KEPT_COUNT, "{} allocations are kept", sum(0));
        let free = comm.device().available_memory().unwrap();
        Self {
            process: Footprint::now(),
            kept: sum(0),
            kept_mib: sum(8) / MIB,
            device_free_mib: free.map(|free| free as usize / MIB),
        }
    }

    /// Nothing has grown since, but for what is kept for reuse, which is bounded. Every rank calls this
    /// at the same time. What was let go of is waited for: peers are told by threads, and it may be kept then.
    pub(crate) fn assert_flat(&self, comm: &Communicator) {
        for last in (0..TRIES).map(|number| number + 1 == TRIES) {
            let now = Self::now(comm);
            let more_mib = now.kept_mib.saturating_sub(self.kept_mib);
            let is_flat = self.is_flat(&now);
            let all = comm.all_gather_bytes(&[u8::from(is_flat)]).unwrap();
            if all.iter().any(|one| *one != [1]) {
                assert!(
                    !last || is_flat,
                    "{self:?}, then {now:?}: {:?}",
                    open_files()
                );
                assert!(!last, "another rank holds more than before");
                std::thread::sleep(PAUSE);
                continue;
            }
            if let (Some(before), Some(now)) = (self.device_free_mib, now.device_free_mib) {
                let least = before.saturating_sub(DEVICE_SLACK_MIB + more_mib);
                assert!(
                    now >= least,
                    "{now} MiB of the device are free; before, {before}"
                );
            }
            return;
        }
    }

    fn is_flat(&self, now: &Self) -> bool {
        let more = now.kept.saturating_sub(self.kept);
        let mut before = self.process;
        // An allocation that is kept has a descriptor, and one for peers that map it.
        before.descriptors += 2 * more;
        before.mappings += more;
        before.resident_mib += now.kept_mib.saturating_sub(self.kept_mib);
        now.process.is_within(&before)
    }
}
