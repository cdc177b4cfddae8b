//! What ranks that bind a program tell one another: which program they bring, and whether their part
//! of binding it succeeded.

use super::context::RankContext;
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::program::ir::Program;
use crate::program::parameters::Parameters;
use serde::{Deserialize, Serialize};

/// The longest message of a failure that is told to the others, in characters.
const MAX_MESSAGE: usize = 4096;

/// What a rank brings to be bound: the same on every rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Digest {
    name: String,
    /// A hash of every line of the program's text.
    lines: Vec<u32>,
    /// The parameters' values, in the order of the program.
    parameters: Vec<(String, String)>,
    /// The optional tensors that are bound.
    tensors: Vec<String>,
    streams: usize,
}

/// What a rank says at a step of binding.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Vote {
    /// It can go on with this.
    Brings(Digest),
    /// Its plan is ready.
    Ready,
    Failed {
        message: String,
        /// Whether another rank's failure may have caused it.
        follows: bool,
    },
}

impl Digest {
    pub(crate) fn of(program: &Program, parameters: &Parameters, streams: usize) -> Result<Self> {
        let values = program.parameters.iter().map(|parameter| {
            let value = parameters.resolve(parameter)?;
            Ok((parameter.name.clone(), value.to_string()))
        });
        Ok(Self {
            name: program.name.clone(),
            lines: program.to_string().lines().map(hash).collect(),
            parameters: values.collect::<Result<_>>()?,
            tensors: parameters.tensors().map(str::to_owned).collect(),
            streams,
        })
    }

    /// With a further value that is the same on every rank.
    pub(crate) fn with(mut self, name: &str, value: impl ToString) -> Self {
        self.parameters.push((name.to_owned(), value.to_string()));
        self
    }

    /// How this, which `rank` brings, differs from what rank 0 brings.
    fn difference(&self, rank: Rank, first: &Self) -> Option<String> {
        let name = &self.name;
        if *name != first.name {
            return Some(format!(
                "rank {rank} binds '{name}', rank 0 binds '{}'",
                first.name
            ));
        }
        if self.lines != first.lines {
            let same = self.lines.iter().zip(&first.lines);
            let line = same.take_while(|(here, there)| here == there).count() + 1;
            return Some(format!(
                "the text of '{name}' on rank {rank} differs from rank 0's, first in line {line} as printed"
            ));
        }
        let values = self.parameters.iter().zip(&first.parameters);
        if let Some(((parameter, here), (_, there))) = values.into_iter().find(|(a, b)| a != b) {
            return Some(format!(
                "rank {rank} binds '{name}' with {parameter} = {here}, rank 0 with {parameter} = {there}"
            ));
        }
        let only = |a: &Self, b: &Self| a.tensors.iter().find(|t| !b.tensors.contains(t)).cloned();
        if let Some(tensor) = only(self, first) {
            return Some(format!(
                "rank {rank} binds '{name}' with the optional tensor '{tensor}', rank 0 without"
            ));
        }
        if let Some(tensor) = only(first, self) {
            return Some(format!(
                "rank 0 binds '{name}' with the optional tensor '{tensor}', rank {rank} without"
            ));
        }
        (self != first).then(|| {
            format!(
                "rank {rank} prepared '{name}' with {} streams, rank 0 with {}",
                self.streams, first.streams
            )
        })
    }
}

impl RankContext {
    /// Blocks until every rank has said what it brings to be bound, or that it failed before. Fails on
    /// all where one failed, or where they bring different programs.
    pub(super) fn agree(&self, brought: Result<&Digest, &Error>) -> Result<()> {
        let own = match brought {
            Ok(digest) => Vote::Brings(digest.clone()),
            Err(error) => Vote::failed(self.rank(), error),
        };
        let votes = self.gather_votes(&own, brought.err())?;
        let Some(Vote::Brings(first)) = votes.first() else {
            return Err(out_of_step(0));
        };
        for (rank, vote) in votes.iter().enumerate() {
            let Vote::Brings(theirs) = vote else {
                return Err(out_of_step(rank));
            };
            if let Some(difference) = theirs.difference(rank, first) {
                let peer = if rank == self.rank() { 0 } else { rank };
                return Err(Error::new(ErrorKind::Mismatch, difference)
                    .with_operation("bind")
                    .with_peer(peer)
                    .with_help("bring the same program, parameters and streams on every rank"));
            }
        }
        Ok(())
    }

    /// Every rank's bytes, of which each gives some. Blocks until every rank has called it. Where one no longer waits, it
    /// fails on all: else those that come later would go on, and be a step ahead from then on.
    pub(crate) fn gather_in_step(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let gathered = self.group.gather_votes(bytes, self.deadline());
        let gathered = gathered.map_err(|error| self.group.in_own_ranks(error))?;
        match gathered.iter().position(Vec::is_empty) {
            Some(rank) => Err(peer_failed(rank, &no_longer_waits(rank))),
            None => Ok(gathered),
        }
    }

    /// Gives what was `made` where every rank made its own. Blocks until all have tried.
    pub(crate) fn agree_on<T>(&self, made: Result<T>) -> Result<T> {
        let failed = made.as_ref().err();
        let own = failed.map_or(Vote::Ready, |error| Vote::failed(self.rank(), error));
        let votes = self.gather_votes(&own, failed)?;
        match votes.iter().position(|vote| *vote != Vote::Ready) {
            Some(rank) => Err(out_of_step(rank)),
            None => made,
        }
    }

