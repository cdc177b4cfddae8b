//! Opening a connection: both ends prove that they hold the job's secret, before either accepts anything else.
//!
//! ```text
//! joiner → store   hello: version, rank, world; then the first message of the channel's handshake
//! store  → joiner  the second message of that handshake, or a refusal in the clear
//! joiner → store   encrypted: why it connects
//! store  → joiner  encrypted: the session, or a refusal
//! ```
//!
//! The hello is the prologue of the channel's handshake (`channel.rs`), which authenticates it too. The first message alone
//! could be a replay, so the store admits a joiner only after its first encrypted frame. A refusal in the clear can be
//! forged by an attacker who can alter packets, and who could cut the connection as well.

use super::channel::{self, Channel, HANDSHAKE_MESSAGE, Opener, internal};
use super::message::{self, Bytes, Refusal, RefusalKind, StoreEntry};
use super::secret::Secret;
use crate::error::{Error, ErrorKind, Rank, Result};
use serde::{Deserialize, Serialize};
use snow::HandshakeState;
use std::io::{Read, Write};
use std::time::Duration;
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The version of the protocol between members and the store.
pub(crate) const VERSION: u32 = 8;
const MAGIC: [u8; 4] = *b"WPLK";

/// The beginning of the first frame. Its layout stays the same in every version, so that an error can name both versions.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct Hello {
    magic: [u8; 4],
    version: U32,
    rank: U64,
    world: U64,
}

#[derive(Serialize, Deserialize)]
enum HelloReply {
    /// The second message of the channel's handshake.
    Accepted(Bytes),
    /// Another version or another secret: the joiner could not read an encrypted refusal.
    Refused(Refusal),
}

#[derive(Serialize, Deserialize)]
enum JoinReply {
    Welcome { session: [u8; 32], serving: u32 },
    Refused(Refusal),
}

/// The process that connects.
#[derive(Clone)]
pub(crate) struct Identity {
    pub(crate) rank: Rank,
    pub(crate) world: usize,
    pub(crate) secret: Secret,
    pub(crate) heartbeat: Duration,
    pub(crate) heartbeat_limit: Duration,
}

/// The request of a joiner that has proved that it holds the secret.
pub(crate) struct Claim {
    pub(crate) rank: u64,
    pub(crate) world: u64,
    pub(crate) entry: StoreEntry,
    /// The store's end.
    pub(crate) channel: Channel,
}

/// Sends a record in the clear.
fn send(stream: &mut impl Write, record: &[u8]) -> Result<()> {
    let mut bytes = Vec::new();
    channel::push_record(&mut bytes, record);
    write(stream, &bytes)
}

fn write(stream: &mut impl Write, bytes: &[u8]) -> Result<()> {
    stream
        .write_all(bytes)
        .map_err(|error| Error::io("send a handshake", &error))
}

/// Receives a record in the clear.
fn receive(stream: &mut impl Read) -> Result<Vec<u8>> {
    channel::read_record(stream)?.ok_or_else(closed)
}

/// This end's next message of the channel's handshake.
fn next_message(handshake: &mut HandshakeState) -> Result<[u8; HANDSHAKE_MESSAGE]> {
    let mut message = [0; HANDSHAKE_MESSAGE];
    let written = handshake.write_message(&[], &mut message);
    written.map_err(internal)?;
    Ok(message)
}

/// Whether the sender of this message of the channel's handshake holds the secret.
fn is_authentic(handshake: &mut HandshakeState, message: &[u8]) -> bool {
    let mut payload = [0; HANDSHAKE_MESSAGE];
    handshake.read_message(message, &mut payload).is_ok()
}

/// The other end closed the connection.
fn closed() -> Error {
    Error::new(
        ErrorKind::Io,
        "the other side closed the connection during the handshake",
    )
}

/// The joiner's side, up to and including the reason why it connects. [`welcomed`] comes next.
///
/// # Errors
/// [`ErrorKind::Io`] when the connection ends, which is worth another attempt; the other kinds
/// are final.
pub(crate) fn join(
    stream: &mut (impl Read + Write),
    identity: &Identity,
    entry: &StoreEntry,
) -> Result<Channel> {
    let mut channel = probe(stream, identity)?;
    let entry = channel.sealer.seal(0, &message::encode(entry)?)?;
    write(stream, &entry)?;
    Ok(channel)
}

