//! The store's contents and the order of events in it: values, waits, gathers, who is there.
//!
//! No socket and no clock appear here. A request goes in, and what is to be sent comes out; so
//! every path can be tested, and fuzzed, without a network.

use super::gathers::{Contribution, Gathers};
use super::members::MemberState;
use super::message::{Bytes, Event, Refusal, RefusalKind, Reply, Request};
use super::outgoing::{Outgoing, body};
use super::values::Values;
use super::waiters::{Waiter, Waiters};
use std::sync::Arc;

/// The whole state of a store.
#[derive(Debug)]
pub(crate) struct Table {
    members: Vec<MemberState>,
    values: Values,
    waiters: Waiters,
    gathers: Gathers,
    /// Whether a rank gave up before all had joined, so that the job can no longer begin.
    abandoned: bool,
    out: Vec<Outgoing>,
}

impl Table {
    /// An empty store for `world` ranks whose values take at most `limit` bytes.
    pub(crate) fn new(world: usize, limit: usize) -> Self {
        Self {
            members: vec![MemberState::Absent; world],
            values: Values::new(limit),
            waiters: Waiters::default(),
            gathers: Gathers::default(),
            abandoned: false,
            out: Vec::new(),
        }
    }

    pub(crate) fn world(&self) -> usize {
        self.members.len()
    }

    /// The ranks that have not joined.
    pub(crate) fn missing(&self) -> Vec<u32> {
        self.ranks(|state| *state == MemberState::Absent)
    }

    /// The ranks that are there.
    pub(crate) fn present(&self) -> Vec<u32> {
        self.ranks(|state| *state == MemberState::Present)
    }

    fn ranks(&self, which: impl Fn(&MemberState) -> bool) -> Vec<u32> {
        (0..)
            .zip(&self.members)
            .filter(|(_, state)| which(state))
            .map(|(rank, _)| rank)
            .collect()
    }

    /// What has to be sent since the last call.
    pub(crate) fn take_outgoing(&mut self) -> Vec<Outgoing> {
        std::mem::take(&mut self.out)
    }

    /// Admits a rank, or says why not.
    pub(crate) fn join(&mut self, rank: u32) -> Result<(), Refusal> {
        let world = self.world();
        if self.abandoned {
            let message = "another rank stopped waiting before every rank had joined";
            return Err(Refusal::new(RefusalKind::PeerLeft, message));
        }
        let Some(state) = self.members.get_mut(rank as usize) else {
            let message = format!("rank {rank} is out of range; the world has {world} ranks");
            return Err(Refusal::new(RefusalKind::Invalid, message));
        };
        let past = match state {
            MemberState::Absent => {
                *state = MemberState::Present;
                return Ok(());
            }
            MemberState::Present => "has already joined",
            MemberState::Left => "has joined before and left",
            MemberState::Lost { .. } => "has joined before and was lost",
        };
        let message = format!("rank {rank} {past}; expected a rank of its own for every process");
        Err(Refusal::new(RefusalKind::Mismatch, message).with_peer(rank))
    }

    /// Tells all that the job is complete, if it is. Call it after the new member was welcomed.
    pub(crate) fn announce(&mut self) {
        // A rank that joins late learns what happened before; repeating it to the others does no harm.
        for (rank, state) in (0..).zip(self.members.clone()) {
            match state {
                MemberState::Lost { reason } => self.broadcast(&Event::Lost { rank, reason }),
                MemberState::Left => self.broadcast(&Event::Left { rank }),
                _ => {}
            }
        }
        if !self.members.contains(&MemberState::Absent) {
            self.broadcast(&Event::Ready);
        }
    }

    /// Tells all that a rank no longer waits for those who are missing. As every rank is needed,
    /// none of them has to wait longer.
    pub(crate) fn abandon(&mut self) {
        let missing = self.missing();
        if missing.is_empty() {
            return;
        }
        self.abandoned = true;
        self.broadcast(&Event::Abandoned { missing });
    }

    /// `rank` aborted, or its connection ended without a goodbye.
    pub(crate) fn lose(&mut self, rank: u32, reason: &str) {
        if self.depart(
            rank,
            MemberState::Lost {
                reason: reason.to_owned(),
            },
        ) {
            self.broadcast(&Event::Lost {
                rank,
                reason: reason.to_owned(),
            });
        }
    }

    fn leave(&mut self, rank: u32) {
        if self.depart(rank, MemberState::Left) {
            self.broadcast(&Event::Left { rank });
            self.abandon();
        }
    }

