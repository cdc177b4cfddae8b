//! The messages between members and the store, and their limits.

use crate::error::{Error, ErrorKind, Rank, Result};
use serde::de::{DeserializeOwned, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

/// The longest body of a frame, in bytes. Bounds the memory that a peer can make this process allocate.
pub(crate) const MAX_BODY: usize = 64 << 20;
/// The longest key, in bytes. Keys of the library are much shorter.
pub(crate) const MAX_KEY: usize = 1024;
/// The most keys in one request, which is handled under the server's lock.
pub(crate) const MAX_KEYS: usize = 1 << 16;
/// The longest reason of an abort, in bytes. It is sent to every rank, and is part of error messages.
pub(crate) const MAX_REASON: usize = 4096;
/// The longest query of a rank to another, and the longest answer, in bytes. All ranks may query at the same time.
pub(crate) const MAX_QUERY: usize = 4096;
/// The most ranks in a job. Bounds the tables that are sized by the world, before anybody has joined.
pub(crate) const MAX_WORLD: usize = 1 << 16;

/// A value. Clones share the bytes. Serialized as a run of bytes, which is shorter than serde's list of numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bytes(pub(crate) Arc<[u8]>);

impl From<&[u8]> for Bytes {
    fn from(bytes: &[u8]) -> Self {
        Self(bytes.into())
    }
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Run;
        impl Visitor<'_> for Run {
            type Value = Bytes;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("bytes")
            }
            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Bytes, E> {
                Ok(bytes.into())
            }
        }
        // In one copy; the derived form for sequences visits every byte.
        deserializer.deserialize_bytes(Run)
    }
}

/// The action of a waiting request once all of its keys exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum OnReady {
    /// Only answers.
    Nothing,
    /// Answers with the values.
    Read,
    /// Answers with the values and deletes the keys.
    Take,
}

/// The purpose of a gather, which its members must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Purpose {
    AllGather,
    Barrier,
    /// A step of binding a program: no rank proceeds unless all do.
    Bind,
    /// The first step of the ranks that are left after a loss: likewise.
    Survivors,
}

impl Purpose {
    /// Whether a member that no longer waits is reported to those that contribute later, rather than counted on.
    pub(crate) fn needs_all_waiting(self) -> bool {
        matches!(self, Self::Bind | Self::Survivors)
    }
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AllGather => "all-gather",
            Self::Barrier => "barrier",
            Self::Bind => "bind",
            Self::Survivors => "survivors",
        })
    }
}

/// Identifies a gather.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct GatherId {
    /// In ascending order, without repetition.
    pub(crate) members: Vec<u32>,
    /// Which group of these members, counted in the order of their creation.
    pub(crate) instance: u64,
    /// Which gather of that group.
    pub(crate) sequence: u64,
}

/// A request of a member to the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Request {
    Set {
        pairs: Vec<(String, Bytes)>,
    },
    /// Waits until all keys exist. `on` lists the ranks it depends on; an empty list means every other rank.
    Wait {
        keys: Vec<String>,
        on_ready: OnReady,
        on: Vec<u32>,
    },
    Check {
        keys: Vec<String>,
    },
    Delete {
        key: String,
    },
    Add {
        key: String,
        amount: i64,
    },
    CompareAndSet {
        key: String,
        expected: Option<Bytes>,
        new: Bytes,
    },
    Gather {
        id: GatherId,
        purpose: Purpose,
        value: Bytes,
    },
    /// Cancels the sender's waiting request of that number. That request is answered, this one is not.
    Cancel {
        id: u64,
    },
    /// Asks which ranks have not joined.
    Missing,
    /// The sender leaves in order.
    Leave,
    /// The sender fails: the others are to treat it as lost, for this reason.
    Abort {
        reason: String,
    },
    /// The sender creates a group. Not answered.
    Declare(GroupDeclaration),
    /// A heartbeat. Not answered.
    Alive,
    /// The sender gives up the store, which sends it nothing any more, and looks for another rank that serves it. Not
    /// answered.
    GiveUp {
        reason: String,
    },
    /// A part of the sender's journal of the lost store. Not answered.
    Restore {
        entries: Vec<JournalEntry>,
        gathers: Vec<(GatherId, Reply)>,
    },
    /// The sender has sent its whole journal. Not answered.
    Restored,
    /// The sender can do no more work in a group of these ranks.
    Fail {
        group: [u8; 16],
        members: Vec<u32>,
        reason: String,
        /// Whether the group is for one attempt, and no communicator ends with it.
        is_attempt: bool,
    },
    /// A query to ranks of a group, which their reading threads answer by [`Self::QueryReply`]; or a notice, which needs no
    /// answer, if `number` is 0. Not answered by the store.
    Query {
        group: [u8; 16],
        number: u64,
        to: Vec<u32>,
        payload: Bytes,
    },
    /// The answer to a query of `to`. Not answered by the store.
    QueryReply {
        number: u64,
        to: u32,
        payload: Bytes,
    },
}

