//! Posting and waiting for many transfers at once.

use super::packets::{Turn, Turns};
use super::protocol::{PostNumber, Role, Steps};
use super::transfer::Transfer;
use crate::device::{DeviceSlice, MemoryOp, Stream, StreamOp, Unit};
use crate::error::Result;
use crate::signal::{SignalOp, SignalWord};

/// Posts and waits to be enqueued together, which a device does in fewer steps than one by one: a
/// small transfer, with what it waits for and what waits for it, becomes one kernel.
///
/// Posts that follow one another form a group: first everything that only tells a peer, then what
/// has to wait for one, then the copies, then what tells of them. So a group completes whatever the
/// order of its members, here and on the other ranks, as long as each rank posts the other end of
/// every member in a group that this one does not wait for. Copies that peers should hear of one by
/// one are posted one by one.
///
/// In a graph, a post of what was posted there before waits until that is done, and if all posts of a
/// batch are waited for in it, a wait for one of them on another stream comes behind the whole batch.
#[derive(Clone, Debug, Default)]
pub struct Batch<'a> {
    parts: Vec<BatchPart<'a>>,
    in_kernel: bool,
    launch: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Post,
    Wait,
}

#[derive(Clone, Copy, Debug)]
struct BatchPart<'a> {
    kind: Kind,
    transfer: &'a Transfer,
    /// Memory that a send copies instead of its buffer.
    source: Option<&'a DeviceSlice>,
}

impl<'a> Batch<'a> {
    /// An empty batch.
    pub fn new() -> Self {
        Self::default()
    }

    /// Posts `transfers` after what the batch holds.
    pub fn post(self, transfers: impl IntoIterator<Item = &'a Transfer>) -> Self {
        self.add(Kind::Post, transfers.into_iter().map(|each| (each, None)))
    }

    /// As [`post`](Self::post), with what sends by put copy instead of their buffers, of as many bytes.
    pub(crate) fn post_from(
        self,
        transfers: impl IntoIterator<Item = (&'a Transfer, Option<&'a DeviceSlice>)>,
    ) -> Self {
        self.add(Kind::Post, transfers)
    }

    /// Waits for every post so far of `transfers` after what the batch holds.
    pub fn wait(self, transfers: impl IntoIterator<Item = &'a Transfer>) -> Self {
        self.add(Kind::Wait, transfers.into_iter().map(|each| (each, None)))
    }

    /// If the batch has no copy, enqueues its signals in a kernel where that is faster. For streams
    /// beside which no matmul runs that would leave a kernel no room.
    pub fn in_kernel(mut self) -> Self {
        self.in_kernel = true;
        self
    }

    /// Enqueues it as a part of the [launch](super::next_launch) `launch`, if there is one.
    pub(crate) fn in_launch(mut self, launch: Option<u64>) -> Self {
        self.launch = launch;
        self
    }

    fn add(
        mut self,
        kind: Kind,
        transfers: impl IntoIterator<Item = (&'a Transfer, Option<&'a DeviceSlice>)>,
    ) -> Self {
        let parts = transfers.into_iter().map(|(transfer, source)| BatchPart {
            kind,
            transfer,
            source,
        });
        self.parts.extend(parts);
        self
    }

    /// Enqueues the batch on `stream`. Does not block.
    ///
    /// # Errors
    /// The device's fault, and
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) for a transfer that is
    /// captured twice without a wait between, or a send that has no memory to copy from.
    pub fn enqueue(&self, stream: &Stream) -> Result<()> {
        for BatchPart { kind, transfer, .. } in &self.parts {
            transfer.end.note(stream);
            if *kind == Kind::Post {
                transfer.end.note_work(stream);
            }
        }
        let enqueued = self.enqueue_parts(stream);
        // Once more, as in `InUse::used_by`.
        let transfers = self.parts.iter().map(|part| part.transfer);
        transfers.for_each(|transfer| transfer.end.note(stream));
        enqueued
    }

    fn enqueue_parts(&self, stream: &Stream) -> Result<()> {
        let mut queue = Queue::new(stream, self.in_kernel, self.launch)?;
        // Before any post is numbered: a number without a post would be waited for in vain.
        for (index, BatchPart { kind, transfer, .. }) in self.parts.iter().enumerate() {
            if *kind == Kind::Wait {
                continue;
            }
            if transfer.end.role() == Role::Initiator {
                transfer.end.copy_operands()?;
            }
            if queue.capture.is_some() || transfer.end.unpacks() {
                let same = |before: &&BatchPart<'_>| std::ptr::eq(before.transfer, *transfer);
                let before = || self.parts[..index].iter().filter(same).rev();
                let posts = before().take_while(|part| part.kind == Kind::Post).count();
                let waited = before().any(|part| part.kind == Kind::Wait);
                transfer
                    .end
                    .check_post(queue.capture, (posts as u64, waited))?;
            }
        }
        queue.whole = queue.capture.is_some()
            && self.parts.iter().enumerate().all(|(index, part)| {
                let same = |wait: &BatchPart<'_>| {
                    wait.kind == Kind::Wait && std::ptr::eq(wait.transfer, part.transfer)
                };
                part.kind == Kind::Wait || self.parts[index + 1..].iter().any(same)
            });
        queue.operations.reserve(6 * self.parts.len());
        let mut rest = &self.parts[..];
        for group in self.parts.chunk_by(|a, b| a.kind == b.kind) {
            rest = &rest[group.len()..];
            match group.first().map(|part| part.kind) {
                Some(Kind::Post) => queue.post(group, rest)?,
                Some(Kind::Wait) | None => queue.wait(group.iter().map(|part| part.transfer))?,
            }
        }
        queue.flush()
    }
}

