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
                .min(machine.largest / (4 * world) * 4 * world);
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
    let of = |collective: Collective, target: usize, source: usize| -> Result<CollectiveRequest> {
        Ok(CollectiveRequest::Collective {
            collective,
            dtype: DType::F32,
            target: machine.memory.into.memory().slice(0..target)?,
            source: machine.memory.own.memory().slice(0..source)?,
        })
    };
    let add = ReduceOp::Sum;
    model.collectives = Collectives(vec![
        times("all_gather", &|bytes| {
            of(Collective::AllGather, bytes, bytes / world)
        })?,
        times("reduce_scatter", &|bytes| {
            of(Collective::ReduceScatter(add), bytes / world, bytes)
        })?,
        times("all_reduce", &|bytes| {
            of(Collective::AllReduce(add), bytes, bytes)
        })?,
        times("all_to_all", &|bytes| {
            of(Collective::AllToAll, bytes, bytes)
        })?,
        times("broadcast", &|bytes| {
            of(Collective::Broadcast(0), bytes, bytes)
        })?,
        times("reduce", &|bytes| {
            of(Collective::Reduce(add, 0), bytes, bytes)
        })?,
        times(EXCHANGE, &|bytes| {
            Ok(CollectiveRequest::Exchange {
                sends: vec![(
                    machine.right(),
                    machine.memory.own.memory().slice(0..bytes)?,
                )],
                receives: vec![(
                    machine.left(),
                    machine.memory.into.memory().slice(0..bytes)?,
                )],
            })
        })?,
    ]);
    let small = of(Collective::AllGather, 1024 * world, 1024)?;
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
