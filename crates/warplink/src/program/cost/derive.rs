//! Hardware model of an untuned machine, derived from its figures.
//!
//! Times that hardly differ between machines, such as those of driver calls and of a signal over a link, are
//! constants here; rates follow the [`Figures`].

use super::collective::{CollectiveTimes, Collectives, EXCHANGE, link_bytes};
use super::curve::Curve;
use super::figures::Figures;
use super::gemm::{Gemm, Grid};
use super::lanes::Lanes;
use super::model::{
    DeviceMatch, FORMAT, HardwareModel, Host, Interference, Latency, Link, Memory, Provenance,
};
use crate::device::{DeviceKind, DeviceProperties};
use crate::dtype::DType;
use crate::p2p::TransferKernels;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Uncertainty of estimates that were never compared with measurements on such a machine.
const UNCERTAINTY: f64 = 2.0;

/// Extents of matrices in the tables: on GPUs, and for products of the host.
const EXTENTS: [usize; 11] = [1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384];
const HOST_EXTENTS: [usize; 5] = [1, 16, 64, 256, 1024];

/// Bytes of puts and gets in the tables, by the copy engine and by kernels.
const SIZES: [u64; 8] = [
    4 * KIB,
    64 * KIB,
    MIB,
    4 * MIB,
    16 * MIB,
    64 * MIB,
    256 * MIB,
    1024 * MIB,
];
const KERNEL_SIZES: [u64; 6] = [KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB];

/// Factor on the latency of a transfer by packets between GPUs that share a bus and have no link.
const BUS_LATENCY: f64 = 2.0;

impl HardwareModel {
    /// Model of `world` ranks, each on a device of `kind` with these properties, that reach these figures.
    pub fn derived(
        kind: DeviceKind,
        device: &DeviceProperties,
        figures: &Figures,
        world: usize,
    ) -> Self {
        let model = if device.shared { of_host } else { of_gpu };
        let mut model = model(device, figures, world);
        model.device = DeviceMatch {
            kind: kind.to_string(),
            model: device.model.clone(),
            ranks: world,
            topology: if device.linked { "links" } else { "the bus" }.to_owned(),
            multiprocessors: device.multiprocessors.max(1),
            link_rate: device.link_rate,
            shared: device.shared,
        };
        model
    }
}

fn of_gpu(device: &DeviceProperties, figures: &Figures, world: usize) -> HardwareModel {
    let far = if device.linked { 1.0 } else { BUS_LATENCY };
    let clock = if device.clock > 0.0 {
        device.clock
    } else {
        1.4e9
    };
    // Bytes per clock cycle that a block copies within its memory, to a peer's and from a peer's.
    // By clock cycle, because a block's throughput is limited by its loads in flight, whose latency in cycles hardly
    // changes.
    let of_block = |bytes: f64, all: f64| (bytes * clock).min(all);
    let one_block = of_block(28.0, figures.stored);
    let kernels_put = line(&KERNEL_SIZES, 2e-6 * far, 0.85 * figures.stored);
    let store_blocks = if device.linked {
        vec![(16 * KIB, 1), (64 * KIB, 4), (256 * KIB, 16), (4 * MIB, 32)]
    } else {
        // Several blocks signal completion by atomic additions in the peer's memory, which not every bus supports.
        vec![(256 * KIB, 1)]
    };
    HardwareModel {
        name: format!("{world} x {}", device.model),
        uncertainty: UNCERTAINTY,
        memory: Memory {
            rate: figures.memory,
            sum_rate: figures.memory,
            kernel: 2.0 * figures.launch,
            copy: line(
                &[4 * KIB, MIB, 64 * MIB, 1024 * MIB],
                3e-6,
                // The figure counts bytes that are read and written, a curve those that are copied.
                figures.memory / 2.0,
            ),
            copy_occupancy: 0.0,
            sum_occupancy: 1.0,
        },
        gemm: gpu_gemm(device, figures),
        link: Link {
            kernel_limit: 256 * KIB,
            kernel_put: line(&KERNEL_SIZES[..5], 3.9e-6 * far, one_block),
            kernel_get: line(&KERNEL_SIZES[..5], 4.0e-6 * far, 0.9 * one_block),
            kernels: TransferKernels {
                limit: if device.linked { 4 * MIB } else { 256 * KIB },
                packet_limit: 256 * KIB,
                packet_blocks: 64,
                packet_threads: 128,
                store_blocks,
                ..TransferKernels::default()
            },
            kernels_put: kernels_put.clone(),
            kernels_get: line(&KERNEL_SIZES, 3.4e-6 * far, 0.85 * figures.loaded),
            put: line(&SIZES, 2.3e-6, figures.put),
            get: line(&SIZES, 2.5e-6, figures.put),
            put_ring: figures.put,
            get_ring: 0.95 * figures.put,
            put_rotated: 0.98 * figures.put,
            get_rotated: 0.93 * figures.put,
            stored: 0.95 * figures.put,
            stored_exposed: 0.7,
        },
        latency: Latency {
            word: 3.2e-6,
            more_words: 0.7e-6,
            kernel_word: 0.05e-6,
            words_in_kernel: 4,
            event: 0.5e-6,
            launch: 0.0,
            room: 0.0,
            captured_copy: 8e-6,
            collective: 3e-6,
        },
        host: Host {
            matmul: 1.9e-6,
            sum: 1.9e-6,
            copy: 5.1e-6,
            transfer: 5.1e-6,
            word: 1.5e-6,
            event: 0.3e-6,
            collective: 11e-6,
            graph: 1.9e-6,
        },
        collectives: engine(world, 4e-6, 0.8e-6, 0.66 * figures.put, 1.5 * MIB as f64),
        lanes: Some(Lanes {
            launch: figures.launch,
            signal: 1.42e-6 * far,
            fence: 0.7e-6 * far,
            packet: 0.87e-6 * far,
            // About 550 cycles between two polls.
            packet_round: 550.0 / clock,
            load: 0.5e-6,
            peer_load: 1e-6 * far,
            block_threads: 512,
            block_own: of_block(50.0, figures.memory),
            block_stored: of_block(33.0, figures.stored),
            block_loaded: of_block(7.6, figures.loaded),
            stored: figures.stored,
            loaded: figures.loaded,
        }),
        ..nothing()
    }
}

