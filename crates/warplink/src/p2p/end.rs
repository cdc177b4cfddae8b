//! One rank's end of a transfer: its memory, its words and the peer's, and what they are set to.

use super::packets::{Turn, Turns, Unpacking};
use super::path::{Flow, Path};
use super::progress::TransferProgress;
use super::protocol::{PostNumber, Protocol, Role, Steps};
use super::recording::{GraphMark, TransferRecording, Waiting};
use super::request::{Buffer, Direction};
use crate::device::{
    DeviceSlice, KernelCopy, MemoryOp, PacketLine, PacketPart, Stream, StreamOp, Unit, Word,
};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::memory::{Region, RemoteRegion};
use crate::signal::{SignalOp, SignalWord, SlotPair};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Resources of an end of a transfer. When they are dropped, its signal words may be used for other
/// transfers as soon as the other end is gone too, so no stream may use it any more.
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
    // The stream of the last post, by its number.
    pub(super) posted_on: AtomicU64,
}

impl TransferEnd {
    pub(super) fn role(&self) -> Role {
        self.direction.role(self.protocol)
    }

    /// Fails where a post cannot be, in the graph `capture` if there is one. `posts` and `waited` tell what is
    /// still to be noted of the transfer: this number of posts, and whether there is a wait before these.
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
        checked.map_err(|error| error.with_peer(self.peer).with_key(self.key()))
    }

    /// Whether its waits unpack what the peer sends.
    pub(super) fn unpacks(&self) -> bool {
        self.role() == Role::Target && self.line.is_some()
    }

    /// Fails where the graph that was recorded last has a post that it does not wait for and would
    /// meet again at its next launch.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`].
    pub(super) fn check_recorded(&self) -> Result<()> {
        if self.role() == Role::Target && self.recording.is_open() {
            return Err(Error::invalid(
                "the transfer is posted in a graph that does not wait for it",
            )
            .with_operation("end a capture")
            .with_help("wait for it before the end")
            .with_peer(self.peer)
            .with_key(self.key()));
        }
        Ok(())
    }

    /// Notes what a post on `stream` is work for. An initiator's says so by its wait.
    pub(super) fn note_work(&self, stream: &Stream) {
        if self.role() == Role::Target
            && let Some(fault) = self.slots.own.inbound_word().fault()
        {
            stream.note_work(fault);
        }
    }

    /// Numbers a post on `stream`, in the graph `capture` if there is one. What it enqueues, and
    /// whether its place in the graph is to be marked.
    pub(super) fn begin_post(
        &self,
        stream: &Stream,
        capture: Option<u64>,
    ) -> Result<(PostNumber, Steps, bool)> {
        self.check_post(capture, (0, false))?;
        let (post, marks) = match capture {
            // Where the buffer is free is said by the last post.
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
                self.posted_on.store(stream.raw(), Ordering::Relaxed);
                (self.progress.post(), false)
            }
        };
        Ok((post, Steps::post(self.role(), post), marks))
    }

    /// The posts that a wait on `stream` covers, its operations, and whether it has to follow the place that
    /// was marked.
    pub(super) fn begin_wait(
        &self,
        stream: &Stream,
        capture: Option<u64>,
    ) -> Result<Option<(PostNumber, Steps, bool)>> {
        if let Some(capture) = capture {
            let waiting = self
                .recording
                .wait(self.role(), capture, stream.raw())
                .map_err(|error| error.with_peer(self.peer).with_key(self.key()))?;
            return Ok(waiting.map(|Waiting { post, follows }| {
                (post, Steps::wait(self.role(), post, !follows), follows)
            }));
        }
        let same_stream = self.posted_on.load(Ordering::Relaxed) == stream.raw();
        let posts = self.progress.posts();
        Ok(posts.map(|post| (post, Steps::wait(self.role(), post, same_stream), false)))
    }

    /// The operations of a wait on `stream` that unpacks. `turns` are this end's.
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
        let waiting = waiting.map_err(|error| error.with_peer(self.peer).with_key(self.key()))?;
        Ok(match waiting {
            Some(Waiting {
                post: PostNumber::Captured(number) | PostNumber::Eager(number),
                follows,
            }) => turns.wait_in_graph((capture, number), stream.raw(), follows),
            None => Turn::Nothing,
        })
    }

    /// The operation on a word that `signal` means for this transfer.
    pub(super) fn operation(&self, signal: SignalOp, post: PostNumber) -> Result<MemoryOp<'_>> {
        let captured = matches!(post, PostNumber::Captured(_));
        Ok(match signal {
            SignalOp::Set(name, value) => MemoryOp::Write {
                word: self.word(name, captured),
                value: value.wrapping_mul(self.growth(name)),
            },
            SignalOp::Reset(name) => MemoryOp::Reset {
                word: self.word(name, captured),
            },
            SignalOp::Wait(SignalWord::Outbound, _) => {
                return Err(Error::new(
                    ErrorKind::Internal,
                    "a rank waits on its own memory only",
                ));
            }
            SignalOp::Wait(name, value) => MemoryOp::Wait {
                word: self.word(name, captured),
                value: value.wrapping_mul(self.growth(name)),
            },
        })
    }

    /// The member of a sequence that `signal` means for this transfer.
    pub(super) fn stream_op(&self, signal: SignalOp, post: PostNumber) -> Result<StreamOp<'_>> {
        let unit = match self.flow {
            Flow::Streams => Unit::Stream,
            Flow::Stores { blocks: 1 } => Unit::Beside,
            Flow::Stores { .. } | Flow::Packets { .. } => Unit::Kernel,
        };
        Ok(StreamOp::Memory(self.operation(signal, post)?, unit))
    }

    /// By how much each post raises the word `name`.
    fn growth(&self, name: SignalWord) -> u64 {
        match (name, self.role()) {
            // What the target announces.
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

    /// The operation that moves the bytes of a post at the initiator, unless another end enqueues it, and whether
    /// it also tells of them. A send copies `from` instead of its buffer, if that is there.
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
                // One block tells of it by a store, which every link knows.
                let tells = blocks > 1;
                let arrival = |signal: Option<SignalOp>| match signal {
                    Some(SignalOp::Set(name, _)) if tells => Some(self.word(name, captured)),
                    _ => None,
                };
                let copy = KernelCopy {
                    target,
                    source,
                    blocks,
                    arrivals: after.map(arrival),
                    counter: self.slots.own.counter(),
                };
                (StreamOp::KernelCopy(copy), tells)
            }
            Flow::Packets { .. } => (self.packets(source, captured)?, true),
        })
    }

    /// This end's part of a transfer by packets, of `data`. Outside of graphs it also counts what is done.
    fn packets<'a>(&'a self, data: &'a DeviceSlice, captured: bool) -> Result<StreamOp<'a>> {
        let Some(line) = &self.line else {
            return Err(Error::new(
                ErrorKind::Internal,
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

    /// The unpacking of one post, where waits do that.
    pub(super) fn unpack(&self, captured: bool) -> Result<StreamOp<'_>> {
        match self.buffer.region() {
            Some(region) => self.packets(region.memory(), captured),
            None => Err(Error::new(
                ErrorKind::Internal,
                "a receive has no buffer of its own",
            )),
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
            return Err(
                Error::invalid("a send without a buffer of its own has nothing to copy")
                    .with_help("post it with post_stores")
                    .with_peer(self.peer)
                    .with_key(self.key()),
            );
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
            None => Err(Error::new(
                ErrorKind::Internal,
                "the initiator has no mapping of the peer's buffer",
            )),
        }
    }

    /// The receiver's buffer, at the sender by put.
    pub(super) fn receive_buffer(&self) -> Result<&DeviceSlice> {
        if self.line.is_some() {
            return Err(
                Error::invalid("a send by packets does not store into the receive buffer")
                    .with_help(
                        "exchange it with TransferRequest::store, or use the path copy-engine",
                    )
                    .with_peer(self.peer)
                    .with_key(self.key()),
            );
        }
        match (self.direction, self.role()) {
            (Direction::Send, Role::Initiator) => self.remote(),
            _ => Err(Error::invalid(format!(
                "a {} by {} has no receive buffer to store into; expected a send by put",
                self.direction, self.protocol
            ))
            .with_help("use put, and store on the sender's side")
            .with_peer(self.peer)
            .with_key(self.key())),
        }
    }

    fn key(&self) -> String {
        format!("{} with tag {}", self.direction, self.tag)
    }
}
