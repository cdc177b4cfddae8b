//! Posting and waiting for many transfers at once.

use super::packets::{Turn, Turns};
use super::protocol::{PostNumber, Role, Steps};
use super::transfer::Transfer;
use crate::device::{DeviceSlice, MemoryOp, Stream, StreamOp, Unit};
use crate::error::Result;
use crate::signal::{SignalOp, SignalWord};

/// Posts and waits that are enqueued as one sequence, which takes a device fewer steps than one at a time: a small
/// transfer becomes one kernel together with the waits before and after it.
///
/// Consecutive posts form a group, enqueued in this order: signals to peers that depend on no wait, waits for peers,
/// copies, completion signals. A group therefore completes regardless of the order of its members here and on other
/// ranks, as long as each rank posts the other end of every member in a group that this one does not wait for. To
/// notify peers of each copy as it finishes, post the copies one by one. A copy by several blocks signals its own
/// completion, and packets are written where they are waited for: there, a wait covers its own transfer alone.
///
/// In a graph, a second post of a transfer waits until its first post is done. If a graph waits for all posts of a
/// batch, a wait for one of them on another stream is ordered after the whole batch.
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
    /// Memory that a send copies from instead of its buffer.
    source: Option<&'a DeviceSlice>,
}

impl<'a> Batch<'a> {
    /// An empty batch.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends posts of `transfers`.
    pub fn post(self, transfers: impl IntoIterator<Item = &'a Transfer>) -> Self {
        self.add(Kind::Post, transfers.into_iter().map(|each| (each, None)))
    }

    /// Like [`post`](Self::post), but sends by put copy from the given memory of the same length instead of their
    /// buffers.
    pub(crate) fn post_from(
        self,
        transfers: impl IntoIterator<Item = (&'a Transfer, Option<&'a DeviceSlice>)>,
    ) -> Self {
        self.add(Kind::Post, transfers)
    }

    /// Appends waits for every post so far of `transfers`.
    pub fn wait(self, transfers: impl IntoIterator<Item = &'a Transfer>) -> Self {
        self.add(Kind::Wait, transfers.into_iter().map(|each| (each, None)))
    }

    /// If the batch has no copy, enqueues its signals in a kernel where that is faster. Only for streams that run no
    /// matmul concurrently: it could occupy every multiprocessor, and the kernel would have none.
    pub fn in_kernel(mut self) -> Self {
        self.in_kernel = true;
        self
    }

    /// Enqueues the batch as a part of the [launch](super::next_launch) `launch`, if there is one.
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
        // Noted again, as in `InUse::used_by`: another thread may have found the stream idle and removed it.
        let transfers = self.parts.iter().map(|part| part.transfer);
        transfers.for_each(|transfer| transfer.end.note(stream));
        enqueued
    }

    fn enqueue_parts(&self, stream: &Stream) -> Result<()> {
        let mut queue = Queue::new(stream, self.in_kernel, self.launch)?;
        // Check before numbering any post: a number without an enqueued post would be waited for forever.
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
        // An estimate that saves reallocations: a post takes at most two signals before its movement, and two after
        // it.
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
    ///
    /// Posts of one transfer must be ordered: a post on another stream than the previous one must follow a wait for
    /// this transfer, or later work of the previous stream. A wait for another transfer of the same group does not
    /// order them, because the words of a group are set one by one. A graph must contain as many posts of this end as
    /// the peer's graph has of the other end, and their waits; where it contains several, each waits until the
    /// previous one is done.
    pub fn post(&self, stream: &Stream) -> Result<()> {
        post_all(&[self], stream)
    }

    /// Enqueues a wait for every post so far on `stream`; under capture, for the last one in the same graph. Does not
    /// block. No-op without a post. Any number of streams may wait.
    pub fn wait(&self, stream: &Stream) -> Result<()> {
        wait_all(&[self], stream)
    }
}

