//! A rank's membership in a job, from joining to leaving.

use super::abort_handle::AbortHandle;
use super::client::Client;
use super::config::{JoinConfig, Rendezvous};
use super::connection;
use super::group::{Group, sort_members};
use super::group_name::GroupName;
use super::handshake::Identity;
use super::health::Health;
use super::heartbeat::Heartbeat;
use super::message::{GroupDeclaration, MAX_WORLD, StoreEntry, wire_ranks};
use super::secret::Secret;
use super::server::{Server, Settings};
use super::socket;
use super::store::{Store, Wait};
use crate::deadline::Deadline;
use crate::debug::debug_fields;
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::named::comma;
use crate::sync::lock;
use std::collections::HashMap;
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// How long an abort waits for the store, and a failed join for its leave.
const DROP_TIMEOUT: Duration = Duration::from_secs(1);

/// The shortest heartbeat limit. With a shorter one, a rank that the system schedules late would count as stopped.
pub(super) const MIN_HEARTBEAT_LIMIT: Duration = Duration::from_millis(100);

/// How long a rank of the process that made a unique id waits for rank 0 to join in the same process,
/// before it serves in its place.
const RANK_0_TIMEOUT: Duration = Duration::from_millis(500);

/// How long rank 0 waits for the port of a unique id that is in use although nobody listens there.
const PORT_TIMEOUT: Duration = Duration::from_secs(5);

/// A rank's membership in its job: the store, collectives of bytes, and the state of the other ranks.
///
/// One rank serves the store for all: rank 0, or a rank of the process that created the unique id. If it is
/// lost, the remaining rank with the lowest number takes over; calls that depend on the lost rank end with
/// an error that names it, and the others go on. All methods may be called from any thread.
pub struct Bootstrap {
    rank: Rank,
    world: usize,
    local_rank: usize,
    secret: Secret,
    client: Arc<Client>,
    store: Store,
    everyone: Arc<Group>,
    /// How many groups of the same members were created.
    groups: Mutex<HashMap<Vec<u32>, u64>>,
    server: Arc<Server>,
    heartbeat: Heartbeat,
    /// Set by the first close or abort.
    ending: OnceLock<Ending>,
    /// Held while the membership ends, for which a second close waits.
    end: Mutex<()>,
}

/// How a membership ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Close,
    Abort,
}

impl Bootstrap {
    /// Joins the job, and returns once every rank has.
    ///
    /// Rank 0 starts to serve the store, or a rank of the process that created the unique id and still holds
    /// its port; the others try to connect until they reach it. Blocks for at most [`JoinConfig::timeout`],
    /// plus about a second.
    ///
    /// # Errors
    /// - [`ErrorKind::InvalidArgument`]: the rank is not below the world size.
    /// - [`ErrorKind::AddressInUse`]: on rank 0, another process listens at the address, which is not that
    ///   of a unique id; or the port of a unique id is in use although nobody listens there.
    /// - [`ErrorKind::Mismatch`]: the world size differs from rank 0's, another process has this rank,
    ///   or the versions of the protocol differ.
    /// - [`ErrorKind::Authentication`]: this process and the store do not hold the same secret.
    /// - [`ErrorKind::PeerLost`]: a rank that had joined died meanwhile.
    /// - [`ErrorKind::Timeout`]: at the deadline; it names the ranks that had not joined, or rank
    ///   0's address when that could not be reached. As every rank is needed, all fail once the
    ///   first gives up.
    pub fn join(config: &JoinConfig) -> Result<Arc<Self>> {
        Self::join_with(config, &AbortHandle::default())
    }

    /// As [`Bootstrap::join`], until it is aborted.
    pub(crate) fn join_with(config: &JoinConfig, abort: &AbortHandle) -> Result<Arc<Self>> {
        Self::enter(config, abort).map_err(|error| {
            let error = error.with_rank(config.rank);
            error.with_operation("join")
        })
    }

