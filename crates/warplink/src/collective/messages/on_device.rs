//! All-to-all with sizes in device memory.

use super::programs::{CountedEnd, End};
use crate::collective::Collectives;
use crate::device::{DeviceSlice, Stream};
use crate::dtype::DType;
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Rank, Result};
use crate::p2p::Direction;

/// Size of a count.
const COUNT_BYTES: usize = size_of::<u64>();

impl Collectives {
    /// As [`all_to_all_v`](Self::all_to_all_v), but with counts in device memory: `sent` has the elements for each
    /// rank, and `received` gets the elements from each; both are `u64[world]`. `max_count` bounds each count and is
    /// equal on all ranks. `output` and `input` are `[world, max_count]`; only the leading elements of each row are
    /// used, and the rest of the output is not modified. May be captured: a graph serves all counts up to the limit.
    /// A rank waits for all others; no host waits for a count. Does not block.
    ///
    /// Fastest if `max_count` elements are a multiple of 16 bytes.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for wrong lengths, counts not aligned to 8 bytes, and overlapping
    /// outputs; [`ErrorKind::Unsupported`] if the vendor's library executes messages, which takes no counts
    /// from device memory. A count above the limit, or a different limit or type on another rank, fails the
    /// streams of both ranks of a message ([`ErrorKind::Mismatch`], with the peer), and nothing of it
    /// arrives.
    pub fn all_to_all_v_on_device(
        &self,
        (output, received): (&DeviceSlice, &DeviceSlice),
        (input, sent): (&DeviceSlice, &DeviceSlice),
        dtype: DType,
        max_count: usize,
        stream: &Stream,
    ) -> Result<()> {
        let done = || {
            let (output, received) = self.padded("output", (output, received), dtype, max_count)?;
            let (input, sent) = self.padded("input", (input, sent), dtype, max_count)?;
            self.exchange_padded((&output, &received), (&input, &sent), dtype, stream)
        };
        check_apart(
            &[("output", output), ("received counts", received)],
            &[("input", input), ("sent counts", sent)],
        )
        .and_then(|()| done())
        .map_err(|error| error.with_operation("all_to_all_v_on_device"))
    }

    /// Part and count of each rank.
    fn padded(
        &self,
        what: &str,
        (memory, counts): (&DeviceSlice, &DeviceSlice),
        dtype: DType,
        max_count: usize,
    ) -> Result<(Vec<DeviceSlice>, Vec<DeviceSlice>)> {
        let world = self.0.machine.world;
        let bytes = max_count.checked_mul(dtype.size());
        let Some(bytes) = bytes.filter(|each| each.checked_mul(world) == Some(memory.bytes()))
        else {
            return Err(Error::invalid(format!(
                "the {what} has {} bytes; expected {max_count} elements of {dtype} for each of {world} ranks",
                memory.bytes()
            ))
            .with_help("pass memory for max_count elements of each rank"));
        };
        if counts.bytes() != COUNT_BYTES * world {
            return Err(Error::invalid(format!(
                "the counts of the {what} have {} bytes; expected {}, a u64 for each rank",
                counts.bytes(),
                COUNT_BYTES * world
            ))
            .with_help("pass a count of 64 bits for each rank"));
        }
        // Kernels load a count as one word of 64 bits, which traps if it is misaligned.
        if !counts.address().is_multiple_of(COUNT_BYTES as u64) {
            return Err(Error::invalid(format!(
                "the counts of the {what} begin at {:#x}; expected a multiple of {COUNT_BYTES}",
                counts.address()
            ))
            .with_help("begin at a whole count"));
        }
        let cut = |memory: &DeviceSlice, each: usize| {
            let ranks = 0..world;
            ranks
                .map(|rank| memory.slice(rank * each..(rank + 1) * each))
                .collect::<Result<Vec<_>>>()
        };
        Ok((cut(memory, bytes)?, cut(counts, COUNT_BYTES)?))
    }

    /// Enqueues a message to and from each rank, including this one, with its part and count.
    fn exchange_padded(
        &self,
        (output, received): (&[DeviceSlice], &[DeviceSlice]),
        (input, sent): (&[DeviceSlice], &[DeviceSlice]),
        dtype: DType,
        stream: &Stream,
    ) -> Result<()> {
        let inner = &*self.0;
        // Before the unsupported case: after a loss, this error explains more.
        inner.context.fault.check()?;
        let Some(kernel) = &inner.messages else {
            let message = "the vendor's library cannot read counts from device memory; expected the direct path between all ranks";
            let help = "send whole parts and the counts by two calls of all_to_all, or read the counts on the host and pass them to all_to_all_v";
            return Err(Error::unsupported(message).with_help(help));
        };
        let (rank, world) = (inner.context.rank(), inner.machine.world);
        let end = |peer: Rank, direction, data, count| CountedEnd {
            end: End {
                peer,
                direction,
                data,
            },
            unit: dtype.size(),
            count,
        };
        let mut ends = Vec::with_capacity(2 * world);
        // Each rank starts with another peer, to spread the load over links.
        for peer in (0..world).map(|step| (rank + step) % world) {
            ends.push(end(peer, Direction::Send, &input[peer], &sent[peer]));
            ends.push(end(
                peer,
                Direction::Receive,
                &output[peer],
                &received[peer],
            ));
        }
        inner.used_by(stream, || {
            inner.turns.take_with(stream, |is_recorded| {
                kernel.enqueue_counted(&ends, (stream, is_recorded))
            })
        })
    }
}

/// Fails if outputs overlap other memory of the call.
pub(in crate::collective) fn check_apart(
    written: &[(&str, &DeviceSlice)],
    read: &[(&str, &DeviceSlice)],
) -> Result<()> {
    for (number, (what, memory)) in written.iter().enumerate() {
        let mut others = written[number + 1..].iter().chain(read);
        // Empty slices may be anywhere, also inside other memory.
        let overlaps = |other: &DeviceSlice| other.bytes() > 0 && memory.overlaps(other);
        let found = others.find(|(_, other)| memory.bytes() > 0 && overlaps(other));
        if let Some((other, _)) = found {
            return Err(Error::invalid(format!(
                "the {what} overlap the {other}; expected separate memory"
            ))
            .with_help("pass separate memory for outputs"));
        }
    }
    Ok(())
}
