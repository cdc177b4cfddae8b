//! Copies within device memory, and sums.

use super::machine::TunedMachine;
use crate::commands::bench::clock::Submission;
use anyhow::Result;
use warplink::program::cost::HardwareModel;

/// Size of a sum whose time is only its kernel's.
const MIN_BYTES: usize = 1024;

pub(super) fn measure(machine: &TunedMachine<'_>, model: &mut HardwareModel) -> Result<()> {
    let (own, into) = (machine.memory.own.memory(), machine.memory.into.memory());
    let sum = |bytes: usize| -> Result<f64> {
        let launch = machine.sum(bytes / 2)?;
        machine.each(16, Submission::Eager, &|stream| Ok(launch.enqueue(stream)?))
    };
    model.memory.kernel = sum(MIN_BYTES)?;
    let seconds = sum(machine.selection.largest)? - model.memory.kernel;
    // Both halves are read, and a third one is written.
    model.memory.sum_rate = 1.5 * machine.selection.largest as f64 / seconds.max(1e-9);
    model.memory.copy = machine.curve(machine.sizes(), |bytes| {
        let (target, source) = (into.slice(0..bytes)?, own.slice(0..bytes)?);
        machine.each(16, Submission::Eager, &|stream| {
            Ok(stream.copy(&target, &source)?)
        })
    })?;
    // The better approximation of the memory bandwidth; a copy reads and writes.
    model.memory.rate = model.memory.sum_rate.max(2.0 * model.memory.copy.peak());
    let one = 1.0 / model.device.multiprocessors as f64;
    // Copy engines need no multiprocessors, while a sum fills them.
    (model.memory.copy_occupancy, model.memory.sum_occupancy) = if model.device.shared {
        (one, one)
    } else {
        (0.0, 1.0)
    };
    Ok(())
}