    fn enter(config: &JoinConfig, abort: &AbortHandle) -> Result<Arc<Self>> {
        let &JoinConfig { rank, world, .. } = config;
        if world == 0 || world > MAX_WORLD || rank >= world {
            return Err(Error::invalid(format!(
                "rank {rank} of {world} is out of range; expected a world of 1 to {MAX_WORLD} ranks, numbered from 0"
            )));
        }
        if config.heartbeat_limit < MIN_HEARTBEAT_LIMIT {
            return Err(Error::invalid(format!(
                "the heartbeat limit is {:?}; expected at least {MIN_HEARTBEAT_LIMIT:?}",
                config.heartbeat_limit
            )));
        }
        let deadline = Deadline::after(config.timeout);
        let identity = Identity {
            rank,
            world,
            secret: config.key()?,
            heartbeat: config.heartbeat,
            heartbeat_limit: config.heartbeat_limit,
        };
        let health = Health::start()?;
        let start = |listener, serves| {
            let settings = Settings {
                identity: identity.clone(),
                store_limit: config.store_limit,
                health: health.clone(),
            };
            Server::start(listener, serves, settings).map(Arc::new)
        };
        let address = config.rendezvous.address();
        // A rank that does not serve at first starts its server only once it is connected: the connection's local address
        // is one at which the others reach it.
        let own = OnceLock::new();
        let target = match listener_of_job(config)? {
            Some(listener) => {
                let bound = listener.local_addr();
                let bound = bound.map_err(|error| Error::io("get the store's address", &error))?;
                let _ = own.set(start(listener, true)?);
                socket::local_target(bound)
            }
            None => address,
        };
        let entry = |stream: &TcpStream| {
            if own.get().is_none() {
                let reached = stream.local_addr();
                let ip = reached
                    .map_err(|error| Error::io("get an address", &error))?
                    .ip();
                let _ = own.set(start(socket::listen_on_any_port(ip)?, false)?);
            }
            let standby = own.get().filter(|server| !server.serves());
            let standby = standby.map(|server| server.address()).transpose()?;
            Ok(StoreEntry::Join { standby })
        };
        let joined = connection::join(target, &identity, (deadline, abort), &entry);
        let link =
            joined.inspect_err(|_| own.get().into_iter().for_each(|server| server.stop()))?;
        let session = link.session;
        let key = identity.secret.clone();
        let server = own
            .into_inner()
            .ok_or_else(|| Error::internal("a rank joined without starting its server"))?;
        let client =
            Client::start(identity, health, server.clone(), link).inspect_err(|_| server.stop())?;
        let heartbeat = Heartbeat::start(client.clone(), server.clone(), config.heartbeat_limit)
            .inspect_err(|_| {
                client.close();
                server.stop();
            })?;
        if let Err(error) = client.wait_until_ready(deadline, abort) {
            let soon = Deadline::after(DROP_TIMEOUT);
            let left = match abort.reason() {
                Some(reason) => client.abort(&aborted(&reason), soon),
                None => {
                    server.stop_waiting();
                    // Giving up is no loss: this rank leaves in order, and so will the others.
                    client.leave(soon)
                }
            };
            if let Err(error) = left {
                tracing::debug!(%error, "the end of a join could not be reported");
            }
            heartbeat.stop();
            client.close();
            server.stop();
            return Err(error);
        }
        let store = Store::new(client.clone(), config.timeout);
        let all: Vec<Rank> = (0..world).collect();
        let sorted = sort_members(&all, rank, world)?;
        let everyone = Arc::new(Group::new(client.clone(), rank, all, sorted.clone(), 0));
        Ok(Arc::new(Self {
            rank,
            world,
            local_rank: config.local_rank,
            secret: Secret::from_bytes(key.proof("warplink session", &[&session])?),
            client,
            store,
            everyone,
            groups: Mutex::new(HashMap::from([(sorted, 1)])),
            server,
            heartbeat,
            ending: OnceLock::new(),
            end: Mutex::default(),
        }))
    }

    /// This process's rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// How many ranks there are.
    pub fn world(&self) -> usize {
        self.world
    }

    /// This process's number among those on its machine.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// A key that the members of this job share, for other proofs among them. It is derived from the
    /// key that they joined with and a random number, so two jobs never have the same; it is secret if
    /// the key is.
    pub fn secret(&self) -> &Secret {
        &self.secret
    }

    /// The key-value store.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The state of the other ranks.
    pub fn health(&self) -> &Health {
        self.client.health()
    }

    /// Sends `bytes` to every rank and returns the bytes of each, by rank. See [`Group::all_gather`].
    ///
    /// # Errors
    /// As [`Group::all_gather`].
    pub fn all_gather(&self, bytes: &[u8], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        self.everyone.all_gather(bytes, deadline)
    }

    /// Blocks until every rank has called it. See [`Group::barrier`].
    ///
    /// # Errors
    /// As [`Group::all_gather`].
    pub fn barrier(&self, deadline: Deadline) -> Result<()> {
        self.everyone.barrier(deadline)
    }

