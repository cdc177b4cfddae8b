//! The member's end of the store protocol: any number of concurrent requests over one connection.
//!
//! If the connection ends because the rank that serves the store was lost, `handover.rs` finds the rank that serves it
//! next, and unanswered requests are retried there.

mod groups;

use super::abort_handle::AbortHandle;
use super::channel::Frame;
use super::connection::StoreLink;
use super::group_name::GroupName;
use super::handshake::Identity;
use super::health::Health;
use super::journal::Journal;
use super::message::{
    self, Answer, Bytes, GroupDeclaration, MAX_REASON, Refusal, RefusalKind, Reply, Request,
    StoreEvent,
};
use super::outbox::Outbox;
use super::pulse::{Pulse, not_heard};
use super::query::Queries;
use super::server::Server;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::sync::{lock, wait_for, wait_while};
use crate::threads;
use std::collections::BTreeMap;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub(crate) use groups::failed_group;

/// How long, beyond its deadline, a request waits for the store to confirm that it was cancelled. Without the
/// confirmation, the reply with a value that was just taken could be in flight, and the value would be lost.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(1);

/// Advice where not all ranks could join.
const START_ALL: &str = "start every rank, with the same address and world size";

/// A member's connection to the store. Its reading thread ends once there is no store any more.
pub(crate) struct Client {
    pub(super) identity: Identity,
    pub(super) health: Health,
    /// This process's server, on standby unless this rank serves the store.
    pub(super) server: Arc<Server>,
    pub(super) state: Mutex<ClientState>,
    /// Signalled when `phase` or `over` changes.
    pub(super) changed: Condvar,
    next: AtomicU64,
    pub(super) queries: Queries,
    reader: Mutex<Option<JoinHandle<()>>>,
}

pub(super) struct ClientState {
    /// Unanswered requests by number, the order in which they are retried.
    calls: BTreeMap<u64, Arc<PendingCall>>,
    pub(super) phase: Phase,
    /// The connection, except between the loss of one store and the handshake of the next.
    pub(super) link: Option<Arc<Outbox>>,
    /// The connection to the next store, during its handshake.
    pub(super) connecting: Option<TcpStream>,
    /// Whether the store accepts requests, which it does not until it has been restored.
    pub(super) open: bool,
    /// Identifies the job.
    pub(super) session: [u8; 32],
    /// The rank that serves.
    pub(super) serving: Rank,
    /// The address at which each rank would serve the store.
    pub(super) standby: Vec<Option<SocketAddr>>,
    /// When something last arrived from the rank that serves.
    pub(super) pulse: Arc<Pulse>,
    /// Why this rank has given up the one that serves, if it has.
    pub(super) given_up: Option<String>,
    pub(super) journal: Journal,
    /// Groups that cannot be used any more, and why: their members disagree about them, or one of them failed.
    ended_groups: Vec<(GroupName, Error)>,
    /// Pairs of a group and one that ends with it.
    pub(super) dependents: Vec<(GroupName, GroupName)>,
    /// Why this rank has no store any more: it left, was given up, or could not reach any.
    pub(super) over: Option<Error>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Joining,
    Ready,
    Abandoned(Refusal),
}

struct PendingCall {
    request: Request,
    answer: Mutex<Option<Result<Reply>>>,
    answered: Condvar,
}

impl PendingCall {
    fn finish(&self, answer: Result<Reply>) {
        *lock(&self.answer) = Some(answer);
        self.answered.notify_one();
    }

    fn wait(&self, limit: Duration) -> Option<Result<Reply>> {
        let answer = lock(&self.answer);
        wait_while(&self.answered, answer, limit, |answer| answer.is_none()).take()
    }
}

impl Client {
    /// Starts a member, which reads from `link` on a separate thread.
    pub(crate) fn start(
        identity: Identity,
        health: Health,
        server: Arc<Server>,
        link: StoreLink,
    ) -> Result<Arc<Self>> {
        let client = Arc::new(Self {
            identity,
            health,
            server,
            state: Mutex::new(ClientState {
                calls: BTreeMap::new(),
                phase: Phase::Joining,
                link: Some(link.connection.outbox.clone()),
                connecting: None,
                open: true,
                session: link.session,
                serving: link.serving,
                standby: Vec::new(),
                pulse: link.connection.pulse.clone(),
                given_up: None,
                journal: Journal::default(),
                ended_groups: Vec::new(),
                dependents: Vec::new(),
                over: None,
            }),
            changed: Condvar::new(),
            next: AtomicU64::new(1),
            queries: Queries::default(),
            reader: Mutex::new(None),
        });
        let reading = client.clone();
        let read = move || reading.run(link);
        let reader = threads::spawn("warplink-client", "start a thread", read)?;
        *lock(&client.reader) = Some(reader);
        Ok(client)
    }