/// Operations collected for one stream.
struct Queue<'a, 's> {
    stream: &'s Stream,
    /// The graph being captured on the stream, or the launch it belongs to.
    capture: Option<u64>,
    in_kernel: bool,
    /// Whether the batch also waits for all of its posts. Other streams then rarely wait for one, so marks in a graph
    /// may be set after the whole batch.
    whole: bool,
    operations: Vec<StreamOp<'a>>,
    /// Marks to record after the operations.
    marks: Vec<(&'a Transfer, PostMark)>,
}

/// A post that copies.
#[derive(Clone, Copy)]
struct CopyOf<'a> {
    transfer: &'a Transfer,
    source: Option<&'a DeviceSlice>,
    post: PostNumber,
    steps: Steps,
    /// Whether to record a mark after it.
    marks: bool,
}

impl<'a> CopyOf<'a> {
    /// The operation that moves the bytes, and whether it also signals the peer.
    fn movement(&self) -> Result<(StreamOp<'a>, bool)> {
        let end = &self.transfer.end;
        end.movement(self.post, &self.steps.after, self.source)
    }
}

/// Positions in a stream that other streams may have to follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PostMark {
    /// A post in a graph.
    Post,
    /// A post outside of graphs that another stream may unpack.
    EagerPost,
    /// An unpack in a graph.
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

    /// Enqueues a group, in the order described at [`Batch`]. `rest` follows in the batch.
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
        // These wait for their previous post.
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

    /// Enqueues the initiators' part: packets first, which rarely wait for a peer; then all waits, all copies and all
    /// signals, so that the copy engine does not stall between copies.
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
            let (movement, signals_peer) = copy.movement()?;
            self.operations.push(movement);
            if !signals_peer {
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
        // Sorted, so that all threads lock in one order, and without duplicates: no deadlock.
        unpacking.sort_unstable_by_key(|transfer| std::ptr::from_ref(*transfer));
        unpacking.dedup_by_key(|transfer| std::ptr::from_ref(*transfer));
        let mut turns: Vec<_> = unpacking
            .iter()
            .map(|transfer| transfer.end.unpacking.turns())
            .collect();
        for (transfer, turns) in unpacking.into_iter().zip(&mut turns) {
            self.unpack(transfer, turns)?;
        }
        // Flush while the locks are held: another stream must be able to follow these unpacks.
        self.flush()
    }

    /// Unpacks the posts of a receive by packets, or follows the stream that has done so.
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

    /// Records the marks collected so far, if any and if it matters: another stream that follows one then waits for
    /// no later operation.
    fn mark(&mut self) -> Result<()> {
        if self.marks.is_empty() || self.whole {
            return Ok(());
        }
        self.flush()
    }

    /// Enqueues the collected operations.
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
        // After the operations are enqueued: an event marks the position of the stream at the time of recording.
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

/// The memory operations, if none of `operations` is a copy.
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

/// Posts sends whose bytes are stored into the receivers' memory by other work than a copy: a kernel, or a matmul
/// that writes its result there. `store` gets the receivers' buffers, in the order of `transfers`, and enqueues on
/// `stream` work that writes each of them completely. The wait until all of them may be written is enqueued before
/// that work, the completion signals after it. Does not block.
///
/// Like any group it completes regardless of the order of its members, but the receivers' posts must not wait for it
/// on any rank's `stream`.
///
/// # Errors
/// As [`Batch::enqueue`], any error of `store`, and [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument)
/// for a receive or a send by get. If `store` fails, the receivers are not signalled.
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
    // The storing work is usually a kernel, so this launch may use kernels as well.
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
    // Enqueued before `store` runs, whose kernels must not begin until the receivers' buffers are free.
    store(&targets)?;
    for (transfer, post, steps, marks) in begun {
        queue.signals(transfer, post, steps.after)?;
        queue
            .marks
            .extend(marks.then_some((transfer, PostMark::Post)));
    }
    let flushed = queue.flush();
    // Noted again, as in `Batch::enqueue`. Failures that return earlier leave nothing in the stream that uses the transfers.
    transfers
        .iter()
        .for_each(|transfer| transfer.end.note(stream));
    flushed
}
