//! What passes between operations, and the host's time to enqueue them.

use super::rig::Rig;
use crate::commands::bench::clock::Submission;
use anyhow::{Context, Result};
use std::cell::Cell;
use warplink::device::{Elementwise, ElementwiseOp, MatmulSpec, MemoryOp, Stream};
use warplink::p2p::{Batch, Path, Protocol, Transfer, TransferRequest, post_all, wait_all};
use warplink::program::cost::HardwareModel;
use warplink::{Communicator, DType};

/// Round trips of a sample.
const ROUND_TRIPS: usize = 32;

/// Bytes of a transfer whose size does not count.
const SMALL: usize = 1024;

/// Bytes of a transfer that the copy engine does.
const ENGINE_COPY: usize = 1 << 20;

/// No figure of a device is less than this.
const MIN_SECONDS: f64 = 50e-9;

/// From how many on a device does operations on words in a kernel, where it has one.
const WORDS_IN_KERNEL: usize = 4;

pub(super) fn measure(rig: &Rig<'_>, model: &mut HardwareModel) -> Result<()> {
    let (one, eight) = (own_words(rig, 1)?, own_words(rig, 8)?);
    model.latency.more_words = ((eight - one) / 7.0).max(MIN_SECONDS);
    model.latency.words_in_kernel = match model.link.kernel_limit {
        0 => 0,
        _ => WORDS_IN_KERNEL,
    };
    model.latency.word = one;
    model.latency.kernel_word = one;
    if rig.comm.world() > 1 {
        model.latency.word = (words_round_trip(rig)? / 4.0).max(MIN_SECONDS);
        if model.link.kernel_limit > 0 {
            let way = one_way(rig, SMALL, Protocol::Put, Path::OneBlock)?;
            let copy = model.link.kernel_put.seconds(SMALL as f64);
            model.latency.kernel_word = ((way - copy) / 2.0).max(MIN_SECONDS);
        }
    }
    model.latency.event = (events(rig)? / 2.0).max(MIN_SECONDS);
    model.latency.launch = (launches(rig, one)? - model.memory.kernel).max(0.0);
    if rig.comm.world() > 1 {
        model.latency.captured_copy = captured_copy(rig)?;
    }
    host(rig, model)
}

/// Seconds that a transfer by the copy engine takes longer in a graph than eagerly, beyond what a
/// kernel does.
fn captured_copy(rig: &Rig<'_>) -> Result<f64> {
    let bytes = ENGINE_COPY.min(rig.largest);
    let pair = pair(rig, bytes)?;
    let group: Vec<&Transfer> = pair.iter().collect();
    let kernel = small_sum(rig)?;
    let longer = |work: &dyn Fn(&Stream) -> Result<()>| -> Result<f64> {
        let captured = rig.each(1, Submission::Captured, work)?;
        Ok(captured - rig.each(1, Submission::Eager, work)?)
    };
    let copy = longer(&|stream| {
        post_all(&group, stream)?;
        Ok(wait_all(&group, stream)?)
    })?;
    let kernel = longer(&|stream| Ok(kernel.enqueue(stream)?))?;
    Ok((copy - kernel).max(0.0))
}

/// Seconds of a single captured run of a small kernel beyond one of many in a row.
pub(super) fn single_run(rig: &Rig<'_>, model: &HardwareModel) -> Result<f64> {
    let kernel = small_sum(rig)?;
    let single = rig.each(1, Submission::Captured, &|stream| {
        Ok(kernel.enqueue(stream)?)
    })?;
    Ok(single - model.memory.kernel)
}

/// Seconds that one sequence of `count` writes to this rank's own words takes.
fn own_words(rig: &Rig<'_>, count: usize) -> Result<f64> {
    // The second word is nobody else's to wait for.
    let write = MemoryOp::Write {
        word: &rig.words[1],
        value: 1,
    };
    rig.each(16, Submission::Eager, &|stream| {
        Ok(stream.memory_ops(&vec![write; count])?)
    })
}