    /// A group of some of the ranks, this one among them. Does not communicate.
    ///
    /// Every member calls this. Members may list the ranks in different orders; if several groups of the
    /// same members are created, the first on one rank is the first on all.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] when a rank is out of range or listed twice, or when this
    /// rank is not listed.
    pub fn group(&self, members: &[Rank]) -> Result<Group> {
        let sorted = sort_members(members, self.rank, self.world)?;
        let mut groups = lock(&self.groups);
        let count = groups.entry(sorted.clone()).or_default();
        let instance = *count;
        *count += 1;
        Ok(Group::new(
            self.client.clone(),
            self.rank,
            members.to_vec(),
            sorted,
            instance,
        ))
    }

    /// The group of all ranks.
    pub(crate) fn everyone(&self) -> &Arc<Group> {
        &self.everyone
    }

    /// A group of some of the ranks, in the order given, which has the same `name` on all of them.
    pub(crate) fn named_group(&self, members: &[Rank], name: GroupName) -> Result<Group> {
        let sorted = sort_members(members, self.rank, self.world)?;
        let group = Group::new(self.client.clone(), self.rank, members.to_vec(), sorted, 0);
        Ok(group.named(name))
    }

    /// Declares the group `name` of `members` of `parent` to the store, which compares it with the declarations of others.
    /// `numbers` are the counts of groups that this rank created before with each member. Does not block.
    pub(crate) fn declare_group(
        &self,
        parent: GroupName,
        name: GroupName,
        members: &[Rank],
        numbers: Vec<u64>,
    ) -> Result<()> {
        self.client.declare(GroupDeclaration {
            parent: parent.to_bytes(),
            name: name.to_bytes(),
            members: wire_ranks(members)?,
            numbers,
        });
        Ok(())
    }

    /// Reports to the members of `group` that this rank can do no more work in it, for `reason`. Blocks until the store has
    /// passed it on, or the deadline.
    pub(crate) fn fail_group(&self, group: &Group, reason: &str, deadline: Deadline) -> Result<()> {
        let members = wire_ranks(group.members())?;
        self.client
            .fail_group(group.name(), members, reason, false, deadline)
    }

    /// Confirms to the others that this rank knows that the group `name` failed. Blocks until the store has the confirmation,
    /// or the deadline; it is sent in any case.
    pub(crate) fn confirm_failure(&self, name: GroupName, deadline: Deadline) -> Result<()> {
        let confirmed = [(confirmation(name, self.rank), Vec::new())];
        self.store.multi_set_until(&confirmed, deadline)
    }

    /// Waits until every present member of `group` has confirmed that it failed, or the deadline. Returns whether all have.
    pub(crate) fn wait_for_confirmations(&self, group: &Group, deadline: Deadline) -> bool {
        let mut all = true;
        for &member in group.members() {
            let key = confirmation(group.name(), member);
            // A member that is gone need not confirm; one that is stopped runs into the deadline.
            let confirmed = self.store.wait(&[key], &Wait::on([member], deadline));
            if let Err(error) = confirmed {
                tracing::debug!(%error, member, "a rank may not know of a failure yet");
                all &= error.kind() != ErrorKind::Timeout;
            }
        }
        all
    }

    /// Leaves in order, which the others do not treat as a loss.
    ///
    /// The rank that serves the store continues until all others have left or were lost, or the deadline
    /// passes; then another one takes over. Calls in flight on this rank end with [`ErrorKind::Closed`],
    /// as do later ones. Closing again does nothing.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] naming the ranks that still remain, on the rank that serves the store;
    /// [`ErrorKind::GivenUp`] where the others went on without this rank; [`ErrorKind::Closed`] where it was
    /// [aborted](Self::abort) meanwhile. It has left all the same.
    pub fn close(&self, deadline: Deadline) -> Result<()> {
        let _end = lock(&self.end);
        if self.ending.set(Ending::Close).is_err() {
            return Ok(());
        }
        let mut result = self
            .client
            .leave(deadline)
            .or_else(|error| match error.kind() {
                // The rank that serves may be gone by the time the others leave.
                ErrorKind::PeerLeft => Ok(()),
                _ => Err(error),
            });
        let notifier = self.disconnect();
        // The heartbeat still runs: without it, members that have not left yet would give up this rank as silent.
        if self.server.serves() {
            let remaining = self.server.wait_until_empty(deadline);
            if let [first, ..] = remaining[..] {
                let awaited = format!("rank {} to leave", comma(&remaining));
                let error = if deadline.passed() {
                    deadline.expired(&awaited)
                } else {
                    Error::closed(format!("it was aborted while it waited for {awaited}"))
                };
                result = result.and(Err(error.with_peer(first)));
            }
        }
        self.heartbeat.stop();
        self.server.stop();
        finish(notifier, deadline);
        result.map_err(|error| error.with_rank(self.rank).with_operation("leave"))
    }

