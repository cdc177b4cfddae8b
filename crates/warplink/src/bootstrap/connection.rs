//! A member's connection to the store: connecting, and the handshake.

use super::handshake;
use super::message::Entry;
use super::outbox::Outbox;
use super::pulse::Pulse;
use super::seal::Opener;
use super::secret::Secret;
use super::socket::{self, DeadlineStream};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Rank, Result};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// The longest that one attempt to connect takes.
const MAX_ATTEMPT: Duration = Duration::from_secs(5);

/// Who connects, and as what.
#[derive(Clone)]
pub(crate) struct Identity {
    pub(crate) rank: Rank,
    pub(crate) world: usize,
    pub(crate) secret: Secret,
    pub(crate) heartbeat: Duration,
    pub(crate) heartbeat_limit: Duration,
}

/// A connection that the store has admitted.
pub(crate) struct Link {
    pub(crate) stream: Arc<TcpStream>,
    pub(crate) outbox: Arc<Outbox>,
    pub(crate) opener: Opener,
    pub(crate) pulse: Arc<Pulse>,
    /// What identifies the job.
    pub(crate) session: [u8; 32],
    /// The rank that serves.
    pub(crate) serving: Rank,
}

/// Joins at `address`, trying again until the deadline while nobody answers. `entry` says what this
/// rank comes for, given the connection.
pub(crate) fn join(
    address: SocketAddr,
    identity: &Identity,
    deadline: Deadline,
    entry: &dyn Fn(&TcpStream) -> Result<Entry>,
) -> Result<Link> {
    let mut pause = Duration::from_millis(5);
    loop {
        let limit = deadline.remaining().min(MAX_ATTEMPT);
        // Rank 0 may have the port but not have begun to serve, so the whole time is allowed.
        let error = match connect(address, identity, limit, [deadline; 2], entry) {
            Ok(link) => return Ok(link),
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
    }
}

/// One attempt: connects within `limit`, proves itself until the first deadline, and is admitted
/// until the second.
pub(crate) fn connect(
    address: SocketAddr,
    identity: &Identity,
    limit: Duration,
    [proved, admitted]: [Deadline; 2],
    entry: &dyn Fn(&TcpStream) -> Result<Entry>,
) -> Result<Link> {
    let failed = |error| Error::io("connect", &error);
    let stream = socket::connect(address, limit).map_err(failed)?;
    socket::set_options(&stream, identity.heartbeat, identity.heartbeat_limit).map_err(failed)?;
    let entry = entry(&stream)?;
    let mut timed = DeadlineStream::new(&stream, proved);
    let mut seals = handshake::join(
        &mut timed,
        &identity.secret,
        identity.rank,
        identity.world,
        &entry,
    )?;
    let mut timed = DeadlineStream::new(&stream, admitted);
    let (session, serving) = handshake::welcomed(&mut timed, &mut seals)?;
    timed.finish().map_err(failed)?;
    let stream = Arc::new(stream);
    Ok(Link {
        outbox: Outbox::new(stream.clone(), seals.sealer),
        stream,
        opener: seals.opener,
        pulse: Pulse::new(),
        session,
        serving,
    })
}

/// Whether the process of a rank answers at `address` until the deadline, as it does at once where it runs.
pub(crate) fn probe(address: SocketAddr, identity: &Identity, deadline: Deadline) -> Result<()> {
    let stream = socket::connect(address, deadline.remaining())
        .map_err(|error| Error::io("connect", &error))?;
    let mut timed = DeadlineStream::new(&stream, deadline);
    handshake::probe(&mut timed, &identity.secret, identity.rank, identity.world)
}
