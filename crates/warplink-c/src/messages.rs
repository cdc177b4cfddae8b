//! Groups of sends and receives, and the all-to-all with a length for each pair of ranks.

use crate::collectives;
use crate::handles::{Collectives, Handle, Stream};
use crate::memory::same_job;
use crate::pointer;
use crate::status::{Failure, Outcome, Status, entry};
use crate::types::numbered;
use std::ffi::c_void;
use warplink::collective::{self, Parts as LibraryParts};
use warplink::device::DeviceSlice;
use warplink::p2p;

/// A send or a receive of a group.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Message {
    /// The rank at the other end; it may be this rank.
    pub peer: i32,
    /// A `warplink_direction`.
    pub direction: i32,
    /// Data to send, which is only read, or memory for received data: a device address. May be null if `bytes` is 0.
    pub memory: *mut c_void,
    /// Length in bytes.
    pub bytes: u64,
}

/// Partition of memory into one part per rank, in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Parts {
    /// Number of elements of each rank's part: one number per rank.
    pub counts: *const u64,
    /// Offset of each rank's part in elements: one number per rank; null if the parts are contiguous.
    pub displacements: *const u64,
}

/// Validated parts, and the number of bytes that they span.
struct Cut {
    counts: Vec<usize>,
    displacements: Vec<usize>,
    bytes: usize,
}

impl Cut {
    /// Reads and checks the parts of memory called `name`, with elements of `element_bytes` bytes.
    ///
    /// # Safety
    /// Pointers that are not null must point to one number for each of `world` ranks.
    unsafe fn read(parts: Parts, world: usize, element_bytes: usize, name: &str) -> Outcome<Self> {
        // SAFETY: the caller vouches for the length.
        let counts = unsafe { pointer::values(parts.counts, world, &format!("{name}.counts")) }?;
        let given = if parts.displacements.is_null() {
            None
        } else {
            let name = format!("{name}.displacements");
            // SAFETY: as above.
            Some(unsafe { pointer::values(parts.displacements, world, &name) }?)
        };
        let too_many = |peer: usize| {
            Failure::invalid(
                format!("{name}: the part of rank {peer} is more than memory can hold"),
                "pass smaller counts and displacements",
            )
        };
        let mut cut = Self {
            counts: Vec::with_capacity(world),
            displacements: Vec::with_capacity(world),
            bytes: 0,
        };
        let mut next = 0;
        for (peer, count) in counts.iter().enumerate() {
            let displacement = match given {
                // The displacement of an empty part is ignored.
                Some(_) if *count == 0 => 0,
                Some(given) => given[peer],
                None => next,
            };
            let ends = displacement.checked_add(*count);
            let ends = ends.and_then(|end| usize::try_from(end).ok());
            let bytes = ends.and_then(|end| end.checked_mul(element_bytes));
            let bytes = bytes.filter(|bytes| *bytes <= isize::MAX as usize);
            cut.bytes = cut.bytes.max(bytes.ok_or_else(|| too_many(peer))?);
            // Cannot overflow: the sum was checked above.
            next = displacement + count;
            cut.counts.push(*count as usize);
            cut.displacements.push(displacement as usize);
        }
        Ok(cut)
    }

    fn parts(&self) -> LibraryParts<'_> {
        LibraryParts {
            counts: &self.counts,
            displacements: &self.displacements,
        }
    }
}

impl Message {
    /// The rank and the direction of message `number` of a group.
    fn end(&self, number: usize) -> Outcome<(usize, p2p::Direction)> {
        let direction = numbered(self.direction, "warplink_direction")
            .map_err(|failure| failure.with_key(format!("message {number}")))?;
        let peer = usize::try_from(self.peer).map_err(|_| {
            Failure::invalid(
                format!(
                    "message {number}: rank {} is out of range; expected a rank of the communicator",
                    self.peer
                ),
                "pass a rank of the communicator",
            )
        })?;
        Ok((peer, direction))
    }
}

/// Performs all `messages` concurrently, on device memory that stays allocated until the stream is synchronized. The
/// n-th send to a rank matches the n-th receive there from this one, of the same length. Only the two ranks of a
/// message take part, and may group their messages differently, as long as some order lets all of them progress; both
/// ends of a message to this rank itself belong in one group. Received data overlaps no other memory of the group. A
/// group has at most 64 messages. Does not block. On the direct path, if lengths of both ends differ,
/// `warplink_stream_synchronize` returns WARPLINK_STATUS_MISMATCH on both ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_send_receive(
    collectives: Collectives,
    messages: *const Message,
    count: usize,
    stream: Stream,
) -> Status {
    entry("send and receive", || {
        let (object, stream) = (collectives.get()?, stream.get()?);
        same_job(&object.job, &stream.job, "stream")?;
        // SAFETY: the caller passes as many messages.
        let given = unsafe { pointer::values(messages, count, "messages") }?;
        let mut memory: Vec<DeviceSlice> = Vec::with_capacity(given.len());
        for (number, message) in given.iter().enumerate() {
            let name = format!("messages[{number}].memory");
            // SAFETY: the caller passes device addresses of that many bytes, and keeps them allocated.
            memory.push(unsafe { object.named(message.memory as u64, message.bytes, &name) }?);
        }
        let ends = given.iter().zip(&memory).enumerate();
        let messages = ends.map(|(number, (message, memory))| {
            let (peer, direction) = message.end(number)?;
            Ok(collective::Message {
                peer,
                direction,
                memory,
            })
        });
        let messages = messages.collect::<Outcome<Vec<_>>>()?;
        Ok(object.collectives.send_receive(&messages, &stream.stream)?)
    })
}

