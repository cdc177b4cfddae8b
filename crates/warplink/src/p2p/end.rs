//! One rank's end of a transfer: its memory, both ends' signal words, and their values.

use super::packets::{Turn, Turns, Unpacking};
use super::path::{Flow, Path};
use super::progress::TransferProgress;
use super::protocol::{PostNumber, Protocol, Role, Steps};
use super::recording::{GraphMark, TransferRecording, Waiting};
use super::request::{Buffer, Direction};
use crate::device::{
    DeviceSlice, KernelCopy, MemoryOp, PacketLine, PacketPart, Stream, StreamOp, Unit, Word,
};
use crate::error::{Error, Rank, Result};
use crate::memory::{Region, RemoteRegion};
use crate::signal::{SignalOp, SignalWord, SlotPair};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Resources of one end of a transfer. Its signal words are reused by other transfers once both ends are dropped, so
/// no stream may still use them.
#[derive(Debug)]
pub(super) struct TransferEnd {
    pub(super) direction: Direction,
    pub(super) protocol: Protocol,
    pub(super) path: Path,
    pub(super) flow: Flow,
    pub(super) peer: Rank,
    pub(super) tag: u64,
    pub(super) buffer: Buffer,
    // The peer's buffer, at the initiator.
    pub(super) remote: Option<RemoteRegion>,
    pub(super) slots: SlotPair,
    pub(super) progress: Arc<TransferProgress>,
    pub(super) recording: TransferRecording,
    pub(super) graph_mark: GraphMark,
    /// Path of packets, and the mapped scratch that it uses.
    pub(super) line: Option<PacketLine>,
    pub(super) _scratch: Option<(Region, RemoteRegion)>,
    pub(super) unpacking: Unpacking,
    // Id of the stream of the last post.
    pub(super) posted_on: AtomicU64,
}

impl TransferEnd {
    pub(super) fn role(&self) -> Role {
        self.direction.role(self.protocol)
    }

    /// Fails if the transfer cannot be posted, in the graph `capture` if there is one. `posts` is the number of posts
    /// that are checked but not recorded yet, `waited` whether a wait precedes them.
    pub(super) fn check_post(
        &self,
        capture: Option<u64>,
        (posts, waited): (u64, bool),
    ) -> Result<()> {
        let checked = match capture {
            Some(capture) => {
                let last = (posts > 0 || waited).then_some(posts == 0);
                self.recording.check(self.role(), capture, last)
            }
            None if self.unpacks() => self.unpacking.check(posts, waited),
            None => Ok(()),
        };
        checked.map_err(|error| self.named(error))
    }

    /// Whether waits on this end unpack packets from the peer.
    pub(super) fn unpacks(&self) -> bool {
        self.role() == Role::Target && self.line.is_some()
    }

    /// Fails if the last captured graph has a post without a wait: the next launch of the graph would repeat the post
    /// before the previous one is known to be done.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`].
    pub(super) fn check_recorded(&self) -> Result<()> {
        if self.role() == Role::Target && self.recording.is_open() {
            let text = "the transfer is posted in a graph that does not wait for it";
            let error = Error::invalid(text).with_operation("end a capture");
            return Err(self.named(error.with_help("wait for it before the end")));
        }
        Ok(())
    }

    /// Records the work that a post on `stream` belongs to. At an initiator, the wait records it.
    pub(super) fn note_work(&self, stream: &Stream) {
        if self.role() == Role::Target
            && let Some(fault) = self.slots.own.inbound_word().fault()
        {
            stream.note_work(fault);
        }
    }

    /// Numbers a post on `stream`, in the graph `capture` if there is one. Returns its steps, and whether its
    /// position in the graph has to be marked.
    pub(super) fn begin_post(
        &self,
        stream: &Stream,
        capture: Option<u64>,
    ) -> Result<(PostNumber, Steps, bool)> {
        self.check_post(capture, (0, false))?;
        let (post, marks) = match capture {
            // The last post determines when the buffer is free.
            Some(capture) if self.unpacks() => {
                let recording = &self.recording;
                recording.post(Role::Initiator, capture, stream.raw())
            }
            Some(capture) => self.recording.post(self.role(), capture, stream.raw()),
            None if self.unpacks() => {
                let number = self.unpacking.turns().post(stream.raw());
                (PostNumber::Eager(number), true)
            }
            None => {
                // Relaxed: it publishes no other data; a wait concurrent with this post covers either post.
                self.posted_on.store(stream.raw(), Ordering::Relaxed);
                (self.progress.post(), false)
            }
        };
        Ok((post, Steps::post(self.role(), post), marks))
    }

