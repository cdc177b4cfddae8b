//! Exchange of the handles and parameters that ranks need before they can communicate without their hosts.
//!
//! # Between two ranks ([`pairs`])
//! Transfers, connections and added regions of connections have two *ends*, one on each rank. Each rank
//! 1. *publishes* its ends: each end is set in the store under its own key, all of a batch by one request;
//! 2. *takes* the peers' ends by one more request, which waits for missing ones until the deadline, or until a peer
//!    is lost or the communicator fails;
//! 3. *matches* each of its ends with the peer's: both ranks compare the same two ends, so on a mismatch both fail
//!    with the same error;
//! 4. *rolls back* on failure: ends that no peer has taken are withdrawn, so that a retry matches the peer's ends;
//!    ends that a peer has taken are matched and dropped, which notifies the peer.
//!
//! There is no barrier. A key contains the two ranks, the tag and a sequence number among the ends with these, so
//! batches may be split differently on the two ranks. Both ranks always publish, whether or not their mappings are
//! cached, and a handle contains the generation of its registration: a rank whose cache is filled while its peer's is
//! not neither waits for a handle that never arrives nor uses a stale mapping.
//!
//! # Among all ranks ([`group`])
//! Ranks that bind a program or join collectives gather a value from every rank, or the error of one that failed:
//! then all fail. [`GroupExchange::share`] maps regions of all ranks this way.
//!
//! The owner counts a handle until the peer returns it. [`ExportedHandle`](crate::memory::ExportedHandle) and
//! [`PeerHandle`](crate::memory::PeerHandle) return or cancel it wherever an exchange ends early.

mod group;
mod numbers;
mod pairs;

use crate::error::{Error, Result};
pub(crate) use group::GroupExchange;
pub(crate) use pairs::{ExchangeServices, Matching, Missing, Offer, PairExchange, PublishedEnds};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Encodes a message for the other rank.
pub(crate) fn encode(value: &impl Serialize) -> Result<Vec<u8>> {
    postcard::to_stdvec(value)
        .map_err(|error| Error::internal(error.to_string()).with_operation("exchange"))
}

/// Decodes a message of the other rank.
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    let malformed = |why: String| {
        let text = format!("malformed message from the peer: {why}");
        Error::protocol(text).with_help("run the same version of Warplink on every rank")
    };
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        Ok((_, rest)) => Err(malformed(format!("{} bytes too many", rest.len()))),
        Err(error) => Err(malformed(error.to_string())),
    }
}