/// Sets part p of `output` to this rank's part of rank p's `input`, for each rank p, with a length for each pair of
/// ranks. Counts are in elements of a `warplink_element_type`; the count sent to a rank equals the count that it
/// expects. Parts of the input may overlap, those of the output may not. Memory without elements may be null.
/// Collective; does not block, and fails as `warplink_send_receive` does.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_all_to_all_v(
    collectives: Collectives,
    element_type: i32,
    output: *mut c_void,
    output_parts: Parts,
    input: *const c_void,
    input_parts: Parts,
    stream: Stream,
) -> Status {
    entry("all_to_all_v", || {
        let (object, stream) = (collectives.get()?, stream.get()?);
        same_job(&object.job, &stream.job, "stream")?;
        let dtype = collectives::element_type(element_type)?;
        let world = object.job.communicator.world();
        // SAFETY: the caller passes one number per rank.
        let received = unsafe { Cut::read(output_parts, world, dtype.size(), "output_parts") }?;
        // SAFETY: as above.
        let sent = unsafe { Cut::read(input_parts, world, dtype.size(), "input_parts") }?;
        let memory = |address: u64, cut: &Cut, name: &str| {
            // SAFETY: the caller passes device addresses that cover all parts, and keeps them allocated.
            unsafe { object.named(address, cut.bytes as u64, name) }
        };
        let output = memory(output as u64, &received, "output")?;
        let input = memory(input as u64, &sent, "input")?;
        Ok(object.collectives.all_to_all_v(
            (&output, received.parts()),
            (&input, sent.parts()),
            dtype,
            &stream.stream,
        )?)
    })
}

/// As `warplink_all_to_all_v`, with counts in device memory: `sent` holds the number of elements for each rank, and
/// `received` is set to the number of elements from each, as one 64-bit integer per rank. `max_count` limits each count
/// and is the same on all ranks; the part of rank p begins at element p * max_count of `output` and `input`, which have
/// space for max_count elements per rank. Elements beyond the count are left unchanged. Memory that is written overlaps
/// nothing. A captured graph is valid for all counts up to the limit. Collective; does not block.
///
/// If a count exceeds the limit, or limit or element size differ at the other end, `warplink_stream_synchronize`
/// returns WARPLINK_STATUS_MISMATCH on both ranks. Returns WARPLINK_STATUS_UNSUPPORTED if messages do not use the
/// direct path (`warplink_collectives_message_path`).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_all_to_all_v_on_device(
    collectives: Collectives,
    element_type: i32,
    output: *mut c_void,
    received: *mut u64,
    input: *const c_void,
    sent: *const u64,
    max_count: u64,
    stream: Stream,
) -> Status {
    entry("all_to_all_v_on_device", || {
        let (object, stream) = (collectives.get()?, stream.get()?);
        same_job(&object.job, &stream.job, "stream")?;
        let dtype = collectives::element_type(element_type)?;
        let world = object.job.communicator.world() as u64;
        let bytes = max_count.checked_mul(dtype.size() as u64);
        let bytes = bytes.and_then(|bytes| bytes.checked_mul(world));
        let bytes = bytes.filter(|bytes| *bytes <= isize::MAX as u64);
        let too_many = || {
            Failure::invalid(
                format!("{max_count} elements for each rank are more than memory can hold"),
                "pass a smaller max_count",
            )
        };
        let bytes = bytes.ok_or_else(too_many)?;
        let counts = world * size_of::<u64>() as u64;
        // SAFETY: the caller passes device addresses of that many bytes, and keeps them allocated.
        let memory =
            |address: u64, bytes: u64, name: &str| unsafe { object.named(address, bytes, name) };
        let output = memory(output as u64, bytes, "output")?;
        let received = memory(received as u64, counts, "received")?;
        let input = memory(input as u64, bytes, "input")?;
        let sent = memory(sent as u64, counts, "sent")?;
        Ok(object.collectives.all_to_all_v_on_device(
            (&output, &received),
            (&input, &sent),
            dtype,
            max_count as usize,
            &stream.stream,
        )?)
    })
}
