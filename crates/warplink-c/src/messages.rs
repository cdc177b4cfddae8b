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
    /// The rank at the other end; it may be this one.
    pub peer: i32,
    /// A `warplink_direction`.
    pub direction: i32,
    /// Data to send, which is only read, or memory for received data: an address of the device. May be null
    /// for no bytes.
    pub memory: *mut c_void,
    /// Length in bytes.
    pub bytes: u64,
}

/// How memory is cut into a part for each rank, in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Parts {
    /// How many elements the part of each rank has: one number for each rank.
    pub counts: *const u64,
    /// From which element on it lies, likewise; null where the parts lie one after the other.
    pub displacements: *const u64,
}

/// Parts that were read, with what they take in all.
struct Cut {
    counts: Vec<usize>,
    displacements: Vec<usize>,
    bytes: usize,
}

impl Cut {
    /// Of memory that is called `name`, in elements of `element_bytes`.
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
                // Where a part of no elements lies says nothing.
                Some(_) if *count == 0 => 0,
                Some(given) => given[peer],
                None => next,
            };
            let ends = displacement.checked_add(*count);
            let ends = ends.and_then(|end| usize::try_from(end).ok());
            let bytes = ends.and_then(|end| end.checked_mul(element_bytes));
            let bytes = bytes.filter(|bytes| *bytes <= isize::MAX as usize);
            cut.bytes = cut.bytes.max(bytes.ok_or_else(|| too_many(peer))?);
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
    /// The rank, and which way the bytes go; the message is number `number` of its group.
    fn end(&self, number: usize) -> Outcome<(usize, p2p::Direction)> {
        let direction = numbered(self.direction, "warplink_direction")
            .map_err(|failure| failure.with_key(format!("message {number}")))?;
        let peer = usize::try_from(self.peer).map_err(|_| {
            Failure::invalid(
                format!(
                    "message {number}: rank {} is out of range; expected a rank of the communicator",
                    self.peer
                ),
                "name a rank of the communicator",
            )
        })?;
        Ok((peer, direction))
    }
}

/// Does all `messages` at the same time, on any memory of the device that stays allocated until the stream is done. The
/// n-th send to a rank is for the n-th receive there from this one, of as many bytes. Only the two ranks of a message
/// call, and may group their messages differently, as long as some order of them lets all go on; messages to this rank
/// itself have both ends in one group. What is received overlaps no other memory of the group. A group has 64
/// messages at most. Does not block. Ends of other lengths are WARPLINK_STATUS_MISMATCH of
/// `warplink_stream_synchronize` on both ranks, where the direct path does it.
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
            // SAFETY: the caller passes addresses of that many bytes of the device, and keeps them.
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

/// Part p of `output` becomes this rank's part of rank p's `input`, for each rank, of a length of its own. Counts are in
/// elements of a `warplink_element_type`; what this rank sends to another has as many as that one expects. Parts of the
/// input may overlap, those of the output may not. Memory of no elements may be null. Every rank calls it, as any
/// collective; does not block, and fails as `warplink_send_receive` does.
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
        // SAFETY: the caller passes a number for each rank.
        let received = unsafe { Cut::read(output_parts, world, dtype.size(), "output_parts") }?;
        // SAFETY: as above.
        let sent = unsafe { Cut::read(input_parts, world, dtype.size(), "input_parts") }?;
        let memory = |address: u64, cut: &Cut, name: &str| {
            // SAFETY: the caller passes addresses of all parts, and keeps them.
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

/// As `warplink_all_to_all_v`, where only device memory has the counts: `sent` says how many elements go to each rank, and
/// `received` becomes how many came from each, one of 64 bits for each rank. `max_count` limits each of them and is the
/// same on all ranks; the part of rank p begins at element p * max_count of `output` and `input`, which have that much
/// room for each rank. What is beyond the count is left alone. Nothing overlaps what is written. A graph serves all
/// counts up to the limit. Every rank calls it; does not block.
///
/// A count above the limit, and another limit or element size at the other end, are WARPLINK_STATUS_MISMATCH of
/// `warplink_stream_synchronize` on both ranks. WARPLINK_STATUS_UNSUPPORTED where the direct path does not send messages
/// (`warplink_collectives_message_path`).
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
        // SAFETY: the caller passes addresses of that many bytes of the device, and keeps them.
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