impl Transfer {
    /// Enqueues this end's part on `stream`; see the table in the [module](super). Does not block.
    /// Posts of one transfer must be ordered among one another: one on another stream than the one before
    /// comes behind a wait for this transfer, or behind what that stream did next. A wait for another
    /// transfer of the same group does not order them, as the words of a group are set one by one. A graph
    /// must hold as many posts of this end as the peer's graph of the other, and the waits for them; where it
    /// holds several, each waits until the one before is done.
    pub fn post(&self, stream: &Stream) -> Result<()> {
        post_all(&[self], stream)
    }

    /// Enqueues the wait for every post so far on `stream`; under capture, for the last in the same
    /// graph. Does not block. Without a post it does nothing. Any number of streams may wait.
    pub fn wait(&self, stream: &Stream) -> Result<()> {
        wait_all(&[self], stream)
    }
}

/// Operations that a stream is to get together.
struct Queue<'a, 's> {
    stream: &'s Stream,
    /// The graph that the stream records, or the launch that it is a part of, if there is one.
    capture: Option<u64>,
    in_kernel: bool,
    /// Whether what is posted is waited for here too, so that other streams hardly will, and a place
    /// in a graph may be marked behind all of it.
    whole: bool,
    operations: Vec<StreamOp<'a>>,
    /// Marks to set behind the operations.
    marks: Vec<(&'a Transfer, PostMark)>,
}

/// A post that copies.
#[derive(Clone, Copy)]
struct CopyOf<'a> {
    transfer: &'a Transfer,
    source: Option<&'a DeviceSlice>,
    post: PostNumber,
    steps: Steps,
    /// Whether its place is to be marked.
    marks: bool,
}

impl<'a> CopyOf<'a> {
    /// The operation that moves the bytes, and whether it also signals the peer.
    fn movement(&self) -> Result<(StreamOp<'a>, bool)> {
        let end = &self.transfer.end;
        end.movement(self.post, &self.steps.after, self.source)
    }
}

/// A place in a stream that others may have to follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PostMark {
    /// A post in a graph.
    Post,
    /// A post outside of graphs that will be unpacked on another stream, perhaps.
    EagerPost,
    /// An unpacking in a graph.
    Unpacked,
}

impl<'a, 's> Queue<'a, 's> {
    fn new(stream: &'s Stream, in_kernel: bool, launch: Option<u64>) -> Result<Self> {
        let capture = match launch {
            Some(launch) => Some(launch),
            None => stream.capture_id()?,
        };
        Ok(Self {
            stream,
            capture,
            in_kernel,
            whole: false,
            operations: Vec::new(),
            marks: Vec::new(),
        })
    }

