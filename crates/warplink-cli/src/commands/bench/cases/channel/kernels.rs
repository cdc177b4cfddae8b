//! The kernels of `bench channel`: CUDA C++ for GPUs, closures for the host device.

use anyhow::Result;
use std::collections::BTreeMap;
use warplink::device::{Block, Kernel, ModuleSource};
use warplink::{Communicator, Error};

/// Bytes at the start of every region that are the kernels' own; must match kernels.cu.
pub(super) const DATA: u64 = 256;

/// A kernel of the host device.
type HostKernel = fn(&Block<'_>) -> Result<(), Error>;

/// Every kernel. On the host device there is nothing below a channel's signal, and no plain copy into a peer's
/// memory.
const KERNELS: [(&str, HostKernel); 8] = [
    ("signals", signals),
    ("words", signals),
    ("puts", puts),
    ("packets", packets),
    ("put_once", put_once),
    ("copy_once", put_once),
    ("put_and_flush", put_and_flush),
    ("triggers", triggers),
];

/// The benchmark's kernels, loaded. Each takes a channel, the rank, a number of rounds, and of bytes.
pub(super) struct Kernels(BTreeMap<&'static str, Kernel>);

impl Kernels {
    pub(super) fn load(comm: &Communicator) -> Result<Self> {
        let source = ModuleSource::new("bench channel").with_cuda(include_str!("kernels.cu"));
        let source = KERNELS.iter().fold(source, |source, (name, kernel)| {
            source.with_host_kernel(*name, *kernel)
        });
        // SAFETY: the kernels access the regions of their channel within bounds that the calls check, and
        // those that access them otherwise ask for the addresses of as many bytes as they touch.
        let module = unsafe { comm.device().load_module(&source) }?;
        // All at once: later, the driver might wait for a running kernel.
        let kernels = KERNELS
            .iter()
            .map(|(name, _)| Ok((*name, module.kernel(name)?)));
        Ok(Self(kernels.collect::<Result<_>>()?))
    }

    pub(super) fn get(&self, name: &str) -> Option<&Kernel> {
        self.0.get(name)
    }
}

fn signals(block: &Block<'_>) -> Result<(), Error> {
    let channel = block.channel(0)?;
    back_and_forth(block, |_| channel.signal(), |_| channel.wait())
}

fn puts(block: &Block<'_>) -> Result<(), Error> {
    let (channel, bytes) = (block.channel(0)?, block.u64(3)?);
    let put = |_| channel.put_with_signal(DATA + bytes, DATA, bytes);
    back_and_forth(block, put, |_| channel.wait())
}

fn packets(block: &Block<'_>) -> Result<(), Error> {
    let (channel, bytes) = (block.channel(0)?, block.u64(3)?);
    // In memory that outlives the launch: with a flag of the launch before, its packets would pass for new ones.
    let counted = channel.here(16, 4)?;
    let mut word = [0; 4];
    block.read(&counted, &mut word)?;
    let before = u32::from_ne_bytes(word);
    let (arrived, packed) = (DATA + bytes, DATA + 2 * bytes);
    let put = |round| channel.put_packets16(packed, DATA, bytes, before + round);
    let read = |round| channel.read_packets16(arrived, packed, bytes, before + round);
    back_and_forth(block, put, read)?;
    block.write(&counted, &(before + block.u32(2)?).to_ne_bytes())
}

/// Rounds, from 1 on, in which rank 0 sends first and the other rank answers.
fn back_and_forth(
    block: &Block<'_>,
    send: impl Fn(u32) -> Result<(), Error>,
    receive: impl Fn(u32) -> Result<(), Error>,
) -> Result<(), Error> {
    let is_first = block.u32(1)? == 0;
    for round in 1..=block.u32(2)? {
        if is_first {
            send(round)?;
        }
        receive(round)?;
        if !is_first {
            send(round)?;
        }
    }
    Ok(())
}

fn put_once(block: &Block<'_>) -> Result<(), Error> {
    let (channel, bytes) = (block.channel(0)?, block.u64(3)?);
    let (index, blocks) = (u64::from(block.index()), u64::from(block.blocks()));
    let (start, end) = (bytes * index / blocks, bytes * (index + 1) / blocks);
    channel.put(DATA + start, DATA + start, end - start)
}

fn put_and_flush(block: &Block<'_>) -> Result<(), Error> {
    let (channel, rounds, bytes) = (block.channel(0)?, block.u32(2)?, block.u64(3)?);
    (0..rounds).try_for_each(|_| channel.put(DATA, DATA, bytes))?;
    channel.flush()
}

fn triggers(block: &Block<'_>) -> Result<(), Error> {
    let (channel, rounds) = (block.channel(0)?, block.u32(2)?);
    (0..rounds).try_for_each(|_| channel.signal())?;
    channel.flush()
}
