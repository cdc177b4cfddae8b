//! The challenge by which a rank that joins and the store prove to each other that they hold the
//! secret, before either accepts anything else.
//!
//! ```text
//! joiner → store   hello: version, rank, world, nonce
//! store  → joiner  challenge: nonce, proof over hello and both nonces under "store"
//! joiner → store   proof over the same under "joiner", and what it comes for
//! store  → joiner  welcome: the session, or a refusal
//! ```
//!
//! The store proves itself first, so that a joiner tells nothing to a stranger. Everything after the
//! joiner's proof is sealed (`seal.rs`), under keys that both derive from the secret and the nonces.

use super::frame::{self, MAX_BODY, MAX_HANDSHAKE};
use super::message::{self, Entry, Refusal, RefusalKind};
use super::seal::{Opener, Sealer, Seals};
use super::secret::{Proof, Secret, random_bytes};
use crate::error::{Error, ErrorKind, Rank, Result};
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The version of the protocol between members and the store.
pub(crate) const VERSION: u32 = 5;
const MAGIC: [u8; 4] = *b"WPLK";

/// The first frame. Its layout stays the same in every version, so that each can name the other.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct Hello {
    magic: [u8; 4],
    version: U32,
    rank: U64,
    world: U64,
    nonce: [u8; 32],
}

#[derive(Serialize, Deserialize)]
enum Challenge {
    Prove {
        nonce: [u8; 32],
        proof: Proof,
    },
    /// Only for what is wrong before secrets matter: another version, or no hello at all.
    Refused(Refusal),
}

#[derive(Serialize, Deserialize)]
enum JoinReply {
    Welcome { session: [u8; 32], serving: u32 },
    Refused(Refusal),
}

/// The rank and the world size that a joiner claims, after it proved that it holds the secret.
pub(crate) struct Claim {
    pub(crate) rank: u64,
    pub(crate) world: u64,
    pub(crate) entry: Entry,
    /// The store's, for the connection.
    pub(crate) seals: Seals,
}

const STORE: &str = "warplink join: store";
const JOINER: &str = "warplink join: joiner";
const FROM_STORE: &str = "warplink frames: store";
const FROM_JOINER: &str = "warplink frames: joiner";

fn send(stream: &mut impl Write, body: &[u8]) -> Result<()> {
    stream
        .write_all(&frame::encode(0, body, 0)?)
        .map_err(|error| Error::io("send a handshake", &error))
}

/// `None` when the other side closed the connection instead.
fn receive(stream: &mut impl Read) -> Result<Option<Vec<u8>>> {
    Ok(frame::read(stream, MAX_HANDSHAKE)?.map(|frame| frame.body))
}

fn stopped() -> Error {
    Error::new(
        ErrorKind::Io,
        "the other side closed the connection during the handshake",
    )
}

/// The joiner's side, up to and including what it comes for: the process at the other end lives and
/// holds the secret. Returns the joiner's seals; [`welcomed`] comes next.
///
/// # Errors
/// [`ErrorKind::Io`] when the connection ends, which is worth another attempt; the other kinds
/// are final.
pub(crate) fn join(
    stream: &mut (impl Read + Write),
    secret: &Secret,
    rank: Rank,
    world: usize,
    entry: &Entry,
) -> Result<Seals> {
    let (hello, nonce) = greet(stream, secret, rank, world)?;
    send(stream, &secret.proof(JOINER, &[hello.as_bytes(), &nonce])?)?;
    let transcript = [hello.as_bytes(), &nonce[..]];
    let mut seals = Seals {
        sealer: Sealer::new(&secret.proof(FROM_JOINER, &transcript)?)?,
        opener: Opener::new(&secret.proof(FROM_STORE, &transcript)?)?,
    };
    stream
        .write_all(&seals.sealer.seal(0, &message::encode(entry)?)?)
        .map_err(|error| Error::io("send a handshake", &error))?;
    Ok(seals)
}

/// As [`join`], without saying what the joiner comes for: whether a process answers that holds the secret.
pub(crate) fn probe(
    stream: &mut (impl Read + Write),
    secret: &Secret,
    rank: Rank,
    world: usize,
) -> Result<()> {
    greet(stream, secret, rank, world).map(drop)
}

