//! The state machine of the store: values, waits, gathers, membership.
//!
//! It uses no sockets and no clock: requests are its input, messages its output, so that every path can be tested and fuzzed
//! without a network.

use super::declarations::Declarations;
use super::gathers::{Contribution, Gathers};
use super::members::MemberState;
use super::message::{Answer, Bytes, Refusal, RefusalKind, Reply, Request, StoreEvent};
use super::outgoing::{Outgoing, body};
use super::restore::{Content, Restoring};
use super::values::StoreValues;
use super::waiters::{Waiter, Waiters};
use crate::named::comma;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

/// The whole state of a store.
#[derive(Debug)]
pub(crate) struct StoreTable {
    members: Vec<MemberState>,
    values: StoreValues,
    waiters: Waiters,
    gathers: Gathers,
    declarations: Declarations,
    /// Why the job can no longer begin, if it cannot.
    abandoned: Option<Refusal>,
    /// The address at which each rank would serve the store.
    standby: Vec<Option<SocketAddr>>,
    /// After a loss of the store, until every remaining rank has sent its journal.
    restoring: Option<Restoring>,
    out: Vec<Outgoing>,
}

impl StoreTable {
    /// An empty store for `world` ranks whose values take at most `limit` bytes.
    pub(crate) fn new(world: usize, limit: usize) -> Self {
        Self {
            members: vec![MemberState::Absent; world],
            values: StoreValues::new(limit),
            waiters: Waiters::default(),
            gathers: Gathers::default(),
            declarations: Declarations::default(),
            abandoned: None,
            standby: vec![None; world],
            restoring: None,
            out: Vec::new(),
        }
    }

    /// The replacement of a table that was lost, empty until every rank that is not `lost` and has not `left` has sent its
    /// journal.
    pub(crate) fn restoring(
        standby: Vec<Option<SocketAddr>>,
        limit: usize,
        lost: &[(u32, String)],
        left: &[u32],
    ) -> Self {
        let mut table = Self::new(standby.len(), limit);
        table.standby = standby;
        table.restoring = Some(Restoring::default());
        table.learn(lost, left);
        table
    }

    /// Learns which ranks another one knows to be gone.
    fn learn(&mut self, lost: &[(u32, String)], left: &[u32]) {
        for &rank in left {
            self.depart(rank, MemberState::Left);
        }
        for (rank, reason) in lost {
            self.lose(*rank, reason);
        }
    }

    pub(crate) fn world(&self) -> usize {
        self.members.len()
    }

    /// The ranks that have not joined.
    pub(crate) fn missing(&self) -> Vec<u32> {
        self.ranks(|state| *state == MemberState::Absent)
    }

    /// The ranks that have joined and are not gone.
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

    /// The messages to send since the last call.
    pub(crate) fn take_outgoing(&mut self) -> Vec<Outgoing> {
        std::mem::take(&mut self.out)
    }

    /// Admits a rank, or returns why not.
    pub(crate) fn join(&mut self, rank: u32, standby: Option<SocketAddr>) -> Result<(), Refusal> {
        let world = self.world();
        if let Some(refusal) = &self.abandoned {
            return Err(refusal.clone());
        }
        let Some(state) = self.members.get_mut(rank as usize) else {
            let message = format!("rank {rank} is out of range; the world has {world} ranks");
            return Err(Refusal::new(RefusalKind::Invalid, message));
        };
        let past = match state {
            MemberState::Absent => {
                *state = MemberState::Present;
                if let Some(place) = self.standby.get_mut(rank as usize) {
                    *place = standby;
                }
                return Ok(());
            }
            MemberState::Present => "has already joined",
            MemberState::Left => "has joined before and left",
            MemberState::Lost { .. } => "has joined before and was lost",
        };
        let message = format!("rank {rank} {past}; expected a different rank for every process");
        Err(Refusal::new(RefusalKind::Mismatch, message).with_peer(rank))
    }

