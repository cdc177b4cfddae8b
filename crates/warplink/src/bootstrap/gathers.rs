//! Gathers: every member contributes a value and gets the values of all.

use super::members::{MemberState, MemberStates, first_lost, gone};
use super::message::{Answer, Bytes, GatherId, MAX_BODY, Purpose, Refusal, RefusalKind, Reply};
use super::outgoing::{Outgoing, body};
use crate::named::comma;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// A member's request to take part in a gather.
#[derive(Debug)]
pub(crate) struct Contribution {
    pub(crate) rank: u32,
    /// The number of the request.
    pub(crate) request: u64,
    pub(crate) id: GatherId,
    pub(crate) purpose: Purpose,
    pub(crate) value: Bytes,
}

/// A member's contribution.
#[derive(Debug)]
struct Share {
    value: Bytes,
    /// The request to answer, or none if its caller no longer waits.
    request: Option<u64>,
}

/// A gather that lacks contributions.
#[derive(Debug)]
struct Gather {
    purpose: Purpose,
    /// By position among the members.
    shares: Vec<Option<Share>>,
    arrived: usize,
    bytes: usize,
}

/// A gather that failed because of a contribution.
#[derive(Debug)]
struct Failed {
    refusal: Refusal,
    /// The present members that have not contributed.
    missing: BTreeSet<u32>,
}

/// All gathers in progress.
#[derive(Debug, Default)]
pub(crate) struct Gathers {
    open: HashMap<GatherId, Gather>,
    by_request: HashMap<(u32, u64), GatherId>,
    /// Gathers that failed, for the members that contribute later: they would wait for members that already have their
    /// answer and do not call again.
    failed: HashMap<GatherId, Failed>,
    /// Results that a lost store had sent to some members, for those that it had not.
    completed: HashMap<GatherId, Reply>,
}

impl Gathers {
    /// Adds a contribution; the last one completes the gather and answers all.
    pub(crate) fn contribute(
        &mut self,
        contribution: Contribution,
        states: &MemberStates,
        out: &mut Vec<Outgoing>,
    ) -> Result<(), Refusal> {
        let Contribution {
            rank,
            request,
            id,
            purpose,
            value,
        } = contribution;
        // Before anything else: the members that were answered by the lost store do not contribute again.
        if let Some(reply) = self.completed.get(&id) {
            out.push(Outgoing::new(rank, request, unversioned(reply.clone())));
            return Ok(());
        }
        let Ok(position) = id.members.binary_search(&rank) else {
            let message = format!("rank {rank} is not a member of the group");
            return Err(Refusal::new(RefusalKind::Invalid, message));
        };
        if let Some(refusal) = self.failed_before(&id, rank) {
            return Err(refusal);
        }
        if let Some(refusal) = self.failure(&id, states) {
            self.fail(&id, &refusal, out);
            return Err(refusal);
        }
        let gather = self.open.entry(id.clone()).or_insert_with(|| Gather {
            purpose,
            shares: id.members.iter().map(|_| None).collect(),
            arrived: 0,
            bytes: 0,
        });
        // Ranks that call different collectives would otherwise wait for each other, or get values of the other
        // call.
        if gather.purpose != purpose {
            let message = format!(
                "rank {rank} calls {purpose}; the other members of its group call {}",
                gather.purpose
            );
            let refusal = Refusal::new(RefusalKind::Mismatch, message).with_peer(rank);
            return Err(self.spoil(&id, rank, refusal, out));
        }
        // 10 bytes is the longest encoding of a length. Checked at each contribution, since the result goes into
        // one message.
        let bytes = gather.bytes + value.0.len() + 10;
        if bytes > MAX_BODY {
            let message = format!(
                "the values of an all-gather take {bytes} bytes; expected at most {MAX_BODY}"
            );
            let refusal = Refusal::new(RefusalKind::Invalid, message).with_peer(rank);
            return Err(self.spoil(&id, rank, refusal, out));
        }
        match gather.shares.get_mut(position) {
            Some(share @ None) => {
                *share = Some(Share {
                    value,
                    request: Some(request),
                })
            }
            _ => {
                return Err(Refusal::new(
                    RefusalKind::Protocol,
                    "a rank sent two values for one gather",
                ));
            }
        }
        gather.bytes = bytes;
        gather.arrived += 1;
        if gather.arrived < id.members.len() {
            // Only parked contributions can be cancelled; the last one is answered at once.
            self.by_request.insert((rank, request), id);
        } else {
            self.complete(&id, out);
        }
        Ok(())
    }

    /// A lost store had sent this result to a member.
    pub(crate) fn restore(&mut self, id: GatherId, reply: Reply) {
        // Kept for the rest of the job; the journals bound their number, and their bytes, per member.
        self.completed.insert(id, reply);
    }

    /// Ends the gathers that a departed rank makes impossible.
    pub(crate) fn depart(&mut self, rank: u32, states: &MemberStates, out: &mut Vec<Outgoing>) {
        self.failed.retain(|_, failed| {
            failed.missing.remove(&rank);
            !failed.missing.is_empty()
        });
        let affected = self
            .open
            .keys()
            .filter(|id| id.members.binary_search(&rank).is_ok());
        for id in affected.cloned().collect::<Vec<_>>() {
            self.stop_answering(&id, rank);
            if let Some(refusal) = self.failure(&id, states) {
                self.fail(&id, &refusal, out);
            }
        }
    }

