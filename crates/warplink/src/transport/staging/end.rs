//! One end of a staged connection: sending, receiving and completions. Never blocks.

use super::message::{StagingMessage, WORDS, malformed};
use super::state::{EndState, MAX_GETS, Portion, StagingOperation};
use super::{ARRIVED, CONSUMED, GONE, HEADER_BYTES, Incoming, RingShape};
use crate::device::network::{NetworkConnection, RemoteMemory};
use crate::device::{
    Device, DeviceSlice, Event, Fault, MemoryOp, Priority, StagingMemory, Stream, Word,
};
use crate::error::{Rank, Result};
use crate::sync::lock;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Maximum queued operations before it reports that it is full.
const MAX_QUEUED: usize = 256;

/// Larger values are poison from aborted waits rather than signal counts.
const MAX_SIGNALS: u64 = 1 << 60;

/// One end.
pub(crate) struct StagedEnd {
    device: Arc<dyn Device>,
    pub(super) parts: EndParts,
    /// Copies from and to device memory.
    outward: Stream,
    inward: Stream,
    /// For the chunks of both rings.
    left: Vec<Event>,
    placed: Vec<Event>,
    ring: StagingMemory,
    headers: StagingMemory,
    state: Mutex<EndState>,
}

/// Constituents of an end.
pub(crate) struct EndParts {
    pub(crate) peer: Rank,
    /// Raised when the peer violates the protocol, or a copy fails.
    pub(crate) fault: Arc<Fault>,
    pub(crate) connection: Arc<dyn NetworkConnection>,
    /// The peer's control memory, its ring, and the ring's shape.
    pub(crate) control: Arc<RemoteMemory>,
    pub(crate) peer_ring: Arc<RemoteMemory>,
    pub(crate) peer_shape: RingShape,
    pub(super) incoming: Arc<Incoming>,
    /// Set by the peer's signals.
    pub(crate) inbound: Word,
}

impl StagedEnd {
    pub(super) fn new(device: &Arc<dyn Device>, parts: EndParts) -> Result<Self> {
        let events = |count: u64| (0..count).map(|_| device.create_event(false)).collect();
        let shape = parts.peer_shape;
        // High priority and streams of their own: copies must not queue behind user kernels.
        Ok(Self {
            outward: device.create_stream(Priority::High)?,
            inward: device.create_stream(Priority::High)?,
            left: Result::from_iter::<Vec<_>>(events(shape.chunks))?,
            placed: Result::from_iter::<Vec<_>>(events(parts.incoming.shape.chunks))?,
            ring: device.allocate_staging(shape.ring_bytes())?,
            headers: device.allocate_staging(HEADER_BYTES * shape.chunks as usize)?,
            state: Mutex::default(),
            device: device.clone(),
            parts,
        })
    }

    /// Exposes one of this rank's regions to the peer as `number`, and to direct puts and gets if
    /// `is_reached`.
    pub(crate) fn set_region(&self, number: u32, memory: &DeviceSlice, is_reached: bool) {
        let state = &mut *lock(&self.state);
        let number = number as usize;
        if state.regions.len() <= number {
            state.regions.resize(number + 1, None);
        }
        state.regions[number] = Some(memory.clone());
        // Memory inside reachable regions bypasses the rings.
        if is_reached {
            state.direct.add_own(memory);
        }
    }

    /// Sets a region of the peer that is directly accessible.
    pub(crate) fn set_peers_region(&self, number: u32, memory: Arc<RemoteMemory>) {
        lock(&self.state).direct.add_peers(number, memory);
    }

    pub(super) fn has_room(&self) -> bool {
        lock(&self.state).queue.len() < MAX_QUEUED
    }

    pub(super) fn push(&self, operation: StagingOperation) {
        lock(&self.state).queue.push_back(operation);
    }

    /// Closes it once both ends are idle: then `delivered` is set, and the peer knows that this end has stopped
    /// writing.
    pub(crate) fn close(&self, delivered: &Arc<AtomicBool>) {
        let mut state = lock(&self.state);
        state.queue.push_back(StagingOperation::End);
        state.delivered = Some(delivered.clone());
    }