/// The joiner's side until the other end has proved that its process runs and holds the secret.
pub(crate) fn probe(stream: &mut (impl Read + Write), identity: &Identity) -> Result<Channel> {
    let hello = Hello {
        magic: MAGIC,
        version: VERSION.into(),
        rank: (identity.rank as u64).into(),
        world: (identity.world as u64).into(),
    };
    let mut handshake = channel::begin(&identity.secret, hello.as_bytes(), true)?;
    let message = next_message(&mut handshake)?;
    send(stream, &[hello.as_bytes(), &message].concat())?;
    match message::decode(&receive(stream)?)? {
        HelloReply::Accepted(answer) if is_authentic(&mut handshake, &answer.0) => {
            Channel::new(handshake)
        }
        HelloReply::Refused(refusal) if refusal.kind != RefusalKind::Authentication => {
            Err(refusal.into_error())
        }
        // Either end may be the one that finds it.
        HelloReply::Accepted(_) | HelloReply::Refused(_) => Err(Error::new(
            ErrorKind::Authentication,
            "the store at this address does not hold this rank's secret",
        )
        .with_help("give every rank the same unique id or WARPLINK_SECRET, and check that no other job uses this address")),
    }
}

/// The end of the joiner's side, once the store has admitted it: what identifies the session, and the
/// rank that serves.
///
/// # Errors
/// As [`join`].
pub(crate) fn welcomed(stream: &mut impl Read, opener: &mut Opener) -> Result<([u8; 32], Rank)> {
    let reply = opener.read(stream)?.ok_or_else(closed)?;
    match message::decode(&reply.body)? {
        JoinReply::Welcome { session, serving } => Ok((session, serving as Rank)),
        JoinReply::Refused(refusal) => Err(refusal.into_error()),
    }
}

/// The store's side, up to and including the joiner's first encrypted frame. The caller then sends an encrypted frame
/// with [`welcome`] or [`refusal`].
pub(crate) fn accept(stream: &mut (impl Read + Write), secret: &Secret) -> Result<Claim> {
    let bytes = receive(stream)?;
    let (hello, message) = match Hello::read_from_prefix(&bytes) {
        Ok((hello, message)) if hello.magic == MAGIC => (hello, message),
        _ => {
            return Err(Error::protocol(
                "the first frame is malformed; expected a join request",
            ));
        }
    };
    let mut refuse = |refusal: Refusal| {
        let reply = HelloReply::Refused(refusal.clone());
        send(stream, &message::encode(&reply)?)?;
        Err(refusal.into_error())
    };
    // Before the secret: another version may have another handshake, which would look like a wrong secret.
    if hello.version.get() != VERSION {
        let message = format!(
            "the store uses version {VERSION} of the protocol, rank {} uses version {}; expected the same",
            hello.rank, hello.version
        );
        return refuse(Refusal::new(RefusalKind::Mismatch, message));
    }
    let mut handshake = channel::begin(secret, hello.as_bytes(), false)?;
    if !is_authentic(&mut handshake, message) {
        let message = "the joining rank does not hold the store's secret";
        return refuse(Refusal::new(RefusalKind::Authentication, message));
    }
    let answer = HelloReply::Accepted(next_message(&mut handshake)?[..].into());
    send(stream, &message::encode(&answer)?)?;
    let mut channel = Channel::new(handshake)?;
    let entry = channel.opener.read(stream)?.ok_or_else(closed)?;
    Ok(Claim {
        rank: hello.rank.get(),
        world: hello.world.get(),
        entry: message::decode(&entry.body)?,
        channel,
    })
}

/// The body of the last frame to a joiner that is admitted.
pub(crate) fn welcome(session: [u8; 32], serving: Rank) -> Result<Vec<u8>> {
    let serving = serving as u32;
    message::encode(&JoinReply::Welcome { session, serving })
}

/// The body of the last frame to a joiner that is not admitted.
pub(crate) fn refusal(refusal: &Refusal) -> Result<Vec<u8>> {
    message::encode(&JoinReply::Refused(refusal.clone()))
}