    /// Posts a group; the order of its steps is what [`Batch`] says. `rest` follows in the batch.
    fn post(&mut self, group: &[BatchPart<'a>], rest: &[BatchPart<'_>]) -> Result<()> {
        let (mut again, mut copies) = (Vec::new(), Vec::new());
        for BatchPart {
            transfer, source, ..
        } in group.iter().copied()
        {
            let (post, steps, marks) = transfer.end.begin_post(self.stream, self.capture)?;
            if steps.copy {
                copies.push(CopyOf {
                    transfer,
                    source,
                    post,
                    steps,
                    marks,
                });
            } else if transfer.end.unpacks() {
                let waits = |part: &BatchPart<'_>| {
                    part.kind == Kind::Wait && std::ptr::eq(part.transfer, transfer)
                };
                if self.capture.is_some() {
                    self.marks.push((transfer, PostMark::Post));
                } else if !rest.iter().any(waits) {
                    self.marks.push((transfer, PostMark::EagerPost));
                }
            } else if matches!(post, PostNumber::Captured(2..)) {
                again.push((transfer, post, steps));
            } else {
                self.signals(transfer, post, steps.before)?;
                self.marks
                    .extend(marks.then_some((transfer, PostMark::Post)));
            }
        }
        // These wait for their post before.
        for (transfer, post, steps) in again {
            self.signals(transfer, post, steps.before)?;
        }
        self.mark()?;
        self.move_bytes(&copies)?;
        for CopyOf {
            transfer, marks, ..
        } in copies
        {
            self.marks
                .extend(marks.then_some((transfer, PostMark::Post)));
        }
        self.mark()
    }

    /// Enqueues what initiators do: packets, which wait for nobody as a rule; then all waits, all copies, all
    /// signals, so that the copy engine is not held up between the copies.
    fn move_bytes(&mut self, copies: &[CopyOf<'a>]) -> Result<()> {
        let (packets, others): (Vec<_>, Vec<_>) = copies
            .iter()
            .copied()
            .partition(|copy| copy.transfer.end.line.is_some());
        for copy in packets {
            let (packets, _) = copy.movement()?;
            self.operations.push(packets);
        }
        for copy in &others {
            self.signals(copy.transfer, copy.post, copy.steps.before)?;
        }
        let mut untold = Vec::new();
        for copy in others {
            if copy.transfer.end.is_empty() {
                untold.push(copy);
                continue;
            }
            let (movement, tells) = copy.movement()?;
            self.operations.push(movement);
            if !tells {
                untold.push(copy);
            }
        }
        for copy in untold {
            self.signals(copy.transfer, copy.post, copy.steps.after)?;
        }
        Ok(())
    }

    fn wait(&mut self, transfers: impl Iterator<Item = &'a Transfer>) -> Result<()> {
        let mut unpacking = Vec::new();
        for transfer in transfers {
            if transfer.end.unpacks() {
                unpacking.push(transfer);
                continue;
            }
            let Some((post, steps, follows)) =
                transfer.end.begin_wait(self.stream, self.capture)?
            else {
                continue;
            };
            if follows {
                self.flush()?;
                transfer.end.graph_mark.wait(self.stream)?;
            }
            self.signals(transfer, post, steps.before)?;
        }
        if unpacking.is_empty() {
            return Ok(());
        }
        // One thread locks them in the same order as another, and none twice.
        unpacking.sort_unstable_by_key(|transfer| std::ptr::from_ref(*transfer));
        unpacking.dedup_by_key(|transfer| std::ptr::from_ref(*transfer));
        let mut turns: Vec<_> = unpacking
            .iter()
            .map(|transfer| transfer.end.unpacking.turns())
            .collect();
        for (transfer, turns) in unpacking.into_iter().zip(&mut turns) {
            self.unpack(transfer, turns)?;
        }
        // Before others may wait for the same.
        self.flush()
    }

    /// Unpacks what was posted of a receive by packets, or follows the stream that did.
    fn unpack(&mut self, transfer: &'a Transfer, turns: &mut Turns) -> Result<()> {
        let end = &*transfer.end;
        let captured = self.capture.is_some();
        match end.begin_unpacking(turns, self.stream, self.capture)? {
            Turn::Nothing => {}
            Turn::Unpack { times, follows } => {
                if follows {
                    self.flush()?;
                    let mark = if captured {
                        &end.graph_mark
                    } else {
                        &end.unpacking.posted
                    };
                    mark.wait(self.stream)?;
                }
                for _ in 0..times {
                    if !captured {
                        end.progress.post();
                    }
                    self.operations.push(end.unpack(captured)?);
                }
                self.marks
                    .extend(captured.then_some((transfer, PostMark::Unpacked)));
            }
            Turn::Follow(_) if captured => {
                self.flush()?;
                end.unpacking.unpacked.wait(self.stream)?;
            }
            Turn::Follow(posts) => {
                let completed = SignalOp::Wait(SignalWord::Completed, posts);
                let wait = end.operation(completed, PostNumber::Eager(posts))?;
                self.operations.push(StreamOp::Memory(wait, Unit::Stream));
            }
        }
        Ok(())
    }

    fn signals(
        &mut self,
        transfer: &'a Transfer,
        post: PostNumber,
        signals: [Option<SignalOp>; 2],
    ) -> Result<()> {
        for signal in signals.into_iter().flatten() {
            let operation = transfer.end.stream_op(signal, post)?;
            self.operations.push(operation);
        }
        Ok(())
    }

    /// Has places marked here, if there are any and it matters: another stream that follows one waits
    /// for nothing that comes behind.
    fn mark(&mut self) -> Result<()> {
        if self.marks.is_empty() || self.whole {
            return Ok(());
        }
        self.flush()
    }

    /// Enqueues what was collected.
    fn flush(&mut self) -> Result<()> {
        if !self.operations.is_empty() {
            let signals = if self.in_kernel {
                only_signals(&self.operations)
            } else {
                None
            };
            match signals {
                Some(signals) => self.stream.memory_ops_in_kernel(&signals)?,
                None => self.stream.sequence(&self.operations)?,
            }
            self.operations.clear();
        }
        self.marks.drain(..).try_for_each(|(transfer, mark)| {
            let end = &transfer.end;
            match mark {
                PostMark::Post => end.graph_mark.record(self.stream),
                PostMark::EagerPost => end.unpacking.posted.record(self.stream),
                PostMark::Unpacked => end.unpacking.unpacked.record(self.stream),
            }
        })
    }
}