    /// Admits a rank that had joined before the store was lost, and learns from it who else is gone.
    pub(crate) fn resume(
        &mut self,
        rank: u32,
        lost: &[(u32, String)],
        left: &[u32],
    ) -> Result<(), Refusal> {
        self.learn(lost, left);
        let gone_as = match self.members.get(rank as usize) {
            Some(MemberState::Lost { reason, .. }) => reason.clone(),
            Some(MemberState::Absent) => {
                if let Some(restoring) = &mut self.restoring {
                    restoring.expect(rank);
                    self.members[rank as usize] = MemberState::Present;
                    return Ok(());
                }
                "it came too late".to_owned()
            }
            _ => "another process has its place".to_owned(),
        };
        Err(Refusal::new(RefusalKind::GivenUp, gone_as))
    }

    /// Whether journals of remaining ranks are missing.
    pub(crate) fn is_restoring(&self) -> bool {
        self.restoring.is_some()
    }

    /// The address at which `rank` would serve the store.
    pub(crate) fn standby(&self, rank: u32) -> Option<SocketAddr> {
        self.standby.get(rank as usize).copied().flatten()
    }

    /// Ends the restoring when every remaining rank has sent its journal.
    fn finish_restoring(&mut self) {
        if self.members.contains(&MemberState::Absent) {
            return;
        }
        let Some(restoring) = self.restoring.take_if(|restoring| restoring.is_complete()) else {
            return;
        };
        let Content {
            values,
            gathers,
            version,
        } = restoring.into_content();
        self.values.count_from(version);
        for (key, value, owner) in values {
            if let Err(refusal) = self.values.insert(key, value, owner) {
                tracing::warn!(?refusal, "a value could not be restored");
            }
        }
        for (id, reply) in gathers {
            self.gathers.restore(id, reply);
        }
        self.announce();
    }

    /// Announces to all that the job is complete, if it is. To be called after the new member was sent its welcome.
    pub(crate) fn announce(&mut self) {
        // A rank that joins late learns of earlier losses, in their order, since the first is the cause; repeating them
        // to the others has no effect.
        let mut lost = BTreeMap::new();
        for (rank, state) in (0..).zip(self.members.clone()) {
            match state {
                MemberState::Lost { reason, before } => drop(lost.insert(before, (rank, reason))),
                MemberState::Left => self.broadcast(&StoreEvent::Left { rank }),
                MemberState::Absent | MemberState::Present => {}
            }
        }
        for (rank, reason) in lost.into_values() {
            self.broadcast(&StoreEvent::Lost { rank, reason });
        }
        if !self.members.contains(&MemberState::Absent) && self.restoring.is_none() {
            let standby = self.standby.clone();
            self.broadcast(&StoreEvent::Ready { standby });
        }
    }

    /// Announces to all that a rank no longer waits for missing ones.
    pub(crate) fn stop_waiting(&mut self) {
        let message = format!(
            "rank {} did not join before another rank's deadline",
            comma(self.missing().iter())
        );
        let mut refusal = Refusal::new(RefusalKind::Cancelled, message);
        refusal.peer = self.missing().first().copied();
        self.abandon(refusal);
    }

    /// Unless all ranks have joined, announces to those that have why the others cannot. As every rank is needed, they need
    /// not wait longer.
    pub(crate) fn abandon(&mut self, refusal: Refusal) {
        let has_begun = self.missing().is_empty() || self.is_restoring();
        if has_begun || self.abandoned.is_some() {
            return;
        }
        self.abandoned = Some(refusal.clone());
        self.broadcast(&StoreEvent::Abandoned(refusal));
    }