    /// Waits until every rank has joined.
    pub(crate) fn wait_until_ready(
        self: &Arc<Self>,
        deadline: Deadline,
        abort: &AbortHandle,
    ) -> Result<()> {
        let waiting = Arc::downgrade(self);
        abort.interrupt_with(move |_| {
            if let Some(client) = waiting.upgrade() {
                client.notify_waiting();
            }
        });
        let mut state = lock(&self.state);
        loop {
            abort.check()?;
            self.health.check(&self.health.lost())?;
            match (&state.phase, &state.over) {
                (Phase::Ready, _) => return Ok(()),
                (Phase::Abandoned(refusal), _) => {
                    return Err(refusal.clone().into_error().with_help(START_ALL));
                }
                (_, Some(error)) => return Err(error.clone()),
                (Phase::Joining, None) => {}
            }
            let left = deadline.remaining();
            if left.is_zero() {
                break;
            }
            state = wait_for(&self.changed, state, left);
        }
        drop(state);
        match self.call("join", Request::Missing, Deadline::after(CANCEL_TIMEOUT)) {
            // The last one joined just now.
            Ok(Reply::Ranks(missing)) if missing.is_empty() => Ok(()),
            Ok(Reply::Ranks(missing)) => {
                let names: Vec<_> = missing.iter().map(u32::to_string).collect();
                let (names, limit) = (names.join(", "), deadline.limit());
                let message = format!("rank {names} did not join within {limit:?}");
                let error = Error::new(ErrorKind::Timeout, message).with_peer(missing[0] as Rank);
                Err(error.with_help(START_ALL))
            }
            _ => Err(deadline.expired("every rank to join")),
        }
    }

    /// Sends a request and waits for its answer; a refusal is an error.
    ///
    /// At the deadline the store is asked to cancel the request; an answer that it sent before is
    /// still returned.
    pub(crate) fn call(
        &self,
        operation: &str,
        request: Request,
        deadline: Deadline,
    ) -> Result<Reply> {
        self.exchange(request, deadline)
            .and_then(|reply| match reply {
                Reply::Refused(mut refusal) => {
                    if refusal.kind == RefusalKind::Cancelled {
                        refusal.message = deadline.expired(&refusal.message).message().to_owned();
                    }
                    Err(refusal.into_error())
                }
                reply => Ok(reply),
            })
            .map_err(|error| error.with_operation(operation.to_owned()))
    }

    fn exchange(&self, request: Request, deadline: Deadline) -> Result<Reply> {
        let body = message::encode(&request)?;
        // Only uniqueness matters; `state` orders everything else.
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let call = Arc::new(PendingCall {
            request,
            answer: Mutex::default(),
            answered: Condvar::new(),
        });
        let link = {
            let mut state = lock(&self.state);
            if let Some(error) = &state.over {
                return Err(error.clone());
            }
            let mut ended = state.ended_groups.iter();
            if let Some((_, error)) = ended.find(|(group, _)| group.is_of(&call.request)) {
                return Err(error.clone());
            }
            // In the same critical section as the lookup of the link. Otherwise `ready` could run in between and
            // send the request over a new link, and this thread would send it a second time.
            state.calls.insert(id, call.clone());
            state.open_link()
        };
        // Without a connection, the request stays in `calls` and is sent to the next store. The same happens if the
        // connection turns out to be broken: its reader notices and looks for the next store.
        if let Some(link) = link
            && let Err(error) = link.push(id, &body)
            && error.kind() == ErrorKind::InvalidArgument
        {
            lock(&self.state).calls.remove(&id);
            return Err(error);
        }
        let answer = call.wait(deadline.remaining()).or_else(|| {
            let cancel = message::encode(&Request::Cancel { id }).ok()?;
            let link = lock(&self.state).open_link()?;
            link.push(0, &cancel).ok()?;
            call.wait(CANCEL_TIMEOUT)
        });
        let serving = {
            let mut state = lock(&self.state);
            state.calls.remove(&id);
            state.serving
        };
        answer.unwrap_or_else(|| Err(deadline.expired("the store to answer").with_peer(serving)))
    }

    /// Reads until there is no store any more.
    fn run(&self, mut link: StoreLink) {
        loop {
            let ended = link.connection.read_all(|frame| self.handle(frame));
            // A rank that gave up the store has shut the connection down itself, for another reason.
            let given_up = lock(&self.state).given_up.take();
            let reason = given_up.unwrap_or_else(|| format!("the connection to its store {ended}"));
            link.connection.outbox.close();
            match self.next_store(&reason) {
                Some(next) => link = next,
                None => return self.end(&reason),
            }
        }
    }