/// A group that a rank creates of ranks of a parent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GroupDeclaration {
    pub(crate) parent: [u8; 16],
    pub(crate) name: [u8; 16],
    /// In the order of the group.
    pub(crate) members: Vec<u32>,
    /// How many groups of the parent the sender created before with each of them.
    pub(crate) numbers: Vec<u64>,
}

/// The state of a key after a request of the rank that sends the entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct JournalEntry {
    pub(crate) key: String,
    /// The store's count of changes at that request. Of several entries of a key, the one with the highest is valid.
    pub(crate) version: u64,
    /// `None` where the request deleted the key.
    pub(crate) value: Option<Bytes>,
}

/// The first encrypted frame of a connection: the purpose of the connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum StoreEntry {
    /// To join the job. If the store's rank is lost, this rank can be reached at `standby`.
    Join { standby: Option<SocketAddr> },
    /// To resume in the job `session`, whose store was lost.
    Resume {
        session: [u8; 32],
        /// The ranks that this rank knows to be lost, and why.
        lost: Vec<(u32, String)>,
        /// The ranks that it knows to have left.
        left: Vec<u32>,
    },
}

/// An answer to a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Answer {
    /// The store's count of changes after the request, if the request could change something.
    pub(crate) version: u64,
    pub(crate) reply: Reply,
}

/// The content of an answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Reply {
    Done,
    Flag(bool),
    Number(i64),
    Values(Vec<Bytes>),
    /// A compare-and-set did not happen, because the key has this value.
    Kept(Option<Bytes>),
    Ranks(Vec<u32>),
    Refused(Refusal),
}

/// A message of the store to members that answers no request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum StoreEvent {
    /// Every rank has joined, or, after a loss of the store, resumed: requests are accepted. With the address at which each
    /// rank would serve the store.
    Ready {
        standby: Vec<Option<SocketAddr>>,
    },
    /// The ranks cannot all join, for this reason.
    Abandoned(Refusal),
    /// A rank is lost. It gets the event too if it can still be reached.
    Lost {
        rank: u32,
        reason: String,
    },
    Left {
        rank: u32,
    },
    /// Two ranks created groups that differ, so nobody can use them.
    Conflict {
        groups: Vec<[u8; 16]>,
        ranks: [u32; 2],
        message: String,
    },
    /// A heartbeat.
    Alive,
    /// Others changed keys that the receiver had set, at these versions, so its journal need not keep them.
    Forget {
        keys: Vec<(String, u64)>,
    },
    /// All members were sent `Forget` for changes up to this version, so journals need not keep older deletions.
    Checkpoint {
        version: u64,
    },
    /// A rank can do no more work in a group.
    Failed {
        group: [u8; 16],
        rank: u32,
        reason: String,
        is_attempt: bool,
    },
    /// A query of a rank to the receiver, or a notice if `number` is 0.
    Query {
        group: [u8; 16],
        number: u64,
        by: u32,
        payload: Bytes,
    },
    /// The answer of a rank to the receiver's query of that number.
    QueryReply {
        number: u64,
        by: u32,
        payload: Bytes,
    },
}

/// Why a request or a join was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Refusal {
    pub(crate) kind: RefusalKind,
    pub(crate) message: String,
    pub(crate) peer: Option<u32>,
    pub(crate) key: Option<String>,
}

/// The kind of a refusal. Separate from [`ErrorKind`], whose variants may change without changing the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum RefusalKind {
    Invalid,
    Mismatch,
    Authentication,
    Protocol,
    PeerLost,
    PeerLeft,
    Cancelled,
    OutOfMemory,
    GivenUp,
}