    /// Ends this rank's membership as a failure: for the others it is lost, and `reason` is in their
    /// errors, as in "rank 1 was lost: REASON". At most 4,096 bytes of it are sent.
    ///
    /// Calls in flight on this rank end with [`ErrorKind::Closed`], as do later ones. Blocks for about
    /// two seconds at most. During [`Bootstrap::close`] it ends that, without a reason for the others where this rank has
    /// left already; after that or an earlier abort, it does nothing. Dropping a member that was not closed aborts it.
    pub fn abort(&self, reason: &str) {
        if self.ending.set(Ending::Abort).is_err() {
            // A close in progress may wait for the store or for other ranks, and ends now. Another abort sends its reason.
            if self.ending.get() == Some(&Ending::Close) {
                self.client.close();
                self.server.shut_down();
            }
            return;
        }
        let _end = lock(&self.end);
        let deadline = Deadline::after(DROP_TIMEOUT);
        tracing::debug!(rank = self.rank, reason, "aborting");
        if let Err(error) = self.client.abort(reason, deadline) {
            // The others notice the end of the connection, without the reason.
            tracing::debug!(%error, "could not send the reason of an abort");
        }
        let notifier = self.disconnect();
        self.heartbeat.stop();
        self.server.stop();
        finish(notifier, deadline);
    }

    /// Whether this rank has closed its membership or aborted it, or is about to. Does not block.
    pub fn is_closed(&self) -> bool {
        self.ending.get().is_some()
    }

    fn disconnect(&self) -> Option<JoinHandle<()>> {
        let notifier = self.client.health().close();
        // Before the server stops, or the client's reader would take that for a loss and look for the next store.
        self.client.close();
        notifier
    }
}

/// The reason of a loss by an abort for `reason`.
pub(crate) fn aborted(reason: &str) -> String {
    format!("it aborted: {reason}")
}

/// The key by which `rank` confirms that it knows of the failure of the group `name`.
fn confirmation(name: GroupName, rank: Rank) -> String {
    name.child("failed", &[], 0).key(&rank.to_string())
}

/// The listener at the job's address, if this rank serves the store at first: rank 0, or a rank of the process that holds
/// the port for a unique id.
fn listener_of_job(config: &JoinConfig) -> Result<Option<TcpListener>> {
    let address = config.rendezvous.address();
    if config.rank != 0 {
        let deadline = Deadline::after(RANK_0_TIMEOUT);
        while socket::is_reserved(address) && !deadline.passed() {
            thread::sleep(Duration::from_millis(5));
        }
        return Ok(socket::take_reserved(address));
    }
    let deadline = Deadline::after(PORT_TIMEOUT.min(config.timeout));
    loop {
        match socket::listen(address) {
            Ok(listener) => return Ok(Some(listener)),
            Err(error)
                if error.kind() == ErrorKind::AddressInUse
                    && matches!(config.rendezvous, Rendezvous::Id(_)) =>
            {
                // The process that created the id serves the store.
                if socket::connect(address, deadline.remaining()).is_ok() {
                    return Ok(None);
                }
                // A connection may have the port as its local one for a moment, or its holder is just closing.
                if deadline.passed() {
                    return Err(error);
                }
                thread::sleep(Duration::from_millis(5));
            }
            Err(error) => return Err(error),
        }
    }
}

/// Waits for the thread that calls callbacks, but not from within a callback, which may close the membership, and not beyond
/// the deadline, since a callback may hang.
fn finish(notifier: Option<JoinHandle<()>>, deadline: Deadline) {
    let Some(notifier) = notifier else { return };
    while !notifier.is_finished()
        && notifier.thread().id() != thread::current().id()
        && !deadline.passed()
    {
        thread::sleep(Duration::from_millis(1));
    }
}

/// A member that is dropped without [`Bootstrap::close`] has failed, and the others must not wait for it.
impl Drop for Bootstrap {
    fn drop(&mut self) {
        self.abort(if thread::panicking() {
            "it panicked"
        } else {
            "it left the job without closing it"
        });
    }
}

debug_fields!(Bootstrap, |it| rank: it.rank, world: it.world, health: it.health());
