//! The store's server.
//!
//! Every rank runs one, and one of them serves. The others are on standby: they authenticate ranks whose connection to the
//! store ended, and let them wait until they take over, should they have to.

mod accept;
mod departure;

use super::channel::Frame;
use super::connection::StoreConnection;
use super::handshake::{self, Claim, Identity};
use super::health::Health;
use super::message::{self, Refusal, RefusalKind, Request, StoreEntry};
use super::outbox::Outbox;
use super::outgoing::Outgoing;
use super::pulse::{Pulse, not_heard};
use super::secret::random_bytes;
use super::socket::{self, DeadlineStream};
use super::table::StoreTable;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::sync::{lock, wait_for};
use crate::threads;

use std::collections::{BTreeMap, HashMap};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a handshake may take. A member needs milliseconds; the rest allows for a loaded machine.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);

/// How often a connection that waits for this rank to serve checks whether it does.
const STANDBY_INTERVAL: Duration = Duration::from_millis(20);

/// The configuration of a server.
pub(crate) struct Settings {
    /// The rank whose process this is. Its heartbeat limit is that of the members.
    pub(crate) identity: Identity,
    pub(crate) store_limit: usize,
    /// This rank's knowledge of the others.
    pub(crate) health: Health,
}

/// A running server.
pub(crate) struct Server {
    shared: Arc<ServerShared>,
    accepting: Mutex<Option<JoinHandle<()>>>,
}

struct ServerShared {
    listener: TcpListener,
    settings: Settings,
    state: Mutex<ServerState>,
    /// The most connections that may be in a handshake at a time.
    max_unauthenticated: usize,
    /// Signalled when a member joins or goes, and when a handshake ends.
    changed: Condvar,
}

struct ServerState {
    table: StoreTable,
    /// Identifies the job, once this rank serves it.
    session: Option<[u8; 32]>,
    /// When this rank took over from one that was lost.
    took_over: Option<Instant>,
    /// When the connection of a member last ended.
    departed: Option<Instant>,
    members: HashMap<u32, Member>,
    /// Every open connection by number, so that closing can end them all.
    streams: HashMap<u64, Arc<TcpStream>>,
    /// Connections in their handshake by number, thus the oldest first, with the time of its begin. Without those that were
    /// dropped to admit others.
    unauthenticated: BTreeMap<u64, Instant>,
    /// How many threads are in a handshake.
    handshakes: usize,
    /// The next number of a connection.
    next: u64,
    /// The thread that probes missing ranks, if one was started.
    probing: Option<JoinHandle<()>>,
    /// When the process began to lack what serving another connection takes, and when it did last.
    short: Option<(Instant, Instant)>,
    /// Whether a thread sends the table's messages.
    sending: bool,
    closing: bool,
}

/// The connection of a member.
struct Member {
    outbox: Arc<Outbox>,
    pulse: Arc<Pulse>,
}

impl Server {
    /// Starts to accept members on `listener`, as the server of a new job if it `serves`, else on standby.
    ///
    /// # Errors
    /// Those of the system.
    pub(crate) fn start(listener: TcpListener, serves: bool, settings: Settings) -> Result<Self> {
        let table = StoreTable::new(settings.identity.world, settings.store_limit);
        let shared = Arc::new(ServerShared {
            listener,
            settings,
            state: Mutex::new(ServerState {
                table,
                session: serves.then(random_bytes).transpose()?,
                took_over: None,
                departed: None,
                members: HashMap::new(),
                streams: HashMap::new(),
                unauthenticated: BTreeMap::new(),
                handshakes: 0,
                next: 0,
                probing: None,
                short: None,
                sending: false,
                closing: false,
            }),
            max_unauthenticated: accept::max_unauthenticated(),
            changed: Condvar::new(),
        });
        let accepting = {
            let shared = shared.clone();
            let accept = move || shared.accept_all();
            threads::spawn("warplink-accept", "start a thread", accept)?
        };
        Ok(Self {
            shared,
            accepting: Mutex::new(Some(accepting)),
        })
    }

    /// The address at which it listens.
    pub(crate) fn address(&self) -> Result<SocketAddr> {
        self.shared
            .listener
            .local_addr()
            .map_err(|error| Error::io("get the store's address", &error))
    }

