//! Streams: ordered queues of device work.

use crate::handles::{Comm, Handle, Stream};
use crate::job::JobObject;
use crate::pointer;
use crate::status::{Status, entry};
use std::ffi::c_void;
use std::sync::Arc;
use warplink::device::{ChannelHandle, MemoryOp, Priority};

/// A stream and the rank that it belongs to.
pub(crate) struct StreamObject {
    pub(crate) job: Arc<JobObject>,
    pub(crate) stream: warplink::device::Stream,
}

/// Creates a stream. Does not wait for other work of the device, but may block briefly.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_stream_create(comm: Comm, stream: *mut Stream) -> Status {
    entry("create a stream", || {
        let job = comm.get()?;
        pointer::check(stream, "stream")?;
        let made = Stream::new(StreamObject {
            stream: job.communicator.create_stream(Priority::Normal)?,
            job,
        });
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(stream, "stream", made) }
    })
}

/// Borrows a CUDA stream (a CUstream or cudaStream_t) of the rank's GPU, in its primary context. It must stay valid
/// until `warplink_stream_destroy`, which does not destroy the CUDA stream. Null is the legacy default stream. Does not
/// block. Returns WARPLINK_STATUS_UNSUPPORTED on the host device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_stream_borrow(
    comm: Comm,
    cuda_stream: *mut c_void,
    stream: *mut Stream,
) -> Status {
    entry("borrow a stream", || {
        let job = comm.get()?;
        pointer::check(stream, "stream")?;
        let device = job.communicator.device();
        // SAFETY: the caller keeps the stream valid until it is released.
        let borrowed = unsafe { device.borrow_stream(cuda_stream as u64, Arc::new(())) }?;
        let made = Stream::new(StreamObject {
            stream: borrowed,
            job,
        });
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(stream, "stream", made) }
    })
}

/// Destroys the handle, on any thread. Enqueued work still completes. Does not block. While a borrowed stream is
/// capturing a graph, returns WARPLINK_STATUS_INVALID_ARGUMENT and leaves it borrowed.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_stream_destroy(stream: Stream) -> Status {
    entry("destroy a stream", || {
        // First, so that the handle stays valid if the stream cannot be released yet.
        stream.get()?.stream.give_back()?;
        stream.take().map(drop)
    })
}

/// The underlying CUDA stream on a GPU; on the host device, a number unique to the stream. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_stream_raw(stream: Stream, raw: *mut *mut c_void) -> Status {
    entry("get a stream's handle", || {
        let value = stream.get()?.stream.raw();
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(raw, "raw", value as *mut c_void) }
    })
}

/// Blocks until all work enqueued so far is complete. Returns the error of failed work in the stream,
/// WARPLINK_STATUS_PEER_LOST if a rank was lost, and WARPLINK_STATUS_TIMEOUT, naming the peer that the stream waits
/// for, if the timeout passes first.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_stream_synchronize(stream: Stream) -> Status {
    entry("synchronize", || {
        let stream = stream.get()?;
        Ok(stream.job.communicator.synchronize(&stream.stream)?)
    })
}

/// Makes the stream wait until the peer has signalled `epoch` times in total through the connection with that peer and
/// tag. Consumes no signal. Does not block the caller. Returns WARPLINK_STATUS_INVALID_ARGUMENT if the connection was
/// not declared, and WARPLINK_STATUS_INVALID_USAGE if it was not set up.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_stream_wait(
    stream: Stream,
    comm: Comm,
    peer: i32,
    tag: u64,
    epoch: u64,
) -> Status {
    entry("wait for signals", || {
        let stream = stream.get()?;
        let job = comm.get()?;
        crate::memory::same_job(&job, &stream.job, "stream")?;
        let connection = job.setup().find(peer, tag)?;
        let wait = MemoryOp::wait(connection.inbound(), epoch);
        stream.stream.memory_ops(&[wait])?;
        // After the wait, so that the memory of the word is kept until the stream is past it.
        connection.note(&stream.stream);
        Ok(())
    })
}
