//! Opening peers' allocations.

use super::handle::Handle;
use super::mapping::Mapped;
use super::message::Message;
use super::process;
use super::shared::Shared;
use crate::device::{DeviceSlice, Opening, Piece};
use crate::error::{Error, Result};
use std::sync::Arc;

/// Maximum physical pieces of an allocation: each takes a descriptor of its owner.
pub(super) const MAX_PIECES: u32 = 4096;

/// Maps the allocation that `handle` refers to.
pub(super) fn open(shared: &Arc<Shared>, handle: &Handle) -> Result<Mapped> {
    let mapped = import(shared, handle).map_err(|error| {
        error
            .with_operation("open a peer's region")
            .with_rank(shared.rank)
            .with_peer(handle.owner)
    })?;
    let same_process = handle.process == process::identity();
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
    if handle.process == process::identity() {
        let backing = process::allocation(handle.allocation).ok_or_else(|| {
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
