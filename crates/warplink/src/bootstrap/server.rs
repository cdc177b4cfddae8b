//! The store's server, which runs in the process of rank 0.

use super::frame;
use super::handshake;
use super::message::{self, MAX_WORLD, Refusal, RefusalKind, Request};
use super::outbox::Outbox;
use super::outgoing::Outgoing;
use super::seal::Opener;
use super::secret::{Secret, random_bytes};
use super::socket::{self, DeadlineStream};
use super::table::Table;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::sync::lock;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::collections::{BTreeMap, HashMap};
use std::io::BufReader;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long a connection may take over the handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a connection in its handshake is safe from being dropped for a new one; a member needs a
/// few milliseconds.
const MIN_PATIENCE: Duration = Duration::from_millis(100);
/// The most connections that may be in a handshake at a time, where the process may have many
/// descriptors.
const MAX_UNAUTHENTICATED: usize = 64;
/// How long the server rests when the process is out of descriptors.
const DESCRIPTOR_PAUSE: Duration = Duration::from_millis(20);

/// What the server needs to know.
pub(crate) struct Settings {
    pub(crate) address: SocketAddr,
    pub(crate) world: usize,
    pub(crate) secret: Secret,
    pub(crate) heartbeat: Duration,
    pub(crate) store_limit: usize,
}