/// The operations, if no copy is among them.
fn only_signals<'a>(operations: &[StreamOp<'a>]) -> Option<Vec<MemoryOp<'a>>> {
    operations
        .iter()
        .map(|operation| match operation {
            StreamOp::Memory(signal, _) => Some(*signal),
            StreamOp::Copy { .. } | StreamOp::KernelCopy(_) | StreamOp::Packets(_) => None,
        })
        .collect()
}

/// Posts `transfers` on `stream` as one group; see [`Batch`]. Does not block.
///
/// # Errors
/// As [`Batch::enqueue`].
pub fn post_all(transfers: &[&Transfer], stream: &Stream) -> Result<()> {
    Batch::new().post(transfers.iter().copied()).enqueue(stream)
}

/// Waits on `stream` for every post so far of `transfers`, in any order. Does not block.
///
/// # Errors
/// The device's fault.
pub fn wait_all(transfers: &[&Transfer], stream: &Stream) -> Result<()> {
    Batch::new().wait(transfers.iter().copied()).enqueue(stream)
}

/// Posts sends whose bytes are not copied but stored into the receivers' memory by something else: a
/// kernel, or a matmul whose result lies there. `store` gets the receivers' buffers, in the order of
/// `transfers`, and enqueues on `stream` what writes each of them in full; before it stands the wait
/// until all of them may be written, behind it what tells that they are. Does not block.
///
/// As a group it completes in any order of its members, but the receivers' posts must not wait for
/// it on any rank's `stream`.
///
/// # Errors
/// As [`Batch::enqueue`], what `store` says, and
/// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) for a receive or a send by get.
/// If `store` fails, the receivers are not told.
pub fn post_stores(
    transfers: &[&Transfer],
    stream: &Stream,
    store: impl FnOnce(&[&DeviceSlice]) -> Result<()>,
) -> Result<()> {
    post_stores_in_launch(None, transfers, stream, store)
}

/// [`post_stores`] as a part of the [launch](super::next_launch) `launch`, if there is one.
pub(crate) fn post_stores_in_launch(
    launch: Option<u64>,
    transfers: &[&Transfer],
    stream: &Stream,
    store: impl FnOnce(&[&DeviceSlice]) -> Result<()>,
) -> Result<()> {
    let targets = transfers
        .iter()
        .map(|transfer| transfer.target())
        .collect::<Result<Vec<_>>>()?;
    if targets.is_empty() {
        return Ok(());
    }
    // What stores is a kernel as a rule, and so finds no more room than these do.
    let mut queue = Queue::new(stream, true, launch)?;
    transfers
        .iter()
        .for_each(|transfer| transfer.end.note(stream));
    let begun = transfers.iter().map(|transfer| {
        let (post, steps, marks) = transfer.end.begin_post(stream, queue.capture)?;
        Ok((*transfer, post, steps, marks))
    });
    let begun = begun.collect::<Result<Vec<_>>>()?;
    for (transfer, post, steps, _) in &begun {
        queue.signals(transfer, *post, steps.before)?;
    }
    queue.flush()?;
    store(&targets)?;
    for (transfer, post, steps, marks) in begun {
        queue.signals(transfer, post, steps.after)?;
        queue
            .marks
            .extend(marks.then_some((transfer, PostMark::Post)));
    }
    let flushed = queue.flush();
    // As for a batch; what failed before has given the stream nothing that lasts.
    transfers
        .iter()
        .for_each(|transfer| transfer.end.note(stream));
    flushed
}