    /// The caller no longer waits for this request. Returns the refusal that names the ranks it waited for, or `None` when
    /// there is no such request.
    ///
    /// The contribution remains, so that the others need not wait and the next gather of the group is the same one on
    /// every rank. Where all have to wait, it becomes empty, from which later members learn that this rank does not go on.
    pub(crate) fn cancel(&mut self, rank: u32, request: u64) -> Option<Refusal> {
        let id = self.by_request.remove(&(rank, request))?;
        self.stop_answering(&id, rank);
        let gather = self.open.get_mut(&id)?;
        if gather.purpose.needs_all_waiting()
            && let Ok(position) = id.members.binary_search(&rank)
            && let Some(Some(share)) = gather.shares.get_mut(position)
        {
            share.value = Bytes::from(&[][..]);
        }
        let missing: Vec<u32> = id
            .members
            .iter()
            .zip(&gather.shares)
            .filter(|(_, share)| share.is_none())
            .map(|(&member, _)| member)
            .collect();
        let awaited = format!("rank {} to call {}", comma(&missing), gather.purpose);
        let refusal = Refusal::new(RefusalKind::Cancelled, awaited);
        Some(match missing[..] {
            [first, ..] => refusal.with_peer(first),
            [] => refusal,
        })
    }

    /// Whether nothing at all is left.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.open.is_empty() && self.by_request.is_empty() && self.failed.is_empty()
    }

    fn stop_answering(&mut self, id: &GatherId, rank: u32) {
        if let Ok(position) = id.members.binary_search(&rank)
            && let Some(gather) = self.open.get_mut(id)
            && let Some(Some(share)) = gather.shares.get_mut(position)
            && let Some(request) = share.request.take()
        {
            self.by_request.remove(&(rank, request));
        }
    }

    /// Why the gather cannot complete: a member is lost, or left before it contributed.
    fn failure(&self, id: &GatherId, states: &MemberStates) -> Option<Refusal> {
        if let Some(rank) = first_lost(id.members.iter().copied(), states) {
            return gone(rank, states);
        }
        let shares = self
            .open
            .get(id)
            .map(|gather| &gather.shares[..])
            .unwrap_or_default();
        id.members.iter().enumerate().find_map(|(position, &rank)| {
            let given = matches!(shares.get(position), Some(Some(_)));
            match states.get(rank as usize) {
                Some(MemberState::Left) if given => None,
                _ => gone(rank, states),
            }
        })
    }

    fn complete(&mut self, id: &GatherId, out: &mut Vec<Outgoing>) {
        let Some(gather) = self.open.remove(id) else {
            return;
        };
        let reply = match gather.purpose {
            Purpose::Barrier => Reply::Done,
            Purpose::AllGather | Purpose::Bind | Purpose::Survivors => Reply::Values(
                gather
                    .shares
                    .iter()
                    .flatten()
                    .map(|share| share.value.clone())
                    .collect(),
            ),
        };
        self.answer(id, &gather, unversioned(reply), out);
    }

    /// Fails a gather because of the contribution of `rank`, also for members that contribute later.
    fn spoil(
        &mut self,
        id: &GatherId,
        rank: u32,
        refusal: Refusal,
        out: &mut Vec<Outgoing>,
    ) -> Refusal {
        let missing: BTreeSet<u32> = match self.open.get(id) {
            Some(gather) => {
                let members = id.members.iter().zip(&gather.shares);
                let missing = members.filter(|(member, share)| share.is_none() && **member != rank);
                missing.map(|(&member, _)| member).collect()
            }
            None => BTreeSet::new(),
        };
        self.fail(id, &refusal, out);
        if !missing.is_empty() {
            let refusal = refusal.clone();
            self.failed.insert(id.clone(), Failed { refusal, missing });
        }
        refusal
    }

    /// Why the gather failed before `rank` contributed, if it did.
    fn failed_before(&mut self, id: &GatherId, rank: u32) -> Option<Refusal> {
        let failed = self.failed.get_mut(id)?;
        if !failed.missing.remove(&rank) {
            let message = "a rank sent two values for one gather";
            return Some(Refusal::new(RefusalKind::Protocol, message));
        }
        let refusal = failed.refusal.clone();
        if failed.missing.is_empty() {
            self.failed.remove(id);
        }
        Some(refusal)
    }

    fn fail(&mut self, id: &GatherId, refusal: &Refusal, out: &mut Vec<Outgoing>) {
        let Some(gather) = self.open.remove(id) else {
            return;
        };
        self.answer(
            id,
            &gather,
            unversioned(Reply::Refused(refusal.clone())),
            out,
        );
    }

    fn answer(&mut self, id: &GatherId, gather: &Gather, body: Arc<[u8]>, out: &mut Vec<Outgoing>) {
        for (&to, share) in id.members.iter().zip(&gather.shares) {
            if let Some(request) = share.as_ref().and_then(|share| share.request) {
                self.by_request.remove(&(to, request));
                out.push(Outgoing::new(to, request, body.clone()));
            }
        }
    }
}

/// An answer to a request that changes no key.
fn unversioned(reply: Reply) -> Arc<[u8]> {
    body(&Answer { version: 0, reply })
}