/// Seconds of a signal from rank 0 to rank 1 and back.
fn words_round_trip(rig: &Rig<'_>) -> Result<f64> {
    // Ranks in between hand it on around the ring.
    let world = rig.comm.world();
    let remote = rig.remote_words.as_ref().context("there is no peer")?;
    let count = Cell::new(0_u64);
    let seconds = rig.each(ROUND_TRIPS, Submission::Eager, &|stream| {
        count.set(count.get() + 1);
        let value = count.get();
        let write = MemoryOp::Write {
            word: &remote[0],
            value,
        };
        let wait = MemoryOp::Wait {
            word: &rig.words[0],
            value,
        };
        let order = if rig.comm.rank() == 0 {
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

/// Seconds of a transfer in graphs from rank to rank around the ring, of one of the ways.
pub(super) fn one_way(rig: &Rig<'_>, bytes: usize, protocol: Protocol, path: Path) -> Result<f64> {
    let [send, receive] = pair_by(rig, bytes, protocol, path)?;
    let world = rig.comm.world();
    let seconds = rig.each(ROUND_TRIPS, Submission::Captured, &|stream| {
        let batch = Batch::new();
        let batch = if rig.comm.rank() == 0 {
            batch.post([&send, &receive]).wait([&receive, &send])
        } else {
            let batch = batch.post([&receive]).wait([&receive]);
            batch.post([&send]).wait([&send])
        };
        Ok(batch.enqueue(stream)?)
    })?;
    Ok(seconds / world as f64)
}

/// A send to the right and a receive from the left, as beside matmuls.
fn pair(rig: &Rig<'_>, bytes: usize) -> Result<[Transfer; 2]> {
    pair_by(rig, bytes, Protocol::Put, Path::OneBlock)
}

fn pair_by(rig: &Rig<'_>, bytes: usize, protocol: Protocol, path: Path) -> Result<[Transfer; 2]> {
    let (own, into) = (rig.own.slice(0..bytes)?, rig.into.slice(0..bytes)?);
    let requests = [
        TransferRequest::send(&own, rig.right(), bytes as u64),
        TransferRequest::receive(&into, rig.left(), bytes as u64),
    ];
    let chosen = |request: TransferRequest| request.with_protocol(protocol).with_path(path);
    let made = rig.comm.exchange(&requests.map(chosen))?;
    made.try_into().ok().context("two transfers were exchanged")
}

/// Seconds of an event to a second stream and one back.
fn events(rig: &Rig<'_>) -> Result<f64> {
    rig.each(16, Submission::Eager, &|stream| {
        rig.second.fork(stream)?;
        rig.second.join(stream)
    })
}

/// Seconds of a small kernel behind a write of a word.
fn launches(rig: &Rig<'_>, word: f64) -> Result<f64> {
    let launch = small_sum(rig)?;
    let write = MemoryOp::Write {
        word: &rig.words[1],
        value: 1,
    };
    let both = rig.each(16, Submission::Eager, &|stream| {
        stream.memory_ops(&[write])?;
        Ok(launch.enqueue(stream)?)
    })?;
    Ok((both - word).max(0.0))
}

type Launch = std::sync::Arc<dyn warplink::device::PreparedLaunch>;

fn small_sum(rig: &Rig<'_>) -> Result<Launch> {
    let own = rig.own.memory();
    let sources = [own.slice(0..SMALL)?, own.slice(SMALL..2 * SMALL)?];
    let target = rig.into.memory().slice(0..SMALL)?;
    let compute = rig.comm.compute()?;
    Ok(compute.prepare_elementwise(&Elementwise::new(
        ElementwiseOp::Sum,
        DType::F32,
        &target,
        &sources,
    ))?)
}

fn small_matmul(comm: &Communicator, rig: &Rig<'_>) -> Result<Launch> {
    let spec = MatmulSpec::new(16, 16, 16, DType::F32);
    let slice = || rig.allocate(SMALL);
    let (a, b, c) = (slice()?, slice()?, slice()?);
    Ok(comm
        .compute()?
        .prepare_matmuls(&spec, &[(a, c)], &b, None)?)
}

fn host(rig: &Rig<'_>, model: &mut HardwareModel) -> Result<()> {
    let stream: &Stream = &rig.clock.stream;
    let (sum, matmul) = (small_sum(rig)?, small_matmul(rig.comm, rig)?);
    let event = rig.comm.device().create_event(false)?;
    let own = rig.own.memory();
    let (target, source) = (rig.into.memory().slice(0..SMALL)?, own.slice(0..SMALL)?);
    let mut times = [
        rig.host(&mut || Ok(matmul.enqueue(stream)?))?,
        rig.host(&mut || Ok(sum.enqueue(stream)?))?,
        rig.host(&mut || Ok(stream.copy(&target, &source)?))?,
        rig.host(&mut || {
            stream.record(&event)?;
            Ok(stream.wait_event(&event)?)
        })? / 2.0,
        graph(rig, stream)?,
    ];
    for time in &mut times {
        *time = rig.median(*time)?;
    }
    let host = &mut model.host;
    [host.matmul, host.sum, host.copy, host.event, host.graph] = times;
    if rig.comm.world() > 1 {
        let [send, receive] = pair(rig, 2 * SMALL)?;
        rig.comm.barrier()?;
        let word = rig.host(&mut || {
            receive.post(stream)?;
            send.post(stream)?;
            Ok(receive.wait(stream)?)
        })?;
        let [send, receive] = pair(rig, 3 * SMALL)?;
        rig.comm.barrier()?;
        let half = rig.host(&mut || {
            receive.post(stream)?;
            Ok(send.post(stream)?)
        })?;
        host.word = rig.median(word - half)?.max(MIN_SECONDS);
        host.transfer = (rig.median(half)? - host.word).max(host.word);
        rig.comm.barrier()?;
    }
    Ok(())
}

/// Seconds of the host to launch a graph of a few operations.
fn graph(rig: &Rig<'_>, stream: &Stream) -> Result<f64> {
    let launch = small_sum(rig)?;
    stream.begin_capture()?;
    let recorded = (0..4).try_for_each(|_| launch.enqueue(stream));
    let graph = stream.end_capture();
    recorded?;
    let graph = graph?;
    rig.host(&mut || Ok(graph.launch(stream)?))
}