    /// Whether this rank serves the store.
    pub(crate) fn serves(&self) -> bool {
        lock(&self.shared.state).session.is_some()
    }

    /// Begins to serve the job `session`, whose store was lost; `standby` are the addresses of its ranks.
    pub(crate) fn take_over(&self, session: [u8; 32], standby: Vec<Option<SocketAddr>>) {
        let shared = &self.shared;
        let (lost, left) = shared.settings.health.gone();
        let mut state = lock(&shared.state);
        if state.session.is_none() {
            tracing::info!(rank = shared.settings.identity.rank, "serving the store");
            let limit = shared.settings.store_limit;
            state.table = StoreTable::restoring(standby, limit, &lost, &left);
            state.took_over = Some(Instant::now());
            state.session = Some(session);
        }
        drop(state);
        shared.changed.notify_all();
    }

    /// Sends heartbeats to the members, and gives up those from which nothing came for `limit`. Time before `awake_since`
    /// does not count.
    pub(crate) fn beat(&self, limit: Duration, awake_since: Instant) {
        let shared = &self.shared;
        let mut state = lock(&shared.state);
        if state.session.is_none() || state.closing {
            return;
        }
        let silent = |member: &Member| member.pulse.silence(awake_since) > limit;
        let members = state.members.iter();
        let silent: Vec<(u32, Arc<Outbox>)> = members
            .filter(|(_, member)| silent(member))
            .map(|(&rank, member)| (rank, member.outbox.clone()))
            .collect();
        for (rank, _) in &silent {
            state.table.give_up(*rank, &not_heard(limit));
        }
        let mut missing = Vec::new();
        if state.table.is_restoring() {
            missing = state.table.missing();
            // All ranks notice the loss at about the same time, and connect at once. Half of the limit allows for delays.
            let late = |since: Instant| since.max(awake_since).elapsed() > limit / 2;
            if state.took_over.is_some_and(late) {
                let server = shared.settings.identity.rank;
                let reason = format!("it did not reach rank {server}, which serves the store now");
                for rank in std::mem::take(&mut missing) {
                    state.table.lose(rank, &reason);
                }
            }
        }
        state.table.beat();
        let standby = |&rank: &u32| Some((rank, state.table.standby(rank)?));
        let missing: Vec<(u32, SocketAddr)> = missing.iter().filter_map(standby).collect();
        shared.probe_missing(&mut state, missing);
        shared.deliver(state);
        // After the delivery, so that a rank that was merely stopped still reads that it was given up.
        for (_, outbox) in silent {
            outbox.shut_down();
        }
    }

    /// Announces to the members that nobody waits for missing ranks any more.
    pub(crate) fn stop_waiting(&self) {
        let mut state = lock(&self.shared.state);
        state.table.stop_waiting();
        self.shared.deliver(state);
    }

    /// Waits until every member has left or was lost and its connection is closed, or the server is shut down. Returns those
    /// that remain then or at the deadline.
    pub(crate) fn wait_until_empty(&self, deadline: Deadline) -> Vec<Rank> {
        let mut state = lock(&self.shared.state);
        loop {
            let present = state.table.present();
            let left = deadline.remaining();
            // A member that left closes its connection once it has read the answer to its leave.
            if state.members.is_empty() || state.closing || left.is_zero() {
                return present.into_iter().map(|rank| rank as Rank).collect();
            }
            state = wait_for(&self.shared.changed, state, left);
        }
    }

    /// Closes every connection and the listener. Its threads end soon.
    pub(crate) fn shut_down(&self) {
        let mut state = lock(&self.shared.state);
        state.closing = true;
        for stream in state.streams.values() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        drop(state);
        self.shared.changed.notify_all();
        // On Linux this ends an accept() in progress.
        let _ = rustix::net::shutdown(&self.shared.listener, rustix::net::Shutdown::Both);
    }

