//! Interference: slowdown of concurrent work, and results stored at peers.

use super::gemm::filled;
use super::link::ends;
use super::machine::TunedMachine;
use crate::commands::bench::clock::{WorkRef, median};
use anyhow::Result;
use std::sync::Arc;
use warplink::DType;
use warplink::device::{DeviceSlice, MatmulSpec, PreparedLaunch, Priority, Stream};
use warplink::p2p::Protocol;
use warplink::program::cost::HardwareModel;

/// Duration of the background load relative to the timed work.
// The load has to outlast the work, which becomes slower beside it.
const LONGER: f64 = 1.5;

pub(super) fn measure(machine: &TunedMachine<'_>, model: &mut HardwareModel) -> Result<()> {
    // If ranks share cores, sharing explains all interference.
    if machine.comm.world() == 1 || model.device.shared {
        return Ok(());
    }
    let other = machine.comm.create_stream(Priority::High)?;
    let matmul = matmul(machine)?;
    let bytes = machine.selection.largest.min(64 << 20);
    let beside = &mut model.interference;
    for (protocol, matmul_beside) in [
        (Protocol::Put, &mut beside.matmul_beside_put),
        (Protocol::Get, &mut beside.matmul_beside_get),
    ] {
        let (target, source) = ends(machine, protocol, 1, bytes)?;
        let copy = |stream: &Stream| Ok(stream.copy(&target, &source)?);
        let multiply = |stream: &Stream| Ok(matmul.enqueue(stream)?);
        let (slower_matmul, slower_copy) = both(machine, &other, &multiply, &copy)?;
        *matmul_beside = slower_matmul;
        // The model has one figure for both kinds of copies.
        if protocol == Protocol::Put {
            beside.copy_beside_matmul = slower_copy;
        }
    }
    stored(machine, model)
}

/// Speed of each of two works when concurrent, relative to alone.
fn both(
    machine: &TunedMachine<'_>,
    other: &Stream,
    first: WorkRef<'_>,
    second: WorkRef<'_>,
) -> Result<(f64, f64)> {
    let alone = |work: WorkRef<'_>| -> Result<f64> {
        machine.comm.barrier()?;
        machine.median(machine.clock.alone(8, work)? / 8.0)
    };
    // Warm-up.
    alone(first)?;
    let times = [alone(first)?, alone(second)?];
    let beside = |timed: usize| -> Result<f64> {
        let (work, load) = if timed == 0 {
            (first, second)
        } else {
            (second, first)
        };
        let (own, others) = (times[timed], times[1 - timed]);
        // Some 4 ms, in which the start and the end of the overlap hardly count.
        let count = (4e-3 / own).clamp(2.0, 32.0).round();
        let loads = (LONGER * count * own / others).ceil() as usize;
        let mut ratios = Vec::new();
        for _ in 0..machine.selection.samples {
            // All ranks at once, since programs load all links at the same time.
            machine.comm.barrier()?;
            (0..loads).try_for_each(|_| load(other))?;
            let seconds = machine.clock.alone(count as usize, work)?;
            machine.comm.synchronize(other)?;
            ratios.push(own * count / seconds);
        }
        // Above 1 is noise: nothing becomes faster beside other work. Estimates divide by it, so that it is not near 0.
        Ok(machine.median(median(&mut ratios))?.clamp(0.05, 1.0))
    };
    Ok((beside(0)?, beside(1)?))
}

/// A matmul that fills the device.
fn matmul(machine: &TunedMachine<'_>) -> Result<Arc<dyn PreparedLaunch>> {
    let (m, k, n) = (4096, 4096, 4096);
    let operand = |elements: usize| filled(machine, 2 * elements, DType::BF16);
    let (a, b, c) = (operand(m * k)?, operand(k * n)?, operand(m * n)?);
    let spec = MatmulSpec::new(m, n, k, DType::BF16);
    let compute = machine.comm.compute()?;
    Ok(compute.prepare_matmuls(&spec, &[(a, c)], &b, None)?)
}

/// Matmuls whose results are stored at all peers: two depths separate the link's rate from the share that the
/// matmul does not hide.
fn stored(machine: &TunedMachine<'_>, model: &mut HardwareModel) -> Result<()> {
    const ROWS: usize = 2048;
    const COLUMNS: usize = 4096;
    const SIZE: usize = 2;
    let (rank, world) = (machine.comm.rank(), machine.comm.world());
    let each = ROWS * COLUMNS * SIZE;
    if machine.selection.largest < each * world {
        return Ok(());
    }
    let targets = (1..world)
        .map(|distance| {
            // Each rank begins with its own neighbour, so that not all store to the same one.
            let peer = machine.memory.remote_into((rank + distance) % world)?;
            // Every rank has its own range there.
            Ok(peer.memory().slice(rank * each..(rank + 1) * each)?)
        })
        .collect::<Result<Vec<DeviceSlice>>>()?;
    let others = world - 1;
    let time = |depth: usize| -> Result<(f64, f64)> {
        let operand = |elements: usize| filled(machine, SIZE * elements, DType::BF16);
        let (a, b) = (operand(others * ROWS * depth)?, operand(depth * COLUMNS)?);
        let c = operand(others * ROWS * COLUMNS)?;
        let spec = MatmulSpec::new(ROWS, COLUMNS, depth, DType::BF16);
        let launch = |results: Vec<DeviceSlice>| -> Result<f64> {
            let products = results.into_iter().enumerate().map(|(index, result)| {
                let bytes = ROWS * depth * SIZE;
                Ok((a.slice(index * bytes..(index + 1) * bytes)?, result))
            });
            let products = products.collect::<Result<Vec<_>>>()?;
            let compute = machine.comm.compute()?;
            let launch = compute.prepare_matmuls(&spec, &products, &b, None)?;
            machine.comm.barrier()?;
            let repeat = |count| {
                machine
                    .clock
                    .alone(count, &|stream| Ok(launch.enqueue(stream)?))
            };
            repeat(2)?;
            machine.comm.barrier()?;
            machine.median(repeat(16)? / 16.0)
        };
        let here = (0..others)
            .map(|index| Ok(c.slice(index * each..(index + 1) * each)?))
            .collect::<Result<Vec<_>>>()?;
        Ok((launch(targets.clone())?, launch(here)?))
    };
    let bytes = (each * others) as f64;
    let ((shallow, hidden), (deep, shown)) = (time(256)?, time(2048)?);
    let exposed = ((deep - shallow) / (shown - hidden).max(1e-9)).clamp(0.0, 1.0);
    model.link.stored_exposed = exposed;
    // At most the rate of puts: a difference of two noisy times may be near 0.
    model.link.stored = bytes / (shallow - exposed * hidden).max(bytes / model.link.put.peak());
    Ok(())
}
