//! Which variant a product is lowered to: a cost model, or the caller's word.
//!
//! The model runs the steps of each variant on paper: the time at which each chunk arrives (bytes
//! over the rate at which this layout copies, and a latency per step), and the products one after
//! another, each no earlier than its chunk. It knows the tail of a product, the last tiles that do
//! not fill the device, which is what many small products lose against few large ones. Rates are of
//! all ranks copying at once; they differ by layout, since one stream that serves many peers keeps
//! its copy engine less busy than one that serves a neighbour.

use super::gather::AllGatherMatmul;
use super::scatter::MatmulReduceScatter;
use super::{Variant, check};
use crate::dtype::DType;
use crate::error::Result;
use std::fmt;

/// What a machine can do, as far as the choice depends on it.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// Its name, for explanations.
    pub name: String,
    /// Products of 16-bit types, in floating-point operations per second, for large sizes.
    pub flops: f64,
    /// Products of f32.
    pub flops_f32: f64,
    /// Multiprocessors; a product's tiles run on them in waves.
    pub multiprocessors: usize,
    /// Rows and columns of a tile.
    pub tile: (usize, usize),
    /// Memory of the device, in bytes per second, for sums and copies.
    pub memory: f64,
    /// Puts around a ring, in bytes per second and rank.
    pub ring_put: f64,
    /// Gets around a ring.
    pub ring_get: f64,
    /// Puts to all others in rotated order.
    pub rotated_put: f64,
    /// Gets from all others in rotated order.
    pub rotated_get: f64,
    /// What products store into the memory of all others while they run.
    pub stored: f64,
    /// The engine's all-gather and reduce-scatter, in bytes received per second and rank.
    pub collective: f64,
    /// From the end of a copy to the start of what waits for it, in seconds.
    pub signal: f64,
    /// An engine's collective of nothing, in seconds.
    pub collective_latency: f64,
    /// From one operation of a stream to the next, in seconds.
    pub launch: f64,
}

impl Machine {
    /// A node of H200, from measurements on four and eight; f32 is four fifths of the data sheet's peak.
    pub fn h200() -> Self {
        Self {
            name: "H200, NVSwitch".to_owned(),
            flops: 745e12,
            flops_f32: 54e12,
            multiprocessors: 132,
            tile: (128, 256),
            memory: 4.0e12,
            ring_put: 388e9,
            ring_get: 371e9,
            rotated_put: 380e9,
            rotated_get: 349e9,
            stored: 355e9,
            collective: 342e9,
            signal: 8e-6,
            collective_latency: 13e-6,
            launch: 2.5e-6,
        }
    }

    /// Seconds of a product.
    fn product(&self, dtype: DType, m: usize, k: usize, n: usize) -> f64 {
        let (rows, columns) = (self.tile.0.max(1), self.tile.1.max(1));
        let tiles = (m.div_ceil(rows) * n.div_ceil(columns)) as f64;
        let per_wave = self.multiprocessors.max(1) as f64;
        let waves = if tiles > per_wave {
            // After the first wave, tiles no longer end together; at the end of the product, half
            // of the device is idle for the time of a tile, or less where the last wave is fuller.
            let waves = tiles / per_wave;
            waves.ceil().min(waves + 0.5)
        } else {
            // Where few tiles leave much of the device idle, a library takes smaller ones, which
            // read more for each product.
            let halvings = (per_wave / tiles).log2().floor().min(3.0);
            0.55_f64.powf(halvings)
        };
        let flops = match dtype {
            DType::F32 => self.flops_f32,
            _ => self.flops,
        };
        let wave = 2.0 * (rows * columns) as f64 * k as f64 * per_wave / flops;
        waves * wave + self.launch
    }

    /// The rate of a variant's copies; that of the all-gather where the two differ.
    fn rate(&self, variant: Variant) -> f64 {
        match variant {
            Variant::RingGet | Variant::RingCoarse => self.ring_get,
            Variant::RingPut | Variant::RingFine => self.ring_put,
            Variant::PairwiseGet => self.rotated_get,
            Variant::PairwisePut | Variant::PushRotated | Variant::PushFine => self.rotated_put,
            Variant::Collective => self.collective,
        }
    }
}

/// What a variant is thought to take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The variant.
    pub variant: Variant,
    /// Seconds from start to end.
    pub seconds: f64,
    /// Seconds until the last byte has arrived, or has left.
    pub link: f64,
    /// Seconds of the products alone, chunked as the variant does.
    pub compute: f64,
}

