//! Kernel transfers with free multiprocessors: number of blocks, maximum length, and time.

use super::latency::one_way;
use super::link::ends;
use super::machine::{TunedMachine, first_within};
use crate::commands::bench::clock::Submission;
use anyhow::Result;
use warplink::p2p::{Path, Protocol};
use warplink::program::cost::HardwareModel;
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
    let mut sizes = machine.sizes();
    sizes.retain(|bytes| *bytes <= LONGEST);
    // Blocks signal completion by atomics on peer memory, which links support but buses may not.
    let linked = machine.comm.topology()?.class() != TopologyClass::Unknown;
    let most = if linked { MAX_BLOCKS } else { 1 };
    let mut blocks: Vec<(u64, u32)> = Vec::new();
    for bytes in &sizes {
        let count = best_blocks(machine, *bytes, most)?;
        match blocks.last_mut() {
            // Longer transfers need no fewer blocks; a smaller number is noise.
            Some(last) if last.1 >= count => last.0 = *bytes as u64,
            _ => blocks.push((*bytes as u64, count)),
        }
    }
    model.link.kernels.store_blocks = blocks;
    let (mut faster, mut limit) = (true, 0);
    let curve = |protocol, path| {
        let sizes = sizes.iter().copied();
        machine.curve(sizes, |bytes| one_way(machine, bytes, protocol, path))
    };
    model.link.kernels_put = curve(Protocol::Put, Path::Multiprocessors)?;
    model.link.kernels_get = curve(Protocol::Get, Path::Multiprocessors)?;
    let engine = curve(Protocol::Put, Path::CopyEngine)?;
    for bytes in &sizes {
        let size = *bytes as f64;
        // Up to the first size at which the copy engine wins: behind that, only noise makes the kernels faster again.
        faster &= model.link.kernels_put.seconds(size) <= engine.seconds(size);
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
    let repeat = ((64 << 20) / bytes).clamp(4, 32);
    let mut tried = Vec::new();
    for blocks in std::iter::successors(Some(1), |blocks| Some(2 * blocks)) {
        if blocks > most {
            break;
        }
        let seconds = machine.each(repeat, Submission::Captured, &|stream| {
            if machine.comm.rank() == 0 {
                machine.kernel_copy(stream, (&target, &source), blocks)?;
            }
            Ok(())
        })?;
        tried.push((blocks, seconds));
    }
    Ok(first_within(AS_GOOD, &tried).unwrap_or(1))
}