    /// Closes every connection and the listener, and waits for all threads to end.
    pub(crate) fn stop(&self) {
        // Idempotent: `Drop` calls it again after an explicit stop.
        let Some(accepting) = lock(&self.accepting).take() else {
            return;
        };
        self.shut_down();
        // This includes the threads that serve connections, none of which is added once `closing` is set.
        let _ = accepting.join();
        let probing = lock(&self.shared.state).probing.take();
        if let Some(probing) = probing {
            let _ = probing.join();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

impl ServerShared {
    /// Serves a connection until it ends.
    fn serve(&self, id: u64, stream: Arc<TcpStream>) {
        let claim = self.authenticate(&stream);
        let in_time = {
            let mut state = lock(&self.state);
            state.handshakes -= 1;
            // Its entry is gone if the connection was shut down to admit others; the handshake may still have just
            // succeeded.
            state.unauthenticated.remove(&id).is_some()
        };
        self.changed.notify_all();
        let member = match claim {
            Ok(_) if !in_time => Err(Error::new(
                ErrorKind::Timeout,
                "the connection was dropped for another; expected a faster handshake",
            )),
            Ok(claim) => self.admit_member(&stream, claim),
            Err(error) => Err(error),
        };
        match member {
            Ok((rank, mut connection)) => {
                let ended = connection.read_all(|frame| self.handle(rank, frame));
                connection.outbox.close();
                self.depart(rank, &format!("its connection {ended}"));
            }
            Err(error) => tracing::info!(%error, "a connection was refused"),
        }
        lock(&self.state).streams.remove(&id);
    }

    /// The handshake.
    fn authenticate(&self, stream: &TcpStream) -> Result<Claim> {
        let failed = |error| Error::io("set socket options", &error);
        let identity = &self.settings.identity;
        let (heartbeat, limit) = (identity.heartbeat, identity.heartbeat_limit);
        socket::set_options(stream, heartbeat, limit).map_err(failed)?;
        let mut timed = DeadlineStream::new(stream, Deadline::after(HANDSHAKE_TIMEOUT));
        let claim = handshake::accept(&mut timed, &identity.secret)?;
        timed.finish().map_err(failed)?;
        Ok(claim)
    }

    /// Admits a rank, or refuses it.
    fn admit_member(
        &self,
        stream: &Arc<TcpStream>,
        claim: Claim,
    ) -> Result<(u32, StoreConnection)> {
        let connection = StoreConnection::new(stream.clone(), claim.channel);
        match self.enter(claim.rank, claim.world, &claim.entry, &connection) {
            Ok(rank) => {
                self.changed.notify_all();
                Ok((rank, connection))
            }
            Err(refusal) => {
                let answered = connection.outbox.push(0, &handshake::refusal(&refusal)?);
                // Either number may be the wrong one, so no rank need wait for the others to come. The joiner has its answer
                // by now: this may end the store.
                if claim.world != self.settings.identity.world as u64 {
                    let joiner = u32::try_from(claim.rank).unwrap_or(u32::MAX);
                    let mut state = lock(&self.state);
                    state.table.abandon(refusal.clone().with_peer(joiner));
                    self.deliver(state);
                }
                answered.and(Err(refusal.into_error()))
            }
        }
    }

    fn enter(
        &self,
        rank: u64,
        world: u64,
        entry: &StoreEntry,
        connection: &StoreConnection,
    ) -> Result<u32, Refusal> {
        let (server, expected) = (self.settings.identity.rank, self.settings.identity.world);
        if world != expected as u64 {
            let message = format!(
                "rank {rank} was started for a world of {world} ranks, rank {server} for one of {expected}; expected the same"
            );
            return Err(Refusal::new(RefusalKind::Mismatch, message).with_peer(server as u32));
        }
        // A number that does not fit is out of range in every world, and is refused as such by the table.
        let rank = u32::try_from(rank).unwrap_or(u32::MAX);
        let mut state = match entry {
            StoreEntry::Join { .. } => lock(&self.state),
            StoreEntry::Resume { .. } => self.wait_until_serving(rank)?,
        };
        let Some(session) = state.session else {
            let message = format!(
                "rank {} does not serve the store",
                self.settings.identity.rank
            );
            return Err(Refusal::new(RefusalKind::Mismatch, message));
        };
        let welcome = handshake::welcome(session, self.settings.identity.rank)
            .map_err(|error| Refusal::new(RefusalKind::Protocol, error.to_string()))?;
        match entry {
            StoreEntry::Join { standby } => state.table.join(rank, *standby)?,
            StoreEntry::Resume {
                session: theirs, ..
            } if *theirs != session => {
                let message = format!("rank {rank} belongs to another job");
                return Err(Refusal::new(RefusalKind::Mismatch, message));
            }
            StoreEntry::Resume { lost, left, .. } => state.table.resume(rank, lost, left)?,
        }
        // Under the lock, so that no event precedes the welcome. If sending fails, the reader notices that the connection
        // is closed, and the rank is lost.
        let _ = connection.outbox.push(0, &welcome);
        let (outbox, pulse) = (connection.outbox.clone(), connection.pulse.clone());
        state.members.insert(rank, Member { outbox, pulse });
        state.table.announce();
        self.deliver(state);
        Ok(rank)
    }

    /// Lets a rank that lost its connection to the store wait until this rank serves it.
    fn wait_until_serving(&self, rank: u32) -> Result<MutexGuard<'_, ServerState>, Refusal> {
        let deadline = Deadline::after(self.settings.identity.heartbeat_limit);
        let mut state = lock(&self.state);
        loop {
            if let Some(reason) = self.settings.health.reason(rank as Rank) {
                return Err(Refusal::new(RefusalKind::GivenUp, reason));
            }
            if state.session.is_some() && !state.closing {
                return Ok(state);
            }
            if state.closing || deadline.passed() {
                let reason = "its connection to the store was cut, which others still reach";
                return Err(Refusal::new(RefusalKind::GivenUp, reason));
            }
            state = wait_for(&self.changed, state, STANDBY_INTERVAL);
        }
    }

    /// Handles a request of a member.
    fn handle(&self, rank: u32, frame: Frame) -> Result<()> {
        let request = message::decode::<Request>(&frame.body)?;
        let leaving = request == Request::Leave;
        let mut state = lock(&self.state);
        if state.closing {
            return Err(Error::closed("the store is closing"));
        }
        match request {
            // Its arrival was noted already.
            Request::Alive => return Ok(()),
            // A single member suffices: this rank ends its membership, and with that the store, which the others notice.
            Request::GiveUp { reason } => {
                let own = u32::try_from(self.settings.identity.rank).unwrap_or(u32::MAX);
                state.table.give_up(own, &reason);
            }
            request => state.table.handle(rank, frame.id, request),
        }
        self.deliver(state);
        // Wakes `wait_until_empty`, which waits for the members to go.
        if leaving {
            self.changed.notify_all();
        }
        Ok(())
    }

    /// Sends the table's messages without holding the lock, since sending takes longer than handling a request.
    ///
    /// One thread sends at a time, also what other threads' requests cause meanwhile. Otherwise a rank could learn of a
    /// loss before it learns of the one that caused it, and blame the wrong rank.
    fn deliver<'a>(&'a self, mut state: MutexGuard<'a, ServerState>) {
        if state.sending {
            return;
        }
        state.sending = true;
        loop {
            let outgoing = state.table.take_outgoing();
            if outgoing.is_empty() {
                state.sending = false;
                return;
            }
            let mut addressed: Vec<(Arc<Outbox>, Outgoing)> = outgoing
                .into_iter()
                // A rank without a connection has left or was lost since the message was queued.
                .filter_map(|frame| Some((state.members.get(&frame.to)?.outbox.clone(), frame)))
                .collect();
            drop(state);
            // This rank last: the message may end its process, and with it this store. The others must have the message
            // by then, or they would blame this rank for the effects of another loss.
            addressed.sort_by_key(|(_, frame)| frame.to as Rank == self.settings.identity.rank);
            for (outbox, frame) in addressed {
                // The reader of a connection that fails here notices it too, and knows whether the rank has left.
                if let Err(error) = outbox.push(frame.id, &frame.body)
                    && error.kind() != ErrorKind::Closed
                {
                    tracing::debug!(rank = frame.to, %error, "could not send to a rank");
                }
            }
            state = lock(&self.state);
        }
    }
}