    /// Returns the posts that a wait on `stream` covers, its steps, and whether the stream has to follow the recorded
    /// mark first.
    pub(super) fn begin_wait(
        &self,
        stream: &Stream,
        capture: Option<u64>,
    ) -> Result<Option<(PostNumber, Steps, bool)>> {
        if let Some(capture) = capture {
            let waiting = self
                .recording
                .wait(self.role(), capture, stream.raw())
                .map_err(|error| self.named(error))?;
            return Ok(waiting.map(|Waiting { post, follows }| {
                (post, Steps::wait(self.role(), post, !follows), follows)
            }));
        }
        // Relaxed, as for the store: a wait that runs beside a post covers it or not, on either stream.
        let same_stream = self.posted_on.load(Ordering::Relaxed) == stream.raw();
        let posts = self.progress.posts();
        Ok(posts.map(|post| (post, Steps::wait(self.role(), post, same_stream), false)))
    }

    /// Returns the steps of a wait on `stream` that unpacks. `turns` are those of this end.
    pub(super) fn begin_unpacking(
        &self,
        turns: &mut Turns,
        stream: &Stream,
        capture: Option<u64>,
    ) -> Result<Turn> {
        let Some(capture) = capture else {
            return Ok(turns.wait(stream.raw()));
        };
        let waiting = self.recording.wait(self.role(), capture, stream.raw());
        let waiting = waiting.map_err(|error| self.named(error))?;
        Ok(match waiting {
            Some(Waiting {
                post: PostNumber::Captured(number) | PostNumber::Eager(number),
                follows,
            }) => turns.wait_in_graph((capture, number), stream.raw(), follows),
            None => Turn::Nothing,
        })
    }