    /// `rank` aborted, or its connection ended although it had not left.
    pub(crate) fn lose(&mut self, rank: u32, reason: &str) {
        let lost = |state: &&MemberState| matches!(state, MemberState::Lost { .. });
        let before = self.members.iter().filter(lost).count();
        if self.depart(
            rank,
            MemberState::Lost {
                reason: reason.to_owned(),
                before,
            },
        ) {
            self.broadcast(&StoreEvent::Lost {
                rank,
                reason: reason.to_owned(),
            });
            self.finish_restoring();
        }
    }

    /// `rank` is lost for `reason`. It is notified itself too, in case it can still receive.
    pub(crate) fn give_up(&mut self, rank: u32, reason: &str) {
        let event = StoreEvent::Lost {
            rank,
            reason: reason.to_owned(),
        };
        self.out.push(Outgoing::new(rank, 0, body(&event)));
        self.lose(rank, reason);
    }

    /// Sends a heartbeat to all.
    pub(crate) fn beat(&mut self) {
        self.broadcast(&StoreEvent::Alive);
    }

    fn leave(&mut self, rank: u32) {
        if self.depart(rank, MemberState::Left) {
            self.broadcast(&StoreEvent::Left { rank });
            self.stop_waiting();
        }
    }

    /// Removes a rank, and fails requests that cannot succeed without it.
    fn depart(&mut self, rank: u32, how: MemberState) -> bool {
        match self.members.get_mut(rank as usize) {
            Some(state @ (MemberState::Present | MemberState::Absent)) => *state = how,
            _ => return false,
        }
        if let Some(restoring) = &mut self.restoring {
            restoring.done(rank);
        }
        self.declarations.forget(rank);
        self.waiters.forget(rank);
        for (waiter, refusal) in self.waiters.take_failed(&self.members) {
            self.answer(waiter.rank, waiter.request, Reply::Refused(refusal));
        }
        self.gathers.depart(rank, &self.members, &mut self.out);
        true
    }

    /// Handles a request that `rank` sent under the number `id`.
    pub(crate) fn handle(&mut self, rank: u32, id: u64, request: Request) {
        // Frames of a rank that was just given up may still arrive until its connection is down.
        if self.members.get(rank as usize) != Some(&MemberState::Present) {
            return;
        }
        let version = self.values.next_version();
        let reply = request
            .check(self.world())
            .and_then(|()| self.dispatch(rank, id, request));
        let reply = match reply {
            Ok(Some(reply)) => reply,
            Ok(None) => return,
            // Messages without a number are not answered.
            Err(refusal) if id == 0 => {
                tracing::debug!(rank, ?refusal, "a notice was refused");
                return;
            }
            Err(refusal) => Reply::Refused(refusal),
        };
        // The version of the answer must be that of the change itself, since journals compare versions. A take that was
        // answered at once changed the table after `version`; a set has `version`, although it may have triggered takes
        // of others, with later versions.
        let version = match reply {
            Reply::Values(_) => self.values.version(),
            _ => version,
        };
        self.answer_at(version, rank, id, reply);
        // After the answer: a notice that came first would find no entry to drop, and the answer would then add
        // one.
        self.send_superseded();
    }

    /// Lets members drop journal entries that others superseded, once there are enough of them.
    fn send_superseded(&mut self) {
        let Some(superseded) = self.values.take_superseded() else {
            return;
        };
        for (to, keys) in superseded {
            self.out
                .push(Outgoing::new(to, 0, body(&StoreEvent::Forget { keys })));
        }
        let version = self.values.version();
        self.broadcast(&StoreEvent::Checkpoint { version });
    }

