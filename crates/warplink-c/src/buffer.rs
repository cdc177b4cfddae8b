//! Buffers registered with all connections and written by the host.

use crate::handles::{Buffer, Comm, Handle, Region, Stream};
use crate::job::JobObject;
use crate::memory::same_job;
use crate::pointer;
use crate::status::{Failure, Status, entry};
use crate::types::Span;
use std::sync::Arc;
use warplink::channel::Connection;

/// A region added to connections, with the number that each connection assigned to it.
pub(crate) struct BufferObject {
    pub(crate) job: Arc<JobObject>,
    numbers: Vec<(Connection, u32)>,
}

/// Adds a region to all connections that are set up. Every peer must make the same number of calls, each with a region
/// of its own. Blocks until the peers have called it. Kernels then address the region as `warplink::At(number,
/// offset)`. Returns WARPLINK_STATUS_INVALID_USAGE before the first setup, and WARPLINK_STATUS_TIMEOUT if a peer does
/// not call it. A connection has at most 16 regions.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_register_buffer(
    comm: Comm,
    region: Region,
    buffer: *mut Buffer,
) -> Status {
    entry("register a buffer", || {
        let job = comm.get()?;
        pointer::check(buffer, "buffer")?;
        let region = region.get()?;
        same_job(&job, &region.job, "region")?;
        // Copied out of the lock, since adding regions waits for the peers.
        let connections = job.setup().all()?.to_vec();
        let added: Vec<_> = connections
            .iter()
            .map(|connection| (connection, &region.region))
            .collect();
        let numbers = job.communicator.add_regions(&added)?;
        let made = Buffer::new(BufferObject {
            job,
            numbers: connections.into_iter().zip(numbers).collect(),
        });
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(buffer, "buffer", made) }
    })
}

/// The number of the buffer, for use in kernels, on the connection to `peer` with `tag`. Does not block. Returns
/// WARPLINK_STATUS_INVALID_ARGUMENT for a connection without the buffer: only connections set up before it was
/// registered have it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_buffer_number(
    buffer: Buffer,
    peer: i32,
    tag: u64,
    number: *mut u32,
) -> Status {
    entry("get a buffer's number", || {
        let buffer = buffer.get()?;
        let mut numbers = buffer.numbers.iter();
        // A negative number is no rank, and finds no connection.
        let is_it = |one: &Connection| {
            usize::try_from(peer).is_ok_and(|peer| (one.peer(), one.tag()) == (peer, tag))
        };
        let Some((_, value)) = numbers.find(|(connection, _)| is_it(connection)) else {
            return Err(Failure::invalid(
                format!("the buffer is not on a connection to rank {peer} with tag {tag}"),
                "name a connection that was set up before the buffer was registered",
            ));
        };
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(number, "number", *value) }
    })
}

/// Enqueues copies of this rank's bytes to the buffers of all peers, starting at byte `offset`; one copy per
/// connection. Does not block, and orders nothing at the peers: signal them, or meet at a barrier after
/// `warplink_stream_synchronize`. Fails as `warplink_write` does; copies to connections before the one that failed may
/// have been enqueued.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_registered_write(
    buffer: Buffer,
    offset: u64,
    source: Span,
    stream: Stream,
) -> Status {
    entry("write to a registered buffer", || {
        let buffer = buffer.get()?;
        let stream = stream.get()?;
        same_job(&buffer.job, &stream.job, "stream")?;
        let source = source.memory(&buffer.job)?;
        for (connection, number) in &buffer.numbers {
            connection.write(&stream.stream, (*number, offset), &source)?;
        }
        Ok(())
    })
}

/// Frees the handle. The region stays with the connections until the communicator is destroyed. Does not block.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_buffer_free(buffer: Buffer) -> Status {
    entry("free a buffer", || buffer.take().map(drop))
}