    /// Whether all requested operations are complete.
    pub(super) fn is_idle(&self) -> Result<bool> {
        let state = lock(&self.state);
        // `consumed == begun` means that the peer has placed the data of every message.
        let is_sent = state.queue.is_empty() && state.consumed == state.begun;
        Ok(is_sent
            && state.gets.is_empty()
            && state.answers.is_empty()
            && state.direct.is_idle()
            && self.inward.is_idle()?)
    }

    /// Makes progress; returns whether there was any.
    pub(super) fn advance(&self) -> bool {
        // Receive before sending: consuming never depends on the peer, so two full rings cannot deadlock.
        let mut state = lock(&self.state);
        if state.is_over {
            return false;
        }
        if self.parts.fault.error().is_some() {
            return self.end_failed(&mut state);
        }
        let before = state.progress();
        let advanced = self
            .take(&mut state)
            .and_then(|()| self.give_back(&mut state))
            .and_then(|()| self.begin(&mut state))
            .and_then(|()| self.send(&mut state))
            .and_then(|()| self.mark_direct(&mut state))
            .and_then(|()| self.answer(&mut state))
            .and_then(|()| self.end_if_idle(&mut state));
        let worked = before != state.progress();
        if let Err(error) = advanced {
            // Raising the fault runs callbacks that may lock this end.
            drop(state);
            let error = error.with_operation("stage data for the network");
            self.parts.fault.fail(error.with_peer(self.parts.peer));
        }
        worked
    }

    /// Notifies the peer after a failure, once the end was closed; returns whether it did. Nothing more is
    /// sent or received.
    fn end_failed(&self, state: &mut EndState) -> bool {
        // A failed stream that cannot be queried counts as idle.
        if state.delivered.is_none() || matches!(self.inward.is_idle(), Ok(false)) {
            return false;
        }
        state.is_over = true;
        if let Some(delivered) = state.delivered.take() {
            // A peer that cannot be notified is gone as well.
            let gone = delivered.clone();
            // Set before the notice: after it, the peer may close the connection, and nothing may use it any more.
            if self.notify_gone(delivered).is_err() {
                gone.store(true, Ordering::Release);
            }
        }
        true
    }

    /// Whether it is finished.
    pub(super) fn is_over(&self) -> bool {
        lock(&self.state).is_over
    }

    /// Receives the messages that have arrived.
    fn take(&self, state: &mut EndState) -> Result<()> {
        let incoming = &self.parts.incoming;
        let arrived = incoming.control.load(ARRIVED);
        // Validates the peer's counter: it may run ahead only by the chunks returned to it.
        if arrived.wrapping_sub(state.returned) > incoming.shape.chunks || arrived < state.taken {
            return Err(malformed(format!(
                "the peer has sent {arrived} messages; expected {} to {}",
                state.taken,
                state.returned + incoming.shape.chunks
            )));
        }
        while state.taken < arrived {
            // Everything below comes from the peer's writes, and is validated before use.
            let number = state.taken;
            let start = incoming.shape.header(number);
            let header: [u64; WORDS] =
                std::array::from_fn(|word| incoming.control.load(start + 8 * word));
            let message = StagingMessage::decode(header, number)?;
            self.apply(state, number, message)?;
            let (chunk, _) = incoming.shape.chunk(number);
            // The chunk may be returned to the peer once this event is reached.
            self.inward.record(&self.placed[chunk])?;
            state.taken += 1;
        }
        Ok(())
    }

