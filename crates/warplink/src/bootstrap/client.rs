//! A member's connection to the store: many requests at a time over one socket.

use super::frame;
use super::handshake;
use super::health::Health;
use super::message::{self, Event, MAX_REASON, RefusalKind, Reply, Request};
use super::outbox::Outbox;
use super::seal::{Opener, Seals};
use super::secret::Secret;
use super::socket::{self, DeadlineStream};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::sync::lock;
use std::collections::HashMap;
use std::io::BufReader;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// How long, beyond its deadline, a request waits for the store to confirm that it was cancelled.
///
/// Without the confirmation a value that was just taken could be on its way and be lost.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(1);

/// Who connects, and as what.
pub(crate) struct Identity<'a> {
    pub(crate) rank: Rank,
    pub(crate) world: usize,
    pub(crate) secret: &'a Secret,
    pub(crate) heartbeat: Duration,
}

/// The connection. Its reading thread ends when the connection does.
pub(crate) struct Client {
    outbox: Arc<Outbox>,
    state: Mutex<State>,
    /// Signalled when `phase` or `over` changes.
    changed: Condvar,
    next: AtomicU64,
    health: Health,
    reader: Mutex<Option<JoinHandle<()>>>,
}

struct State {
    calls: HashMap<u64, Arc<Call>>,
    phase: Phase,
    /// Why the connection ended, or that this rank closed it.
    over: Option<Error>,
}

enum Phase {
    Joining,
    Ready,
    Abandoned(Vec<u32>),
}

#[derive(Default)]
struct Call {
    answer: Mutex<Option<Result<Reply>>>,
    answered: Condvar,
}

impl Call {
    fn finish(&self, answer: Result<Reply>) {
        *lock(&self.answer) = Some(answer);
        self.answered.notify_one();
    }

    fn wait(&self, limit: Duration) -> Option<Result<Reply>> {
        let answer = lock(&self.answer);
        self.answered
            .wait_timeout_while(answer, limit, |answer| answer.is_none())
            .unwrap_or_else(PoisonError::into_inner)
            .0
            .take()
    }
}

impl Client {
    /// Connects and passes the handshake, trying again until the deadline while nobody answers.
    /// Returns the session beside the connection.
    pub(crate) fn connect(
        address: SocketAddr,
        identity: &Identity<'_>,
        health: Health,
        deadline: Deadline,
    ) -> Result<(Arc<Self>, [u8; 32])> {
        let mut pause = Duration::from_millis(5);
        let (stream, session, seals) = loop {
            let error = match Self::attempt(address, identity, deadline) {
                Ok(connected) => break connected,
                Err(error) if error.kind() == ErrorKind::Io => error,
                // A single attempt is shorter than the deadline, so it may time out before it.
                Err(error) if error.kind() == ErrorKind::Timeout => error,
                Err(error) => return Err(error),
            };
            if deadline.passed() {
                return Err(deadline
                    .expired(&format!("a connection to the store at {address}"))
                    .with_peer(0)
                    .with_help(format!(
                        "check that rank 0 is running and can be reached at that address; the last attempt failed with: {error}"
                    )));
            }
            thread::sleep(pause.min(deadline.remaining()));
            pause = (pause * 2).min(Duration::from_millis(250));
        };
        let stream = Arc::new(stream);
        let client = Arc::new(Self {
            outbox: Outbox::new(stream.clone(), seals.sealer),
            state: Mutex::new(State {
                calls: HashMap::new(),
                phase: Phase::Joining,
                over: None,
            }),
            changed: Condvar::new(),
            next: AtomicU64::new(1),
            health,
            reader: Mutex::new(None),
        });
        let reading = client.clone();
        let reader = thread::Builder::new()
            .name("warplink-client".into())
            .spawn(move || reading.read_all(&stream, seals.opener))
            .map_err(|error| Error::io("start a thread", &error))?;
        *lock(&client.reader) = Some(reader);
        Ok((client, session))
    }

    fn attempt(
        address: SocketAddr,
        identity: &Identity<'_>,
        deadline: Deadline,
    ) -> Result<(TcpStream, [u8; 32], Seals)> {
        let failed = |error| Error::io("connect", &error);
        let limit = deadline.remaining().min(Duration::from_secs(5));
        let stream = socket::connect(address, limit).map_err(failed)?;
        socket::set_options(&stream, identity.heartbeat).map_err(failed)?;
        // Rank 0 may have the port but not have begun to serve, so the whole time is allowed.
        let mut timed = DeadlineStream::new(&stream, deadline);
        let (session, seals) =
            handshake::join(&mut timed, identity.secret, identity.rank, identity.world)?;
        timed.finish().map_err(failed)?;
        Ok((stream, session, seals))
    }