    /// Translates `signal` into an operation on this transfer's words.
    pub(super) fn operation(&self, signal: SignalOp, post: PostNumber) -> Result<MemoryOp<'_>> {
        let captured = matches!(post, PostNumber::Captured(_));
        Ok(match signal {
            SignalOp::Set(name, value) => MemoryOp::write(
                self.word(name, captured),
                value.wrapping_mul(self.growth(name)),
            ),
            SignalOp::Reset(name) => MemoryOp::Reset {
                word: self.word(name, captured),
            },
            SignalOp::Wait(SignalWord::Outbound, _) => {
                return Err(Error::internal("a rank waits on its own memory only"));
            }
            SignalOp::Wait(name, value) => MemoryOp::wait(
                self.word(name, captured),
                value.wrapping_mul(self.growth(name)),
            ),
        })
    }

    /// Translates `signal` into a stream operation on this transfer's words.
    pub(super) fn stream_op(&self, signal: SignalOp, post: PostNumber) -> Result<StreamOp<'_>> {
        let unit = match self.flow {
            Flow::Streams => Unit::Stream,
            Flow::Stores { blocks: 1 } => Unit::Beside,
            Flow::Stores { .. } | Flow::Packets { .. } => Unit::Kernel,
        };
        Ok(StreamOp::Memory(self.operation(signal, post)?, unit))
    }

    /// Increment of the word `name` by each post.
    fn growth(&self, name: SignalWord) -> u64 {
        match (name, self.role()) {
            // Announcements of the target: one store each, however many blocks copy.
            (SignalWord::Inbound, Role::Initiator) | (SignalWord::Outbound, Role::Target) => 1,
            (SignalWord::Inbound, Role::Target)
            | (SignalWord::Outbound, Role::Initiator)
            | (SignalWord::Completed, _) => self.flow.arrivals(),
        }
    }

    /// Whether it has no bytes to move.
    pub(super) fn is_empty(&self) -> bool {
        self.buffer.bytes() == 0
    }

    /// The operation that moves the bytes of a post at the initiator (unless other work stores them), and whether it
    /// also signals completion. A send copies from `from` instead of its buffer, if given.
    pub(super) fn movement<'a>(
        &'a self,
        post: PostNumber,
        after: &[Option<SignalOp>; 2],
        from: Option<&'a DeviceSlice>,
    ) -> Result<(StreamOp<'a>, bool)> {
        let (target, own) = self.copy_operands()?;
        let source = from.unwrap_or(own);
        let captured = matches!(post, PostNumber::Captured(_));
        Ok(match self.flow {
            Flow::Streams => (StreamOp::Copy { target, source }, false),
            Flow::Stores { blocks } => {
                // One block signals by a plain store, which works over every link; several need atomic adds.
                let signals_peer = blocks > 1;
                let arrival = |signal: Option<SignalOp>| match signal {
                    Some(SignalOp::Set(name, _)) if signals_peer => Some(self.word(name, captured)),
                    _ => None,
                };
                let copy = KernelCopy {
                    target,
                    source,
                    blocks,
                    arrivals: after.map(arrival),
                    counter: self.slots.own.counter(),
                };
                (StreamOp::KernelCopy(copy), signals_peer)
            }
            Flow::Packets { .. } => (self.packets(source, captured)?, true),
        })
    }

    /// This end's part of a transfer of `data` by packets. Outside of graphs it also counts completed posts.
    fn packets<'a>(&'a self, data: &'a DeviceSlice, captured: bool) -> Result<StreamOp<'a>> {
        let Some(line) = &self.line else {
            return Err(Error::internal(
                "a transfer by packets has no scratch memory",
            ));
        };
        let completed = self.word(SignalWord::Completed, false);
        Ok(StreamOp::Packets(PacketPart {
            line,
            data,
            receives: self.direction == Direction::Receive,
            completed: (!captured).then_some(completed),
        }))
    }

    /// The unpack of one post, for ends whose waits unpack.
    pub(super) fn unpack(&self, captured: bool) -> Result<StreamOp<'_>> {
        match self.buffer.region() {
            Some(region) => self.packets(region.memory(), captured),
            None => Err(Error::internal("a receive has no buffer of its own")),
        }
    }

    fn word(&self, name: SignalWord, captured: bool) -> &Word {
        self.slots
            .own
            .word(name, captured)
            .unwrap_or_else(|| self.slots.remote.word(captured))
    }

    /// Destination and source of the copy, at the initiator.
    pub(super) fn copy_operands(&self) -> Result<(&DeviceSlice, &DeviceSlice)> {
        let Some(region) = self.buffer.region() else {
            let error = Error::invalid("a send without a buffer of its own has nothing to copy");
            return Err(self.named(error.with_help("post it with post_stores")));
        };
        let (own, remote) = (region.memory(), self.remote()?);
        Ok(match self.direction {
            Direction::Send => (remote, own),
            Direction::Receive => (own, remote),
        })
    }

    /// The peer's buffer, at the initiator.
    pub(super) fn remote(&self) -> Result<&DeviceSlice> {
        match &self.remote {
            Some(remote) => Ok(remote.memory()),
            None => Err(Error::internal(
                "the initiator has no mapping of the peer's buffer",
            )),
        }
    }

    /// The receiver's buffer, at the sender by put.
    pub(super) fn receive_buffer(&self) -> Result<&DeviceSlice> {
        let error = match (self.direction, self.role()) {
            _ if self.line.is_some() => {
                Error::invalid("a send by packets does not store into the receive buffer")
                    .with_help(
                        "exchange it with TransferRequest::store, or use the path copy-engine",
                    )
            }
            (Direction::Send, Role::Initiator) => return self.remote(),
            _ => Error::invalid(format!(
                "a {} by {} has no receive buffer to store into; expected a send by put",
                self.direction, self.protocol
            ))
            .with_help("use put, and store on the sender's side"),
        };
        Err(self.named(error))
    }

    /// Adds which transfer an error is about.
    fn named(&self, error: Error) -> Error {
        let key = format!("{} with tag {}", self.direction, self.tag);
        error.with_peer(self.peer).with_key(key)
    }
}