fn of_host(device: &DeviceProperties, figures: &Figures, world: usize) -> HardwareModel {
    let copy = line(
        &[64, 4 * KIB, 64 * KIB, MIB, 16 * MIB],
        figures.launch,
        figures.put,
    );
    let products = times(&HOST_EXTENTS, |m, k, n| {
        5e-6 + 2.0 * (m * k * n) as f64 / figures.products
    });
    HardwareModel {
        name: "processors of one machine".to_owned(),
        // Ranks that share processors disturb one another's trials more than estimates are off, so estimates alone
        // decide.
        uncertainty: 1.0,
        memory: Memory {
            rate: 4.0 * figures.memory,
            sum_rate: figures.memory,
            kernel: figures.launch,
            copy: copy.clone(),
            copy_occupancy: 1.0 / device.multiprocessors.max(1) as f64,
            sum_occupancy: 1.0 / device.multiprocessors.max(1) as f64,
        },
        gemm: Gemm {
            // One thread computes a whole product.
            tile: (1 << 20, 1 << 20),
            smallest_tile: (1 << 20, 1 << 20),
            tail_filled: 0.5,
            tile_sharers: 4.0,
            grids: [DType::F32, DType::F16, DType::BF16]
                .map(|dtype| grid(dtype, &HOST_EXTENTS, &products))
                .to_vec(),
        },
        link: Link {
            // Kernels only on request: threads that wait for one another are no faster.
            kernels: TransferKernels {
                packet_limit: 16 * KIB,
                packet_blocks: 4,
                packet_threads: 64,
                store_blocks: vec![(16 * KIB, 1), (MIB, 4)],
                ..TransferKernels::default()
            },
            put: copy.clone(),
            get: copy,
            put_ring: figures.put,
            get_ring: figures.put,
            put_rotated: figures.put,
            get_rotated: figures.put,
            stored: figures.put,
            stored_exposed: 1.0,
            ..Link::default()
        },
        latency: Latency {
            word: 5e-6,
            more_words: 1e-6,
            kernel_word: 1e-6,
            event: 10e-6,
            launch: 1e-6,
            ..Latency::default()
        },
        host: Host {
            matmul: 0.3e-6,
            sum: 0.3e-6,
            copy: 0.2e-6,
            transfer: 0.5e-6,
            word: 0.2e-6,
            event: 0.2e-6,
            collective: 0.5e-6,
            graph: 5e-6,
        },
        collectives: engine(world, 60e-6, 20e-6, 0.5 * figures.put, 0.0),
        lanes: Some(Lanes {
            launch: figures.launch,
            signal: 5e-6,
            fence: 1e-6,
            packet: 10e-6,
            packet_round: 56e-9,
            load: 2e-6,
            peer_load: 3e-6,
            // One host thread does the work of all threads of a lane.
            block_threads: 1,
            block_own: 2.0 * figures.memory,
            block_stored: 2.0 * figures.stored,
            block_loaded: 2.0 * figures.loaded,
            stored: 2.0 * figures.stored,
            loaded: 2.0 * figures.loaded,
        }),
        ..nothing()
    }
}

/// Defaults common to all models.
fn nothing() -> HardwareModel {
    HardwareModel {
        format: FORMAT,
        name: String::new(),
        device: DeviceMatch::default(),
        source: Provenance::default(),
        uncertainty: 1.0,
        memory: Memory::default(),
        gemm: Gemm::default(),
        link: Link::default(),
        latency: Latency::default(),
        host: Host::default(),
        interference: Interference::default(),
        collectives: Collectives::default(),
        lanes: None,
        algorithms: Vec::new(),
    }
}

