//! Latencies between operations, and host time for enqueuing.

use super::machine::TunedMachine;
use crate::commands::bench::clock::{Submission, WorkRef};
use crate::commands::bench::peers::{allocate, round_trip};
use anyhow::{Context, Result};
use std::cell::Cell;
use std::sync::Arc;
use warplink::DType;
use warplink::device::{MatmulSpec, MemoryOp, PreparedLaunch, Stream};
use warplink::p2p::{Path, Protocol, Transfer, TransferRequest, post_all, wait_all};
use warplink::program::cost::HardwareModel;

/// Round trips of a sample.
const ROUND_TRIPS: usize = 32;

/// Transfer size for measuring latency only.
const SMALL: usize = 1024;

/// Transfer size for which the copy engine is used.
const ENGINE_COPY: usize = 1 << 20;

/// Lower bound of every figure: below it a difference is noise.
const MIN_SECONDS: f64 = 50e-9;

/// Number of word operations from which on a device merges them into a kernel.
const WORDS_IN_KERNEL: usize = 4;

pub(super) fn measure(machine: &TunedMachine<'_>, model: &mut HardwareModel) -> Result<()> {
    let (one, eight) = (own_words(machine, 1)?, own_words(machine, 8)?);
    model.latency.more_words = ((eight - one) / 7.0).max(MIN_SECONDS);
    model.latency.words_in_kernel = match model.link.kernel_limit {
        0 => 0,
        _ => WORDS_IN_KERNEL,
    };
    model.latency.word = one;
    model.latency.kernel_word = one;
    if machine.comm.world() > 1 {
        // A write and a wait on each of two ranks.
        model.latency.word = (words_round_trip(machine)? / 4.0).max(MIN_SECONDS);
        if model.link.kernel_limit > 0 {
            let way = one_way(machine, SMALL, Protocol::Put, Path::OneBlock)?;
            let copy = model.link.kernel_put.seconds(SMALL as f64);
            model.latency.kernel_word = ((way - copy) / 2.0).max(MIN_SECONDS);
        }
    }
    model.latency.event = (events(machine)? / 2.0).max(MIN_SECONDS);
    model.latency.launch = (launches(machine, one)? - model.memory.kernel).max(0.0);
    if machine.comm.world() > 1 {
        model.latency.captured_copy = captured_copy(machine)?;
    }
    host(machine, model)
}

/// Extra seconds of a copy-engine transfer in a graph compared to eager submission, beyond the extra of a
/// kernel.
fn captured_copy(machine: &TunedMachine<'_>) -> Result<f64> {
    let bytes = ENGINE_COPY.min(machine.selection.largest);
    let pair = pair(machine, bytes)?;
    let group: Vec<&Transfer> = pair.iter().collect();
    let kernel = machine.sum(SMALL)?;
    let longer = |work: WorkRef<'_>| -> Result<f64> {
        let captured = machine.each(1, Submission::Captured, work)?;
        Ok(captured - machine.each(1, Submission::Eager, work)?)
    };
    let copy = longer(&|stream| {
        post_all(&group, stream)?;
        Ok(wait_all(&group, stream)?)
    })?;
    let kernel = longer(&|stream| Ok(kernel.enqueue(stream)?))?;
    Ok((copy - kernel).max(0.0))
}

/// Extra seconds of a single captured kernel compared to one of a sequence.
pub(super) fn single_run(machine: &TunedMachine<'_>, model: &HardwareModel) -> Result<f64> {
    let kernel = machine.sum(SMALL)?;
    let single = machine.each(1, Submission::Captured, &|stream| {
        Ok(kernel.enqueue(stream)?)
    })?;
    Ok(single - model.memory.kernel)
}

/// Seconds of one sequence of `count` writes to this rank's own words.
fn own_words(machine: &TunedMachine<'_>, count: usize) -> Result<f64> {
    // No other rank waits for the second word.
    let write = MemoryOp::write(&machine.memory.words[1], 1);
    machine.each(16, Submission::Eager, &|stream| {
        Ok(stream.memory_ops(&vec![write; count])?)
    })
}

/// Seconds of a signal round trip between rank 0 and rank 1.
fn words_round_trip(machine: &TunedMachine<'_>) -> Result<f64> {
    // Ranks in between forward it around the ring.
    let world = machine.comm.world();
    let remote = machine.memory.remote_words(machine.right)?;
    let count = Cell::new(0_u64);
    let seconds = machine.each(ROUND_TRIPS, Submission::Eager, &|stream| {
        count.set(count.get() + 1);
        let value = count.get();
        let write = MemoryOp::write(&remote[0], value);
        let wait = MemoryOp::wait(&machine.memory.words[0], value);
        let order = if machine.comm.rank() == 0 {
            [write, wait]
        } else {
            [wait, write]
        };
        order
            .into_iter()
            .try_for_each(|op| Ok(stream.memory_ops(&[op])?))
    })?;
    Ok(seconds * 2.0 / world as f64)
}

