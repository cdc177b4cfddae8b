//! Kernel transfers with free multiprocessors: number of blocks, maximum length, and time.

use super::latency::one_way;
use super::link::ends;
use super::machine::{self, TunedMachine};
use crate::commands::bench::clock::Submission;
use anyhow::Result;
use warplink::device::{KernelCopy, StreamOp};
use warplink::p2p::{Path, Protocol};
use warplink::program::cost::HardwareModel;
use warplink::program::cost::curve::Curve;
use warplink::topology::TopologyClass;

/// Longest transfer measured; the copy engine catches up before.
const LONGEST: usize = 16 << 20;

/// Maximum number of blocks to try.
const MAX_BLOCKS: u32 = 128;

/// Prefer fewer blocks if they take at most this factor longer.
const AS_GOOD: f64 = 1.03;

/// The transfers timed here use the previous model's numbers of blocks; run it again to measure with the new
/// ones. The division into packets is not changed.
pub(super) fn measure(machine: &TunedMachine<'_>, model: &mut HardwareModel) -> Result<()> {
    let properties = machine.comm.device().properties();
    if !properties.kernel_copies || properties.shared || machine.comm.world() == 1 {
        return Ok(());
    }
    let sizes: Vec<usize> = machine.sizes();
    let sizes: Vec<usize> = sizes
        .into_iter()
        .filter(|bytes| *bytes <= LONGEST)
        .collect();
    // Blocks signal completion by atomics on peer memory, which links support but buses may not.
    let linked = machine.comm.topology()?.class() != TopologyClass::Unknown;
    let most = if linked { MAX_BLOCKS } else { 1 };
    let mut blocks: Vec<(u64, u32)> = Vec::new();
    for bytes in &sizes {
        let count = best_blocks(machine, *bytes, most)?;
        match blocks.last_mut() {
            Some(last) if last.1 >= count => last.0 = *bytes as u64,
            _ => blocks.push((*bytes as u64, count)),
        }
    }
    model.link.kernels.store_blocks = blocks;
    let (mut faster, mut limit) = (true, 0);
    let curve = |protocol, path| -> Result<Curve> {
        let mut points = Vec::new();
        for bytes in &sizes {
            points.push((*bytes as u64, one_way(machine, *bytes, protocol, path)?));
        }
        Ok(machine::curve(points))
    };
    model.link.kernels_put = curve(Protocol::Put, Path::Multiprocessors)?;
    model.link.kernels_get = curve(Protocol::Get, Path::Multiprocessors)?;
    let engine = curve(Protocol::Put, Path::CopyEngine)?;
    for bytes in &sizes {
        let seconds = |curve: &Curve| curve.seconds(*bytes as f64);
        faster &= seconds(&model.link.kernels_put) <= seconds(&engine);
        if faster {
            limit = *bytes as u64;
        }
    }
    model.link.kernels.limit = limit;
    Ok(())
}

/// Fewest blocks that put `bytes` about as fast as any number.
fn best_blocks(machine: &TunedMachine<'_>, bytes: usize, most: u32) -> Result<u32> {
    let (target, source) = ends(machine, Protocol::Put, 1, bytes)?;
    let counter = machine.comm.device().allocate_signals(64)?.word(0)?;
    let repeat = ((64 << 20) / bytes).clamp(4, 32);
    let mut tried = Vec::new();
    for blocks in std::iter::successors(Some(1), |blocks| Some(2 * blocks)) {
        if blocks > most {
            break;
        }
        let seconds = machine.each(repeat, Submission::Captured, &|stream| {
            if machine.comm.rank() == 0 {
                stream.sequence(&[StreamOp::KernelCopy(KernelCopy {
                    target: &target,
                    source: &source,
                    blocks,
                    arrivals: [None; 2],
                    counter: &counter,
                })])?;
            }
            Ok(())
        })?;
        tried.push((blocks, seconds));
    }
    let least = tried.iter().map(|(_, seconds)| *seconds);
    let least = least.fold(f64::INFINITY, f64::min);
    let good = tried
        .iter()
        .find(|(_, seconds)| *seconds <= AS_GOOD * least);
    // All ranks use the slowest rank's times, so they decide alike.
    Ok(good.map_or(1, |(blocks, _)| *blocks))
}