/// A variant, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The variant.
    pub variant: Variant,
    /// How many streams its products take turns on.
    pub streams: usize,
    /// Whether the caller forced it.
    pub forced: bool,
    /// All variants, the fastest first.
    pub estimates: Vec<Estimate>,
    /// What is computed, and on what.
    pub subject: String,
}

impl fmt::Display for Choice {
    /// The explanation: a line for the decision and one for each variant.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = if self.forced {
            "as asked"
        } else {
            "the least time in the model"
        };
        writeln!(f, "{}: {}, {why}", self.subject, self.variant)?;
        for estimate in &self.estimates {
            let bound = match estimate {
                _ if estimate.variant == Variant::Collective => "link, then products",
                _ if estimate.link > estimate.compute => "bound by the link",
                _ => "bound by the products",
            };
            writeln!(
                f,
                "  {:13} {:9.1} µs (link {:.1}, products {:.1}: {bound})",
                estimate.variant.name(),
                estimate.seconds * 1e6,
                estimate.link * 1e6,
                estimate.compute * 1e6
            )?;
        }
        Ok(())
    }
}

fn decide(
    subject: String,
    streams: fn(Variant) -> usize,
    force: Option<Variant>,
    estimate: impl Fn(Variant) -> Estimate,
) -> Choice {
    // Where two are thought equal, the first is taken: no step of it waits for another rank's.
    let mut estimates: Vec<Estimate> = [
        Variant::PushRotated,
        Variant::PushFine,
        Variant::RingPut,
        Variant::PairwiseGet,
        Variant::RingGet,
        Variant::PairwisePut,
        Variant::RingCoarse,
        Variant::RingFine,
        Variant::Collective,
    ]
    .into_iter()
    .map(estimate)
    .collect();
    estimates.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    let best = estimates
        .first()
        .map_or(Variant::Collective, |best| best.variant);
    let variant = force.unwrap_or(best);
    Choice {
        variant,
        streams: streams(variant),
        forced: force.is_some(),
        estimates,
        subject,
    }
}

/// Chooses the variant for an all-gather + matmul, or explains the one that is forced.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) for sizes that
/// [`lower_all_gather_matmul`](super::lower_all_gather_matmul) refuses.
pub fn choose_all_gather_matmul(
    spec: &AllGatherMatmul,
    world: usize,
    machine: &Machine,
    force: Option<Variant>,
) -> Result<Choice> {
    check(world, &[("m", spec.m), ("k", spec.k)], &["m"], 1)?;
    let rows = spec.m / world;
    let columns = spec.n.iter().sum();
    let bytes = (rows * spec.k * spec.dtype.size()) as f64;
    let product = |m: usize| -> f64 {
        let each = spec
            .n
            .iter()
            .map(|&n| machine.product(spec.dtype, m, spec.k, n));
        each.sum()
    };
    let subject = format!(
        "all-gather + matmul of {} × {} × {:?} {} on {world} ranks of {}",
        spec.m, spec.k, spec.n, spec.dtype, machine.name
    );
    Ok(decide(subject, Variant::gather_streams, force, |variant| {
        let copy = bytes / machine.rate(variant);
        if variant == Variant::Collective {
            let link = machine.collective_latency + copy * (world - 1) as f64;
            let compute = product(spec.m);
            let seconds = link + compute;
            return Estimate {
                variant,
                seconds,
                link,
                compute,
            };
        }
        let (mut arrival, mut compute) = (0.0_f64, product(rows));
        let mut end = compute;
        for (rows, seconds) in arrivals(machine, variant, (rows, columns), world, copy) {
            if variant == Variant::PairwisePut {
                // The copies of two streams share the link and end together, so that no product is
                // left to run beside the next ones.
                arrival = arrival.max(end);
            }
            arrival += seconds;
            let chunk = product(rows);
            end = end.max(arrival + machine.signal) + chunk;
            compute += chunk;
        }
        Estimate {
            variant,
            seconds: end * disturbance(variant),
            link: (copy + hop(machine, variant)) * (world - 1) as f64,
            compute,
        }
    }))
}

