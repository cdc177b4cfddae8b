//! The kernel that lists the rows of a dispatch; see `kernels/experts.cu`.

use crate::device::{Argument, Block, Device, DeviceSlice, Kernel, Launch, ModuleSource, Stream};
use crate::error::{Error, ErrorKind, Result};
use std::sync::Arc;

/// Threads of a block.
const ROUTE_THREADS: u32 = 1024;

/// The loaded kernel.
pub(super) struct ExpertKernels {
    route: Kernel,
}

/// Arguments of `route`; memory holds 32-bit integers.
pub(super) struct Routing {
    pub(super) experts: DeviceSlice,
    pub(super) tokens: usize,
    pub(super) slots: usize,
    pub(super) all: usize,
    pub(super) each: usize,
    pub(super) limit: usize,
    pub(super) counts: DeviceSlice,
    pub(super) rows: DeviceSlice,
    pub(super) locals: DeviceSlice,
    pub(super) places: DeviceSlice,
}

impl ExpertKernels {
    pub(super) fn load(device: &dyn Device) -> Result<Self> {
        let source = ModuleSource::new("experts")
            .with_cuda(include_str!("../../../kernels/experts.cu"))
            .with_host_kernel("route", route);
        // SAFETY: the kernel accesses the memory of a launch within the lengths that the layer has checked.
        let module = unsafe { device.load_module(&source)? };
        Ok(Self {
            route: module.kernel("route")?,
        })
    }

    /// Enqueues building the list of rows for each of `world` ranks.
    pub(super) fn route(&self, it: &Routing, world: usize, stream: &Stream) -> Result<()> {
        let words = [
            it.experts.address(),
            it.tokens as u64,
            it.slots as u64,
            it.all as u64,
            it.each as u64,
            it.limit as u64,
            it.counts.address(),
            it.rows.address(),
            it.locals.address(),
            it.places.address(),
        ];
        let memory = [&it.experts, &it.counts, &it.rows, &it.locals, &it.places];
        let launch = Launch::new(world as u32, ROUTE_THREADS);
        let memory: Arc<[DeviceSlice]> = memory.into_iter().cloned().collect();
        let arguments = [Argument::Words(words.into()), Argument::Memory(memory)];
        self.route.launch(stream, &launch, &arguments)
    }
}

fn numbers(block: &Block<'_>, memory: &DeviceSlice) -> Result<Vec<u32>> {
    let bytes = block.load(memory)?;
    let words = bytes.chunks_exact(4);
    Ok(words
        .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
        .collect())
}

fn store(block: &Block<'_>, memory: &DeviceSlice, from: usize, numbers: &[u32]) -> Result<()> {
    let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
    block.store(&memory.slice(4 * from..4 * from + bytes.len())?, &bytes)
}

/// `route`: one block for each rank.
fn route(block: &Block<'_>) -> Result<()> {
    let words = block.words(0)?;
    let [tokens, slots, all, each, limit] = [1, 2, 3, 4, 5].map(|word| words[word] as usize);
    let [experts, counts, rows, locals, places] = block.memory(1)? else {
        return Err(missing());
    };
    let rank = block.index() as usize;
    // Marks a slot without an expert.
    let nowhere = (block.blocks() as usize * limit) as u32;
    let experts = numbers(block, experts)?;
    let (mut listed, mut of_rank) = (Vec::new(), Vec::new());
    let mut count = 0;
    for (slot, expert) in experts.iter().take(tokens * slots).enumerate() {
        let expert = *expert as usize;
        let there = expert < all;
        if there && expert / each == rank {
            let fits = count < limit;
            if fits {
                listed.push((slot / slots) as u32);
                of_rank.push((expert % each) as u32);
            }
            let place = if fits {
                (rank * limit + count) as u32
            } else {
                nowhere
            };
            store(block, places, slot, &[place])?;
            count += 1;
        } else if !there && rank == 0 {
            store(block, places, slot, &[nowhere])?;
        }
    }
    store(block, rows, rank * limit, &listed)?;
    store(block, locals, rank * limit, &of_rank)?;
    store(block, counts, rank, &[count as u32])?;
    if rank == 0 {
        store(block, counts, block.blocks() as usize, &[tokens as u32])?;
    }
    Ok(())
}

fn missing() -> Error {
    Error::new(
        ErrorKind::Internal,
        "a launch without memory of a layer of experts",
    )
}