    /// Executes message `number` of the peer.
    fn apply(&self, state: &mut EndState, number: u64, message: StagingMessage) -> Result<()> {
        let Incoming { shape, ring, .. } = &*self.parts.incoming;
        // After its end the peer only answers this end's gets.
        if state.peer_ended && !matches!(message, StagingMessage::Got { .. }) {
            return Err(malformed(
                "the peer asks for something after its end".to_owned(),
            ));
        }
        let (_, start) = shape.chunk(number);
        let payload = message.payload();
        if payload > shape.chunk_bytes {
            return Err(malformed(format!(
                "a message has {payload} bytes; expected at most {}",
                shape.chunk_bytes
            )));
        }
        let chunk = ring.slice().slice(start..start + payload as usize)?;
        match message {
            StagingMessage::Put { at, bytes } => self.inward.copy(state.region(at, bytes)?, &chunk),
            StagingMessage::Signal { value } => {
                // Signals count up, and must stay below the poison value.
                if value <= state.signalled || value >= MAX_SIGNALS {
                    return Err(malformed(format!(
                        "the peer signals {value} after {}",
                        state.signalled
                    )));
                }
                state.signalled = value;
                // Direct puts of the peer precede this signal: make them visible to kernels first.
                if state.direct.is_exposed() {
                    self.device.settle_network_writes()?;
                }
                let word = &self.parts.inbound;
                // Ordered after the copies of earlier puts, which are in the same stream.
                self.inward.memory_ops(&[MemoryOp::write(word, value)])
            }
            StagingMessage::Get { id, at, bytes } => {
                let left = state.region(at, bytes)?;
                if bytes == 0 {
                    return Err(malformed(
                        "the peer asks for 0 bytes; expected at least 1".to_owned(),
                    ));
                }
                // Bounds the memory for outstanding gets.
                if state.requests.len() >= MAX_GETS {
                    return Err(malformed(format!(
                        "the peer asks for more than {MAX_GETS} gets at a time"
                    )));
                }
                state.requests.push_back((id, Portion { done: 0, left }));
                Ok(())
            }
            StagingMessage::Got { id, offset, bytes } => {
                let get = state.gets.get_mut(&id);
                let due = |get: &&mut Portion| {
                    // Parts of a get arrive in order, so exactly the next offset is valid.
                    offset == get.done && (1..=get.left.bytes() as u64).contains(&bytes)
                };
                let Some(get) = get.filter(due) else {
                    return Err(malformed(format!(
                        "the peer sends {bytes} bytes from {offset} of get {id}, which are not due"
                    )));
                };
                let target = get.take(bytes)?;
                if get.left.bytes() == 0 {
                    state.gets.remove(&id);
                }
                self.inward.copy(&target, &chunk)
            }
            StagingMessage::End => {
                state.peer_ended = true;
                Ok(())
            }
        }
    }

    /// Returns consumed chunks to the peer.
    fn give_back(&self, state: &mut EndState) -> Result<()> {
        let before = state.returned;
        while state.returned < state.taken {
            let (chunk, _) = self.parts.incoming.shape.chunk(state.returned);
            // Chunks are returned in order, so stop at the first unfinished copy.
            if !self.placed[chunk].is_reached()? {
                break;
            }
            state.returned += 1;
        }
        if state.returned == before {
            return Ok(());
        }
        let EndParts {
            connection,
            control,
            ..
        } = &self.parts;
        // One signal acknowledges all chunks so far.
        connection.signal(control, CONSUMED, state.returned)
    }

    /// Starts messages while chunks are free: copies their payload into chunks.
    fn begin(&self, state: &mut EndState) -> Result<()> {
        let consumed = self.parts.incoming.control.load(CONSUMED);
        // The peer cannot consume more than was sent, and never goes back.
        if !(state.consumed..=state.sent).contains(&consumed) {
            return Err(malformed(format!(
                "the peer has consumed {consumed} messages; expected {} to {}",
                state.consumed, state.sent
            )));
        }
        state.consumed = consumed;
        let shape = self.parts.peer_shape;
        loop {
            // An answer waits for the operations before it; record them before later ones start.
            while let Some(StagingOperation::Answer { .. }) = state.queue.front() {
                state.note_answer();
            }
            let is_for_messages = self.begin_direct(state)?;
            if let Some(StagingOperation::Answer { .. }) = state.queue.front() {
                continue;
            }
            // Flow control: at most one ring of unconsumed messages.
            if !is_for_messages || state.begun - state.consumed >= shape.chunks {
                return Ok(());
            }
            let Some((message, payload)) = state.next(shape.chunk_bytes)? else {
                return Ok(());
            };
            let (chunk, start) = shape.chunk(state.begun);
            if let Some(source) = payload {
                let target = self.ring.slice().slice(start..start + source.bytes())?;
                self.outward.copy(&target, &source)?;
            }
            // Messages without payload too: the event keeps the order with earlier ones.
            self.outward.record(&self.left[chunk])?;
            state.leaving.push_back(message);
            state.begun += 1;
        }
    }

