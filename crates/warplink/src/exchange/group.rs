//! Exchanges among all ranks of a group. A rank that has failed takes part with its error, and then all ranks fail.

use super::{decode, encode};
use crate::bootstrap::Group;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::memory::{ExportedHandle, MemoryRegistry, PeerHandle, Region, RemoteRegion};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Maximum length of a failure message sent to the other ranks, in characters.
const MAX_MESSAGE: usize = 4096;

/// First byte of a contribution of bytes, which is never empty therefore.
const WAITS: u8 = 1;

/// Exchanges among a group's ranks. All of them make the same calls in the same order.
pub(crate) struct GroupExchange<'a> {
    pub(crate) group: &'a Group,
    pub(crate) deadline: Deadline,
    /// Operation named in errors.
    pub(crate) operation: &'static str,
}

/// One rank's contribution to an exchange.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Vote {
    Value {
        /// Name of the exchange, so that ranks detect diverging calls.
        step: String,
        value: Vec<u8>,
    },
    Failed {
        message: String,
        /// Whether another rank's failure may have caused it.
        follows: bool,
    },
}

impl GroupExchange<'_> {
    /// Returns the values of all ranks in rank order. Blocks until every rank has called it.
    ///
    /// # Errors
    /// On all ranks if one failed, with the root cause: this rank's own failure; else the failure of a rank that did
    /// not fail because of another; else any. [`ErrorKind::Mismatch`] if a rank is at another step.
    pub(crate) fn gather<T: Serialize + DeserializeOwned>(
        &self,
        step: &str,
        own: Result<&T, &Error>,
    ) -> Result<Vec<T>> {
        let vote = match own {
            Ok(value) => Vote::Value {
                step: step.to_owned(),
                value: encode(value)?,
            },
            Err(error) => Vote::failed(self.group.rank(), error),
        };
        let votes = self.votes(&vote);
        let failure = |votes: &[Vote], wanted: bool| {
            let mut votes = votes.iter().enumerate();
            votes.find_map(|(rank, vote)| match vote {
                Vote::Failed { message, follows } if *follows == wanted => {
                    Some(self.peer_failed(rank, message))
                }
                _ => None,
            })
        };
        let votes = match (votes, own.err()) {
            (Ok(votes), None) => match failure(&votes, false).or_else(|| failure(&votes, true)) {
                Some(error) => return Err(error),
                None => votes,
            },
            // This rank's error may be a consequence, so the cause that another rank reports takes precedence.
            (Ok(votes), Some(error)) if follows(error) => {
                return Err(failure(&votes, false).unwrap_or_else(|| error.clone()));
            }
            // A failure of its own is the most specific, whether or not the votes arrived.
            (_, Some(error)) => return Err(error.clone()),
            (Err(error), None) => return Err(error),
        };
        let values = votes.into_iter().enumerate();
        let values = values.map(|(rank, vote)| match vote {
            Vote::Value {
                step: theirs,
                value,
            } if theirs == step => decode(&value).map_err(|error| error.with_peer(rank)),
            _ => Err(self.out_of_step(rank)),
        });
        values.collect()
    }

    /// Returns `made` if every rank's value was created successfully. Blocks until all have tried.
    pub(crate) fn agree_on<T>(&self, made: Result<T>) -> Result<T> {
        self.gather("agree", made.as_ref().map(|_| &())).and(made)
    }

    /// Gathers every rank's bytes. Blocks until every rank has called it. If one rank no longer waits, it fails on
    /// all: otherwise later ranks would succeed and be one step ahead from then on.
    pub(crate) fn gather_in_step(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let gathered = self.gather_votes(&[&[WAITS], bytes].concat())?;
        let gathered = gathered.into_iter().enumerate();
        let gathered = gathered.map(|(rank, bytes)| match bytes.split_first() {
            Some((_, bytes)) => Ok(bytes.to_vec()),
            None => Err(self.peer_failed(rank, &no_longer_waits(rank))),
        });
        gathered.collect()
    }

    /// Maps the regions that the other ranks share, in rank order; each rank shares the same number. The entries of
    /// this rank and of unreachable ranks are empty. Blocks until every rank has called it.
    ///
    /// # Errors
    /// On all ranks if one cannot share its regions. A rank that cannot map regions fails alone, so ranks have to
    /// [agree](Self::agree_on) afterwards.
    pub(crate) fn share(
        &self,
        memory: &MemoryRegistry,
        regions: &[&Region],
        reaches: impl Fn(Rank) -> bool,
    ) -> Result<Vec<Vec<RemoteRegion>>> {
        let own = self.group.rank();
        let exported = self.export(memory, regions);
        let wires = exported.as_ref().map(|exported| {
            let wires = |handles: &Vec<ExportedHandle>| {
                let wires = handles.iter().map(|handle| handle.wire().to_vec());
                wires.collect::<Vec<_>>()
            };
            exported.iter().map(wires).collect::<Vec<_>>()
        });
        let gathered = self.gather("share memory", wires.as_ref().map_err(|error| *error));
        // If a rank failed, or the store has dropped this rank's vote, no rank opens any handle; after other errors, another
        // rank may.
        let is_unused = matches!(
            &gathered,
            Err(error) if error.kind() == ErrorKind::PeerFailed || error.is_cancelled()
        );
        if let (Ok(exported), false) = (exported, is_unused) {
            exported.into_iter().flatten().for_each(|handle| {
                handle.sent();
            });
        }
        let mut handles = Vec::new();
        for (mut theirs, job_rank) in gathered?.into_iter().zip(self.group.members()) {
            let wires = theirs.get_mut(own).map(std::mem::take).unwrap_or_default();
            let received = wires
                .into_iter()
                .map(|wire| memory.peer_handle(*job_rank, wire));
            handles.push(received.collect::<Vec<_>>());
        }
        let mut counts = handles.iter().map(Vec::len).enumerate();
        let differs = |(rank, count): &(Rank, usize)| *rank != own && *count != regions.len();
        // The handles received so far are dropped, which returns them to their owners.
        if let Some((rank, _)) = counts.find(differs) {
            return Err(self.out_of_step(rank));
        }
        let handles = handles.into_iter().enumerate();
        let mapped = handles.map(|(rank, handles)| {
            let handles = handles.into_iter().filter(|_| reaches(rank));
            handles.map(PeerHandle::open).collect::<Result<Vec<_>>>()
        });
        mapped.collect::<Result<_>>().map_err(|error: Error| {
            let error = self.group.in_own_ranks(error);
            error.with_operation("map a peer's memory")
        })
    }

    /// Handles of `regions` for every other rank; none for this one.
    fn export(
        &self,
        memory: &MemoryRegistry,
        regions: &[&Region],
    ) -> Result<Vec<Vec<ExportedHandle>>> {
        let members = self.group.members().iter().enumerate();
        let exported = members.map(|(rank, job_rank)| {
            let regions = regions.iter().filter(|_| rank != self.group.rank());
            let handles = regions.map(|region| memory.export_handle(region, *job_rank));
            handles.collect()
        });
        exported
            .collect::<Result<_>>()
            .map_err(|error: Error| self.group.in_own_ranks(error))
    }

    /// Every rank's vote; a failure for a rank that no longer waits.
    fn votes(&self, own: &Vote) -> Result<Vec<Vote>> {
        let votes = self.gather_votes(&encode(own)?)?;
        let votes = votes.iter().enumerate();
        votes
            .map(|(rank, bytes)| match &**bytes {
                [] => Ok(Vote::Failed {
                    message: no_longer_waits(rank),
                    follows: true,
                }),
                bytes => decode(bytes).map_err(|error| error.with_peer(rank)),
            })
            .collect()
    }

    /// Every rank's contribution; an empty one for a rank that no longer waits.
    fn gather_votes(&self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let votes = self.group.gather_votes(own, self.deadline);
        votes.map_err(|error| self.group.in_own_ranks(error))
    }

    fn peer_failed(&self, rank: Rank, message: &str) -> Error {
        Error::new(
            ErrorKind::PeerFailed,
            format!("another rank failed: {message}"),
        )
        .with_operation(self.operation)
        .with_peer(rank)
        .with_help("fix the error of that rank, then retry on every rank")
    }

    fn out_of_step(&self, rank: Rank) -> Error {
        Error::mismatch("the peer makes another call")
            .with_operation(self.operation)
            .with_peer(rank)
            .with_help("make the same calls in the same order on every rank")
    }
}

impl Vote {
    fn failed(rank: Rank, error: &Error) -> Self {
        let text = error.clone().with_rank(rank).to_string();
        Self::Failed {
            message: text.chars().take(MAX_MESSAGE).collect(),
            follows: follows(error),
        }
    }
}

/// Whether an error looks like a consequence of another rank's failure.
fn follows(error: &Error) -> bool {
    error.is_by_peer() || error.kind() == ErrorKind::Timeout
}

fn no_longer_waits(rank: Rank) -> String {
    format!("rank {rank}: its timeout passed while it waited for the others")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn votes_survive_the_wire() {
        let value = Vote::Value {
            step: "bind".to_owned(),
            value: vec![7; 300],
        };
        let failed = Vote::failed(3, &Error::new(ErrorKind::PeerLost, "gone"));
        assert!(
            matches!(&failed, Vote::Failed { message, follows: true } if message.contains("gone"))
        );
        for vote in [value, failed] {
            let wire = encode(&vote).unwrap();
            assert_eq!(decode::<Vote>(&wire).unwrap(), vote);
            let error = decode::<Vote>(&wire[..wire.len() - 1]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol);
        }
    }
}