    /// Takes a rank out and ends what can no longer happen without it.
    fn depart(&mut self, rank: u32, how: MemberState) -> bool {
        match self.members.get_mut(rank as usize) {
            Some(state) if *state == MemberState::Present => *state = how,
            _ => return false,
        }
        self.waiters.forget(rank);
        for (waiter, refusal) in self.waiters.take_failed(&self.members) {
            self.answer(waiter.rank, waiter.request, &Reply::Refused(refusal));
        }
        self.gathers.depart(rank, &self.members, &mut self.out);
        true
    }

    /// Handles a request that `rank` sent under the number `id`.
    pub(crate) fn handle(&mut self, rank: u32, id: u64, request: Request) {
        if self.members.get(rank as usize) != Some(&MemberState::Present) {
            return;
        }
        let reply = request
            .check(self.world())
            .and_then(|()| self.dispatch(rank, id, request));
        match reply {
            Ok(Some(reply)) => self.answer(rank, id, &reply),
            Ok(None) => {}
            Err(refusal) => self.answer(rank, id, &Reply::Refused(refusal)),
        }
    }

    /// The answer, or `None` when it comes later or never.
    fn dispatch(&mut self, rank: u32, id: u64, request: Request) -> Result<Option<Reply>, Refusal> {
        Ok(Some(match request {
            Request::Set { pairs } => {
                for (key, value) in pairs {
                    self.set(key, value.0)?;
                }
                Reply::Done
            }
            Request::Wait { keys, on_ready, on } => {
                let waiter = Waiter::new(rank, id, keys, on_ready, on);
                let (values, members) = (&mut self.values, &self.members);
                return self.waiters.wait(waiter, values, members);
            }
            Request::Check { keys } => {
                Reply::Flag(keys.iter().all(|key| self.values.get(key).is_some()))
            }
            Request::Delete { key } => Reply::Flag(self.values.remove(&key).is_some()),
            Request::Add { key, amount } => Reply::Number(self.add(key, amount)?),
            Request::CompareAndSet { key, expected, new } => {
                let current = self.values.get(&key);
                if current.map(|value| &value[..]) == expected.as_ref().map(|value| &value.0[..]) {
                    self.set(key, new.0)?;
                    Reply::Done
                } else {
                    Reply::Kept(current.cloned().map(Bytes))
                }
            }
            Request::Gather {
                id: gather,
                purpose,
                value,
            } => {
                let contribution = Contribution {
                    rank,
                    request: id,
                    id: gather,
                    purpose,
                    value,
                };
                self.gathers
                    .contribute(contribution, &self.members, &mut self.out)?;
                return Ok(None);
            }
            Request::Cancel { id } => {
                let cancelled = self.waiters.cancel(rank, id);
                if let Some(refusal) = cancelled.or_else(|| self.gathers.cancel(rank, id)) {
                    self.answer(rank, id, &Reply::Refused(refusal));
                }
                return Ok(None);
            }
            Request::Missing => Reply::Ranks(self.missing()),
            Request::Leave => {
                self.leave(rank);
                Reply::Done
            }
            Request::Abort { reason } => {
                self.lose(rank, &reason);
                Reply::Done
            }
        }))
    }

    fn set(&mut self, key: String, value: Arc<[u8]>) -> Result<(), Refusal> {
        self.values.insert(key.clone(), value)?;
        for (rank, id, reply) in self.waiters.arrived(&key, &mut self.values) {
            self.answer(rank, id, &reply);
        }
        Ok(())
    }

    fn add(&mut self, key: String, amount: i64) -> Result<i64, Refusal> {
        let current = match self
            .values
            .get(&key)
            .map(|value| <[u8; 8]>::try_from(&value[..]))
        {
            None => 0,
            Some(Ok(bytes)) => i64::from_le_bytes(bytes),
            Some(Err(_)) => {
                return Err(Refusal::new(
                    RefusalKind::Invalid,
                    "the value is not a counter; expected 8 bytes",
                )
                .with_key(&key));
            }
        };
        let sum = current.checked_add(amount).ok_or_else(|| {
            Refusal::new(RefusalKind::Invalid, "the counter would overflow").with_key(&key)
        })?;
        self.set(key, sum.to_le_bytes().as_slice().into())?;
        Ok(sum)
    }

    fn answer(&mut self, to: u32, id: u64, reply: &Reply) {
        self.out.push(Outgoing {
            to,
            id,
            body: body(reply),
        });
    }

    fn broadcast(&mut self, event: &Event) {
        let body = body(event);
        let present = self.present();
        self.out.extend(present.into_iter().map(|to| Outgoing {
            to,
            id: 0,
            body: body.clone(),
        }));
    }
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