/// A curve whose time grows linearly with bytes, starting at `first`.
fn line(sizes: &[u64], first: f64, rate: f64) -> Curve {
    let points = sizes.iter();
    Curve(
        points
            .map(|bytes| (*bytes, first + *bytes as f64 / rate))
            .collect(),
    )
}

/// Times of the vendor's collectives: a startup time and a time per rank, and a rate that reaches half of `rate` for
/// messages of `half` bytes.
fn engine(world: usize, first: f64, each: f64, rate: f64, half: f64) -> Collectives {
    let worlds = if world > 2 { vec![2, world] } else { vec![2] };
    let names = [
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "all_reduce",
        "broadcast",
        "reduce",
        EXCHANGE,
    ];
    let times = |world: usize, name: &str| {
        let sizes = (10..=30).step_by(2).map(|power| 1_u64 << power);
        let seconds = |bytes: u64| {
            let sent = link_bytes(name, world, bytes as f64);
            // Counting short messages twice halves their rate, up to `half` bytes.
            first + each * world as f64 + (sent + half.min(sent)) / rate
        };
        CollectiveTimes {
            name: name.to_owned(),
            world,
            times: Curve(sizes.map(|bytes| (bytes, seconds(bytes))).collect()),
        }
    };
    let all = worlds
        .iter()
        .flat_map(|world| names.iter().map(|name| times(*world, name)));
    Collectives(all.collect())
}

fn gpu_gemm(device: &DeviceProperties, figures: &Figures) -> Gemm {
    let [halves, floats] = device.products;
    let ratio = if halves > 0.0 && floats > 0.0 {
        floats / halves
    } else {
        0.0625
    };
    let (multiprocessors, memory) = (device.multiprocessors, figures.memory);
    let shape = |rate: f64, size: usize| {
        monotone(times(&EXTENTS, |m, k, n| {
            product(multiprocessors, memory, rate, size, (m, k, n))
        }))
    };
    let (halves, floats) = (
        shape(figures.products, 2),
        shape(ratio * figures.products, 4),
    );
    let of = |dtype, seconds: &[f64]| grid(dtype, &EXTENTS, seconds);
    Gemm {
        tile: (128, 256),
        smallest_tile: (64, 64),
        tail_filled: 0.5,
        tile_sharers: 4.0,
        grids: vec![
            of(DType::BF16, &halves),
            of(DType::F16, &halves),
            of(DType::F32, &floats),
        ],
    }
}

/// Seconds of a product whose tiles run on the multiprocessors in waves, or that is bound by memory.
fn product(
    multiprocessors: usize,
    memory: f64,
    rate: f64,
    size: usize,
    (m, k, n): (usize, usize, usize),
) -> f64 {
    const TILE: (usize, usize) = (128, 256);
    const FLOOR: f64 = 2e-6;
    let all = multiprocessors.max(1);
    let tiles = m.div_ceil(TILE.0) * n.div_ceil(TILE.1);
    let waves = if tiles > all {
        // After the first wave, tiles no longer end together; in the last one, half of the device idles for the time
        // of a tile, or less if that wave is fuller.
        (tiles.div_ceil(all) as f64).min(tiles as f64 / all as f64 + 0.5)
    } else {
        // If few tiles would leave much of the device idle, a library uses smaller ones, which read more data per
        // product.
        0.55_f64.powi((all / tiles).ilog2().min(3) as i32)
    };
    let wave = 2.0 * (TILE.0 * TILE.1 * k * all) as f64 / rate;
    let moved = ((m * k + k * n + m * n) * size) as f64 / memory;
    FLOOR + (waves * wave).max(moved)
}

/// Times of products of all [`EXTENTS`], each at least that of any smaller shape: wave quantization would make some larger
/// shapes faster.
fn monotone(mut times: Vec<f64>) -> Vec<f64> {
    const COUNT: usize = EXTENTS.len();
    for here in 0..times.len() {
        // By the next smaller extent along each axis.
        for back in [COUNT * COUNT, COUNT, 1] {
            if here / back % COUNT > 0 {
                times[here] = times[here].max(times[here - back]);
            }
        }
    }
    times
}

/// Times of products whose sides are all combinations of `extents`: by m, then k, then n.
fn times(extents: &[usize], seconds: impl Fn(usize, usize, usize) -> f64) -> Vec<f64> {
    let mut times = Vec::with_capacity(extents.len().pow(3));
    for &m in extents {
        for &k in extents {
            times.extend(extents.iter().map(|&n| seconds(m, k, n)));
        }
    }
    times
}

fn grid(dtype: DType, extents: &[usize], seconds: &[f64]) -> Grid {
    Grid {
        dtype,
        aligned: true,
        m: extents.to_vec(),
        k: extents.to_vec(),
        n: extents.to_vec(),
        seconds: seconds.to_vec(),
    }
}

#[cfg(test)]
#[path = "derive_tests.rs"]
mod tests;