    fn handle(&self, frame: Frame) -> Result<()> {
        if frame.id != 0 {
            let Answer { version, reply } = message::decode(&frame.body)?;
            let mut state = lock(&self.state);
            let call = state.calls.remove(&frame.id);
            // If there is none, its deadline has passed.
            if let Some(call) = call {
                // Before the caller sees the answer: the store may be lost right after, and a confirmed change must
                // survive that.
                state.journal.record(&call.request, version, &reply);
                drop(state);
                call.finish(Ok(reply));
            }
            return Ok(());
        }
        match message::decode(&frame.body)? {
            StoreEvent::Alive => return Ok(()),
            StoreEvent::Lost { rank, reason } if rank as Rank == self.identity.rank => {
                self.give_up_membership(&reason);
            }
            StoreEvent::Lost { rank, reason } => self.health.lose(rank as Rank, &reason),
            StoreEvent::Left { rank } => self.health.leave(rank as Rank),
            StoreEvent::Ready { standby } => self.ready(standby),
            StoreEvent::Abandoned(refusal) => {
                lock(&self.state).phase = Phase::Abandoned(refusal);
            }
            StoreEvent::Conflict {
                groups,
                ranks,
                message,
            } => self.conflict(&groups, ranks, message),
            StoreEvent::Failed {
                group,
                rank,
                reason,
                is_attempt,
            } => {
                let group = GroupName::from_bytes(group);
                self.group_failed(group, rank as Rank, &reason, is_attempt);
            }
            StoreEvent::Query {
                group,
                number,
                by,
                payload,
            } => {
                let group = GroupName::from_bytes(group);
                if let Some(answer) = self.queries.answer(group, number, by, &payload.0) {
                    self.notify(&Request::QueryReply {
                        number,
                        to: by,
                        payload: Bytes::from(&answer[..]),
                    });
                }
            }
            StoreEvent::QueryReply {
                number,
                by,
                payload,
            } => self.queries.replied(number, by, payload),
            StoreEvent::Forget { keys } => lock(&self.state).journal.forget(&keys),
            StoreEvent::Checkpoint { version } => lock(&self.state).journal.checkpoint(version),
        }
        self.notify_waiting();
        Ok(())
    }

    /// Has threads that wait for `changed` check their conditions.
    fn notify_waiting(&self) {
        // A thread between checking its condition and waiting holds the lock; after this it waits, and is notified.
        drop(lock(&self.state));
        self.changed.notify_all();
    }

    /// The store accepts requests. Retries those that a lost store did not answer.
    fn ready(&self, standby: Vec<Option<SocketAddr>>) {
        let mut state = lock(&self.state);
        state.phase = Phase::Ready;
        state.standby = standby;
        // A repeated announcement must not send the same requests again.
        if state.open {
            return;
        }
        state.open = true;
        let Some(link) = state.link.clone() else {
            return;
        };
        let serving = state.serving;
        // These are not idempotent, and the lost store may have carried them out.
        let unsure = |call: &PendingCall| {
            matches!(
                call.request,
                Request::Add { .. } | Request::CompareAndSet { .. }
            )
        };
        for (&id, call) in &state.calls {
            if unsure(call) {
                let message = "the rank that served the store was lost before it answered; expected an answer";
                call.finish(Err(Error::new(ErrorKind::PeerLost, message)
                    .with_peer(serving)
                    .with_help("read the key to see whether it was changed")));
            } else if let Ok(body) = message::encode(&call.request) {
                // If this fails, the reader notices that the connection is closed.
                let _ = link.push(id, &body);
            }
        }
        state.calls.retain(|_, call| !unsure(call));
    }

    /// Declares a group that this rank creates to the store. Does not block.
    pub(crate) fn declare(&self, declaration: GroupDeclaration) {
        // Without a store, members that disagree run into their deadlines.
        self.notify(&Request::Declare(declaration));
    }

    /// Sends a request that the store does not answer. False if there is no store to send it to.
    pub(super) fn notify(&self, request: &Request) -> bool {
        let link = lock(&self.state).open_link();
        match (link, message::encode(request)) {
            (Some(link), Ok(body)) => link.push(0, &body).is_ok(),
            _ => false,
        }
    }

    /// The others go on without this rank.
    pub(super) fn give_up_membership(&self, reason: &str) {
        let message = format!("the other ranks gave this rank up: {reason}");
        let error = Error::new(ErrorKind::GivenUp, message)
            .with_rank(self.identity.rank)
            .with_help("end this process, or join a new job");
        self.health.end(&error);
        let mut state = lock(&self.state);
        // Set before the connection is shut down, so that its reader does not look for another store.
        state.over.get_or_insert_with(|| error.clone());
        let link = state.link.clone();
        drop(state);
        if let Some(link) = link {
            link.shut_down();
        }
    }

