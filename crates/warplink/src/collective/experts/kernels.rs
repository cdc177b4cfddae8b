//! Local kernels of a layer of experts; see `kernels/experts.cu`.

use crate::device::{Argument, Block, Device, DeviceSlice, Kernel, Launch, ModuleSource, Stream};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use std::sync::Arc;

/// Marks a slot without an expert. Must match the kernels.
const NOWHERE: u32 = u32::MAX;

/// Threads of a block of each kernel.
const ROUTE_THREADS: u32 = 1024;
const SUM_THREADS: u32 = 512;

/// Maximum blocks of the sum: enough to saturate memory bandwidth.
const MAX_SUM_BLOCKS: usize = 256;

/// The loaded kernels.
pub(super) struct ExpertKernels {
    route: Kernel,
    sums: [(DType, Kernel); 3],
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

/// Arguments of `sum`.
pub(super) struct Sum {
    pub(super) rows: DeviceSlice,
    pub(super) places: DeviceSlice,
    pub(super) weights: DeviceSlice,
    pub(super) output: DeviceSlice,
    pub(super) tokens: usize,
    pub(super) slots: usize,
    pub(super) elements: usize,
}

impl ExpertKernels {
    pub(super) fn load(device: &dyn Device) -> Result<Self> {
        let mut source = ModuleSource::new("experts")
            .with_cuda(include_str!("../../../kernels/experts.cu"))
            .with_host_kernel("route", route);
        for dtype in DType::MATMUL {
            source = source.with_host_kernel(name_of_sum(dtype), move |block| sum(block, dtype));
        }
        // SAFETY: the kernels access the memory of a launch within the lengths that the layer has checked.
        let module = unsafe { device.load_module(&source)? };
        let sum = |dtype| {
            module
                .kernel(&name_of_sum(dtype))
                .map(|kernel| (dtype, kernel))
        };
        let [first, second, third] = DType::MATMUL.map(sum);
        Ok(Self {
            route: module.kernel("route")?,
            sums: [first?, second?, third?],
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
        self.route
            .launch(stream, &launch, &arguments(&words, &memory))
    }

    /// Enqueues the weighted sums.
    pub(super) fn sum(&self, it: &Sum, dtype: DType, stream: &Stream) -> Result<()> {
        let kernel = self.sums.iter().find(|(known, _)| *known == dtype);
        let (Some((_, kernel)), true) = (kernel, it.tokens > 0) else {
            return Ok(());
        };
        let words = [
            it.rows.address(),
            it.places.address(),
            it.weights.address(),
            it.output.address(),
            it.tokens as u64,
            it.slots as u64,
            it.elements as u64,
        ];
        let memory = [&it.rows, &it.places, &it.weights, &it.output];
        let blocks = it.tokens.min(MAX_SUM_BLOCKS);
        let launch = Launch::new(blocks as u32, SUM_THREADS);
        kernel.launch(stream, &launch, &arguments(&words, &memory))
    }
}

fn arguments(words: &[u64], memory: &[&DeviceSlice]) -> [Argument; 2] {
    let memory: Arc<[DeviceSlice]> = memory.iter().map(|slice| (*slice).clone()).collect();
    [Argument::Words(words.into()), Argument::Memory(memory)]
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
                NOWHERE
            };
            store(block, places, slot, &[place])?;
            count += 1;
        } else if !there && rank == 0 {
            store(block, places, slot, &[NOWHERE])?;
        }
    }
    store(block, rows, rank * limit, &listed)?;
    store(block, locals, rank * limit, &of_rank)?;
    store(block, counts, rank, &[count as u32])
}

fn name_of_sum(dtype: DType) -> String {
    format!("sum_{dtype}")
}

/// `sum`: blocks process tokens round-robin.
fn sum(block: &Block<'_>, dtype: DType) -> Result<()> {
    let words = block.words(0)?;
    let [tokens, slots, elements] = [4, 5, 6].map(|word| words[word] as usize);
    let [rows, places, weights, output] = block.memory(1)? else {
        return Err(missing());
    };
    let row = elements * dtype.size();
    for token in (block.index() as usize..tokens).step_by(block.blocks() as usize) {
        let of_token = |memory: &DeviceSlice| {
            let memory = memory.slice(4 * token * slots..4 * (token + 1) * slots)?;
            numbers(block, &memory)
        };
        let mut total = vec![0_f32; elements];
        for (place, weight) in of_token(places)?.into_iter().zip(of_token(weights)?) {
            if place == NOWHERE {
                continue;
            }
            let (from, weight) = (place as usize * row, f32::from_bits(weight));
            let values = block.load(&rows.slice(from..from + row)?)?;
            for (total, value) in total.iter_mut().zip(dtype.decode(&values)) {
                *total += weight * value as f32;
            }
        }
        let target = output.slice(token * row..(token + 1) * row)?;
        block.store(&target, &dtype.encode(total.into_iter().map(f64::from)))?;
    }
    Ok(())
}

fn missing() -> Error {
    Error::new(
        ErrorKind::Internal,
        "a launch without memory of a layer of experts",
    )
}
