//! Matrix multiplications over a grid of shapes.

use super::machine::TunedMachine;
use crate::commands::bench::peers::{allocate, gather};
use anyhow::{Context, Result};
use warplink::DType;
use warplink::device::{DeviceSlice, MatmulSpec};
use warplink::program::cost::HardwareModel;
use warplink::program::cost::gemm::Grid;

/// Size of the pattern that fills the operands.
const PATTERN: usize = 4 << 20;

/// Measures a grid for each element type: rows that are multiples of 16 bytes and, where that matters,
/// others. Ranks divide the shapes among themselves; if they share cores, each measures all concurrently,
/// given enough cores, and the slowest counts.
pub(super) fn measure(machine: &TunedMachine<'_>, model: &mut HardwareModel) -> Result<()> {
    let (shared, largest) = (model.device.shared, machine.selection.largest_shape);
    model.gemm.grids.clear();
    for &dtype in &machine.selection.dtypes {
        for aligned in [true, false] {
            // Processors do not care about alignment.
            if !shared || aligned {
                let grid = grid(machine, dtype, aligned, largest, shared)?;
                model.gemm.grids.push(grid);
            }
        }
    }
    if shared {
        // Each matmul runs on one thread.
        model.gemm.tile = (usize::MAX >> 16, usize::MAX >> 16);
        model.gemm.smallest_tile = model.gemm.tile;
    }
    Ok(())
}

/// 1, 16, 64, 256, 1024 and so on up to `largest`; with `fine`, every power of two from 1024 on, where tiling
/// and wave quantization matter most.
fn sizes(largest: usize, fine: bool) -> Vec<usize> {
    let next = |size: &usize| size.checked_mul(if fine && *size >= 1024 { 2 } else { 4 });
    let from_16 = std::iter::successors(Some(16_usize), next);
    let rest = from_16.take_while(|size| *size <= largest);
    std::iter::once(1).chain(rest).collect()
}

/// Sizes of k and n: multiples of 8, or odd.
fn columns(largest: usize, aligned: bool) -> Vec<usize> {
    let size = |size: usize| match (aligned, size) {
        (true, 1) => 8,
        (true, size) => size,
        (false, 1) => 1,
        // One more would pass the largest size, for which the operands are allocated.
        (false, size) if size == largest => size - 1,
        (false, size) => size + 1,
    };
    let mut columns: Vec<usize> = sizes(largest, aligned).into_iter().map(size).collect();
    if aligned {
        // 8 and 16 differ little.
        columns.retain(|size| *size != 16);
    }
    columns
}

fn grid(
    machine: &TunedMachine<'_>,
    dtype: DType,
    aligned: bool,
    largest: usize,
    shared: bool,
) -> Result<Grid> {
    let rows = sizes(largest, aligned);
    let columns = columns(largest, aligned);
    let most = |sizes: &[usize]| sizes.last().copied().unwrap_or(1);
    let (m, k, n) = (most(&rows), most(&columns), most(&columns));
    let operand = |elements: usize| filled(machine, elements * dtype.size(), dtype);
    let (a, b, c) = (operand(m * k)?, operand(k * n)?, operand(m * n)?);
    let (rank, world) = (machine.comm.rank(), machine.comm.world());
    let multiprocessors = machine.comm.device().properties().multiprocessors;
    let measures = |index: usize| {
        if shared {
            rank == 0 || world <= multiprocessors
        } else {
            index % world == rank
        }
    };
    let mut seconds = Vec::new();
    for &m in &rows {
        let shapes: Vec<_> = columns
            .iter()
            .flat_map(|&k| columns.iter().map(move |&n| (k, n)))
            .collect();
        let mut own = Vec::new();
        for (index, &(k, n)) in shapes.iter().enumerate() {
            own.push(if measures(index) {
                shape(machine, dtype, (m, k, n), [&a, &b, &c])?
            } else {
                0.0
            });
        }
        // No rank stays idle for longer than a row of the grid.
        let all = gather(machine.comm, &own)?;
        for index in 0..shapes.len() {
            // Ranks that did not measure this shape have 0 for it.
            let of_ranks = all.iter().filter_map(|own| own.get(index));
            seconds.push(of_ranks.copied().fold(0.0, f64::max));
        }
    }
    Ok(Grid {
        dtype,
        aligned,
        m: rows,
        k: columns.clone(),
        n: columns,
        seconds,
    })
}

/// Seconds of one shape, on the path that programs use.
fn shape(
    machine: &TunedMachine<'_>,
    dtype: DType,
    (m, k, n): (usize, usize, usize),
    [a, b, c]: [&DeviceSlice; 3],
) -> Result<f64> {
    let part = |slice: &DeviceSlice, elements: usize| slice.slice(0..elements * dtype.size());
    let spec = MatmulSpec::new(m, n, k, dtype);
    let products = [(part(a, m * k)?, part(c, m * n)?)];
    let compute = machine.comm.compute()?;
    let launch = compute.prepare_matmuls(&spec, &products, &part(b, k * n)?, None)?;
    machine
        .alone(&|stream| Ok(launch.enqueue(stream)?))
        .with_context(|| format!("multiply {m} x {k} by {k} x {n} of {dtype}"))
}

/// Random memory with distinct rows: zeros draw less power and run faster.
pub(super) fn filled(
    machine: &TunedMachine<'_>,
    bytes: usize,
    dtype: DType,
) -> Result<DeviceSlice> {
    let slice = allocate(machine.comm, bytes)?;
    let size = dtype.size();
    let values = (0..PATTERN.min(bytes) / size).map(|index| {
        let value = (index as u32).wrapping_mul(2_654_435_761) >> 8;
        f64::from(value) / f64::from(1_u32 << 23) - 1.0
    });
    let pattern = dtype.encode(values);
    let mut done = pattern.len().min(bytes);
    machine
        .comm
        .device()
        .upload(&slice.slice(0..done)?, &pattern[..done])?;
    let stream = &machine.clock.stream;
    // Doubled on the device: drawing all elements on the host would take longer than the measurement.
    while done < bytes {
        let more = done.min(bytes - done);
        stream.copy(slice.slice(done..done + more)?, slice.slice(0..more)?)?;
        done += more;
    }
    machine.comm.synchronize(stream)?;
    Ok(slice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_aligned_or_odd() {
        assert_eq!(sizes(1024, true), [1, 16, 64, 256, 1024]);
        assert_eq!(sizes(4096, true)[4..], [1024, 2048, 4096]);
        assert_eq!(sizes(4096, false)[4..], [1024, 4096]);
        assert_eq!(columns(1024, true), [8, 64, 256, 1024]);
        assert_eq!(columns(1024, false), [1, 17, 65, 257, 1023]);
    }
}