/// How much longer an all-gather's variant took on eight H200 than its steps on paper: bytes that
/// peers put into a device's memory hold its products up, those that it gets hardly do, and what
/// cuts products in uneven or smaller pieces loses more than its tails.
fn disturbance(variant: Variant) -> f64 {
    match variant {
        Variant::RingPut | Variant::PushRotated | Variant::PushFine => 1.02,
        Variant::RingFine => 1.08,
        _ => 1.0,
    }
}

/// The products of an all-gather's variant after that of the own shard: the rows of each, and the
/// seconds between the arrival of the one before and its own.
fn arrivals(
    machine: &Machine,
    variant: Variant,
    (rows, columns): (usize, usize),
    world: usize,
    copy: f64,
) -> Vec<(usize, f64)> {
    let steps = world - 1;
    match variant {
        Variant::RingFine => {
            // Two streams hide half of a part's handover.
            let parts = super::gather::parts(rows, columns);
            let each = copy / parts as f64 + machine.signal / 2.0;
            vec![(rows / parts, each); steps * parts]
        }
        Variant::RingCoarse => {
            let step = copy + hop(machine, variant);
            let (early, late) = (steps / 2, steps - steps / 2);
            let wait = |shards: usize| shards as f64 * step;
            // On most ranks, one group is on both ends of the result, and so are two products.
            let (low, high) = (late / 2, late - late / 2);
            [
                (early * rows, wait(early)),
                (high * rows, wait(late)),
                (low * rows, 0.0),
            ]
            .into_iter()
            .filter(|(rows, _)| *rows > 0)
            .collect()
        }
        Variant::PushFine if steps > 0 => {
            let parts = super::gather::last_parts(rows, columns);
            let part = |rows_of: usize| {
                let share = rows_of as f64 / rows as f64;
                (rows_of, copy * share + hop(machine, variant))
            };
            let halves = (1..parts).map(|halvings| rows >> halvings);
            let last = rows >> (parts - 1);
            let of_last = halves.chain([last]).map(part);
            vec![part(rows); steps - 1]
                .into_iter()
                .chain(of_last)
                .collect()
        }
        _ => vec![(rows, copy + hop(machine, variant)); steps],
    }
}

/// Chooses the variant for a matmul + reduce-scatter, or explains the one that is forced.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) for sizes that
/// [`lower_matmul_reduce_scatter`](super::lower_matmul_reduce_scatter) refuses.
pub fn choose_matmul_reduce_scatter(
    spec: &MatmulReduceScatter,
    world: usize,
    machine: &Machine,
    force: Option<Variant>,
) -> Result<Choice> {
    let sizes = [("m", spec.m), ("k", spec.k), ("n", spec.n)];
    check(world, &sizes, &["m", "k"], 1)?;
    let (rows, depth) = (spec.m / world, spec.k / world);
    let bytes = (rows * spec.n * spec.dtype.size()) as f64;
    let subject = format!(
        "matmul + reduce-scatter of {} × {} × {} {} on {world} ranks of {}",
        spec.m, spec.k, spec.n, spec.dtype, machine.name
    );
    Ok(decide(
        subject,
        Variant::scatter_streams,
        force,
        |variant| {
            let copy = bytes
                / match variant {
                    Variant::RingCoarse => machine.rotated_get,
                    _ => machine.rate(variant),
                };
            if variant == Variant::Collective {
                let link = machine.collective_latency + copy * (world - 1) as f64;
                let compute = machine.product(spec.dtype, spec.m, depth, spec.n);
                let seconds = link + compute;
                return Estimate {
                    variant,
                    seconds,
                    link,
                    compute,
                };
            }
            if variant == Variant::RingFine {
                return rings_of_parts(machine, spec, world, copy);
            }
            if variant == Variant::PushFine {
                return stored(machine, spec, world);
            }
            let chunk = machine.product(spec.dtype, rows, depth, spec.n);
            let ring = matches!(variant, Variant::RingGet | Variant::RingPut);
            // A ring adds two blocks at every step; the others add all up at the end.
            let step_sum = if ring {
                3.0 * bytes / machine.memory + machine.launch
            } else {
                0.0
            };
            // Parts of blocks follow one another on streams of their own, which hide their handovers.
            let parts = match variant {
                Variant::RingCoarse => super::scatter::parts(rows, spec.n),
                _ => 1,
            };
            let part = parts as f64;
            // Every step is handed over from the stream of a product, whoever copies.
            let step = (copy + machine.signal) / part;
            let (mut computed, mut arrived) = (0.0_f64, 0.0_f64);
            for _ in parts..world * parts {
                computed += chunk / part;
                let leaves = if ring {
                    computed.max(arrived) + step_sum
                } else {
                    computed
                };
                arrived = arrived.max(leaves + machine.signal) + step;
            }
            let own = computed + chunk;
            // What was added up early counts as one block.
            let blocks = match variant {
                Variant::RingCoarse => world + 1 - world.div_ceil(2),
                _ => world,
            };
            let last_sum = match ring {
                true => step_sum,
                false => (blocks + 1) as f64 * bytes / machine.memory / part + machine.launch,
            };
            // With sums beside products, the whole took so much longer on four and eight H200.
            let held_up = match variant {
                Variant::RingCoarse | Variant::RingGet | Variant::RingPut => 1.07,
                _ => 1.0,
            };
            Estimate {
                variant,
                seconds: (own.max(arrived + machine.signal) + last_sum) * held_up,
                link: step * part * (world - 1) as f64,
                compute: own,
            }
        },
    ))
}