impl Refusal {
    pub(crate) fn new(kind: RefusalKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            peer: None,
            key: None,
        }
    }

    pub(crate) fn with_peer(mut self, peer: u32) -> Self {
        self.peer = Some(peer);
        self
    }

    pub(crate) fn with_key(mut self, key: &str) -> Self {
        self.key = Some(key.to_owned());
        self
    }

    /// The refusal as an error of the caller.
    pub(crate) fn into_error(self) -> Error {
        let kind = match self.kind {
            RefusalKind::Invalid => ErrorKind::InvalidArgument,
            RefusalKind::Mismatch => ErrorKind::Mismatch,
            RefusalKind::Authentication => ErrorKind::Authentication,
            RefusalKind::Protocol => ErrorKind::Protocol,
            RefusalKind::PeerLost => ErrorKind::PeerLost,
            RefusalKind::PeerLeft => ErrorKind::PeerLeft,
            RefusalKind::Cancelled => ErrorKind::Timeout,
            RefusalKind::OutOfMemory => ErrorKind::OutOfMemory,
            RefusalKind::GivenUp => ErrorKind::GivenUp,
        };
        let mut error = Error::new(kind, self.message);
        if self.kind == RefusalKind::Cancelled {
            error = error.cancelled();
        }
        if let Some(peer) = self.peer {
            error = error.with_peer(peer as Rank);
        }
        match self.key {
            Some(key) => error.with_key(key),
            None => error,
        }
    }
}

impl Request {
    /// Whether its keys, counts and ranks are within the limits, in a job of `world` ranks.
    pub(crate) fn check(&self, world: usize) -> Result<(), Refusal> {
        match self {
            Self::Set { pairs } => check_keys(pairs.iter().map(|(key, _)| key)),
            Self::Wait { keys, on, on_ready } => {
                check_keys(keys.iter())?;
                if *on_ready == OnReady::Take && has_duplicates(keys) {
                    return Err(Refusal::new(
                        RefusalKind::Invalid,
                        "a key is listed twice; expected each key once",
                    ));
                }
                check_ranks(on, world)
            }
            Self::Check { keys } => check_keys(keys.iter()),
            Self::Delete { key } | Self::Add { key, .. } | Self::CompareAndSet { key, .. } => {
                check_keys(std::iter::once(key))
            }
            Self::Gather { id, .. } => {
                check_ranks(&id.members, world)?;
                // Positions are found by binary search, and two spellings of one group would be two gathers.
                if !id.members.is_sorted_by(|a, b| a < b) {
                    return Err(Refusal::new(
                        RefusalKind::Protocol,
                        "the members of a group are not sorted; expected ascending order",
                    ));
                }
                Ok(())
            }
            Self::Abort { reason } | Self::Fail { reason, .. } if reason.len() > MAX_REASON => {
                Err(Refusal::new(
                    RefusalKind::Invalid,
                    format!(
                        "a reason has {} bytes; expected at most {MAX_REASON}",
                        reason.len()
                    ),
                ))
            }
            Self::Query { payload, .. } | Self::QueryReply { payload, .. }
                if payload.0.len() > MAX_QUERY =>
            {
                let length = payload.0.len();
                let message = format!(
                    "a query or its answer has {length} bytes; expected at most {MAX_QUERY}"
                );
                Err(Refusal::new(RefusalKind::Invalid, message))
            }
            Self::Fail { members, .. } => check_ranks(members, world),
            // Each receiver is sent the whole payload, so a repeated one would multiply the traffic.
            Self::Query { to, .. } if to.len() > world => {
                let message = format!(
                    "a query has {} receivers in a job of {world} ranks",
                    to.len()
                );
                Err(Refusal::new(RefusalKind::Invalid, message))
            }
            Self::Query { to, .. } => check_ranks(to, world),
            Self::QueryReply { to, .. } => check_ranks(&[*to], world),
            Self::Declare(group) => {
                check_ranks(&group.members, world)?;
                if group.members.len() != group.numbers.len() {
                    return Err(Refusal::new(
                        RefusalKind::Protocol,
                        "a group is declared with another number of counts than of members",
                    ));
                }
                Ok(())
            }
            Self::Restore { entries, gathers } => {
                check_keys(entries.iter().map(|entry| &entry.key))?;
                gathers
                    .iter()
                    .try_for_each(|(id, _)| check_ranks(&id.members, world))
            }
            Self::Cancel { .. }
            | Self::Missing
            | Self::Leave
            | Self::Abort { .. }
            | Self::Alive
            | Self::GiveUp { .. }
            | Self::Restored => Ok(()),
        }
    }
}

