//! Transfers between ranks: one pair, and all at once.

use super::machine::TunedMachine;
use crate::commands::bench::clock::Submission;
use anyhow::Result;
use warplink::device::{DeviceSlice, Stream};
use warplink::p2p::Protocol;
use warplink::program::cost::HardwareModel;

/// Up to this size a one-block kernel may be worthwhile.
const ONE_BLOCK_LIMIT: usize = 256 << 10;

pub(super) fn measure(machine: &TunedMachine<'_>, model: &mut HardwareModel) -> Result<()> {
    if machine.comm.world() == 1 {
        return Ok(());
    }
    let properties = machine.comm.device().properties();
    // Ranks that share multiprocessors have no copy engine to compare with.
    let limit = if properties.kernel_copies && !properties.shared {
        ONE_BLOCK_LIMIT
    } else {
        0
    };
    model.link.kernel_limit = limit as u64;
    let curve = |protocol, in_kernel: bool| {
        let mut sizes = machine.sizes();
        sizes.retain(|bytes| !in_kernel || *bytes <= limit);
        machine.curve(sizes, |bytes| copies(machine, protocol, bytes, in_kernel))
    };
    model.link.put = curve(Protocol::Put, false)?;
    model.link.get = curve(Protocol::Get, false)?;
    model.link.kernel_put = curve(Protocol::Put, true)?;
    model.link.kernel_get = curve(Protocol::Get, true)?;
    let bytes = machine.selection.largest.min(64 << 20);
    let neighbour = |protocol| peers(machine, protocol, bytes, false);
    let rotated = |protocol| peers(machine, protocol, bytes, true);
    model.link.put_ring = neighbour(Protocol::Put)?;
    model.link.get_ring = neighbour(Protocol::Get)?;
    model.link.put_rotated = rotated(Protocol::Put)?;
    model.link.get_rotated = rotated(Protocol::Get)?;
    Ok(())
}

/// Target and source of a copy of `bytes` between this rank and the one at a distance.
pub(super) fn ends(
    machine: &TunedMachine<'_>,
    protocol: Protocol,
    distance: usize,
    bytes: usize,
) -> Result<(DeviceSlice, DeviceSlice)> {
    let (rank, world) = (machine.comm.rank(), machine.comm.world());
    let memory = &machine.memory;
    let (target, source) = match protocol {
        Protocol::Put => {
            let remote = memory.remote_into((rank + distance) % world)?;
            (remote.memory(), memory.own.memory())
        }
        Protocol::Get => {
            let remote = memory.remote_own((rank + world - distance) % world)?;
            (memory.into.memory(), remote.memory())
        }
    };
    Ok((target.slice(0..bytes)?, source.slice(0..bytes)?))
}

/// Seconds of one of many consecutive copies between two ranks.
fn copies(
    machine: &TunedMachine<'_>,
    protocol: Protocol,
    bytes: usize,
    in_kernel: bool,
) -> Result<f64> {
    let (target, source) = ends(machine, protocol, 1, bytes)?;
    let repeat = ((256 << 20) / bytes).clamp(4, 32);
    let is_first = machine.comm.rank() == 0;
    machine.each(repeat, Submission::Eager, &|stream| {
        if is_first && in_kernel {
            machine.kernel_copy(stream, (&target, &source), 1)?;
        } else if is_first {
            stream.copy(&target, &source)?;
        }
        Ok(())
    })
}

/// Bandwidth of each rank when all copy at once: to one neighbour, or to all in turn.
fn peers(
    machine: &TunedMachine<'_>,
    protocol: Protocol,
    bytes: usize,
    rotated: bool,
) -> Result<f64> {
    let distances = if rotated { machine.comm.world() - 1 } else { 1 };
    let turns: Vec<_> = (1..=distances)
        .map(|distance| ends(machine, protocol, distance, bytes))
        .collect::<Result<_>>()?;
    // About as many copies in a sample for any number of ranks.
    let repeat = 8_usize.div_ceil(distances);
    let seconds = machine.each(repeat, Submission::Eager, &|stream: &Stream| {
        let mut turns = turns.iter();
        turns.try_for_each(|(target, source)| Ok(stream.copy(target, source)?))
    })?;
    Ok((bytes * distances) as f64 / seconds)
}
