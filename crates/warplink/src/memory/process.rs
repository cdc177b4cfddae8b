//! This process, as ranks that are threads of it find one another's memory.

use crate::device::Backing;
use crate::sync::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};

/// State of this process. A fork has a copy of it, which is not its own.
struct ThisProcess {
    /// Process id that the rest belongs to.
    number: u32,
    /// Random id.
    identity: [u8; 16],
    /// Registered allocations, for ranks that are threads of this process. Several may belong to one allocation:
    /// memory borrowed in parts.
    allocations: BTreeMap<u64, Vec<Weak<dyn Backing>>>,
}

/// Calls `body` with the state of this process, which is new in a fork: with its parent's identity, the ranks that are
/// forks of one process would take one another's memory for their own.
fn with_this_process<T>(body: impl FnOnce(&mut ThisProcess) -> T) -> T {
    static THIS_PROCESS: Mutex<ThisProcess> = Mutex::new(ThisProcess {
        number: 0,
        identity: [0; 16],
        allocations: BTreeMap::new(),
    });
    let mut process = lock(&THIS_PROCESS);
    let number = std::process::id();
    if process.number != number {
        *process = ThisProcess {
            number,
            identity: draw_identity(number),
            allocations: BTreeMap::new(),
        };
    }
    body(&mut process)
}

fn draw_identity(number: u32) -> [u8; 16] {
    let mut identity = [0; 16];
    if getrandom::fill(&mut identity).is_err() {
        // Without randomness: process id and time, unique on this machine.
        let now = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or_default();
        identity[..8].copy_from_slice(&u64::from(number).to_le_bytes());
        identity[8..].copy_from_slice(&(now.as_nanos() as u64).to_le_bytes());
    }
    identity
}

/// Random id of this process; a fork has its own.
pub(super) fn identity() -> [u8; 16] {
    with_this_process(|process| process.identity)
}

/// Makes the allocation available to ranks that are threads of this process.
pub(super) fn publish(backing: &Arc<dyn Backing>) {
    with_this_process(|process| {
        let known = &mut process.allocations;
        // Nothing else removes entries of freed memory.
        known.retain(|_, holders| {
            holders.retain(|holder| holder.strong_count() > 0);
            !holders.is_empty()
        });
        let holders = known.entry(backing.identity()).or_default();
        let same = |holder: &Weak<dyn Backing>| holder.ptr_eq(&Arc::downgrade(backing));
        if !holders.iter().any(same) {
            holders.push(Arc::downgrade(backing));
        }
    });
}

/// The allocation `identity` of this process, unless it was freed.
pub(super) fn allocation(identity: u64) -> Option<Arc<dyn Backing>> {
    with_this_process(|process| {
        let holders = process.allocations.get(&identity)?;
        holders.iter().find_map(Weak::upgrade)
    })
}
