//! Fast path of a staged connection: puts and gets between regions that the network library accesses
//! directly.
//!
//! Data moves from memory to memory, while signals remain messages: a message is announced once all earlier
//! puts have arrived, and the target's host sets the inbound word. So no word is in device memory, and the
//! target can flush network writes to its kernels before it sets the word.
//!
//! Each end uses the fast path where both sides' regions allow it, and always accepts messages: memory
//! outside the connection's regions, and regions without a key, are staged.

use super::end::StagedEnd;
use super::state::{Direct, EndState, StagingOperation};
use crate::device::channel::trigger::Movement;
use crate::device::network::RemoteMemory;
use crate::device::{At, DeviceSlice};
use crate::error::Result;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Maximum bytes of one operation, so that progress is visible even on slow networks.
const PART: usize = 16 << 20;

/// Maximum parts in flight, and number of parts for each completion callback.
const MAX_UNDER_WAY: u64 = 1024;
const PARTS_PER_MARK: u64 = 32;

/// Operation at the front of the queue that needs no staging memory.
struct Front {
    movement: Movement,
    own: DeviceSlice,
    at: At,
    remote: Arc<RemoteMemory>,
}

impl Direct {
    pub(super) fn add_own(&mut self, region: &DeviceSlice) {
        self.own.push(region.clone());
    }

    pub(super) fn add_peers(&mut self, number: u32, region: Arc<RemoteMemory>) {
        self.peers.insert(number, region);
    }

    /// Whether the peer may write to this rank's memory directly.
    pub(super) fn is_exposed(&self) -> bool {
        !self.own.is_empty()
    }

    pub(super) fn begun(&self) -> u64 {
        self.begun
    }

    pub(super) fn done(&self) -> u64 {
        // Acquire: pairs with the release store in the completion callback.
        self.done.load(Ordering::Acquire)
    }

    pub(super) fn is_idle(&self) -> bool {
        self.done() == self.begun
    }

    fn has_room(&self) -> bool {
        self.begun - self.done() < MAX_UNDER_WAY
    }

    /// The peer's region at `at`, if both it and `own` are directly accessible.
    fn remote(&self, own: &DeviceSlice, at: At) -> Option<&Arc<RemoteMemory>> {
        // The peer's key alone does not suffice: the network card reads this side's memory by its own registration.
        self.own.iter().find(|region| region.contains(own))?;
        self.peers.get(&at.region)
    }
}

impl EndState {
    fn direct_front(&self) -> Option<Front> {
        let (movement, own, at) = match self.queue.front()? {
            StagingOperation::Put { source, at } => (Movement::Put, source, *at),
            StagingOperation::Get { target, at } => (Movement::Get, target, *at),
            StagingOperation::Signal(_)
            | StagingOperation::Answer { .. }
            | StagingOperation::End => return None,
        };
        let remote = self.direct.remote(own, at)?.clone();
        Some(Front {
            movement,
            own: own.clone(),
            at,
            remote,
        })
    }
}

impl StagedEnd {
    /// Starts direct operations at the front of the queue, up to the limit; returns whether the next one
    /// needs messages.
    pub(super) fn begin_direct(&self, state: &mut EndState) -> Result<bool> {
        while let Some(front) = state.direct_front() {
            if !state.direct.has_room() {
                return Ok(false);
            }
            self.start_part(state, front)?;
            // Bound the parts for each callback, so that completions are reported regularly.
            if state.direct.begun - state.direct.marked >= PARTS_PER_MARK {
                self.mark(state)?;
            }
        }
        Ok(true)
    }

    /// Registers a completion callback for started parts, except those before messages that no answer waits
    /// for, which would wait twice.
    pub(super) fn mark_direct(&self, state: &mut EndState) -> Result<()> {
        let answer = state.answers.front();
        let is_awaited = answer.is_some_and(|answer| answer.direct > state.direct.marked);
        // Messages are sent after earlier parts complete, so they need a callback only if an answer waits.
        if state.leaving.is_empty() || is_awaited {
            self.mark(state)?;
        }
        Ok(())
    }

    fn start_part(&self, state: &mut EndState, front: Front) -> Result<()> {
        let Front {
            movement,
            own,
            at,
            remote,
        } = front;
        let bytes = own.bytes().min(PART);
        // Split long transfers, so that progress is observable.
        let (part, offset) = (own.slice(0..bytes)?, at.offset as usize);
        let connection = &self.parts.connection;
        match movement {
            Movement::Put => connection.put(&part, &remote, offset)?,
            Movement::Get => connection.get(&part, &remote, offset)?,
        }
        state.direct.begun += 1;
        if bytes == own.bytes() {
            state.queue.pop_front();
            return Ok(());
        }
        // The remainder stays at the front, which preserves the order.
        let rest = own.slice(bytes..own.bytes())?;
        if let Some(
            StagingOperation::Put {
                source: own, at, ..
            }
            | StagingOperation::Get {
                target: own, at, ..
            },
        ) = state.queue.front_mut()
        {
            *own = rest;
            at.offset += bytes as u64;
        }
        Ok(())
    }

    fn mark(&self, state: &mut EndState) -> Result<()> {
        let direct = &mut state.direct;
        if direct.marked == direct.begun {
            return Ok(());
        }
        direct.marked = direct.begun;
        let (done, number) = (direct.done.clone(), direct.begun);
        self.parts.connection.when_done(Box::new(move |ended| {
            // A broken connection raises the fault elsewhere.
            if ended.is_ok() {
                // Release: a thread that sees the count sees the data.
                done.store(number, Ordering::Release);
            }
        }))
    }
}
