//! Transfers between ranks: one pair, and all at once.

use super::machine::{self, TunedMachine};
use crate::commands::bench::clock::Submission;
use anyhow::{Context, Result};
use warplink::device::{DeviceSlice, KernelCopy, Stream, StreamOp};
use warplink::p2p::Protocol;
use warplink::program::cost::HardwareModel;
use warplink::program::cost::curve::Curve;

/// Up to this size a one-block kernel may be worthwhile.
const ONE_BLOCK_LIMIT: usize = 256 << 10;

/// Ranks that copy: only the first, or all at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Copying {
    First,
    All,
}

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
    let curve = |protocol, in_kernel: bool| -> Result<Curve> {
        let fits = |bytes: &usize| !in_kernel || *bytes <= limit;
        let mut points = Vec::new();
        for bytes in machine.sizes().into_iter().filter(fits) {
            let seconds = copies(machine, protocol, bytes, in_kernel)?;
            points.push((bytes as u64, seconds));
        }
        Ok(machine::curve(points))
    };
    model.link.put = curve(Protocol::Put, false)?;
    model.link.get = curve(Protocol::Get, false)?;
    model.link.kernel_put = curve(Protocol::Put, true)?;
    model.link.kernel_get = curve(Protocol::Get, true)?;
    let bytes = machine.largest.min(64 << 20);
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
    let missing = || format!("rank {rank} has no peer at distance {distance}");
    Ok(match protocol {
        Protocol::Put => {
            let remote = machine.remote_into[(rank + distance) % world].as_ref();
            let target = remote.with_context(missing)?.memory();
            (
                target.slice(0..bytes)?,
                machine.own.memory().slice(0..bytes)?,
            )
        }
        Protocol::Get => {
            let remote = machine.remote_own[(rank + world - distance) % world].as_ref();
            let source = remote.with_context(missing)?.memory();
            (
                machine.into.memory().slice(0..bytes)?,
                source.slice(0..bytes)?,
            )
        }
    })
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
    let counter = machine.comm.device().allocate_signals(64)?.word(0)?;
    repeated(machine, Copying::First, repeat, &|stream| {
        if in_kernel {
            stream.sequence(&[StreamOp::KernelCopy(KernelCopy {
                target: &target,
                source: &source,
                blocks: 1,
                arrivals: [None; 2],
                counter: &counter,
            })])?;
        } else {
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
    let repeat = 8_usize.div_ceil(distances);
    let seconds = repeated(machine, Copying::All, repeat, &|stream| {
        let mut turns = turns.iter();
        turns.try_for_each(|(target, source)| Ok(stream.copy(target, source)?))
    })?;
    Ok((bytes * distances) as f64 / seconds)
}

fn repeated(
    machine: &TunedMachine<'_>,
    copying: Copying,
    repeat: usize,
    work: &dyn Fn(&Stream) -> Result<()>,
) -> Result<f64> {
    let first = machine.comm.rank() == 0;
    machine.each(repeat, Submission::Eager, &|stream| {
        if copying == Copying::All || first {
            work(stream)?;
        }
        Ok(())
    })
}
