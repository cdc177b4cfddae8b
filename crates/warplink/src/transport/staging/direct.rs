//! What goes without staging memory: puts and gets between regions that the network's library reaches by itself.
//!
//! Data goes straight from memory to memory, and signals as messages: a message is announced when all that was put
//! before it has arrived, and the host of the target sets the inbound word. So no word lies in memory that only the
//! device reaches, and the target can make what a network card wrote visible to its kernels before the word is set.
//!
//! Each end does so for what both sides' regions allow, and either takes messages all the same: memory that is no
//! region of the connection is staged, and so is what goes to a region that the peer gave no key of.

use super::end::StagedEnd;
use super::state::{Operation, State};
use crate::device::channel::trigger::Movement;
use crate::device::network::RemoteMemory;
use crate::device::{At, DeviceSlice};
use crate::error::Result;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that are sent at once, so that something arrives now and then over a slow network too.
const PART: usize = 16 << 20;

/// Parts that may be under way, and how many end together.
const MAX_UNDER_WAY: u64 = 1024;
const PARTS_PER_MARK: u64 = 32;

/// How far an end is with what goes without staging memory.
#[derive(Default)]
pub(super) struct Direct {
    /// This rank's regions that the network reaches.
    own: Vec<DeviceSlice>,
    /// The peer's, by number.
    peers: BTreeMap<u32, Arc<RemoteMemory>>,
    /// Parts that were begun, those that a mark is behind, and those that are done.
    begun: u64,
    marked: u64,
    done: Arc<AtomicU64>,
}

/// What is at the front of the queue, where it needs no staging memory.
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

    /// Whether the peer may write to memory of this rank without staging memory.
    pub(super) fn is_exposed(&self) -> bool {
        !self.own.is_empty()
    }

    pub(super) fn begun(&self) -> u64 {
        self.begun
    }

    pub(super) fn done(&self) -> u64 {
        self.done.load(Ordering::Acquire)
    }

    pub(super) fn is_idle(&self) -> bool {
        self.done() == self.begun
    }

    fn has_room(&self) -> bool {
        self.begun - self.done() < MAX_UNDER_WAY
    }

    /// The peer's region at `at`, where both it and `own` are reached.
    fn remote(&self, own: &DeviceSlice, at: At) -> Option<&Arc<RemoteMemory>> {
        self.own.iter().find(|region| region.contains(own))?;
        self.peers.get(&at.region)
    }
}

impl State {
    fn direct_front(&self) -> Option<Front> {
        let (movement, own, at) = match self.queue.front()? {
            Operation::Put { source, at } => (Movement::Put, source, *at),
            Operation::Get { target, at } => (Movement::Get, target, *at),
            Operation::Signal(_) | Operation::Answer { .. } | Operation::End => return None,
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
    /// Begins what is at the front of the queue and needs no staging memory, as far as there is room; whether the front is
    /// for messages now.
    pub(super) fn begin_direct(&self, state: &mut State) -> Result<bool> {
        while let Some(front) = state.direct_front() {
            if !state.direct.has_room() {
                return Ok(false);
            }
            self.start_part(state, front)?;
            if state.direct.begun - state.direct.marked >= PARTS_PER_MARK {
                self.mark(state)?;
            }
        }
        Ok(true)
    }

    /// Has all that was begun counted when it is done, but for what messages follow that no answer waits for: they are not
    /// to wait for it twice.
    pub(super) fn mark_direct(&self, state: &mut State) -> Result<()> {
        let answer = state.answers.front();
        let is_awaited = answer.is_some_and(|answer| answer.direct > state.direct.marked);
        if state.leaving.is_empty() || is_awaited {
            self.mark(state)?;
        }
        Ok(())
    }

    fn start_part(&self, state: &mut State, front: Front) -> Result<()> {
        let Front {
            movement,
            own,
            at,
            remote,
        } = front;
        let bytes = own.bytes().min(PART);
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
        let rest = own.slice(bytes..own.bytes())?;
        if let Some(
            Operation::Put {
                source: own, at, ..
            }
            | Operation::Get {
                target: own, at, ..
            },
        ) = state.queue.front_mut()
        {
            *own = rest;
            at.offset += bytes as u64;
        }
        Ok(())
    }

    fn mark(&self, state: &mut State) -> Result<()> {
        let direct = &mut state.direct;
        if direct.marked == direct.begun {
            return Ok(());
        }
        direct.marked = direct.begun;
        let (done, number) = (direct.done.clone(), direct.begun);
        self.parts.connection.when_done(Box::new(move |ended| {
            // A connection that broke raises the fault.
            if ended.is_ok() {
                done.store(number, Ordering::Release);
            }
        }))
    }
}