    /// Waits until every rank has joined.
    pub(crate) fn wait_until_ready(&self, deadline: Deadline) -> Result<()> {
        let mut state = lock(&self.state);
        loop {
            if let Some(&rank) = self.health.lost().first() {
                return self.health.check(&[rank]);
            }
            match (&state.phase, &state.over) {
                (Phase::Ready, _) => return Ok(()),
                (Phase::Abandoned(missing), _) => {
                    return Err(missing_ranks(missing, "before another rank's deadline"));
                }
                (_, Some(error)) => return Err(error.clone()),
                (Phase::Joining, None) => {}
            }
            let left = deadline.remaining();
            if left.is_zero() {
                break;
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        drop(state);
        match self.call("join", &Request::Missing, Deadline::after(CANCEL_TIMEOUT)) {
            // The last came just now.
            Ok(Reply::Ranks(missing)) if missing.is_empty() => Ok(()),
            Ok(Reply::Ranks(missing)) => {
                let when = format!("within {:?}", deadline.limit());
                Err(missing_ranks(&missing, &when))
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
        request: &Request,
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

    fn exchange(&self, request: &Request, deadline: Deadline) -> Result<Reply> {
        let body = message::encode(request)?;
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let call = Arc::new(Call::default());
        {
            let mut state = lock(&self.state);
            if let Some(error) = &state.over {
                return Err(error.clone());
            }
            state.calls.insert(id, call.clone());
        }
        if let Err(error) = self.outbox.push(id, &body) {
            // When the connection is gone, its reader says why.
            let answer = match error.kind() {
                ErrorKind::InvalidArgument => None,
                _ => call.wait(CANCEL_TIMEOUT),
            };
            lock(&self.state).calls.remove(&id);
            return answer.unwrap_or(Err(error));
        }
        let answer = call.wait(deadline.remaining()).or_else(|| {
            let cancel = message::encode(&Request::Cancel { id }).ok()?;
            self.outbox.push(0, &cancel).ok()?;
            call.wait(CANCEL_TIMEOUT)
        });
        lock(&self.state).calls.remove(&id);
        answer.unwrap_or_else(|| Err(deadline.expired("the store to answer").with_peer(0)))
    }

    fn read_all(&self, stream: &TcpStream, mut opener: Opener) {
        let mut reader = BufReader::with_capacity(16 << 10, stream);
        let reason = loop {
            match opener
                .read(&mut reader, frame::MAX_BODY)
                .and_then(|frame| match frame {
                    Some(frame) => self.handle(frame).map(Some),
                    None => Ok(None),
                }) {
                Ok(Some(())) => {}
                Ok(None) => break "the connection to its store was closed".to_owned(),
                Err(error) => {
                    break format!("the connection to its store failed: {}", error.message());
                }
            }
        };
        self.outbox.close();
        self.end(&reason);
    }

    fn handle(&self, frame: frame::Frame) -> Result<()> {
        if frame.id != 0 {
            let answer = message::decode(&frame.body)?;
            let call = lock(&self.state).calls.remove(&frame.id);
            // Without a call, its deadline passed.
            if let Some(call) = call {
                call.finish(Ok(answer));
            }
            return Ok(());
        }
        match message::decode(&frame.body)? {
            Event::Lost { rank, reason } => self.health.lose(rank as Rank, &reason),
            Event::Left { rank } => self.health.leave(rank as Rank),
            Event::Ready => lock(&self.state).phase = Phase::Ready,
            Event::Abandoned { missing } => lock(&self.state).phase = Phase::Abandoned(missing),
        }
        // Taken and released, so that nobody is between looking and waiting.
        drop(lock(&self.state));
        self.changed.notify_all();
        Ok(())
    }

    /// The connection ended: so does every call.
    fn end(&self, reason: &str) {
        let mut state = lock(&self.state);
        let error = match state.over.clone() {
            Some(closed) => closed,
            None if self.health.left().contains(&0) => {
                let message = "rank 0 closed the job, and the store with it";
                Error::new(ErrorKind::PeerLeft, message).with_peer(0)
            }
            None if matches!(state.phase, Phase::Abandoned(_)) => Error::new(
                ErrorKind::Closed,
                "rank 0 stopped waiting for the other ranks to join",
            ),
            None => {
                // Without effect if rank 0 has said why it aborts.
                self.health.lose(0, reason);
                match self.health.check(&[0]) {
                    Err(lost) => lost,
                    Ok(()) => Error::new(ErrorKind::PeerLost, reason.to_owned()).with_peer(0),
                }
            }
        };
        state.over = Some(error.clone());
        let calls = std::mem::take(&mut state.calls);
        drop(state);
        for call in calls.into_values() {
            call.finish(Err(error.clone()));
        }
        self.changed.notify_all();
    }

    /// Says goodbye: the store takes this rank for one that left in order.
    pub(crate) fn leave(&self, deadline: Deadline) -> Result<()> {
        self.call("leave", &Request::Leave, deadline).map(drop)
    }

    /// Has the store tell the others that this rank is lost, and why.
    pub(crate) fn abort(&self, reason: &str, deadline: Deadline) -> Result<()> {
        let mut length = reason.len().min(MAX_REASON);
        while !reason.is_char_boundary(length) {
            length -= 1;
        }
        let reason = reason[..length].to_owned();
        self.call("abort", &Request::Abort { reason }, deadline)
            .map(drop)
    }

    /// Ends the connection and every call that is under way, and waits for the reading thread.
    pub(crate) fn close(&self) {
        lock(&self.state).over.get_or_insert_with(|| {
            Error::new(ErrorKind::Closed, "this rank has closed its membership")
        });
        self.outbox.close();
        let reader = lock(&self.reader).take();
        if let Some(reader) = reader {
            let _ = reader.join();
        }
    }

    pub(crate) fn health(&self) -> &Health {
        &self.health
    }
}

/// The error of a join that not every rank came to; `when` says until when they were waited for.
fn missing_ranks(missing: &[u32], when: &str) -> Error {
    let names: Vec<_> = missing.iter().map(u32::to_string).collect();
    let message = format!("rank {} did not join {when}", names.join(", "));
    let error = Error::new(ErrorKind::Timeout, message)
        .with_help("start every rank, with the same address and world size");
    match missing {
        [one, ..] => error.with_peer(*one as Rank),
        [] => error,
    }
}
