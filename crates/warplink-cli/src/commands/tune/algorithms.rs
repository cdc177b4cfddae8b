//! Fastest algorithms of the library's own collectives.

use super::machine::TunedMachine;
use crate::commands::bench::clock::Submission;
use anyhow::Result;
use std::time::{Duration, Instant};
use warplink::Collectives;
use warplink::DType;
use warplink::collective::{Algorithm, Call, CollectiveKind, CollectiveOptions, CollectivePath};
use warplink::device::{DeviceSlice, ReduceOp};
use warplink::program::cost::HardwareModel;
use warplink::program::cost::model::Algorithms;

/// Calls of a sample.
const CALLS: usize = 8;

/// Element types of reductions: one of each size, floats, since these cost more.
const REDUCED: [DType; 4] = [DType::F8E4M3, DType::BF16, DType::F32, DType::F64];

/// Warm-up calls, and time limit for memory to become reachable.
const WARM_UP: usize = 4;
const SOON: Duration = Duration::from_secs(2);

/// Measures them if requested and the direct path is possible.
pub(super) fn measure(machine: &TunedMachine<'_>, model: &mut HardwareModel) -> Result<()> {
    let comm = machine.comm;
    // Previous choices belong to previous figures.
    model.algorithms.clear();
    if comm.world() == 1 || !machine.selection.algorithms {
        return Ok(());
    }
    let mut by = Vec::new();
    for algorithm in Algorithm::CHOICES {
        let collectives = comm.collectives_with(&CollectiveOptions {
            algorithm: Some(algorithm),
            ..CollectiveOptions::default()
        })?;
        if collectives.path() == CollectivePath::Direct {
            by.push((algorithm, collectives));
        }
    }
    for kind in CollectiveKind::ALL {
        let dtypes: &[DType] = if kind.reduces() {
            &REDUCED
        } else {
            &[DType::U8]
        };
        for &dtype in dtypes {
            let limits = limits(machine, (kind, dtype), &by)?;
            if !limits.is_empty() {
                model.algorithms.push(Algorithms {
                    collective: kind.name().to_owned(),
                    world: comm.world(),
                    element_bytes: Some(dtype.size()),
                    limits,
                });
            }
        }
    }
    Ok(())
}

/// Fastest algorithm for each range of part sizes.
fn limits(
    machine: &TunedMachine<'_>,
    (kind, dtype): (CollectiveKind, DType),
    by: &[(Algorithm, Collectives)],
) -> Result<Vec<(u64, String)>> {
    let world = machine.comm.world();
    let (input_rows, output_rows) = kind.rows(world);
    let rows = input_rows.max(output_rows);
    let mut limits: Vec<(u64, String)> = Vec::new();
    // A barrier has no data.
    let fitting = |bytes: &usize| rows > 0 && *bytes <= machine.selection.largest / rows;
    for bytes in machine.sizes().into_iter().filter(fitting) {
        let call = Call::new(kind, ReduceOp::Sum, dtype, bytes / dtype.size(), 0);
        let input = machine.memory.own.memory().slice(0..input_rows * bytes)?;
        let output = machine.memory.into.memory().slice(0..output_rows * bytes)?;
        let mut best: Option<(f64, Algorithm)> = None;
        for (algorithm, collectives) in by {
            // Unsupported, or exceeds the workspace, on some rank.
            if collectives.choice(&call).is_err() {
                continue;
            }
            let seconds = seconds(machine, collectives, &call, (&output, &input))?;
            if best.is_none_or(|(least, _)| seconds < least) {
                best = Some((seconds, *algorithm));
            }
        }
        let Some((_, algorithm)) = best else {
            continue;
        };
        match limits.last_mut() {
            // Adjacent sizes with the same algorithm are one range, which ends at the largest of them.
            Some(last) if last.1 == algorithm.name() => last.0 = bytes as u64,
            _ => limits.push((bytes as u64, algorithm.name().to_owned())),
        }
    }
    Ok(limits)
}

/// Seconds of a call, once memory is reachable.
fn seconds(
    machine: &TunedMachine<'_>,
    collectives: &Collectives,
    call: &Call,
    (output, input): (&DeviceSlice, &DeviceSlice),
) -> Result<f64> {
    let stream = &machine.clock.stream;
    let choice = collectives.choice(call)?;
    let started = Instant::now();
    for round in 0.. {
        let before = collectives.direct_lanes()?;
        collectives.enqueue(call, output, input, stream)?;
        machine.comm.synchronize(stream)?;
        // Until the peers have mapped the memory, lanes take another way, whose time is not the algorithm's.
        let direct = collectives.direct_lanes()? - before == choice.lanes as u64;
        let reached = choice.algorithm != Algorithm::Direct || direct;
        let done = round >= WARM_UP && (reached || started.elapsed() > SOON);
        // All ranks continue together.
        let all = machine.comm.all_gather_bytes(&[u8::from(done)])?;
        if all.iter().all(|done| *done == [1]) {
            break;
        }
    }
    machine.each(CALLS, Submission::Captured, &|stream| {
        Ok(collectives.enqueue(call, output, input, stream)?)
    })
}