/// The joiner's hello and the other side's nonce, once that has proved itself.
fn greet(
    stream: &mut (impl Read + Write),
    secret: &Secret,
    rank: Rank,
    world: usize,
) -> Result<(Hello, [u8; 32])> {
    let hello = Hello {
        magic: MAGIC,
        version: VERSION.into(),
        rank: (rank as u64).into(),
        world: (world as u64).into(),
        nonce: random_bytes()?,
    };
    send(stream, hello.as_bytes())?;
    let (nonce, proof) = match message::decode(&receive(stream)?.ok_or_else(stopped)?)? {
        Challenge::Prove { nonce, proof } => (nonce, proof),
        Challenge::Refused(refusal) => return Err(refusal.into_error()),
    };
    if !secret.verify(STORE, &[hello.as_bytes(), &nonce], &proof)? {
        return Err(Error::new(
            ErrorKind::Authentication,
            "the store at this address does not hold this rank's secret",
        )
        .with_help("give every rank the same unique id or WARPLINK_SECRET, and check that no other job uses this address"));
    }
    Ok((hello, nonce))
}

/// The end of the joiner's side, once the store has admitted it: what identifies the session, and the
/// rank that serves.
///
/// # Errors
/// As [`join`].
pub(crate) fn welcomed(stream: &mut impl Read, seals: &mut Seals) -> Result<([u8; 32], Rank)> {
    let reply = seals.opener.read(stream, MAX_HANDSHAKE)?;
    match message::decode(&reply.ok_or_else(stopped)?.body)? {
        JoinReply::Welcome { session, serving } => Ok((session, serving as Rank)),
        JoinReply::Refused(refusal) => Err(refusal.into_error()),
    }
}

/// The store's side, up to and including the joiner's proof. The caller then sends a sealed frame
/// with [`welcome`] or [`refusal`].
pub(crate) fn accept(stream: &mut (impl Read + Write), secret: &Secret) -> Result<Claim> {
    let bytes = receive(stream)?.ok_or_else(stopped)?;
    let hello = match Hello::read_from_bytes(&bytes) {
        Ok(hello) if hello.magic == MAGIC => hello,
        _ => {
            return Err(Error::new(
                ErrorKind::Protocol,
                "the first frame is malformed; expected a join request",
            ));
        }
    };
    if hello.version.get() != VERSION {
        let message = format!(
            "the store uses version {VERSION} of the protocol, rank {} uses version {}; expected the same",
            hello.rank, hello.version
        );
        let refusal = Refusal::new(RefusalKind::Mismatch, message);
        send(
            stream,
            &message::encode(&Challenge::Refused(refusal.clone()))?,
        )?;
        return Err(refusal.into_error());
    }
    let nonce: [u8; 32] = random_bytes()?;
    let proof = secret.proof(STORE, &[hello.as_bytes(), &nonce])?;
    send(
        stream,
        &message::encode(&Challenge::Prove { nonce, proof })?,
    )?;
    let claimed = receive(stream)?.ok_or_else(stopped)?;
    let claimed = Proof::try_from(&claimed[..]).map_err(|_| {
        Error::new(
            ErrorKind::Protocol,
            "a proof has the wrong length; expected 32 bytes",
        )
    })?;
    if !secret.verify(JOINER, &[hello.as_bytes(), &nonce], &claimed)? {
        let denied = Refusal::new(
            RefusalKind::Authentication,
            "the joining rank does not hold the store's secret",
        );
        // The joiner could not read a sealed one.
        send(stream, &refusal(&denied)?)?;
        return Err(denied.into_error());
    }
    let transcript = [hello.as_bytes(), &nonce[..]];
    let mut seals = Seals {
        sealer: Sealer::new(&secret.proof(FROM_STORE, &transcript)?)?,
        opener: Opener::new(&secret.proof(FROM_JOINER, &transcript)?)?,
    };
    let entry = seals.opener.read(stream, MAX_BODY)?.ok_or_else(stopped)?;
    Ok(Claim {
        rank: hello.rank.get(),
        world: hello.world.get(),
        entry: message::decode(&entry.body)?,
        seals,
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