/// A running server.
pub(crate) struct Server {
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

struct Shared {
    listener: TcpListener,
    settings: Settings,
    session: [u8; 32],
    state: Mutex<State>,
    /// The most connections that may be in a handshake at a time.
    max_unauthenticated: usize,
    /// Signalled when a member joins or goes, and when a handshake ends.
    changed: Condvar,
}

struct State {
    table: Table,
    outboxes: HashMap<u32, Arc<Outbox>>,
    /// Every open connection by a number of its own, so that closing can end them all.
    streams: HashMap<u64, Arc<TcpStream>>,
    threads: HashMap<u64, JoinHandle<()>>,
    /// Connections whose threads are about to end.
    finished: Vec<u64>,
    /// Connections in their handshake, the oldest first, and since when; without those that were
    /// dropped for others.
    unauthenticated: BTreeMap<u64, Instant>,
    /// How many threads are in a handshake.
    handshakes: usize,
    next: u64,
    closing: bool,
}

impl Server {
    /// Listens and starts to accept members.
    ///
    /// # Errors
    /// [`ErrorKind::AddressInUse`] and other failures to listen.
    pub(crate) fn start(settings: Settings) -> Result<Self> {
        if settings.world == 0 || settings.world > MAX_WORLD {
            return Err(Error::invalid(format!(
                "a world of {} ranks is out of range; expected 1 to {MAX_WORLD}",
                settings.world
            )));
        }
        let listener = socket::listen(settings.address)?;
        let table = Table::new(settings.world, settings.store_limit);
        let shared = Arc::new(Shared {
            listener,
            session: random_bytes()?,
            settings,
            state: Mutex::new(State {
                table,
                outboxes: HashMap::new(),
                streams: HashMap::new(),
                threads: HashMap::new(),
                finished: Vec::new(),
                unauthenticated: BTreeMap::new(),
                handshakes: 0,
                next: 0,
                closing: false,
            }),
            max_unauthenticated: max_unauthenticated(),
            changed: Condvar::new(),
        });
        let accepting = {
            let shared = shared.clone();
            spawn("warplink-accept", move || shared.accept_all())?
        };
        Ok(Self {
            shared,
            accepting: Some(accepting),
        })
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> Result<SocketAddr> {
        self.shared
            .listener
            .local_addr()
            .map_err(|error| Error::io("get the store's address", &error))
    }

    /// Tells the members that nobody waits any more for the ranks that are missing.
    pub(crate) fn abandon(&self) {
        let mut state = lock(&self.shared.state);
        state.table.abandon();
        self.shared.deliver(state);
    }

    /// Waits until every member has left or was lost and its connection is closed; returns those
    /// that still remain at the deadline.
    pub(crate) fn wait_until_empty(&self, deadline: Deadline) -> Vec<Rank> {
        let mut state = lock(&self.shared.state);
        loop {
            let present = state.table.present();
            let left = deadline.remaining();
            // A member that left closes its connection once it has read the answer to its goodbye.
            if state.outboxes.is_empty() || left.is_zero() {
                return present.into_iter().map(|rank| rank as Rank).collect();
            }
            state = self
                .shared
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Closes every connection and the listener, and waits for all threads to end.
    fn stop(&mut self) {
        let Some(accepting) = self.accepting.take() else {
            return;
        };
        let outboxes: Vec<_> = {
            let mut state = lock(&self.shared.state);
            state.closing = true;
            for stream in state.streams.values() {
                let _ = stream.shutdown(Shutdown::Both);
            }
            state.outboxes.values().cloned().collect()
        };
        self.shared.changed.notify_all();
        // On Linux this ends the accept() that is under way.
        let _ = rustix::net::shutdown(&self.shared.listener, rustix::net::Shutdown::Both);
        let _ = accepting.join();
        for outbox in outboxes {
            outbox.close();
        }
        // No connection is added once `closing` is set.
        let threads: Vec<_> = lock(&self.shared.state).threads.drain().collect();
        for (_, thread) in threads {
            let _ = thread.join();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn accept_all(self: Arc<Self>) {
        let mut warned: Option<Instant> = None;
        loop {
            self.make_room();
            let accepted = self.listener.accept();
            if lock(&self.state).closing {
                return;
            }
            let error = match accepted {
                Ok((stream, _)) => {
                    self.clone().admit(stream);
                    continue;
                }
                Err(error) => error,
            };
            let errno = error.raw_os_error().map(Errno::from_raw_os_error);
            if errno == Some(Errno::MFILE) || errno == Some(Errno::NFILE) {
                // Once in a while: this may happen as often as anybody connects.
                if warned.is_none_or(|at| at.elapsed() > Duration::from_secs(10)) {
                    warned = Some(Instant::now());
                    tracing::warn!(
                        limit = getrlimit(Resource::Nofile).current,
                        "the process has no file descriptor left to let a rank join; \
                         raise the limit with ulimit -n, or close files"
                    );
                }
                self.drop_unauthenticated(&mut lock(&self.state), usize::MAX, Duration::ZERO);
            } else {
                tracing::warn!(%error, "could not accept a connection");
            }
            // It may pass, and must not turn into a busy loop.
            thread::sleep(DESCRIPTOR_PAUSE);
        }
    }

    /// Blocks until another connection may begin its handshake; drops the oldest that takes too
    /// long over its own.
    fn make_room(&self) {
        let mut state = lock(&self.state);
        while !state.closing && state.handshakes >= self.max_unauthenticated {
            self.drop_unauthenticated(&mut state, 1, MIN_PATIENCE);
            state = self
                .changed
                .wait_timeout(state, DESCRIPTOR_PAUSE)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Drops up to `count` connections whose handshakes are at least as old as `age`.
    fn drop_unauthenticated(&self, state: &mut State, count: usize, age: Duration) {
        for _ in 0..count {
            match state.unauthenticated.first_key_value() {
                Some((&id, since)) if since.elapsed() >= age => {
                    state.unauthenticated.remove(&id);
                    if let Some(stream) = state.streams.get(&id) {
                        // Its thread finds the connection closed, and ends.
                        let _ = stream.shutdown(Shutdown::Both);
                    }
                }
                _ => return,
            }
        }
    }

    /// Gives a new connection a thread.
    fn admit(self: Arc<Self>, stream: TcpStream) {
        let stream = Arc::new(stream);
        let mut state = lock(&self.state);
        for id in std::mem::take(&mut state.finished) {
            if let Some(thread) = state.threads.remove(&id) {
                // It has nothing left to do but to end.
                let _ = thread.join();
            }
        }
        if state.closing {
            return;
        }
        let id = state.next;
        let (shared, own) = (self.clone(), stream.clone());
        match spawn("warplink-store", move || shared.serve(id, own)) {
            Ok(thread) => {
                state.next += 1;
                state.handshakes += 1;
                state.unauthenticated.insert(id, Instant::now());
                state.streams.insert(id, stream);
                state.threads.insert(id, thread);
            }
            Err(error) => tracing::warn!(%error, "could not serve a connection"),
        }
    }

    /// A connection from its first byte to its last.
    fn serve(&self, id: u64, stream: Arc<TcpStream>) {
        let member = self.greet(id, &stream);
        {
            let mut state = lock(&self.state);
            state.handshakes -= 1;
            state.unauthenticated.remove(&id);
        }
        self.changed.notify_all();
        match member {
            Ok((rank, outbox, opener)) => {
                let reason = self.attend(rank, &stream, opener);
                outbox.close();
                let mut state = lock(&self.state);
                if !state.closing {
                    // Without effect on one that left in order.
                    state.table.lose(rank, &reason);
                }
                state.outboxes.remove(&rank);
                self.deliver(state);
                self.changed.notify_all();
            }
            Err(error) => tracing::info!(%error, "a connection was refused"),
        }
        let mut state = lock(&self.state);
        state.streams.remove(&id);
        state.finished.push(id);
    }

    /// The handshake, and the admission of the rank.
    fn greet(&self, id: u64, stream: &Arc<TcpStream>) -> Result<(u32, Arc<Outbox>, Opener)> {
        socket::set_options(stream, self.settings.heartbeat)
            .map_err(|error| Error::io("set socket options", &error))?;
        let mut timed = DeadlineStream::new(stream, Deadline::after(HANDSHAKE_TIMEOUT));
        let claim = handshake::accept(&mut timed, &self.settings.secret)?;
        let outbox = Outbox::new(stream.clone(), claim.seals.sealer);
        match self.enter(id, claim.rank, claim.world, &outbox) {
            Ok(rank) => {
                timed
                    .finish()
                    .map_err(|error| Error::io("set socket options", &error))?;
                self.changed.notify_all();
                Ok((rank, outbox, claim.seals.opener))
            }
            Err(refusal) => {
                outbox.push(0, &handshake::refusal(&refusal)?)?;
                Err(refusal.into_error())
            }
        }
    }

    fn enter(&self, id: u64, rank: u64, world: u64, outbox: &Arc<Outbox>) -> Result<u32, Refusal> {
        let expected = self.settings.world as u64;
        if world != expected {
            let message = format!(
                "rank {rank} was started for a world of {world} ranks, rank 0 for one of {expected}; expected the same"
            );
            return Err(Refusal::new(RefusalKind::Mismatch, message));
        }
        let rank = u32::try_from(rank).unwrap_or(u32::MAX);
        let welcome = handshake::welcome(self.session)
            .map_err(|error| Refusal::new(RefusalKind::Protocol, error.to_string()))?;
        let mut state = lock(&self.state);
        if state.unauthenticated.remove(&id).is_none() {
            let message = "the connection was dropped for another; expected a faster handshake";
            return Err(Refusal::new(RefusalKind::Protocol, message));
        }
        state.table.join(rank)?;
        // Under the lock, so that no event overtakes the welcome. Should it fail, the reader finds
        // the connection closed, and the rank is lost.
        let _ = outbox.push(0, &welcome);
        state.outboxes.insert(rank, outbox.clone());
        state.table.announce();
        self.deliver(state);
        Ok(rank)
    }

    /// Handles a member's requests; returns why its connection ended.
    fn attend(&self, rank: u32, stream: &TcpStream, mut opener: Opener) -> String {
        let mut reader = BufReader::with_capacity(16 << 10, stream);
        loop {
            let frame = match opener.read(&mut reader, frame::MAX_BODY) {
                Ok(Some(frame)) => frame,
                Ok(None) => return "its connection was closed".into(),
                Err(error) => return format!("its connection failed: {}", error.message()),
            };
            let request = match message::decode::<Request>(&frame.body) {
                Ok(request) => request,
                Err(error) => return format!("it broke the protocol: {}", error.message()),
            };
            let leaving = request == Request::Leave;
            let mut state = lock(&self.state);
            if state.closing {
                return "the store is closing".into();
            }
            state.table.handle(rank, frame.id, request);
            self.deliver(state);
            if leaving {
                self.changed.notify_all();
            }
        }
    }

    /// Sends what the table wants sent, after releasing the lock: sending takes longer than any
    /// request.
    fn deliver(&self, mut state: MutexGuard<'_, State>) {
        let outgoing = state.table.take_outgoing();
        let mut addressed: Vec<(Arc<Outbox>, Outgoing)> = outgoing
            .into_iter()
            .filter_map(|frame| Some((state.outboxes.get(&frame.to)?.clone(), frame)))
            .collect();
        drop(state);
        // Rank 0 last: what it learns may end its process, and with it this store. The others are to
        // know by then why, or they would name rank 0 for what another's loss did.
        addressed.sort_by_key(|(_, frame)| frame.to == 0);
        for (outbox, frame) in addressed {
            // A connection that fails here is noticed by its reader.
            if let Err(error) = outbox.push(frame.id, &frame.body)
                && error.kind() != ErrorKind::Closed
            {
                tracing::warn!(rank = frame.to, %error, "could not send to a rank");
            }
        }
    }
}

/// Strangers get an eighth of the descriptors that this process may have.
fn max_unauthenticated() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(limit / 8)
        .unwrap_or(usize::MAX)
        .clamp(4, MAX_UNAUTHENTICATED)
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    thread::Builder::new()
        .name(name.into())
        .spawn(body)
        .map_err(|error| Error::io("start a thread", &error))
}
