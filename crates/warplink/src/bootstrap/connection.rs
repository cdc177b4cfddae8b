//! A connection between a member and the store, and how a member makes one.

use super::abort_handle::AbortHandle;
use super::channel::{Channel, Frame, Opener};
use super::handshake::{self, Identity};
use super::message::StoreEntry;
use super::outbox::Outbox;
use super::pulse::{Heard, Pulse};
use super::socket::{self, DeadlineStream};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Rank, Result};
use std::io::BufReader;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Bytes read at a time. Most frames are much shorter, so that several are read at once.
const READ_BUFFER: usize = 16 << 10;

/// The longest that one attempt to connect takes, so that a lost packet does not use up the whole deadline.
const MAX_ATTEMPT: Duration = Duration::from_secs(5);

/// A connection between a member and the store, at either end of it.
pub(crate) struct StoreConnection {
    stream: Arc<TcpStream>,
    opener: Opener,
    pub(crate) outbox: Arc<Outbox>,
    /// When the other end was last heard.
    pub(crate) pulse: Arc<Pulse>,
}

impl StoreConnection {
    pub(crate) fn new(stream: Arc<TcpStream>, channel: Channel) -> Self {
        Self {
            outbox: Outbox::new(stream.clone(), channel.sealer),
            stream,
            opener: channel.opener,
            pulse: Pulse::new(),
        }
    }

    /// Passes each frame that arrives to `handle`, which ends the connection by an error. Blocks until the connection has
    /// ended, and returns how it did.
    pub(crate) fn read_all(&mut self, mut handle: impl FnMut(Frame) -> Result<()>) -> String {
        let heard = Heard::new(&*self.stream, self.pulse.clone());
        let mut reader = BufReader::with_capacity(READ_BUFFER, heard);
        loop {
            let read = self.opener.read(&mut reader);
            match read.and_then(|frame| frame.map(&mut handle).transpose()) {
                Ok(Some(())) => {}
                Ok(None) => return "was closed".to_owned(),
                Err(error) => return format!("failed: {}", error.message()),
            }
        }
    }
}

/// A connection that the store has admitted.
pub(crate) struct StoreLink {
    pub(crate) connection: StoreConnection,
    /// Identifies the job.
    pub(crate) session: [u8; 32],
    /// The rank that serves.
    pub(crate) serving: Rank,
}

/// Joins at `address`, retrying with backoff until the deadline or an abort while nobody answers. `entry` makes the
/// request, which may depend on the connection.
pub(crate) fn join(
    address: SocketAddr,
    identity: &Identity,
    (deadline, abort): (Deadline, &AbortHandle),
    entry: &dyn Fn(&TcpStream) -> Result<StoreEntry>,
) -> Result<StoreLink> {
    let failed = |error| Error::io("connect", &error);
    let begin = |stream: &TcpStream| {
        let stream_of_abort = stream.try_clone().map_err(failed)?;
        // This ends the handshake.
        abort.interrupt_with(move |_| drop(stream_of_abort.shutdown(Shutdown::Both)));
        entry(stream)
    };
    // Exponential backoff: ranks usually start within milliseconds of each other, but may come minutes apart.
    let mut pause = Duration::from_millis(5);
    loop {
        abort.check()?;
        let limit = deadline.remaining().min(MAX_ATTEMPT);
        // A process that holds the port may not have begun to serve, so the handshake may take all of the time.
        let error = match connect(address, identity, limit, [deadline; 2], &begin) {
            Ok(link) => return Ok(link),
            // Refused, reset or closed during the handshake: the store is not there yet, or was out of descriptors.
            Err(error) if error.kind() == ErrorKind::Io => error,
            // A single attempt has a shorter limit than the deadline.
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
        // The cap bounds how late a rank joins once the store is up, at four attempts per second and rank.
        pause = (pause * 2).min(Duration::from_millis(250));
    }
}

/// One attempt: connects within `limit`, authenticates until the first deadline, and is admitted until the second.
pub(crate) fn connect(
    address: SocketAddr,
    identity: &Identity,
    limit: Duration,
    [proved, admitted]: [Deadline; 2],
    entry: &dyn Fn(&TcpStream) -> Result<StoreEntry>,
) -> Result<StoreLink> {
    let failed = |error| Error::io("connect", &error);
    let stream = socket::connect(address, limit).map_err(failed)?;
    socket::set_options(&stream, identity.heartbeat, identity.heartbeat_limit).map_err(failed)?;
    let entry = entry(&stream)?;
    let mut timed = DeadlineStream::new(&stream, proved);
    let mut channel = handshake::join(&mut timed, identity, &entry)?;
    let mut timed = DeadlineStream::new(&stream, admitted);
    let (session, serving) = handshake::welcomed(&mut timed, &mut channel.opener)?;
    timed.finish().map_err(failed)?;
    Ok(StoreLink {
        connection: StoreConnection::new(Arc::new(stream), channel),
        session,
        serving,
    })
}

/// Whether the process of a rank answers at `address` until the deadline. One that runs answers at once.
pub(crate) fn probe(address: SocketAddr, identity: &Identity, deadline: Deadline) -> Result<()> {
    let stream = socket::connect(address, deadline.remaining())
        .map_err(|error| Error::io("connect", &error))?;
    let mut timed = DeadlineStream::new(&stream, deadline);
    handshake::probe(&mut timed, identity).map(drop)
}
