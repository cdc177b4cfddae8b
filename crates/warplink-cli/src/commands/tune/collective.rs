//! The vendor's collectives.

use super::latency::single_run;
use super::machine::TunedMachine;
use crate::commands::bench::clock::Submission;
use crate::commands::bench::peers::optional;
use anyhow::Result;
use warplink::DType;
use warplink::device::{Collective, CollectiveRequest, ReduceOp};
use warplink::program::cost::HardwareModel;
use warplink::program::cost::collective::{CollectiveTimes, Collectives, EXCHANGE};
use warplink::program::cost::curve::Curve;

/// Measures them, unless their library is missing.
pub(super) fn measure(machine: &TunedMachine<'_>, model: &mut HardwareModel) -> Result<()> {
    let (comm, world) = (machine.comm, machine.comm.world());
    if world == 1 || !machine.selection.nccl {
        return Ok(());
    }
    let Some(engine) = optional(comm, "the collectives", comm.collective_engine())? else {
        return Ok(());
    };
    model.source.notes = format!("collectives of {}", engine.name());
    let times = |name: &str, request: &dyn Fn(usize) -> Result<CollectiveRequest>| {
        let mut points = Vec::new();
        for bytes in machine.sizes() {
            // Every rank's part must be whole elements.
            let bytes = bytes
                .next_multiple_of(4 * world)
                .min(machine.selection.largest / (4 * world) * 4 * world);
            let request = request(bytes)?;
            let most = if model.device.shared { 4 } else { 16 };
            // Bounded in bytes, so that large sizes do not take seconds for a sample.
            let repeat = ((64 << 20) / bytes).clamp(2, most);
            let seconds = machine.each(repeat, Submission::Captured, &|stream| {
                Ok(engine.enqueue(stream, &request)?)
            })?;
            points.push((bytes as u64, seconds));
        }
        // With many ranks, two sizes may be rounded to the same one.
        points.dedup_by_key(|point| point.0);
        Ok::<_, anyhow::Error>(CollectiveTimes {
            name: name.to_owned(),
            world,
            times: Curve(points),
        })
    };
    let (own, into) = (machine.memory.own.memory(), machine.memory.into.memory());
    // Of `bytes` bytes of the larger of input and output.
    let request = |collective: Collective, bytes: usize| -> Result<CollectiveRequest> {
        let (input, output) = collective.kind().rows(world);
        let part = bytes / input.max(output);
        Ok(CollectiveRequest::Collective {
            collective,
            dtype: DType::F32,
            target: into.slice(0..output * part)?,
            source: own.slice(0..input * part)?,
        })
    };
    let mut all = Vec::new();
    for collective in [
        Collective::AllGather,
        Collective::ReduceScatter(ReduceOp::Sum),
        Collective::AllReduce(ReduceOp::Sum),
        Collective::AllToAll,
        Collective::Broadcast(0),
        Collective::Reduce(ReduceOp::Sum, 0),
    ] {
        all.push(times(collective.name(), &|bytes| {
            request(collective, bytes)
        })?);
    }
    all.push(times(EXCHANGE, &|bytes| {
        Ok(CollectiveRequest::Exchange {
            sends: vec![(machine.right, own.slice(0..bytes)?)],
            receives: vec![(machine.left, into.slice(0..bytes)?)],
        })
    })?);
    model.collectives = Collectives(all);
    let small = request(Collective::AllGather, 1024 * world)?;
    let stream = &machine.clock.stream;
    let host = machine.host(&mut || Ok(engine.enqueue(stream, &small)?))?;
    model.host.collective = machine.median(host)?;
    let single = machine.each(1, Submission::Captured, &|stream| {
        Ok(engine.enqueue(stream, &small)?)
    })?;
    let in_a_row = model
        .collectives
        .seconds("all_gather", world, (1024 * world) as f64);
    // A single kernel in a graph takes longer as well, which is not the collective's.
    model.latency.collective = (single - in_a_row - single_run(machine, model)?).max(0.0);
    Ok(())
}