    /// The answer, or `None` if it follows later or there is none.
    fn dispatch(&mut self, rank: u32, id: u64, request: Request) -> Result<Option<Reply>, Refusal> {
        if let Some(restoring) = &mut self.restoring {
            match request {
                Request::Restore { entries, gathers } => {
                    restoring.add(rank, entries, gathers);
                    return Ok(None);
                }
                Request::Restored => {
                    restoring.done(rank);
                    self.finish_restoring();
                    return Ok(None);
                }
                Request::Abort { .. } => {}
                _ => {
                    return Err(Refusal::new(
                        RefusalKind::Protocol,
                        "a request came before the store was restored",
                    ));
                }
            }
        }
        Ok(Some(match request {
            Request::Set { pairs } => {
                // Before the first: a rank whose request failed has set none, and the others have seen none.
                self.values.check_room(&pairs)?;
                for (key, value) in pairs {
                    self.set(rank, key, value.0)?;
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
            Request::Add { key, amount } => Reply::Number(self.add(rank, key, amount)?),
            Request::CompareAndSet { key, expected, new } => {
                let current = self.values.get(&key);
                if current.map(|value| &value[..]) == expected.as_ref().map(|value| &value.0[..]) {
                    self.set(rank, key, new.0)?;
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
                    self.answer(rank, id, Reply::Refused(refusal));
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
            Request::Declare(group) => {
                for (to, event) in self.declarations.declare(rank, group) {
                    let body = body(&event);
                    self.out.push(Outgoing::new(to, 0, body));
                }
                return Ok(None);
            }
            Request::Fail {
                group,
                members,
                reason,
                is_attempt,
            } => {
                // Otherwise a rank could end the calls of groups that it has no part in.
                if !members.contains(&rank) {
                    let message = format!(
                        "protocol error: rank {rank} reported the failure of a group that it does not belong to"
                    );
                    return Err(Refusal::new(RefusalKind::Protocol, message));
                }
                let event = StoreEvent::Failed {
                    group,
                    rank,
                    reason,
                    is_attempt,
                };
                self.send(members, &event);
                Reply::Done
            }
            Request::Query {
                group,
                number,
                to,
                payload,
            } => {
                let event = StoreEvent::Query {
                    group,
                    number,
                    by: rank,
                    payload,
                };
                self.send(to, &event);
                return Ok(None);
            }
            Request::QueryReply {
                number,
                to,
                payload,
            } => {
                let event = StoreEvent::QueryReply {
                    number,
                    by: rank,
                    payload,
                };
                self.send([to], &event);
                return Ok(None);
            }
            // Handled by the server, before the table.
            Request::Alive | Request::GiveUp { .. } => return Ok(None),
            Request::Restore { .. } | Request::Restored => {
                return Err(Refusal::new(
                    RefusalKind::Protocol,
                    "a journal was sent to a store that is not being restored",
                ));
            }
        }))
    }

    fn set(&mut self, owner: u32, key: String, value: Arc<[u8]>) -> Result<(), Refusal> {
        self.values.insert(key.clone(), value, owner)?;
        for (rank, id, reply) in self.waiters.arrived(&key, &mut self.values) {
            self.answer(rank, id, reply);
        }
        Ok(())
    }

    fn add(&mut self, rank: u32, key: String, amount: i64) -> Result<i64, Refusal> {
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
        // A counter that wraps would repeat values, which callers use as unique numbers.
        let sum = current.checked_add(amount).ok_or_else(|| {
            Refusal::new(RefusalKind::Invalid, "the counter would overflow").with_key(&key)
        })?;
        self.set(rank, key, sum.to_le_bytes().as_slice().into())?;
        Ok(sum)
    }

    fn answer(&mut self, to: u32, id: u64, reply: Reply) {
        self.answer_at(self.values.version(), to, id, reply);
    }

    fn answer_at(&mut self, version: u64, to: u32, id: u64, reply: Reply) {
        self.out
            .push(Outgoing::new(to, id, body(&Answer { version, reply })));
    }

    fn broadcast(&mut self, event: &StoreEvent) {
        self.send(self.present(), event);
    }

    fn send(&mut self, to: impl IntoIterator<Item = u32>, event: &StoreEvent) {
        let body = body(event);
        self.out
            .extend(to.into_iter().map(|to| Outgoing::new(to, 0, body.clone())));
    }
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
