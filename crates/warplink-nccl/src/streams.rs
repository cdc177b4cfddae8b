//! Streams passed by callers: CUDA streams; on the host device any number, which identifies a stream of the process.

use crate::abi::RawStream;
use crate::communicator::{Joined, all, lock};
use crate::devices;
use crate::status::{Failure, Outcome, entry};
use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;
use std::time::Duration;
use warplink::device::{Device, Priority, Stream};
use warplink::{Deadline, DeviceKind, ErrorKind, Result};

/// `cudaStreamPerThread`, which is a different stream on each thread.
const PER_THREAD: u64 = 2;

/// Timeout of waits for streams of the host device.
const LIMIT: Duration = Duration::from_secs(600);

/// The streams on which calls of a communicator were enqueued. CUDA streams are borrowed until the communicator ends.
#[derive(Debug, Default)]
pub(crate) struct Streams(Mutex<Vec<KnownStream>>);

#[derive(Debug)]
struct KnownStream {
    raw: u64,
    /// The owning thread of a per-thread stream.
    thread: Option<ThreadId>,
    stream: Stream,
}

impl Streams {
    /// The stream of `device` that a caller's handle identifies.
    pub(crate) fn find(&self, device: &Arc<dyn Device>, raw: RawStream) -> Result<Stream> {
        let raw = raw as u64;
        if device.kind() == DeviceKind::Host {
            return of_host(raw);
        }
        // The same handle is another stream on each thread, so it alone does not identify one.
        let thread = (raw == PER_THREAD).then(|| std::thread::current().id());
        let mut known = lock(&self.0);
        let same = |one: &&KnownStream| one.raw == raw && one.thread == thread;
        if let Some(found) = known.iter().find(same) {
            return Ok(found.stream.clone());
        }
        // SAFETY: the caller keeps a stream that calls were made on until the communicator has ended (docs/nccl.md).
        let stream = unsafe { device.borrow_stream(raw, Arc::new(())) }?;
        known.push(KnownStream {
            raw,
            thread,
            stream: stream.clone(),
        });
        Ok(stream)
    }

    /// Releases all streams, which their owners may destroy afterwards.
    pub(crate) fn give_back(&self) {
        for known in lock(&self.0).drain(..) {
            if let Err(error) = known.stream.give_back() {
                tracing::debug!(%error, "a stream cannot be released");
            }
        }
    }
}

/// The host device's streams of this process, by number.
static OF_HOST: Mutex<Option<HashMap<u64, Stream>>> = Mutex::new(None);

fn of_host(raw: u64) -> Result<Stream> {
    let mut all = lock(&OF_HOST);
    let all = all.get_or_insert_default();
    if let Some(stream) = all.get(&raw) {
        return Ok(stream.clone());
    }
    let stream = devices::of_process(0)?.create_stream(Priority::Normal)?;
    all.insert(raw, stream.clone());
    Ok(stream)
}

/// Blocks until a stream of the host device has finished: the equivalent of `cudaStreamSynchronize` for programs
/// without a GPU. Returns an `ncclResult_t`, an error if a call on the stream has failed.
///
/// # Safety
/// No requirements; CUDA streams are rejected.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn warplink_nccl_host_stream_synchronize(stream: RawStream) -> c_int {
    entry("warplink_nccl_host_stream_synchronize", || {
        if devices::kind()? != DeviceKind::Host {
            return Err(Failure::usage(
                "this function supports only streams of the host device",
                "call cudaStreamSynchronize",
            ));
        }
        let raw = stream as u64;
        let ended = of_host(raw)?.synchronize(Deadline::after(LIMIT));
        if ended
            .as_ref()
            .is_err_and(|error| error.kind() != ErrorKind::Timeout)
        {
            // As on a GPU, a stream whose calls were aborted can be used again.
            lock(&OF_HOST).get_or_insert_default().remove(&raw);
        }
        Ok(ended?)
    })
}

/// A stream for work that involves several streams: the work runs after everything already enqueued on them, and they
/// continue after it, also if some of it failed. `enqueue` enqueues the work on it; without streams, it is not called.
pub(crate) fn together(
    joined: &Joined,
    streams: &[Stream],
    enqueue: impl FnOnce(&Stream) -> Outcome,
) -> Outcome {
    let Some((main, others)) = streams.split_first() else {
        return Ok(());
    };
    let others: Vec<_> = others
        .iter()
        .filter(|other| other.raw() != main.raw())
        .collect();
    for other in &others {
        // The event may be dropped at once: a wait that is enqueued keeps the point that was recorded.
        let event = joined.device().create_event(false)?;
        other.record(&event)?;
        main.wait_event(&event)?;
    }
    let enqueued = enqueue(main);
    if others.is_empty() {
        return enqueued;
    }
    let event = joined.device().create_event(false)?;
    main.record(&event)?;
    for other in &others {
        other.wait_event(&event)?;
    }
    enqueued
}

/// Releases the streams of all communicators, at the exit of the process.
pub(crate) fn give_back_all() {
    for comm in all() {
        if let Ok(joined) = comm.joined()
            && let Some(served) = joined.served()
        {
            served.streams.give_back();
        }
    }
}