/// Seconds of a captured transfer around the ring, for one path.
pub(super) fn one_way(
    machine: &TunedMachine<'_>,
    bytes: usize,
    protocol: Protocol,
    path: Path,
) -> Result<f64> {
    let pair = pair_by(machine, bytes, protocol, path)?;
    let world = machine.comm.world();
    let seconds = machine.each(ROUND_TRIPS, Submission::Captured, &|stream| {
        Ok(round_trip(machine.comm.rank() == 0, &pair).enqueue(stream)?)
    })?;
    Ok(seconds / world as f64)
}

/// A send to the right and a receive from the left, as they run concurrently with matmuls.
fn pair(machine: &TunedMachine<'_>, bytes: usize) -> Result<[Transfer; 2]> {
    pair_by(machine, bytes, Protocol::Put, Path::OneBlock)
}

fn pair_by(
    machine: &TunedMachine<'_>,
    bytes: usize,
    protocol: Protocol,
    path: Path,
) -> Result<[Transfer; 2]> {
    let (own, into) = (
        machine.memory.own.slice(0..bytes)?,
        machine.memory.into.slice(0..bytes)?,
    );
    let requests = [
        // The length is the tag, so that pairs of different lengths do not match one another's ends.
        TransferRequest::send(&own, machine.right, bytes as u64),
        TransferRequest::receive(&into, machine.left, bytes as u64),
    ];
    let chosen = |request: TransferRequest| request.with_protocol(protocol).with_path(path);
    let made = machine.comm.exchange(&requests.map(chosen))?;
    made.try_into().ok().context("two transfers were exchanged")
}

/// Seconds of an event to a second stream and back.
fn events(machine: &TunedMachine<'_>) -> Result<f64> {
    machine.each(16, Submission::Eager, &|stream| {
        machine.second.fork(stream)?;
        machine.second.join(stream)
    })
}

/// Seconds of a small kernel after a write of a word.
fn launches(machine: &TunedMachine<'_>, word: f64) -> Result<f64> {
    let launch = machine.sum(SMALL)?;
    let write = MemoryOp::write(&machine.memory.words[1], 1);
    let both = machine.each(16, Submission::Eager, &|stream| {
        stream.memory_ops(&[write])?;
        Ok(launch.enqueue(stream)?)
    })?;
    Ok((both - word).max(0.0))
}

fn small_matmul(machine: &TunedMachine<'_>) -> Result<Arc<dyn PreparedLaunch>> {
    let spec = MatmulSpec::new(16, 16, 16, DType::F32);
    let slice = || allocate(machine.comm, SMALL);
    let (a, b, c) = (slice()?, slice()?, slice()?);
    let compute = machine.comm.compute()?;
    Ok(compute.prepare_matmuls(&spec, &[(a, c)], &b, None)?)
}

fn host(machine: &TunedMachine<'_>, model: &mut HardwareModel) -> Result<()> {
    let stream: &Stream = &machine.clock.stream;
    let (sum, matmul) = (machine.sum(SMALL)?, small_matmul(machine)?);
    let event = machine.comm.device().create_event(false)?;
    let own = machine.memory.own.memory();
    let (target, source) = (
        machine.memory.into.memory().slice(0..SMALL)?,
        own.slice(0..SMALL)?,
    );
    let mut times = [
        machine.host(&mut || Ok(matmul.enqueue(stream)?))?,
        machine.host(&mut || Ok(sum.enqueue(stream)?))?,
        machine.host(&mut || Ok(stream.copy(&target, &source)?))?,
        machine.host(&mut || {
            stream.record(&event)?;
            Ok(stream.wait_event(&event)?)
        })? / 2.0,
        graph(machine)?,
    ];
    for time in &mut times {
        *time = machine.median(*time)?;
    }
    let host = &mut model.host;
    [host.matmul, host.sum, host.copy, host.event, host.graph] = times;
    if machine.comm.world() > 1 {
        let [send, receive] = pair(machine, 2 * SMALL)?;
        machine.comm.barrier()?;
        let word = machine.host(&mut || {
            receive.post(stream)?;
            send.post(stream)?;
            Ok(receive.wait(stream)?)
        })?;
        let [send, receive] = pair(machine, 3 * SMALL)?;
        machine.comm.barrier()?;
        // The same without the wait, which cannot be timed alone, since it needs a post to wait for.
        let half = machine.host(&mut || {
            receive.post(stream)?;
            Ok(send.post(stream)?)
        })?;
        host.word = machine.median(word - half)?.max(MIN_SECONDS);
        host.transfer = (machine.median(half)? - host.word).max(host.word);
        machine.comm.barrier()?;
    }
    Ok(())
}

/// Host seconds to launch a graph of a few operations.
fn graph(machine: &TunedMachine<'_>) -> Result<f64> {
    let (clock, launch) = (&machine.clock, machine.sum(SMALL)?);
    let graph = clock.capture(&|stream| (0..4).try_for_each(|_| Ok(launch.enqueue(stream)?)))?;
    machine.host(&mut || Ok(graph.launch(&clock.stream)?))
}
