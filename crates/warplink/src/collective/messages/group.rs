//! Groups of sends and receives, and all-to-all with a size for each peer.

use super::MAX_MESSAGES;
use super::programs::End;
use crate::collective::Collectives;
use crate::device::{CollectiveRequest, DeviceSlice, Stream};
use crate::dtype::DType;
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Rank, Result};
use crate::p2p::Direction;

/// Bytes of messages to self that join the launch in any case: a separate device copy costs another host call.
const ALWAYS_ALONG: usize = 1 << 20;

/// A message to self: target and source.
type SelfMessage<'a> = (&'a DeviceSlice, &'a DeviceSlice);

/// A send or receive of a group.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a> {
    /// Rank at the other end; may be this rank.
    pub peer: Rank,
    /// Direction.
    pub direction: Direction,
    /// Source of a send, destination of a receive.
    pub memory: &'a DeviceSlice,
}

impl<'a> Message<'a> {
    /// Sends `memory` to `peer`.
    pub const fn send(peer: Rank, memory: &'a DeviceSlice) -> Self {
        Self {
            peer,
            direction: Direction::Send,
            memory,
        }
    }

    /// Receives from `peer` into `memory`.
    pub const fn receive(peer: Rank, memory: &'a DeviceSlice) -> Self {
        Self {
            peer,
            direction: Direction::Receive,
            memory,
        }
    }
}

/// Division of memory into a part for each rank, in elements.
#[derive(Clone, Copy, Debug)]
pub struct Parts<'a> {
    /// Elements of each rank's part.
    pub counts: &'a [usize],
    /// Offset of each rank's part.
    pub displacements: &'a [usize],
}

