//! The kernels of the channel tests: CUDA C++ for GPUs, closures for the host device.

// Each test binary uses a part of this.
#![allow(dead_code, unreachable_pub)]

use std::sync::Arc;
use warplink::channel::Connection;
use warplink::device::{
    AllocationKind, Argument, Block, Device, DeviceSlice, Kernel, Launch, ModuleSource, Stream,
};
use warplink::{Communicator, Error, Result};

/// Threads of a block on a GPU.
pub const THREADS: u32 = 256;

/// Word `i` of what is sent in `round`; must match the CUDA kernels.
pub fn pattern(round: u32, i: usize) -> u32 {
    round
        .wrapping_mul(2_654_435_761)
        .wrapping_add((i as u32).wrapping_mul(40503))
        .wrapping_add(1)
}

/// What is sent in `round`.
pub fn contents(round: u32, bytes: usize) -> Vec<u8> {
    (0..bytes / 4)
        .flat_map(|i| pattern(round, i).to_ne_bytes())
        .collect()
}

/// How many words of `slice` differ from what is sent in `round`.
fn differences(block: &Block<'_>, slice: &DeviceSlice, round: u32) -> Result<u32> {
    let mut found = vec![0; slice.bytes()];
    block.read(slice, &mut found)?;
    let expected = contents(round, found.len());
    let pairs = found.chunks_exact(4).zip(expected.chunks_exact(4));
    Ok(pairs.filter(|(a, b)| a != b).count() as u32)
}

/// Adds to the number of wrong words in `result`.
fn note(block: &Block<'_>, result: &DeviceSlice, wrong: u32) -> Result<()> {
    let mut bytes = [0; 4];
    block.read(&result.slice(0..4)?, &mut bytes)?;
    let sum = u32::from_ne_bytes(bytes) + wrong;
    block.write(&result.slice(0..4)?, &sum.to_ne_bytes())
}

fn ping_pong(block: &Block<'_>) -> Result<()> {
    let channel = block.channel(0)?;
    let (bytes, rank, rounds) = (block.u64(1)?, block.u32(2)?, block.u32(3)?);
    let (result, region) = (block.slice(4)?, block.slice(5)?);
    let half = bytes as usize;
    let (first, second) = (region.slice(0..half)?, region.slice(half..2 * half)?);
    for round in 0..rounds {
        if rank == 0 {
            block.write(&first, &contents(2 * round, half))?;
            channel.put_with_signal(bytes, 0, bytes)?;
        }
        channel.wait()?;
        let expected = 2 * round + u32::from(rank == 0);
        note(block, result, differences(block, &second, expected)?)?;
        if rank == 1 {
            block.write(&first, &contents(2 * round + 1, half))?;
            channel.put_with_signal(bytes, 0, bytes)?;
        }
    }
    Ok(())
}

fn wait_once(block: &Block<'_>) -> Result<()> {
    block.channel(0)?.wait()
}

/// The module of all test kernels, loaded.
pub struct Kernels(warplink::device::Module);

impl Kernels {
    pub fn load(device: &Arc<dyn Device>) -> Self {
        let source = ModuleSource::new("kernels.cu")
            .with_cuda(include_str!("kernels.cu"))
            .with_host_kernel("ping_pong", ping_pong)
            .with_host_kernel("wait_once", wait_once);
        // SAFETY: the kernels access the memory that their arguments name, within its bounds.
        Self(unsafe { device.load_module(&source) }.unwrap())
    }

    pub fn get(&self, name: &str) -> Kernel {
        self.0.kernel(name).unwrap()
    }
}

/// Where a kernel says how many words were wrong, and its status.
pub struct Outcome {
    device: Arc<dyn Device>,
    memory: DeviceSlice,
}

impl Outcome {
    pub fn new(device: &Arc<dyn Device>) -> Self {
        let memory = device.allocate(8, AllocationKind::Plain).unwrap();
        device.upload(&memory, &[0; 8]).unwrap();
        Self {
            device: device.clone(),
            memory,
        }
    }

    pub fn argument(&self) -> Argument {
        Argument::from(&self.memory)
    }

    /// The number of wrong words and the status.
    pub fn read(&self) -> [u32; 2] {
        let mut bytes = [0; 8];
        self.device.download(&self.memory, &mut bytes).unwrap();
        [0, 4].map(|at| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap()))
    }
}

/// A rank of a test: its communicator, a stream, the kernels, and an outcome.
pub struct Rig<'a> {
    pub comm: &'a Communicator,
    pub stream: Stream,
    pub kernels: Kernels,
    pub outcome: Outcome,
}

impl<'a> Rig<'a> {
    /// Loads the kernels on all ranks before any launches one: loading might wait for one that runs.
    pub fn new(comm: &'a Communicator) -> Self {
        let device = comm.device();
        let rig = Self {
            comm,
            stream: comm.create_stream(Default::default()).unwrap(),
            kernels: Kernels::load(device),
            outcome: Outcome::new(device),
        };
        comm.barrier().unwrap();
        rig
    }

    pub fn launch(&self, name: &str, blocks: u32, arguments: &[Argument]) -> Result<()> {
        let launch = Launch::new(blocks, THREADS);
        self.kernels
            .get(name)
            .launch(&self.stream, &launch, arguments)
    }

    /// Waits for the stream, and checks that nothing was wrong.
    pub fn finish(&self) -> Result<(), Error> {
        self.comm.synchronize(&self.stream)?;
        assert_eq!(self.outcome.read(), [0, 0], "wrong words, and the status");
        Ok(())
    }

    /// Enqueues so many rounds of ping-pong of `bytes` on a connection between ranks 0 and 1.
    pub fn ping_pong(&self, connection: &Connection, bytes: usize, rounds: u32) -> Result<()> {
        let mut arguments = vec![
            connection.channel(),
            Argument::U64(bytes as u64),
            Argument::U32(self.comm.rank() as u32),
            Argument::U32(rounds),
            self.outcome.argument(),
        ];
        arguments.push(Argument::from(connection.region(0).unwrap().memory()));
        self.launch("ping_pong", 1, &arguments)
    }
}