    /// Sends messages whose chunks are filled.
    fn send(&self, state: &mut EndState) -> Result<()> {
        let EndParts {
            connection,
            control,
            peer_ring,
            peer_shape: shape,
            ..
        } = &self.parts;
        let before = state.sent;
        while let Some(message) = state.leaving.front() {
            let (chunk, start) = shape.chunk(state.sent);
            // Send in order, so stop at the first chunk that is still being filled.
            if !self.left[chunk].is_reached()? {
                break;
            }
            let header = HEADER_BYTES * chunk;
            for (word, value) in message.encode(state.sent).into_iter().enumerate() {
                self.headers.store(header + 8 * word, value);
            }
            let header = self.headers.slice().slice(header..header + HEADER_BYTES)?;
            connection.put(&header, control, shape.header(state.sent))?;
            let payload = message.payload() as usize;
            if payload > 0 {
                let chunk = self.ring.slice().slice(start..start + payload)?;
                // The arrival signal below is ordered after both puts.
                connection.put(&chunk, peer_ring, start)?;
            }
            state.leaving.pop_front();
            state.sent += 1;
        }
        if state.sent == before {
            return Ok(());
        }
        // One signal announces all messages so far.
        connection.signal(control, ARRIVED, state.sent)
    }

    /// Sets the words of completed operations.
    fn answer(&self, state: &mut EndState) -> Result<()> {
        while let Some(answer) = state.answers.front() {
            let oldest = state.gets.keys().next().copied();
            let is_got = oldest.is_none_or(|oldest| oldest >= answer.get);
            let is_moved = state.direct.done() >= answer.direct;
            if !is_got || !is_moved || state.consumed < answer.begun {
                break;
            }
            // Direct gets wrote to device memory through the network card.
            if answer.direct > 0 {
                self.device.settle_network_writes()?;
            }
            let (word, value) = (&answer.word, answer.value);
            // Ordered after the copies of received gets.
            self.inward.memory_ops(&[MemoryOp::write(word, value)])?;
            state.answers.pop_front();
        }
        Ok(())
    }

    /// Notifies the peer that this end has stopped writing, once both are idle.
    fn end_if_idle(&self, state: &mut EndState) -> Result<()> {
        // Idle in both directions: otherwise the peer could still wait for an answer.
        let is_done = state.peer_ended
            && state.queue.is_empty()
            && state.consumed == state.begun
            && state.returned == state.taken
            && state.gets.is_empty()
            && state.direct.is_idle()
            && state.requests.is_empty();
        let Some(delivered) = state.delivered.take_if(|_| is_done) else {
            return Ok(());
        };
        state.is_over = true;
        self.notify_gone(delivered)
    }

    /// Notifies the peer, after all puts, that this end has stopped writing; `delivered` is set on delivery.
    fn notify_gone(&self, delivered: Arc<AtomicBool>) -> Result<()> {
        let connection = &self.parts.connection;
        connection.signal(&self.parts.control, GONE, 1)?;
        // Release: pairs with the acquire load in `Networks::collect`, which frees the memory then.
        connection.when_done(Box::new(move |_| delivered.store(true, Ordering::Release)))
    }
}

#[cfg(all(test, not(loom)))]
impl StagedEnd {
    pub(super) fn sent(&self) -> u64 {
        lock(&self.state).sent
    }

    pub(super) fn returned(&self) -> u64 {
        lock(&self.state).returned
    }

    pub(super) fn gets(&self) -> usize {
        lock(&self.state).gets.len()
    }
}

impl fmt::Debug for StagedEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = lock(&self.state);
        f.debug_struct("StagedEnd")
            .field("peer", &self.parts.peer)
            .field("sent", &state.sent)
            .field("taken", &state.taken)
            .finish_non_exhaustive()
    }
}