impl Collectives {
    /// Executes all `messages` concurrently; those to or from one peer are matched in order: the n-th send to
    /// a rank belongs to its n-th receive from this rank. Only the two ranks of a message need to call, and
    /// ranks may group messages differently, as long as some order allows all to complete. Messages to self
    /// need both ends in one group. Receive buffers must not overlap other memory of the group. Does not
    /// block.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for ranks out of range, overlapping memory, more than [`MAX_MESSAGES`]
    /// messages, and unmatched messages to self. Different lengths of a message's ends fail the streams of
    /// both ranks ([`ErrorKind::Mismatch`], with the peer) on the direct path.
    pub fn send_receive(&self, messages: &[Message<'_>], stream: &Stream) -> Result<()> {
        self.exchange(messages, Overlaps::Refused, stream)
            .map_err(|error| error.with_operation("send and receive"))
    }

    /// The same, except that a receive buffer may overlap memory that the group sends, as NCCL allows. Which of the
    /// two contents such a send transfers is undefined.
    ///
    /// # Errors
    /// As [`send_receive`](Self::send_receive), and [`ErrorKind::InvalidArgument`] only for receive buffers that overlap
    /// one another.
    pub fn send_receive_overlapping(
        &self,
        messages: &[Message<'_>],
        stream: &Stream,
    ) -> Result<()> {
        self.exchange(messages, Overlaps::OfSends, stream)
            .map_err(|error| error.with_operation("send and receive"))
    }

    /// Sends part p of `input` to rank p and receives its part into part p of `output`; sizes may differ.
    /// Counts may be 0, and input parts may overlap. New counts compile no kernel. Does not block.
    ///
    /// # Errors
    /// As [`send_receive`](Self::send_receive): a part's length must match at both ranks.
    /// [`ErrorKind::InvalidArgument`] if there is not one part for each rank, or a part is out of bounds.
    pub fn all_to_all_v(
        &self,
        (output, output_parts): (&DeviceSlice, Parts<'_>),
        (input, input_parts): (&DeviceSlice, Parts<'_>),
        dtype: DType,
        stream: &Stream,
    ) -> Result<()> {
        let operation = |error: Error| error.with_operation("all_to_all_v");
        let cut = |what, memory, parts| self.cut(what, memory, parts, dtype).map_err(operation);
        let (sent, received) = (
            cut("input", input, input_parts)?,
            cut("output", output, output_parts)?,
        );
        let (rank, world) = (self.0.context.rank(), self.0.machine.world);
        let mut messages = Vec::with_capacity(2 * world);
        // Each rank starts with another peer, to spread the load over links.
        for peer in (0..world).map(|step| (rank + step) % world) {
            messages.push(Message::send(peer, &sent[peer]));
            messages.push(Message::receive(peer, &received[peer]));
        }
        self.exchange(&messages, Overlaps::Refused, stream)
            .map_err(operation)
    }

    fn cut(
        &self,
        what: &str,
        memory: &DeviceSlice,
        parts: Parts<'_>,
        dtype: DType,
    ) -> Result<Vec<DeviceSlice>> {
        let world = self.0.machine.world;
        if (parts.counts.len(), parts.displacements.len()) != (world, world) {
            return Err(Error::invalid(format!(
                "{} counts and {} displacements of the {what}; expected {world} of each",
                parts.counts.len(),
                parts.displacements.len()
            ))
            .with_help("give one of each for every rank"));
        }
        // Checked arithmetic: counts and displacements come from the caller.
        let both = parts.counts.iter().zip(parts.displacements);
        let parts = both.enumerate().map(|(peer, (count, displacement))| {
            let end = displacement.checked_add(*count);
            let end = end.and_then(|end| end.checked_mul(dtype.size()));
            let Some(end) = end.filter(|end| *end <= memory.bytes()) else {
                return Err(Error::invalid(format!(
                    "{count} elements from {displacement} on in the {what}; expected a part of its {}",
                    memory.bytes() / dtype.size()
                ))
                .with_peer(peer)
                .with_help("pass counts and displacements within the memory"));
            };
            memory.slice(displacement * dtype.size()..end)
        });
        parts.collect()
    }

    fn exchange(
        &self,
        messages: &[Message<'_>],
        overlaps: Overlaps,
        stream: &Stream,
    ) -> Result<()> {
        self.0.used_by(stream, || {
            self.0.context.fault.check()?;
            check(messages, self.0.machine.world, overlaps)?;
            self.enqueue_messages(messages, stream)
        })
    }

    fn enqueue_messages(&self, messages: &[Message<'_>], stream: &Stream) -> Result<()> {
        let inner = &*self.0;
        let rank = inner.context.rank();
        let copies = own(messages, rank)?;
        let others = messages.iter().filter(|message| message.peer != rank);
        if let Some(kernel) = &inner.messages {
            let end = |peer, direction, data| End {
                peer,
                direction,
                data,
            };
            let mut ends: Vec<End<'_>> = others
                .map(|message| end(message.peer, message.direction, message.memory))
                .collect();
            check_count(ends.len())?;
            let (along, copies) = divide(copies, &ends);
            for (target, source) in along {
                ends.push(end(rank, Direction::Send, source));
                ends.push(end(rank, Direction::Receive, target));
            }
            return inner.turns.take_with(stream, |is_recorded| {
                // Copies first: behind the kernel they would wait for the peers.
                copy(&copies, stream)?;
                kernel.enqueue(&ends, (stream, is_recorded))
            });
        }
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        // Both ends skip empty messages.
        for message in others.filter(|message| message.memory.bytes() > 0) {
            let end = (message.peer, message.memory.clone());
            match message.direction {
                Direction::Send => sends.push(end),
                Direction::Receive => receives.push(end),
            }
        }
        if sends.is_empty() && receives.is_empty() {
            // No call of the engine: the peers make none either, as an empty message is empty at both ends.
            return inner.turns.take(stream, || copy(&copies, stream));
        }
        let engine = inner.path.engine()?.ok_or_else(not_linked)?;
        let request = CollectiveRequest::Exchange { sends, receives };
        inner.turns.take(stream, || {
            copy(&copies, stream)?;
            engine.request(&request, stream)
        })
    }
}

/// Enqueues messages to self.
fn copy(copies: &[SelfMessage<'_>], stream: &Stream) -> Result<()> {
    let mut filled = copies.iter().filter(|(_, source)| source.bytes() > 0);
    filled.try_for_each(|(target, source)| stream.copy(target, source))
}

/// Splits messages to self into those that join a launch of the messages `others`, and those copied before it.
///
/// In a launch they are copied while data crosses the link, which takes longer for as many bytes: with two H200s,
/// parts of 1.5 to 32 MiB take 13 to 17 % less of an all-to-all's time than behind a copy of the rank's own.
fn divide<'a>(
    copies: Vec<SelfMessage<'a>>,
    others: &[End<'_>],
) -> (Vec<SelfMessage<'a>>, Vec<SelfMessage<'a>>) {
    let crossing = |direction| {
        let ends = others.iter().filter(|end| end.direction == direction);
        ends.map(|end| end.data.bytes()).sum::<usize>()
    };
    let mut hidden = crossing(Direction::Send).max(crossing(Direction::Receive));
    // A launch for nothing else costs as much as a copy.
    let mut room = if others.is_empty() {
        0
    } else {
        MAX_MESSAGES.saturating_sub(others.len()) / 2
    };
    copies.into_iter().partition(|(_, source)| {
        let bytes = source.bytes();
        let goes = room > 0 && bytes > 0 && bytes <= hidden.max(ALWAYS_ALONG);
        if goes {
            // Each takes two entries, a send and a receive.
            room -= 1;
            hidden = hidden.saturating_sub(bytes);
        }
        goes
    })
}

fn not_linked() -> Error {
    let message = "the direct path sends no messages in a hybrid cube mesh; expected the vendor's library to do it";
    Error::unsupported(message).with_help("leave the path open")
}

/// Fails for more messages than one launch supports.
fn check_count(messages: usize) -> Result<()> {
    if messages <= MAX_MESSAGES {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{messages} messages in one group; expected at most {MAX_MESSAGES}"
    ))
    .with_help("make several groups"))
}

/// Which messages of a group a receive buffer may overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Overlaps {
    Refused,
    OfSends,
}

fn check(messages: &[Message<'_>], world: usize, overlaps: Overlaps) -> Result<()> {
    for (number, message) in messages.iter().enumerate() {
        if message.peer >= world {
            return Err(Error::invalid(format!(
                "rank {} is out of range; expected a rank below {world}",
                message.peer
            ))
            .with_peer(message.peer)
            .with_help("name a rank of the communicator"));
        }
        // Sources may overlap one another: only receives write.
        if message.direction == Direction::Send || message.memory.bytes() == 0 {
            continue;
        }
        let others = messages.iter().enumerate();
        let mut others = others.filter(|(other, message)| {
            *other != number
                && (overlaps == Overlaps::Refused || message.direction == Direction::Receive)
        });
        if let Some((_, other)) = others
            .find(|(_, other)| other.memory.bytes() > 0 && other.memory.overlaps(message.memory))
        {
            return Err(Error::invalid(format!(
                "the receive buffer {:?} overlaps {:?}; expected separate memory",
                message.memory, other.memory
            ))
            .with_peer(message.peer)
            .with_help("receive into memory that no other message of the group uses"));
        }
    }
    Ok(())
}

/// Targets and sources of messages to self.
fn own<'a>(messages: &[Message<'a>], rank: Rank) -> Result<Vec<SelfMessage<'a>>> {
    let of = |direction| {
        let own = messages.iter().filter(move |message| message.peer == rank);
        own.filter(move |message| message.direction == direction)
            .map(|message| message.memory)
    };
    let refused = |text: String| {
        Error::invalid(text)
            .with_peer(rank)
            .with_help("give each message of a rank to itself a send and a receive of one length")
    };
    let (sends, receives) = (of(Direction::Send).count(), of(Direction::Receive).count());
    if sends != receives {
        return Err(refused(format!(
            "{sends} sends of this rank to itself; expected {receives}, as it receives"
        )));
    }
    // In order, as for messages between ranks.
    let pairs = of(Direction::Receive).zip(of(Direction::Send));
    let pairs = pairs.map(|(target, source)| {
        if target.bytes() != source.bytes() {
            return Err(refused(format!(
                "this rank sends itself {} bytes; expected {}, as it receives",
                source.bytes(),
                target.bytes()
            )));
        }
        Ok((target, source))
    });
    pairs.collect()
}