/// [`Variant::PushFine`] of a matmul + reduce-scatter: one product whose tiles leave as they are done.
fn stored(machine: &Machine, spec: &MatmulReduceScatter, world: usize) -> Estimate {
    let (rows, depth) = (spec.m / world, spec.k / world);
    let bytes = (rows * spec.n * spec.dtype.size()) as f64;
    let others = rows * (world - 1);
    let (own, rest) = (
        machine.product(spec.dtype, rows, depth, spec.n),
        match others {
            0 => 0.0,
            rows => machine.product(spec.dtype, rows, depth, spec.n),
        },
    );
    // Of the product, so much is not hidden behind what it stores: tiles are computed in waves, and
    // the link is idle while one is.
    const BESIDE: f64 = 0.55;
    let link = (world - 1) as f64 * bytes / machine.stored;
    let stored = own.max(machine.signal) + link + BESIDE * rest;
    let sum = (world + 1) as f64 * bytes / machine.memory + machine.launch;
    Estimate {
        variant: Variant::PushFine,
        seconds: stored.max(own + rest) + machine.signal + sum,
        link,
        compute: own + rest,
    }
}

/// [`Variant::RingFine`] of a matmul + reduce-scatter: parts of blocks that take turns on the link
/// and on the device, each product after the arrival of what it adds to.
fn rings_of_parts(
    machine: &Machine,
    spec: &MatmulReduceScatter,
    world: usize,
    copy: f64,
) -> Estimate {
    let (rows, depth) = (spec.m / world, spec.k / world);
    let parts = super::scatter::parts(rows, spec.n);
    let stride = super::scatter::stride(spec, world);
    let bytes = (rows * spec.n * spec.dtype.size()) as f64;
    // Two streams hide the tails of parts.
    let product = machine.product(spec.dtype, rows, depth, spec.n) / parts as f64;
    let copy = copy / parts as f64;
    let (mut device, mut link) = (0.0_f64, 0.0_f64);
    let mut arrived = vec![0.0_f64; world * parts];
    for step in 0..world {
        for part in 0..parts {
            let needed = match step.checked_sub(stride) {
                Some(before) => arrived[before * parts + part],
                None => 0.0,
            };
            device = device.max(needed) + product;
            if step + 1 < world {
                link = link.max(device) + machine.signal + copy;
                arrived[step * parts + part] = link + machine.signal;
            }
        }
    }
    let sum = match stride {
        1 => 0.0,
        _ => (stride + 1) as f64 * bytes / machine.memory + machine.launch,
    };
    // Blocks too short for parts took so much longer on four H200: nothing hides that a step starts
    // late.
    let late = if parts == 1 { 1.28 } else { 1.0 };
    Estimate {
        variant: Variant::RingFine,
        seconds: (device.max(link + machine.signal) + sum) * late,
        link: (copy + machine.signal) * (parts * (world - 1)) as f64,
        compute: product * (parts * world) as f64,
    }
}

/// Seconds that a step of an all-gather's variant takes beside its copy.
fn hop(machine: &Machine, variant: Variant) -> f64 {
    match variant {
        // What a step passes on must have arrived, which a signal tells.
        Variant::RingGet | Variant::RingPut | Variant::RingFine | Variant::RingCoarse => {
            machine.signal
        }
        _ => machine.launch,
    }
}
