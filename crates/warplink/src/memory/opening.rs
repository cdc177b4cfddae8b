//! Opening peers' allocations.

use super::handle::Handle;
use super::mapping::Mapped;
use super::message::Message;
use super::shared::Shared;
use crate::device::{Backing, DeviceSlice, Opening, Piece};
use crate::error::{Error, Result};
use crate::sync::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};

/// Maximum physical pieces of an allocation: each takes a descriptor of its owner.
pub(super) const MAX_PIECES: u32 = 4096;

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
pub(super) fn process_identity() -> [u8; 16] {
    with_this_process(|process| process.identity)
}

/// Makes the allocation available to ranks that are threads of this process.
pub(super) fn publish_in_process(backing: &Arc<dyn Backing>) {
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
fn in_process(identity: u64) -> Option<Arc<dyn Backing>> {
    with_this_process(|process| {
        let holders = process.allocations.get(&identity)?;
        holders.iter().find_map(Weak::upgrade)
    })
}

/// Maps the allocation that `handle` refers to.
pub(super) fn open(shared: &Arc<Shared>, handle: &Handle) -> Result<Mapped> {
    let mapped = import(shared, handle).map_err(|error| {
        error
            .with_operation("open a peer's region")
            .with_rank(shared.rank)
            .with_peer(handle.owner)
    })?;
    let same_process = handle.process == process_identity();
    Ok(Mapped::new(shared, handle, &mapped, same_process))
}

/// Tries in order: same process, host memory by descriptor, CUDA IPC, descriptors.
fn import(shared: &Shared, handle: &Handle) -> Result<DeviceSlice> {
    let bytes = usize::try_from(handle.allocation_bytes).map_err(|_| {
        Error::invalid_handle(format!(
            "the allocation has {} bytes, more than this process can address",
            handle.allocation_bytes
        ))
    })?;
    let peers = shared.peers()?;
    // Before any request to the owner, so that both ranks of a pair fail alike.
    if !handle.host && peers.is_near(handle.owner)? && !peers.access(handle.owner)?.mapped {
        return Err(Error::unsupported(
            "the devices of the two ranks cannot map each other's memory",
        )
        .with_help(
            "allocate the memory with the communicator, which takes memory of the host then",
        ));
    }
    if handle.process == process_identity() {
        let backing = in_process(handle.allocation).ok_or_else(|| {
            Error::invalid_handle("the peer's memory was freed")
                .with_help("keep the region until the peer has opened its handle")
        })?;
        let opening = Opening::SameProcess(DeviceSlice::whole(backing));
        return shared.device.import(opening, bytes);
    }
    peers.check_same_host(handle.owner)?;
    if handle.host {
        let mut pieces = pieces(shared, handle)?;
        let (Some(piece), true) = (pieces.pop(), pieces.is_empty()) else {
            return Err(Error::invalid_handle(
                "memory of the host has one piece; the handle names another number",
            ));
        };
        return shared.device.import(Opening::Host(piece), bytes);
    }
    let mut failed = None;
    // IPC first, since it needs no round trip to the owner. Where it cannot be used, descriptors can.
    if let Some(ipc) = handle.ipc {
        match shared.device.import(Opening::Ipc(ipc), bytes) {
            Ok(mapped) => return Ok(mapped),
            // Kept for the case without descriptors: the driver's own error is the more useful one then.
            Err(error) => failed = Some(error),
        }
    }
    if handle.pieces > 0 {
        let pieces = pieces(shared, handle)?;
        return shared.device.import(Opening::Pieces(pieces), bytes);
    }
    Err(failed.unwrap_or_else(|| {
        Error::invalid_handle("the handle has neither an IPC handle nor descriptors")
    }))
}

/// Requests descriptors of the allocation's pieces from the owner.
fn pieces(shared: &Shared, handle: &Handle) -> Result<Vec<Piece>> {
    // The number comes from a peer; each piece costs a descriptor and a round trip.
    if handle.pieces > MAX_PIECES {
        return Err(Error::invalid_handle(format!(
            "the allocation has {} pieces; expected at most {MAX_PIECES}",
            handle.pieces
        ))
        .with_help("register a smaller part of it"));
    }
    let piece = |index: u32| {
        let message = Message::Piece {
            allocation: handle.allocation,
            generation: handle.generation,
            index: index.into(),
        };
        shared
            .ask(handle.owner, message)?
            .ok_or_else(|| Error::protocol("the peer answered without a descriptor"))
    };
    (0..handle.pieces).map(piece).collect()
}
