//! Exchanging what ranks need of one another before they can communicate without their hosts.
//!
//! # Between two ranks ([`pairs`])
//! Transfers, connections and regions that are added to connections have two *ends*, one on each rank. Each rank
//! 1. *publishes* its ends: every end is set in the store under a key of its own, all of a batch by one request;
//! 2. *takes* the peers' ends by one more request, which waits for those that are missing until the deadline, or until a
//!    peer is lost;
//! 3. *matches* each own end with the peer's: both ranks compare the same two ends, so where they do not fit, both fail
//!    with the same error;
//! 4. *rolls back* on failure: what no peer has taken is withdrawn, so that a later attempt meets the peer's; what a
//!    peer has taken is matched and dropped, which tells the peer.
//!
//! There is no barrier. A key has the two ranks, the tag and how many ends with these were exchanged before, so
//! batches need not be cut alike on the two ranks. Both ranks always publish, whether or not their mappings are cached,
//! and a handle has the generation of its registration: a rank whose cache is filled while its peer's is not neither
//! waits for a handle that does not come nor uses a stale mapping.
//!
//! # Among all ranks ([`group`])
//! Ranks that bind a program or join collectives gather a value of each, or the error of one that failed: then all of
//! them fail. [`GroupExchange::share`] maps regions of all ranks that way.
//!
//! A handle is counted by its owner until the peer gives it back. [`ExportedHandle`](crate::memory::ExportedHandle) and
//! [`PeerHandle`](crate::memory::PeerHandle) do that wherever an exchange ends early.

mod group;
mod numbers;
mod pairs;

use crate::error::{Error, ErrorKind, Result};
pub(crate) use group::GroupExchange;
pub(crate) use pairs::{ExchangeServices, Matching, Missing, Offer, PairExchange, PublishedEnds};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Encodes what the other rank gets.
pub(crate) fn encode(value: &impl Serialize) -> Result<Vec<u8>> {
    postcard::to_stdvec(value).map_err(|error| {
        Error::new(ErrorKind::Internal, error.to_string()).with_operation("exchange")
    })
}

/// Reads what the other rank sent.
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    let malformed = |why: String| {
        let text = format!("what the peer sent is malformed: {why}");
        Error::new(ErrorKind::Protocol, text)
            .with_help("run the same version of Warplink on every rank")
    };
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        Ok((_, rest)) => Err(malformed(format!("{} bytes too many", rest.len()))),
        Err(error) => Err(malformed(error.to_string())),
    }
}