    /// There is no store any more: fails every call.
    fn end(&self, reason: &str) {
        let state = lock(&self.state);
        let serving = state.serving;
        // The most specific reason first: callers should see why there is no store rather than that a connection
        // closed.
        let error = match state.over.clone() {
            Some(closed) => closed,
            None if self.health.left().contains(&serving) => {
                let message = format!("rank {serving} closed the job, and the store with it");
                Error::new(ErrorKind::PeerLeft, message).with_peer(serving)
            }
            None if matches!(state.phase, Phase::Abandoned(_)) => Error::closed(format!(
                "rank {serving} stopped waiting for the other ranks to join"
            )),
            None => {
                // No effect if the rank has reported why it aborts.
                self.health.lose(serving, reason);
                match self.health.check(&[serving]) {
                    Err(lost) => lost,
                    Ok(()) => Error::new(ErrorKind::PeerLost, reason.to_owned()).with_peer(serving),
                }
            }
        };
        drop(state);
        // Before any call fails, as `when_ended` promises, and without the lock, which the callbacks may need.
        if error.kind() != ErrorKind::Closed {
            self.health.end(&error);
        }
        let mut state = lock(&self.state);
        state.over = Some(error.clone());
        let calls = std::mem::take(&mut state.calls);
        drop(state);
        for call in calls.into_values() {
            call.finish(Err(error.clone()));
        }
        self.changed.notify_all();
        if error.kind() == ErrorKind::GivenUp {
            // If this rank serves the store, the others look for the next server once their connections close.
            self.server.shut_down();
        }
    }

    /// Sends a heartbeat to the store, or gives the store up if none came from it for `limit`. Time before `awake_since`
    /// does not count.
    pub(crate) fn beat(&self, limit: Duration, awake_since: Instant) {
        let Ok(alive) = message::encode(&Request::Alive) else {
            return;
        };
        let (link, silence) = {
            let state = lock(&self.state);
            let Some(link) = state.link.clone() else {
                return;
            };
            (link, state.pulse.silence(awake_since))
        };
        if silence <= limit {
            // If this fails, the reader notices that the connection is closed.
            let _ = link.push(0, &alive);
            return;
        }
        let reason = not_heard(limit);
        // Before the shutdown below, which wakes the reader: `run` takes its reason from here.
        lock(&self.state).given_up = Some(reason.clone());
        // If the rank that serves was merely stopped, it learns from this that it is no longer a member. If it is
        // dead, nothing is lost.
        if let Ok(given_up) = message::encode(&Request::GiveUp { reason }) {
            let _ = link.push(0, &given_up);
        }
        link.shut_down();
    }

    /// Leaves in order, which the store does not treat as a loss.
    pub(crate) fn leave(&self, deadline: Deadline) -> Result<()> {
        self.call("leave", Request::Leave, deadline).map(drop)
    }

    /// Has the store report this rank to the others as lost, and why.
    pub(crate) fn abort(&self, reason: &str, deadline: Deadline) -> Result<()> {
        let reason = limited(reason);
        self.call("abort", Request::Abort { reason }, deadline)
            .map(drop)
    }

    /// Closes the connection, fails every call in flight, and waits for the reading thread.
    pub(crate) fn close(&self) {
        let link = {
            let mut state = lock(&self.state);
            state
                .over
                // First: the reader, which the shutdown below wakes, would otherwise take it for the loss of the
                // store.
                .get_or_insert_with(|| Error::closed("this rank has closed its membership"));
            if let Some(connecting) = &state.connecting {
                // This ends its handshake.
                let _ = connecting.shutdown(Shutdown::Both);
            }
            state.link.clone()
        };
        if let Some(link) = link {
            link.close();
        }
        // Taken out of the lock before joining, so a concurrent close does not block on it and finds nothing to
        // join.
        let reader = lock(&self.reader).take();
        if let Some(reader) = reader {
            let _ = reader.join();
        }
    }

    pub(crate) fn health(&self) -> &Health {
        &self.health
    }
}

impl ClientState {
    /// The connection, if the store accepts requests.
    pub(super) fn open_link(&self) -> Option<Arc<Outbox>> {
        self.link.clone().filter(|_| self.open)
    }
}

/// A reason, truncated to the limit.
fn limited(reason: &str) -> String {
    let mut length = reason.len().min(MAX_REASON);
    while !reason.is_char_boundary(length) {
        length -= 1;
    }
    reason[..length].to_owned()
}