    /// Every rank's vote, where none failed. Otherwise the first cause: what `failed` here; else what a
    /// rank says that did not fail because of another; else what any says.
    fn gather_votes(&self, own: &Vote, failed: Option<&Error>) -> Result<Vec<Vote>> {
        let gathered = own.encode().and_then(|bytes| {
            let votes = self.group.gather_votes(&bytes, self.deadline());
            votes.map_err(|error| self.group.in_own_ranks(error))
        });
        let votes = gathered.and_then(|gathered| {
            let votes = gathered.iter().enumerate();
            let votes = votes.map(|(rank, bytes)| Vote::decode(rank, bytes));
            votes.collect::<Result<Vec<_>>>()
        });
        let failure = |votes: &[Vote], wanted: bool| {
            votes
                .iter()
                .enumerate()
                .find_map(|(rank, vote)| match vote {
                    Vote::Failed { message, follows } if *follows == wanted => {
                        Some(peer_failed(rank, message))
                    }
                    _ => None,
                })
        };
        match (votes, failed) {
            (Ok(votes), None) => match failure(&votes, false).or_else(|| failure(&votes, true)) {
                Some(error) => Err(error),
                None => Ok(votes),
            },
            (Ok(votes), Some(error)) if follows(error) => {
                Err(failure(&votes, false).unwrap_or_else(|| error.clone()))
            }
            (_, Some(error)) => Err(error.clone()),
            (Err(error), None) => Err(error),
        }
    }
}

fn no_longer_waits(rank: Rank) -> String {
    format!("rank {rank}: its timeout passed while it waited for the others")
}

fn peer_failed(rank: Rank, message: &str) -> Error {
    Error::new(
        ErrorKind::PeerFailed,
        format!("another rank failed: {message}"),
    )
    .with_operation("bind")
    .with_peer(rank)
    .with_help("correct what that rank says, and bind again on every rank")
}

impl Vote {
    fn failed(rank: Rank, error: &Error) -> Self {
        let text = error.clone().with_rank(rank).to_string();
        Self::Failed {
            message: text.chars().take(MAX_MESSAGE).collect(),
            follows: follows(error),
        }
    }

    fn encode(&self) -> Result<Vec<u8>> {
        postcard::to_stdvec(self)
            .map_err(|error| Error::new(ErrorKind::Internal, error.to_string()))
    }

    /// What `rank` said; nothing where it no longer waits.
    fn decode(rank: Rank, bytes: &[u8]) -> Result<Self> {
        if bytes.is_empty() {
            return Ok(Self::Failed {
                message: no_longer_waits(rank),
                follows: true,
            });
        }
        postcard::from_bytes(bytes).map_err(|error| {
            Error::new(
                ErrorKind::Protocol,
                format!("what the rank says of its program is malformed: {error}"),
            )
            .with_peer(rank)
            .with_help("run the same version of Warplink on every rank")
        })
    }
}

/// Whether a failure is what other ranks' failures look like.
fn follows(error: &Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::PeerFailed
            | ErrorKind::PeerLost
            | ErrorKind::PeerLeft
            | ErrorKind::Timeout
            | ErrorKind::Closed
    )
}

fn out_of_step(rank: Rank) -> Error {
    Error::new(
        ErrorKind::Mismatch,
        "the peer is at another step of binding a program",
    )
    .with_peer(rank)
    .with_help("bind the same programs in the same order on every rank")
}

/// FNV-1a.
fn hash(line: &str) -> u32 {
    line.bytes().fold(0x811c_9dc5, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(text: &str, parameters: &[(&str, i64)], streams: usize) -> Digest {
        let program = Program::parse(text).unwrap();
        let parameters = parameters.iter().copied().collect();
        Digest::of(&program, &parameters, streams).unwrap()
    }

    #[test]
    fn a_difference_is_named_as_precisely_as_it_is_known() {
        let text =
            "program p(n, k = 1 | 2) {\n  input A: f32[n]\n  output B: f32[n]\n  B = copy(A)\n}";
        let first = digest(text, &[("n", 8)], 2);
        assert_eq!(first.difference(1, &first), None);
        // What is given as the default is the same as what is left open.
        let given = digest(text, &[("n", 8), ("k", 1)], 2);
        assert_eq!(given.difference(1, &first), None);
        let cases = [
            (
                digest(&text.replace("program p", "program q"), &[("n", 8)], 2),
                "rank 1 binds 'q', rank 0 binds 'p'",
            ),
            (
                digest(&text.replace("copy(A)", "sum(A, A)"), &[("n", 8)], 2),
                "first in line",
            ),
            (
                digest(text, &[("n", 9)], 2),
                "rank 1 binds 'p' with n = 9, rank 0 with n = 8",
            ),
            (
                digest(text, &[("n", 8), ("k", 2)], 2),
                "with k = 2, rank 0 with k = 1",
            ),
            (
                digest(text, &[("n", 8)], 3),
                "with 3 streams, rank 0 with 2",
            ),
        ];
        for (other, expected) in cases {
            let difference = other.difference(1, &first).unwrap();
            assert!(difference.contains(expected), "{difference}");
        }
    }

    #[test]
    fn votes_survive_the_wire_and_none_is_a_failure() {
        let vote = Vote::Brings(digest(
            "program p(n) {\n  input A: f32[n]\n}",
            &[("n", 8)],
            2,
        ));
        let wire = vote.encode().unwrap();
        assert_eq!(Vote::decode(1, &wire).unwrap(), vote);
        let error = Vote::decode(1, &wire[..wire.len() - 1]).unwrap_err();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::Protocol, Some(1)));
        let gone = Vote::decode(1, &[]).unwrap();
        assert!(matches!(gone, Vote::Failed { follows: true, .. }));
    }
}