fn check_keys<'a>(keys: impl ExactSizeIterator<Item = &'a String>) -> Result<(), Refusal> {
    if keys.len() > MAX_KEYS {
        return Err(Refusal::new(
            RefusalKind::Invalid,
            format!(
                "a request has {} keys; expected at most {MAX_KEYS}",
                keys.len()
            ),
        ));
    }
    for key in keys {
        if key.is_empty() || key.len() > MAX_KEY {
            return Err(Refusal::new(
                RefusalKind::Invalid,
                format!("a key has {} bytes; expected 1 to {MAX_KEY}", key.len()),
            ));
        }
    }
    Ok(())
}

fn has_duplicates(keys: &[String]) -> bool {
    let mut seen = std::collections::HashSet::new();
    !keys.iter().all(|key| seen.insert(key))
}

fn check_ranks(ranks: &[u32], world: usize) -> Result<(), Refusal> {
    match ranks.iter().find(|&&rank| rank as usize >= world) {
        None => Ok(()),
        Some(rank) => Err(Refusal::new(
            RefusalKind::Invalid,
            format!("rank {rank} is out of range; the world has {world} ranks"),
        )),
    }
}

/// Encodes a message as the body of a frame.
pub(crate) fn encode(message: &impl Serialize) -> Result<Vec<u8>> {
    postcard::to_stdvec(message)
        .map_err(|error| Error::internal(format!("a message cannot be encoded: {error}")))
}

/// Decodes the message in a body, which must not contain further bytes.
///
/// # Errors
/// [`ErrorKind::Protocol`].
pub(crate) fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T> {
    match postcard::take_from_bytes(body) {
        Ok((message, [])) => Ok(message),
        // Bytes that are left over come from another version, whose message only begins like ours.
        Ok((_, rest)) => Err(Error::protocol(format!(
            "{} bytes follow a message; expected none",
            rest.len()
        ))),
        Err(error) => Err(Error::protocol(format!("a message is malformed: {error}"))),
    }
}

/// Ranks in the wire format.
pub(crate) fn wire_ranks(ranks: &[Rank]) -> Result<Vec<u32>> {
    ranks
        .iter()
        .map(|&rank| {
            u32::try_from(rank).map_err(|_| Error::invalid(format!("rank {rank} is out of range")))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn arbitrary_bodies_never_panic(body: Vec<u8>) {
            if let Ok(request) = decode::<Request>(&body) {
                let _ = request.check(4);
            }
            let _ = decode::<Answer>(&body);
            let _ = decode::<StoreEntry>(&body);
            let _ = decode::<StoreEvent>(&body);
        }

        #[test]
        fn a_request_survives(key: String, amount: i64, value: Vec<u8>, ranks: Vec<u32>) {
            let value = Bytes::from(&value[..]);
            for request in [
                Request::Add { key: key.clone(), amount },
                Request::Set { pairs: vec![(key.clone(), value.clone())] },
                Request::Wait { keys: vec![key.clone()], on_ready: OnReady::Take, on: ranks.clone() },
                Request::CompareAndSet { key: key.clone(), expected: Some(value.clone()), new: value.clone() },
            ] {
                let body = encode(&request).unwrap();
                prop_assert_eq!(&decode::<Request>(&body).unwrap(), &request);
                for length in 0..body.len() {
                    prop_assert!(decode::<Request>(&body[..length]).is_err());
                }
            }
        }
    }

    #[test]
    fn limits_hold() {
        let wait = |keys: Vec<String>, on| Request::Wait {
            keys,
            on_ready: OnReady::Take,
            on,
        };
        assert!(wait(vec!["k".repeat(MAX_KEY)], vec![3]).check(4).is_ok());
        for refused in [
            wait(vec!["k".repeat(MAX_KEY + 1)], vec![]),
            wait(vec![String::new()], vec![]),
            wait(vec!["k".into(); MAX_KEYS + 1], vec![]),
            wait(vec!["k".into(); 2], vec![]),
            wait(vec!["k".into()], vec![4]),
        ] {
            assert_eq!(refused.check(4).unwrap_err().kind, RefusalKind::Invalid);
        }
    }
}
